// Which rows are checked where checking every element takes too long: some of every rank, so that no rank's mistake stays
// unseen.
//
// Pure; a function of its arguments. Cost: O(slices) per key.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/dense.h"

namespace ringspan::cli {

struct Sample {
  // The first and the last query, and of every rank in turn one that sees a key; of every rank in turn a key that is seen. A
  // rank whose rows are padding has one of those: its gradients are 0.
  std::vector<oracle::Row> queries, keys;
  // dk and dv are to be made of the o and lse computed: whole rows of all queries that see the keys would take too long.
  bool from_outputs = false;
  // Whose keys are not among them: with several softmax states, which o and lse do not tell apart, as many as fit.
  std::vector<int> ranks_without_keys;
};

Sample draw_sample(const Problem& problem, bool backward, std::uint64_t seed);

}  // namespace ringspan::cli
