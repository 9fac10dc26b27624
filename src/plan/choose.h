// Choosing a strategy and a bucket size. What all ranks must agree on follows from what all of them know: the problem, the
// options and the plans of the same sample of ranks. Pure, in integers.
#pragma once

#include <vector>

#include "plan/pass.h"
#include "ringspan/plan.h"

namespace ringspan::internal {

struct Choice {
  Setting setting;  // strategy and bucket_rows decided
  std::vector<Rejected> rejected;
};

// The cheapest supported candidate within the budget. Throws Unsupported, or OutOfBudget with the smallest budget that would
// do. `problem` and `options` are valid by themselves. Cost: two passes of up to 16 ranks per candidate and bucket size;
// candidates whose computing alone takes longer than the best so far are not built. One candidate without a budget: nothing.
Choice choose(const Problem& problem, const PlanOptions& options);

}  // namespace ringspan::internal
