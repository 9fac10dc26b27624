#include "ordinary.h"

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

nb::object checked(PyObject* result) {
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

}  // namespace

Ordinary::Ordinary(const nb::tuple& types, nb::callable keys_of, std::uint64_t allowed, const nb::tuple& quiet)
    : keys_of_(std::move(keys_of)), raw_repr_(nb::str("raw_repr")), allowed_(allowed) {
  for (const nb::handle type : types) types_.push_back(nb::borrow(type));
  for (const nb::handle callable : quiet) quiet_.push_back(nb::borrow(callable));
}

bool Ordinary::is_quiet() const {
  for (const nb::object& callable : quiet_) {
    const nb::object told = checked(PyObject_CallNoArgs(callable.ptr()));
    if (told.is_none()) continue;
    const int is_true = PyObject_IsTrue(told.ptr());
    if (is_true < 0) nb::raise_python_error();
    if (is_true != 0) return false;
  }
  return true;
}

bool Ordinary::has(nb::handle tensor) const {
  bool is_of_types = false;
  for (const nb::object& type : types_) is_of_types = is_of_types || tensor.type().is(type);
  if (!is_of_types) return false;
  const nb::object keys = checked(PyObject_CallOneArg(keys_of_.ptr(), tensor.ptr()));
  const nb::object bits = checked(PyObject_CallMethodNoArgs(keys.ptr(), raw_repr_.ptr()));
  return (nb::cast<std::uint64_t>(bits) & ~allowed_) == 0;
}

void bind_ordinary(nb::module_& module) {
  nb::class_<Ordinary>(module, "Ordinary", "Which tensors are what lies in their memory.")
      .def(nb::init<const nb::tuple&, nb::callable, std::uint64_t, const nb::tuple&>(), "types"_a, "keys_of"_a, "allowed"_a,
           "quiet"_a)
      .def(
          "all",
          [](const Ordinary& ordinary, const nb::args& given) {
            if (!ordinary.is_quiet()) return false;
            for (const nb::handle tensor : given) {
              if (!tensor.is_none() && !ordinary.has(tensor)) return false;
            }
            return true;
          },
          "given"_a, "Whether these are, None left out, and nobody else wants to see what is done with them.");
}

}  // namespace ringspan::python
