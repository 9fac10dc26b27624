// What the files of the extension share: each binds one part of the library to the module ringspan._core.
//
// Tensors cross as (address, batch stride, token stride, head stride), strides in elements; the Python modules have checked
// shapes, dtypes and devices. Whatever computes, plans or communicates runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <tuple>

#include "ringspan/attention.h"

namespace ringspan::python {

using Address = std::uintptr_t;
using TensorTuple = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;

inline Tensor to_tensor(const TensorTuple& t) {
  const auto& [data, batch, token, head] = t;
  return {reinterpret_cast<void*>(data), batch, token, head};
}

inline ConstTensor to_const_tensor(const TensorTuple& t) { return to_tensor(t); }

void bind_problem(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_transport(nanobind::module_& module);
void bind_session(nanobind::module_& module);
void bind_devices(nanobind::module_& module);
void bind_fused(nanobind::module_& module);

}  // namespace ringspan::python
