#include <nanobind/nanobind.h>

#include <exception>

#include "bindings.h"
#include "ringspan/error.h"
#include "ringspan/version.h"

namespace nb = nanobind;

namespace ringspan::python {
namespace {

// The classes are those of ringspan/errors.py: they derive from Python's own as well.
void raise(const char* name, const char* text) {
  const nb::object type = nb::module_::import_("ringspan.errors").attr(name);
  PyErr_SetString(type.ptr(), text);
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    raise("InvalidArgument", e.what());
  } catch (const Unsupported& e) {
    raise("Unsupported", e.what());
  } catch (const CommError& e) {
    raise("CommError", e.what());
  } catch (const OutOfBudget& e) {
    raise("OutOfBudget", e.what());
  } catch (const DeviceError& e) {
    raise("DeviceError", e.what());
  } catch (const Error& e) {
    raise("Error", e.what());
  }
}

}  // namespace
}  // namespace ringspan::python

NB_MODULE(_core, module) {
  using namespace ringspan::python;
  module.doc() = "The binding to the C++ library; ringspan and ringspan.torch are the interface.";
  module.attr("VERSION") = RINGSPAN_VERSION;
  nb::set_leak_warnings(false);  // caches of the Python modules live until the interpreter ends
  nb::register_exception_translator(translate);
  bind_problem(module);
  bind_plan(module);
  bind_transport(module);
  bind_tensors(module);
  bind_ordinary(module);
  bind_recent_calls(module);
  bind_session(module);
  bind_devices(module);
  bind_fused(module);
}
