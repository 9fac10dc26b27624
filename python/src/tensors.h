// Tensors as the Python fronts give them: one of torch's, None, or (address, batch stride, token stride, head stride), strides
// in elements. Four dimensions are (batch, tokens, heads, dim), three are statistics, (batch, heads, tokens), one is bytes. The
// Python modules have checked shapes, dtypes and devices.
//
// torch's are read by a function of the DLPack exchange API, which torch.Tensor names: no torch is needed to build, and no
// Python is called. Those of a torch without it are read by their methods. Needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <vector>

#include "ringspan/attention.h"

namespace ringspan::python {

struct Given {
  Tensor tensor;
  std::size_t dimensions = 0;
  std::int64_t last = 0;  // size of the last dimension
  bool dense = true;      // in the last dimension, as kernels need it
};

// What a tensor of torch's is, but for its strides and values.
struct SeenTensor {
  std::size_t dimensions = 0;
  std::int64_t device = 0, type = 0;  // numbers for them
  std::array<std::int64_t, 4> shape{};
  bool operator==(const SeenTensor&) const = default;
};

// False where the object is none, or has more dimensions than 4. Leaves no error of Python's.
bool see_tensor(nanobind::handle object, SeenTensor& seen) noexcept;

// False where the object is none of these. Leaves no error of Python's.
bool read_tensor(nanobind::handle object, Given& given) noexcept;

// The same of a tensor of torch's or None; of one that is not dense of a copy that is, which is added to `copies`. heads_first:
// four dimensions are (batch, heads, tokens, dim).
Given read_dense(nanobind::handle object, std::vector<nanobind::object>& copies, bool heads_first = false);

// Tensors, each from empty(*arguments), or None for None.
nanobind::tuple make_tensors(const nanobind::callable& empty, const nanobind::tuple& arguments);

}  // namespace ringspan::python

template <>
struct nanobind::detail::type_caster<ringspan::Tensor> {
  NB_TYPE_CASTER(ringspan::Tensor, const_name("object"))
  bool from_python(handle object, uint32_t, cleanup_list*) noexcept {
    ringspan::python::Given given;
    const bool found = ringspan::python::read_tensor(object, given);
    value = given.tensor;
    return found;
  }
};
