// Where the tiles of attend's program for warpgroups (attend_warpgroup_block.h) lie in shared memory, for both roles.
#pragma once

#include "cuda/attend_walk.h"
#include "cuda/block_queue.h"
#include "cuda/tile_ring.h"
#include "cuda/warpgroup.h"

namespace ringspan::cuda {

// Shared memory of a block: the queries, two buffers of keys, two of values, a byte per pair of a tile or results on their way
// out, barriers, numbers of blocks.
template <typename P>
struct AttendTiles {
  template <typename M>
  RINGSPAN_DEVICE AttendTiles(const M& m, unsigned char* shared)
      : begin(shared + (0U - m.shared_address(shared)) % kSwizzleBytes), barriers(m.shared_address(begin) + kBarriers) {}

  RINGSPAN_DEVICE unsigned char* queries() const { return begin; }
  RINGSPAN_DEVICE unsigned char* keys(int buffer) const { return begin + P::kRowTileBytes + buffer * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* values(int buffer) const { return keys(2 + buffer); }
  RINGSPAN_DEVICE unsigned char* pairs() const { return keys(4); }
  RINGSPAN_DEVICE typename P::Element* results() const { return reinterpret_cast<typename P::Element*>(pairs()); }
  RINGSPAN_DEVICE TileRing<1> query_ring() const { return TileRing<1>(barriers); }
  RINGSPAN_DEVICE TileRing<2> key_ring() const { return TileRing<2>(barriers + TileRing<1>::kBarrierBytes); }
  RINGSPAN_DEVICE TileRing<2> value_ring() const {
    return TileRing<2>(barriers + TileRing<1>::kBarrierBytes + TileRing<2>::kBarrierBytes);
  }

  RINGSPAN_DEVICE BlockQueue blocks() const {
    return BlockQueue(barriers + kRingBytes,
                      reinterpret_cast<int*>(begin + kBarriers + kRingBytes + BlockQueue::kBarrierBytes));
  }

  // By one thread, before the roles begin.
  template <typename M>
  RINGSPAN_DEVICE void init_barriers(M& m) const {
    query_ring().init(m, P::kProducers, P::kThreads / 32);
    key_ring().init(m, P::kProducers, P::kThreads / 32);
    value_ring().init(m, P::kProducers, P::kThreads / 32);
    blocks().init(m, P::kProducers, P::kThreads / 32);
  }

  static constexpr int kBarriers = P::kRowTileBytes + 4 * P::kColTileBytes + P::kForwardPairBytes;
  static constexpr int kRingBytes = TileRing<1>::kBarrierBytes + 2 * TileRing<2>::kBarrierBytes;
  static_assert(kBarriers + kRingBytes + BlockQueue::kBytes + kSwizzleBytes == P::kForwardBytes);
  unsigned char* begin;  // at a multiple of 1,024
  std::uint32_t barriers;
};

}  // namespace ringspan::cuda
