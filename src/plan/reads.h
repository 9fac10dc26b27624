// Who reads which rows: the one rule from which every transfer follows. Both ends of a transfer evaluate the same function on
// the same arguments, so what one plans to send is what the other plans to receive.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "pattern/lower.h"
#include "plan/near.h"

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
Reads keys_read(const Lowering& lowering, const Rows& queries, HeadRange heads, const Rows& keys);
// Rows of `queries` (in query heads) that attend some key of `keys`.
Reads queries_reading(const Lowering& lowering, const Rows& queries, HeadRange heads, const Rows& keys);

// Pieces whose ranges overlap or touch, and the range of all of them; between two hulls there is a gap, so that a pattern is
// lowered for what is at hand and not for what lies between.
struct Hull {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<std::size_t> members;
};
std::vector<Hull> hulls(std::span<const Progression> pieces);

// The hulls of pieces, and which of a hull's pieces a slice may have rows of.
class Pieces {
 public:
  explicit Pieces(std::span<const Progression> pieces);
  const std::vector<Hull>& hulls() const { return hulls_; }
  // In the order of the hull's members; valid until the next call.
  const std::vector<std::size_t>& near(const Hull& hull, const Progression& positions);

 private:
  std::vector<Hull> hulls_;
  std::vector<std::optional<Ranges>> ranges_;  // of hulls with many members
  std::vector<std::size_t> found_;
};

// Every slice between two hulls, clipped to them: hull by hull of `outer`, then of `inner`, then as for_each_slice has them.
// Cost: one lowering for each two hulls where both lists are short, else for each hull of the short one, or of `outer`.
void for_each_slice_between(const Lowering& lowering, std::span<const Hull> outer, std::span<const Hull> inner,
                            bool outer_is_queries, HeadRange heads,
                            FunctionRef<void(const Slice&, const Hull& outer, const Hull& inner)> visit);

// The kv heads that a progression of query heads reads, as disjoint progressions.
std::vector<Progression> kv_heads_of(const Progression& heads, int group);
// The query heads of `heads` whose kv head is in `kv_heads`, as disjoint progressions.
std::vector<Progression> heads_reading(const Progression& heads, int group, const Progression& kv_heads);

}  // namespace ringspan::internal
