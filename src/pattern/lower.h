// Lowering: Problem -> slices, restricted to what one rank (or one pair of ranks) needs. Pure.
//
// The slices of one state are pairwise disjoint, except those of different dilated branches, which are summed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/function_ref.h"
#include "pattern/block_index.h"
#include "pattern/slice.h"
#include "ringspan/problem.h"

namespace ringspan {

// Only slices that may hold a pair inside these half-open ranges are visited (they are clipped to them exactly).
struct Restriction {
  std::int64_t q_begin = 0, q_end = 0;
  std::int64_t k_begin = 0, k_end = 0;
  int head_begin = 0, head_end = 0;  // query heads
};

Restriction unrestricted(const Problem& problem);

// Calls `visit` for every non-empty slice (normalized) of the restricted pattern, in a fixed order that depends only on the
// problem (frames ascending, branches, segments, head classes). Cost: O(slices visited + log frames + branches), not O(n):
// frames and segments outside the restriction are never touched; of blocks, each is. `problem` must be valid.
void for_each_slice(const Problem& problem, const Restriction& restriction, FunctionRef<void(const Slice&)> visit);

std::vector<Slice> lower(const Problem& problem, const Restriction& restriction);
std::vector<Slice> lower(const Problem& problem);

// A problem that is lowered for many restrictions: of a long list of blocks, only those at hand are touched. Refers to the
// problem, which must be valid. Any thread.
class Lowering {
 public:
  explicit Lowering(const Problem& problem);
  explicit Lowering(Problem&&) = delete;
  const Problem& problem() const { return problem_; }

  // What the function above visits. Returns how many blocks, and bounds of several, it looked at.
  std::int64_t for_each_slice(const Restriction& restriction, FunctionRef<void(const Slice&)> visit) const;

 private:
  const Problem& problem_;
  std::optional<internal::BlockIndex> blocks_;  // of long lists
};

// Total pairs of the pattern: batch x heads x (i, j).
Int128 pair_count(const Problem& problem);

}  // namespace ringspan
