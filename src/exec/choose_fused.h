// ChooseFused: which passes of a plan a device computes by its library's fused attention, and why the others are not.
//
// A pass is chosen whole: plan/fuse.h says whether each of its rows takes one call (or, with PlanOptions::partials = storage,
// whether the program can take in what several leave), the device whether its library has such calls and what workspace they
// need, the memory budget whether that fits. Asked for by name, what cannot be is refused.
//
// Cost: O(items^2); the device may load a library and build execution plans.
#pragma once

#include "exec/bindings.h"
#include "exec/device.h"
#include "kernels/attend.h"
#include "plan/plan_data.h"

namespace ringspan::internal {

// The plan, booked for a device already, with fused programs where options and device allow. `arena_bytes`: of the arena that
// is given; 0: none is. Throws Unsupported.
PlanData choose_fused(const PlanData& data, Device& device, bool deterministic, std::int64_t arena_bytes = 0);

// The device's answer for a fused pass of the plan on these tensors; dense stand-ins without any.
FusedAnswer ask_fused(const PlanData& data, Pass pass, Device& device, bool deterministic, const Bindings* bindings);

// How a pass of the plan calls a library; no longer than the plan.
FusedMode fused_mode(const PlanData& plan, Pass pass, bool deterministic);

// What is the same for all tasks of a plan.
kernels::AttendParams attend_params(const PlanData& plan);

}  // namespace ringspan::internal
