// Who reads which rows: the one rule from which every transfer follows. Both ends of a transfer evaluate the same function on
// the same arguments, so what one plans to send is what the other plans to receive.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/box.h"

namespace ringspan::internal {

// Positions of one or more ranks, with the query heads that matter.
struct Rows {
  std::vector<Progression> pieces;  // disjoint
  bool empty() const { return pieces.empty(); }
};

struct HeadRange {
  int begin = 0;
  int end = 0;
};

struct Reads {
  std::vector<Box> boxes;        // disjoint; on the key side in kv heads, on the query side in query heads
  std::int64_t excess_rows = 0;  // rows of the boxes that nobody reads; at most, where several slices share rows
  std::int64_t visited_slices = 0;
};

// Rows of `keys` (in kv heads) that some query of `queries`, in `heads`, attends.
Reads keys_read(const Problem& problem, const Rows& queries, HeadRange heads, const Rows& keys);
// Rows of `queries` (in query heads) that attend some key of `keys`.
Reads queries_reading(const Problem& problem, const Rows& queries, HeadRange heads, const Rows& keys);

// Pieces whose ranges overlap or touch, and the range of all of them; between two hulls there is a gap, so that a pattern is
// lowered for what is at hand and not for what lies between.
struct Hull {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<std::size_t> members;
};
std::vector<Hull> hulls(std::span<const Progression> pieces);

// The kv heads that a progression of query heads reads, as disjoint progressions.
std::vector<Progression> kv_heads_of(const Progression& heads, int group);
// The query heads of `heads` whose kv head is in `kv_heads`, as disjoint progressions.
std::vector<Progression> heads_reading(const Progression& heads, int group, const Progression& kv_heads);

}  // namespace ringspan::internal
