#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringspan::python {
namespace {

// https://dmlc.github.io/dlpack: a table of functions of a class of tensors, which lives as long as the process.
struct ExchangeHeader {
  std::uint32_t major, minor;
  const ExchangeHeader* older;  // the table of an older major version, or null
};
struct ExchangeTable {
  ExchangeHeader header;
  void* not_used[3];  // those that make tensors and keep them
  // Not 0: an error of Python's is set. What `out` points to is the object's.
  int (*read)(void* object, nb::dlpack::dltensor* out);
  // More follows.
};

constexpr const char* kCapsule = "dlpack_exchange_api";

const ExchangeTable* torchs_table = nullptr;

// Whether torch's tensors are read by a table from now on: by the one in this capsule of torch.Tensor's, if it is one that is
// known.
bool read_tensors_by(nb::handle capsule) {
  torchs_table = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), kCapsule) == 0) return false;
  const auto* header = static_cast<const ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  while (header != nullptr && header->major != 1) header = header->older;
  const auto* const table = reinterpret_cast<const ExchangeTable*>(header);
  if (table != nullptr && table->read != nullptr) torchs_table = table;
  return torchs_table != nullptr;
}

bool arrange(void* data, const std::int64_t* strides, std::size_t dimensions, std::int64_t last, Given& given) {
  if (dimensions == 4) {
    given.tensor = {data, strides[0], strides[1], strides[2]};
  } else if (dimensions == 3) {
    given.tensor = {data, strides[0], strides[2], strides[1]};
  } else if (dimensions == 1) {
    given.tensor.data = data;
  } else {
    return false;
  }
  given.last = last;
  given.dimensions = dimensions;
  given.dense = dimensions != 4 || strides[3] == 1 || last <= 1;
  return true;
}

bool look_up(nb::handle object, nb::dlpack::dltensor& found) {
  if (torchs_table->read(object.ptr(), &found) == 0) return true;
  PyErr_Clear();
  return false;
}

bool read_by_table(nb::handle object, Given& given) {
  nb::dlpack::dltensor found;
  if (!look_up(object, found)) return false;
  const auto dimensions = static_cast<std::size_t>(found.ndim);
  return found.strides != nullptr && dimensions > 0 &&
         arrange(static_cast<std::byte*>(found.data) + found.byte_offset, found.strides, dimensions,
                 found.shape[dimensions - 1], given);
}

bool see(std::span<const std::int64_t> shape, std::int64_t device, std::int64_t type, SeenTensor& seen) {
  if (shape.size() > seen.shape.size()) return false;
  seen = {shape.size(), device, type, {}};
  std::ranges::copy(shape, seen.shape.begin());
  return true;
}

bool read_by_methods(nb::handle object, Given& given) {
  const auto data = nb::cast<Address>(object.attr("data_ptr")());
  const auto strides = nb::cast<std::vector<std::int64_t>>(object.attr("stride")());
  const auto last = nb::cast<std::int64_t>(object.attr("size")(-1));
  return arrange(reinterpret_cast<void*>(data), strides.data(), strides.size(), last, given);
}

}  // namespace

bool see_tensor(nb::handle object, SeenTensor& seen) noexcept {
  try {
    nb::dlpack::dltensor found;
    if (torchs_table != nullptr && look_up(object, found)) {
      return see({found.shape, static_cast<std::size_t>(found.ndim)},
                 std::int64_t{found.device.device_type} << 32 | found.device.device_id,
                 found.dtype.lanes << 16 | found.dtype.code << 8 | found.dtype.bits, seen);
    }
    const auto shape = nb::cast<std::vector<std::int64_t>>(object.attr("shape"));
    return see(shape, nb::hash(object.attr("device")), nb::hash(object.attr("dtype")), seen);
  } catch (const std::exception&) {
    return false;
  }
}

bool read_tensor(nb::handle object, Given& given) noexcept {
  try {
    if (object.is_none()) return true;
    if (PyTuple_Check(object.ptr())) {
      const auto [data, batch, token, head] = nb::cast<std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>>(object);
      given.tensor = {reinterpret_cast<void*>(data), batch, token, head};
      return true;
    }
    return (torchs_table != nullptr && read_by_table(object, given)) || read_by_methods(object, given);
  } catch (const std::exception&) {
    return false;
  }
}

Given read_dense(nb::handle object, std::vector<nb::object>& copies, bool heads_first) {
  Given given;
  bool found = read_tensor(object, given);
  if (found && !given.dense) {
    copies.emplace_back(object.attr("contiguous")());
    found = read_tensor(copies.back(), given);
  }
  if (!found) throw nb::type_error("expected a tensor of torch's");
  if (heads_first && given.dimensions == 4) std::swap(given.tensor.token_stride, given.tensor.head_stride);
  return given;
}

nb::tuple make_tensors(const nb::callable& empty, const nb::tuple& arguments) {
  nb::tuple made = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(arguments.size())));
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    PyObject* const of = PyTuple_GET_ITEM(arguments.ptr(), static_cast<Py_ssize_t>(i));
    PyObject* const tensor = of == Py_None ? nb::none().release().ptr() : PyObject_CallObject(empty.ptr(), of);
    if (tensor == nullptr) nb::raise_python_error();
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), tensor);
  }
  return made;
}

void bind_tensors(nb::module_& module) {
  module.def("read_tensors_by", &read_tensors_by, "table"_a.none(),
             "torch.Tensor.__dlpack_c_exchange_api__ or None: whether tensors are read by that from now on, and not by their "
             "methods.");
}

}  // namespace ringspan::python
