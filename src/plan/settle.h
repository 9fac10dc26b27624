// Settle: tasks that are the last to touch their rows leave results there (kernels/attend.h), and the launch that turns states
// into the caller's o and lse keeps the other rows only. Pure: a program of a forward pass in, the same one with fewer launches
// out; what is stored, sent and computed stays the same. Where the tasks over the rows of a state are alone, and settled, and
// kernels need none of it, the state goes: m, l and acc of these tasks are no views, and nobody fills them.
//
// Where kernels group tasks, those of one launch over the same rows are last together (split_tasks.h).
//
// Left as they are, because who is last does not show at a glance: rows that take in partial results, tasks over overlapping
// but different sets of heads or batch items, or over rows in steps that come together too seldom.
//
// Cost: O(items log items + finalize items x items); allocates.
#pragma once

#include "plan/plan_data.h"

namespace ringspan::internal {

// sinks: whether the problem has any. keys_without_state: of a task, up to which the kernel needs no state; groups_tasks:
// whether it takes tasks with results over the same rows together.
void settle(Program* program, bool sinks, std::int64_t keys_without_state, bool groups_tasks);

}  // namespace ringspan::internal
