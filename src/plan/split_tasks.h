// Split: tasks cut along the rows that blocks own, so that any two of a launch have the same rows or none in common. Kernels
// of devices, whose blocks keep their rows, then take in all tasks over a row at once: its state, or the sum of its gradient,
// does not pass through memory from task to task, and settle (settle.h, settle_gradients.h) finds who is last.
//
// Where LongNet's branches overlap, of rows that three branches have, that two have and that one has, each become tasks of
// their own. A launch of backward becomes two, one with tasks cut along queries, for dq, one cut along keys, for dk and dv.
//
// Left as it is: a launch whose tasks have nothing to cut, where cutting makes blocks emptier than it saves, or too many tasks,
// or where rows or heads lie in steps that come together too seldom.
//
// Pure: the pairs of each launch, or of each of the two, stay the same. Cost: O(parts log parts), some 2^18 at most, also where
// nothing comes of them.
#pragma once

#include "plan/plan_data.h"

namespace ringspan::internal {

void split_tasks(Program* program, int group);

}  // namespace ringspan::internal
