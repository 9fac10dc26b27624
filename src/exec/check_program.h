// Proves once, before anything runs, that no task of a program leaves the memory it may touch.
#pragma once

#include "plan/plan_data.h"

namespace ringspan::internal {

// Throws std::logic_error (a bug of the planner) unless every item of every launch lies inside its views, every view and
// message inside the arena, and widths and dtypes are what the kernels expect. O(items).
void check_program(const PlanData& plan, const Program& program);

}  // namespace ringspan::internal
