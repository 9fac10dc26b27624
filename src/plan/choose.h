// Choosing a strategy and a bucket size. What all ranks must agree on follows from what all of them know: the problem, the
// options and the plans of the same ranks. Pure, in integers.
#pragma once

#include <vector>

#include "plan/pass.h"
#include "ringspan/plan.h"

namespace ringspan::internal {

struct Choice {
  Setting setting;  // strategy and bucket_rows decided
  std::vector<Rejected> rejected;
  Int128 slowest_nanoseconds = 0;  // of the ranks that were looked at
  int ranks_looked_at = 0;         // 0: there was nothing to choose
  int plans = 0;                   // that were made to choose, of all candidates
};

// The cheapest supported candidate within the budget. Throws Unsupported, or OutOfBudget with the smallest budget that would
// do. `problem` and `options` are valid by themselves. Cost: the pairs of all ranks are counted (plan/load.h); then the plans
// of all ranks of the candidate that wins where that is little effort, else of those that have the most to do and a few more;
// and of the others, as many ranks as it takes to see that they lose. One candidate without a budget: nothing.
Choice choose(const Problem& problem, const PlanOptions& options);

}  // namespace ringspan::internal
