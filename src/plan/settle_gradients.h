// Settle gradients: where a row of dq, or of dk and dv, has one task, or tasks of one launch over the same rows (split_tasks.h),
// nothing else adds to it, and kernels can, tasks write the caller's gradients in the storage dtype; nobody fills, adds and casts
// float32 sums, which are not allocated. Pure: a program of a backward pass in, the same one with fewer launches out. All tasks
// do, or none.
//
// Cost: O(items log items + row items x items); allocates.
#pragma once

#include "plan/plan_data.h"

namespace ringspan::internal {

void settle_gradients(Program* program, int group);

}  // namespace ringspan::internal
