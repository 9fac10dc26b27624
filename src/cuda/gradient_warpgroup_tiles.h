// Where the tiles of backward's programs for warpgroups (gradient_warpgroup_block.h) lie in shared memory, for both roles.
#pragma once

#include "cuda/gradient_walk.h"
#include "cuda/tile_ring.h"
#include "cuda/warpgroup.h"

namespace ringspan::cuda {

// Shared memory of a block: x1 and x2, three buffers of y1 and y2, a byte per pair of a tile, three buffers of lse and delta of
// the rows of y with a word that says whether an lse among them is -inf (dk and dv only), barriers.
template <typename P>
struct GradientTiles {
  static constexpr int kBuffers = 3;

  template <typename M>
  RINGSPAN_DEVICE GradientTiles(const M& m, unsigned char* shared)
      : begin(shared + (0U - m.shared_address(shared)) % kSwizzleBytes), barriers(m.shared_address(begin) + kBarriers) {}

  RINGSPAN_DEVICE unsigned char* x1() const { return begin; }
  RINGSPAN_DEVICE unsigned char* x2() const { return begin + P::kRowTileBytes; }
  RINGSPAN_DEVICE unsigned char* y1(int buffer) const { return begin + 2 * P::kRowTileBytes + buffer * 2 * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* y2(int buffer) const { return y1(buffer) + P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* pairs() const { return y1(kBuffers); }
  RINGSPAN_DEVICE float* lse(int buffer) const {
    return reinterpret_cast<float*>(pairs() + P::kRows * P::kCols) + buffer * (2 * P::kCols + 1);
  }
  RINGSPAN_DEVICE float* delta(int buffer) const { return lse(buffer) + P::kCols; }
  RINGSPAN_DEVICE float* without(int buffer) const { return lse(buffer) + 2 * P::kCols; }  // 1: an lse is -inf

  RINGSPAN_DEVICE TileRing<1> row_ring() const { return TileRing<1>(barriers); }
  RINGSPAN_DEVICE TileRing<kBuffers> column_ring() const { return TileRing<kBuffers>(barriers + TileRing<1>::kBarrierBytes); }
  // By one thread, before the roles begin.
  template <typename M>
  RINGSPAN_DEVICE void init_barriers(M& m) const {
    row_ring().init(m, P::kProducers, P::kThreads / 32);
    column_ring().init(m, P::kProducers, P::kThreads / 32);
  }

  static constexpr int kStatistics = P::kBackwardStatisticsBytes;
  static_assert(kStatistics >= kBuffers * (2 * P::kCols + 1) * 4 && kStatistics % 8 == 0);
  static constexpr int kBarriers = 2 * P::kRowTileBytes + 2 * kBuffers * P::kColTileBytes + P::kRows * P::kCols + kStatistics;
  unsigned char* begin;  // at a multiple of 1,024
  std::uint32_t barriers;
};

}  // namespace ringspan::cuda
