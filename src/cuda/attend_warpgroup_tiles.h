// Where the tiles of attend's program for warpgroups (attend_warpgroup_block.h) lie in shared memory, for both roles.
#pragma once

#include "cuda/checked_tile.h"
#include "cuda/tile_policy.h"
#include "cuda/work_ring.h"

namespace ringspan::cuda {

// Shared memory of a block: the queries, buffers of keys and of values, a byte per pair of a tile, results on their way out,
// barriers, what is to be done.
template <typename P>
struct AttendTiles {
  static constexpr int kBuffers = P::kDim == 64 ? 4 : 2;  // what there is room for

  template <typename M>
  RINGSPAN_DEVICE AttendTiles(const M& m, unsigned char* shared)
      : begin(shared + (0U - m.shared_address(shared)) % kSwizzleBytes), barriers(m.shared_address(begin) + kBarriers) {}

  RINGSPAN_DEVICE unsigned char* queries() const { return begin; }
  RINGSPAN_DEVICE unsigned char* keys(int buffer) const { return begin + P::kRowTileBytes + buffer * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* values(int buffer) const { return keys(kBuffers + buffer); }
  RINGSPAN_DEVICE unsigned char* pairs() const { return keys(2 * kBuffers); }
  RINGSPAN_DEVICE typename P::Element* results() const { return reinterpret_cast<typename P::Element*>(begin + kResults); }
  RINGSPAN_DEVICE int* non_finite(int buffer) const { return reinterpret_cast<int*>(begin + kFlags) + buffer; }  // of values
  RINGSPAN_DEVICE WorkSlots<P>& work() const { return *reinterpret_cast<WorkSlots<P>*>(begin + kWork); }

  RINGSPAN_DEVICE TileRing<1> query_ring() const { return TileRing<1>(barriers); }
  RINGSPAN_DEVICE TileRing<kBuffers> key_ring() const { return TileRing<kBuffers>(barriers + 16); }
  RINGSPAN_DEVICE TileRing<kBuffers> value_ring() const { return TileRing<kBuffers>(barriers + 16 + kRingBytes); }
  RINGSPAN_DEVICE WorkRing work_ring() const { return WorkRing(barriers + 16 + 2 * kRingBytes); }
  RINGSPAN_DEVICE Landing landing() const { return Landing(barriers + 48 + 2 * kRingBytes); }
  RINGSPAN_DEVICE Asked asked() const { return Asked(barriers + 56 + 2 * kRingBytes); }
  // By one thread, before the roles begin.
  template <typename M>
  RINGSPAN_DEVICE void init_barriers(M& m) const {
    query_ring().init(m, P::kCopiers, P::kThreads / 32);
    key_ring().init(m, P::kCopiers, P::kThreads / 32);
    value_ring().init(m, P::kCopiers, P::kThreads / 32);
    work_ring().init(m, P::kFinders, (P::kThreads + P::kCopiers) / 32);
    landing().init(m, P::kCopiers);
    asked().init(m, P::kCopiers / 32);
  }

  static constexpr int kRingBytes = TileRing<kBuffers>::kBarrierBytes;
  static constexpr int kResults = P::kRowTileBytes + 2 * kBuffers * P::kColTileBytes + P::kRows * P::kCols;
  static constexpr int kBarriers = kResults + P::kRows * (P::kDim + 8) * 2;
  static constexpr int kFlags = kBarriers + 64 + 2 * kRingBytes;
  static constexpr int kWork = kFlags + 4 * kBuffers;
  static constexpr int kBytes = kWork + static_cast<int>(sizeof(WorkSlots<P>)) + kSwizzleBytes;
  static_assert(kBarriers % 16 == 0 && kWork % alignof(WorkSlots<P>) == 0 && kBytes <= kMostSharedBytes);
  unsigned char* begin;  // at a multiple of 1,024
  std::uint32_t barriers;
};

}  // namespace ringspan::cuda
