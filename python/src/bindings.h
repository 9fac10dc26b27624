// What the files of the extension share: each binds one part of the library to the module ringspan._core.
//
// Whatever computes, plans or communicates runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace ringspan::python {

using Address = std::uintptr_t;

void bind_problem(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_transport(nanobind::module_& module);
void bind_tensors(nanobind::module_& module);
void bind_ordinary(nanobind::module_& module);
void bind_recent_calls(nanobind::module_& module);
void bind_session(nanobind::module_& module);
void bind_devices(nanobind::module_& module);
void bind_fused(nanobind::module_& module);

}  // namespace ringspan::python
