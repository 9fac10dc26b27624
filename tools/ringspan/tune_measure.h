// Measuring sizes for `ringspan tune`: candidates run in turn on the same tensors in the same memory.
#pragma once

#include <functional>
#include <vector>

#include "rank_work.h"

namespace ringspan::cli {

// Seconds of each pass, of the slowest rank.
struct PassSeconds {
  double forward = 0, backward = 0;
};

// Runs `options` one after the other, `rounds` times, over problem.ranks threads of one thread each; every other round in the
// opposite order. [candidate][round], the best of `repeats` runs in a row: what disturbs a run only makes it slower. `step` is
// called by the first rank before them. A run before the first warms up.
std::vector<std::vector<PassSeconds>> run_in_turns(const Problem& problem, const std::vector<PlanOptions>& options,
                                                   const Inputs& inputs, int rounds, int repeats,
                                                   const std::function<void()>& step);

}  // namespace ringspan::cli
