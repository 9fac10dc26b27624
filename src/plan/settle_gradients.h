// Settle gradients: where a row of dq, or of dk and dv, has one task, or tasks of one launch over the same rows
// (split_tasks.h), nothing else adds to it, and kernels can, tasks write the caller's gradient in the storage dtype. Its sums
// in float32 are neither filled nor cast; where that is so of all rows, they are not allocated. Pure: a program of a backward
// pass in, the same one with less in its row launches out.
//
// Cost: O(items log items + row items x items); allocates.
#pragma once

#include "plan/plan_data.h"

namespace ringspan::internal {

// group: query heads per kv head. groups_tasks: as in settle.h.
void settle_gradients(Program* program, int group, bool groups_tasks);

}  // namespace ringspan::internal
