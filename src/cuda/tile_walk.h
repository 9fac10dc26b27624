// TileWalk: the tiles of the other side that a block's rows have to do with, in one task and head.
#pragma once

#include <cstdint>

#include "cuda/machine.h"
#include "kernels/task_view.h"

namespace ringspan::cuda {

// Tile t is rows first(t) and on, valid(t) of them. Views of them are made from the task anew where they are needed: registers
// are scarce.
template <typename P>
struct TileWalk {
  // `first`, `last`: what the first and the last row of the block see, of `count` rows. Ends of rows' ranges never decrease, so
  // the block sees those from the first one's first to the last one's last, and all of its rows see those from the last one's
  // first to the first one's last.
  static RINGSPAN_DEVICE TileWalk of(const kernels::IndexRange& first, const kernels::IndexRange& last, std::int64_t count,
                                     std::int64_t head) {
    const std::int64_t end = last.end < count ? last.end : count;
    const std::int64_t rows = end > first.begin ? end - first.begin : 0;
    TileWalk walk;
    walk.head = static_cast<int>(head);
    walk.begin = static_cast<int>(first.begin);
    walk.rows = static_cast<int>(rows);
    walk.tiles = static_cast<int>((rows + P::kCols - 1) / P::kCols);
    walk.full_begin = static_cast<int>((last.begin - first.begin + P::kCols - 1) / P::kCols);
    walk.full_end = static_cast<int>((first.end - first.begin) / P::kCols);
    return walk;
  }

  // The same, which is that of all threads, known to be so by the compiler.
  template <typename M>
  RINGSPAN_DEVICE TileWalk uniform() const {
    return {M::uniform(head),  M::uniform(begin),      M::uniform(rows),
            M::uniform(tiles), M::uniform(full_begin), M::uniform(full_end)};
  }

  RINGSPAN_DEVICE int first(int tile) const { return begin + tile * P::kCols; }
  RINGSPAN_DEVICE int valid(int tile) const {
    const int left = rows - tile * P::kCols;
    return left < P::kCols ? left : P::kCols;
  }
  RINGSPAN_DEVICE bool is_full(int tile) const { return tile >= full_begin && tile < full_end; }

  int head;  // of the operands on the other side
  int begin, rows, tiles;
  int full_begin, full_end;  // tiles [full_begin, full_end) are seen whole by all rows
};

}  // namespace ringspan::cuda
