// Where the tiles of backward's programs for warpgroups (gradient_warpgroup_block.h) lie in shared memory, for both roles.
#pragma once

#include "cuda/checked_tile.h"
#include "cuda/gradient.h"
#include "cuda/tile_policy.h"
#include "cuda/work_ring.h"

namespace ringspan::cuda {

// Shared memory of a block: x1 and x2, buffers of y1 and y2, a byte per pair of a tile, results on their way out, as many
// of lse and delta of the rows of y (dk and dv only), what is to be known of a tile, barriers, what is to be done.
template <typename P>
struct GradientTiles {
  static constexpr int kBuffers = P::kDim == 64 ? 4 : 3;  // what there is room for
  // Of a tile: some of its pairs are masked; there are NaN or infinities in it that these must not meet.
  enum Flag : int { kChecked = 1, kExcludes = 2 };

  template <typename M>
  RINGSPAN_DEVICE GradientTiles(const M& m, unsigned char* shared)
      : begin(shared + (0U - m.shared_address(shared)) % kSwizzleBytes), barriers(m.shared_address(begin) + kBarriers) {}

  RINGSPAN_DEVICE unsigned char* x1() const { return begin; }
  RINGSPAN_DEVICE unsigned char* x2() const { return begin + P::kRowTileBytes; }
  RINGSPAN_DEVICE unsigned char* y1(int buffer) const { return begin + 2 * P::kRowTileBytes + buffer * 2 * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* y2(int buffer) const { return y1(buffer) + P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* pairs() const { return y1(kBuffers); }
  RINGSPAN_DEVICE typename P::Element* results() const { return reinterpret_cast<typename P::Element*>(begin + kResults); }
  RINGSPAN_DEVICE float* lse(int buffer) const { return reinterpret_cast<float*>(begin + kStatistics) + buffer * 2 * P::kCols; }
  RINGSPAN_DEVICE float* delta(int buffer) const { return lse(buffer) + P::kCols; }
  RINGSPAN_DEVICE int* flags(int buffer) const { return reinterpret_cast<int*>(begin + kFlags) + buffer; }
  RINGSPAN_DEVICE WorkSlots<P>& work() const { return *reinterpret_cast<WorkSlots<P>*>(begin + kWork); }

  RINGSPAN_DEVICE TileRing<1> row_ring() const { return TileRing<1>(barriers); }
  RINGSPAN_DEVICE TileRing<kBuffers> column_ring() const { return TileRing<kBuffers>(barriers + 16); }
  RINGSPAN_DEVICE WorkRing work_ring() const { return WorkRing(barriers + 16 + kRingBytes); }
  RINGSPAN_DEVICE Landing landing() const { return Landing(barriers + 48 + kRingBytes); }
  RINGSPAN_DEVICE Asked asked() const { return Asked(barriers + 56 + kRingBytes); }
  // By one thread, before the roles begin.
  template <typename M>
  RINGSPAN_DEVICE void init_barriers(M& m) const {
    row_ring().init(m, P::kCopiers, P::kThreads / 32);
    column_ring().init(m, P::kCopiers, P::kThreads / 32);
    work_ring().init(m, P::kFinders, (P::kThreads + P::kCopiers) / 32);
    landing().init(m, P::kCopiers);
    asked().init(m, P::kCopiers / 32);
  }

  static constexpr int kRingBytes = TileRing<kBuffers>::kBarrierBytes;
  static constexpr int kResults = 2 * P::kRowTileBytes + 2 * kBuffers * P::kColTileBytes + P::kRows * P::kCols;
  static constexpr int kStatistics = kResults + P::kRows * (P::kDim + 8) * 2;
  static constexpr int kBarriers = kStatistics + kBuffers * 2 * P::kCols * 4;
  static constexpr int kFlags = kBarriers + 64 + kRingBytes;
  static constexpr int kWork = kFlags + (4 * kBuffers + 7) / 8 * 8;
  static constexpr int kBytes = kWork + static_cast<int>(sizeof(WorkSlots<P>)) + kSwizzleBytes;
  static_assert(kBarriers % 16 == 0 && kWork % alignof(WorkSlots<P>) == 0 && kBytes <= kMostSharedBytes);
  unsigned char* begin;  // at a multiple of 1,024
  std::uint32_t barriers;
};

// Of the side that a block walks over: y1 is k or q, y2 is v or do.
template <Gradient kGradient, typename P>
RINGSPAN_DEVICE TileRows<typename P::Element> y1_rows(const TaskWork<P>& work, const TileWalk<P>& walk, int tile,
                                                      const kernels::AttendShape& shape) {
  if constexpr (kGradient == Gradient::dq) return work.tile_rows(work.task.k, walk, tile, shape.head_dim);
  return work.tile_rows(work.task.q, walk, tile, shape.head_dim);
}
template <Gradient kGradient, typename P>
RINGSPAN_DEVICE TileRows<typename P::Element> y2_rows(const TaskWork<P>& work, const TileWalk<P>& walk, int tile,
                                                      const kernels::AttendShape& shape) {
  if constexpr (kGradient == Gradient::dq) return work.tile_rows(work.task.v, walk, tile, shape.head_dim_v);
  return work.tile_rows(work.task.d_out, walk, tile, shape.head_dim_v);
}
// The walk over query head t, of the task's first one.
template <Gradient kGradient, typename P>
RINGSPAN_DEVICE TileWalk<P> walk_over(TileWalk<P> walk, int t) {
  if constexpr (kGradient != Gradient::dq) walk.head = t;
  return walk;
}

}  // namespace ringspan::cuda
