// What each rank has to compute and to read, counted without planning it. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/int128.h"
#include "plan/strategy.h"

namespace ringspan::internal {

// Of the rows of one rank, queries or keys.
struct Load {
  Int128 pairs = 0;       // that these rows are in
  std::int64_t rows = 0;  // of the rank
  std::int64_t others =
      0;  // (batch, position, head) rows of the other side in these pairs; those of several slices count again
};

// Cost: the slices that hold a row of a rank, over all ranks and both sides.
class Loads {
 public:
  explicit Loads(const Setting& setting);

  // Exact, of an assignment in which a rank computes whole queries, whole keys or whole heads; otherwise the least it may be.
  Int128 pairs(const Assignment& assignment) const;

  // Ranks that have the most of something: pairs or rows, of queries or of keys. Ascending, without repetition.
  std::vector<int> extremes() const;

 private:
  int ranks_;
  std::vector<Load> queries_, keys_;  // by rank
  std::vector<Int128> heads_;         // pairs of each query head
};

}  // namespace ringspan::internal
