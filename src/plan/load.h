// What each rank has to compute and to read, counted without planning it. Pure.
#pragma once

#include <cstdint>
#include <limits>
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

// The ranks, `first` first, then the others, each far from all before it and in step with no period of a pattern.
std::vector<int> spread_ranks(const std::vector<int>& first, int ranks);

// Cost: the slices that hold a row of a rank, over both sides of all ranks, or of as many, spread out, as have `most_slices`;
// the others count as what these have on average.
class Loads {
 public:
  explicit Loads(const Setting& setting, std::int64_t most_slices = std::numeric_limits<std::int64_t>::max());

  // Of an assignment in which a rank computes whole queries, whole keys or whole heads: exact where all ranks were looked at,
  // otherwise estimated. Of any other the least it may be.
  Int128 pairs(const Assignment& assignment) const;

  // Ranks that have the most of something, of those that were looked at: pairs or rows, of queries or of keys. Ascending,
  // without repetition.
  std::vector<int> extremes() const;

  int ranks_looked_at() const { return looked_at_; }

 private:
  struct HeadPairs {
    Progression heads;
    Int128 pairs = 0;  // of each
  };

  Int128 sum(const std::vector<Load>& loads, Int128 of_known, const Progression& owners) const;

  int ranks_, heads_, looked_at_ = 0;
  std::vector<bool> is_known_;
  std::vector<Load> queries_, keys_;        // by rank
  Int128 query_pairs_ = 0, key_pairs_ = 0;  // of the ranks that were looked at
  std::vector<HeadPairs> head_pairs_;
};

}  // namespace ringspan::internal
