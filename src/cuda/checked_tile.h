// Tiles in which masked or dropped pairs meet values: 0 x NaN must not reach a sum. Whether it has, sums say themselves, since
// NaN stays: a block whose sums are not finite is taken in again (work_ring.h). Then those who copy look at such a
// tile when it has landed, before it is published; where there is something, those that multiply set it to 0 and add it, one by
// one, to the rows that see it.
#pragma once

#include "cuda/tile_ring.h"
#include "cuda/tile_walk.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

// A barrier at which the side that copies waits for its own copies.
class Landing {
 public:
  static constexpr int kBarrierBytes = 8;
  explicit RINGSPAN_DEVICE Landing(std::uint32_t barrier) : barrier_(barrier) {}

  // By one thread, before anything else.
  template <typename M>
  RINGSPAN_DEVICE void init(M& m, int copying_threads) const {
    m.init_barrier(barrier_, 2 * copying_threads);
  }
  // Where the bytes of a tile are counted.
  RINGSPAN_DEVICE std::uint32_t barrier() const { return barrier_; }
  template <typename M>
  RINGSPAN_DEVICE void wait(M& m) {
    m.arrive_when_copied(barrier_);
    m.arrive_threads(barrier_);
    m.wait(barrier_, phase_);
    phase_ = 1 - phase_;
  }

 private:
  std::uint32_t barrier_;
  int phase_ = 0;
};

// Whether attend looks at a tile's values, in a block that is taken in again.
template <typename P>
RINGSPAN_DEVICE bool looks_at_tile(const TileWalk<P>& walk, int tile, const kernels::AttendShape& shape) {
  return !walk.is_full(tile) || (P::kOptions && shape.dropout);
}

// By the side that copies, of tiles that have landed and lie one behind the other: whether they hold NaN or infinities.
// fence_async() has to follow, before the next copy to where was read. One loop of few instructions, which are fetched anew for
// every look.
template <typename P, int kTiles, typename M>
RINGSPAN_DEVICE bool hold_non_finite(M& m, unsigned char* tiles, typename M::template Registers<int, 1>& flags) {
  constexpr int kPassBytes = M::kThreads * 16;
  static_assert(P::kColTileBytes % kPassBytes == 0);
  m.each([&](int thread) {
    const unsigned char* at = tiles + thread * 16;
    std::uint32_t notes = 0;
    RINGSPAN_UNROLL_4  // several reads under way
        for (int pass = 0; pass < kTiles * P::kColTileBytes / kPassBytes; ++pass, at += kPassBytes) {
      const Chunk chunk = m.load_shared(thread, at);
      RINGSPAN_UNROLL
      for (int word = 0; word < 4; ++word) notes = M::template note_non_finite<P::kType>(chunk.words[word], notes);
    }
    flags[thread][0] = (notes & 0x7fff7fffU) != 0 ? 1 : 0;
  });
  return m.sync_any(flags);
}

// By the side that multiplies, of a tile that does, before `weights` are multiplied by it, with no product under way. `pairs`:
// kRows x kCols bytes of shared memory; visible_of(thread) has sees(half, column). kDropped: -0 is the weight of a dropped
// pair, which no other one has. Barriers.
template <typename P, bool kDropped, typename M, typename Visible>
RINGSPAN_DEVICE void exclude_non_finite(M& m, unsigned char* tile, const TileRows<typename P::Element>& from,
                                        typename M::template Registers<float, P::kDim / 2>& sums,
                                        typename M::template Registers<std::uint32_t, P::kCols / 4>& weights,
                                        unsigned char* pairs, Visible&& visible_of) {
  note_pairs<P>(m, pairs, [&](int thread) {
    const auto& words = weights[thread];
    return [&words, visible = visible_of(thread)](int half, int index, int column) {
      const auto bits = static_cast<std::uint16_t>(words[index / 2] >> (index % 2 * 16));
      const bool takes = visible.sees(half, column) && !(kDropped && bits == 0x8000U);
      return takes ? kind_of_weight(P::Storage::load(bits)) : kNoPair;
    };
  });
  m.sync();  // nobody multiplies by the tile any more
  clear_non_finite<P, SwizzledTile<P::kCols>>(m, tile);
  m.fence_async();
  m.sync();
  add_non_finite<P>(m, sums, pairs, from);
  m.sync_warps();  // a row of pairs is that of four threads of a warp
}

// By the side that multiplies, at the end of a block: which warps store their sums, by kept[thread][0]. At first those whose
// sums are finite; the others say so (is_spoilt of WorkSlots), and they, `again` of TaskWork, when the block was taken in
// again. Every other row will do: what must not reach a sum of one row of the block has reached that of each, 0 x NaN at least.
template <typename M, typename... Sums>
RINGSPAN_DEVICE void find_kept(M& m, typename M::template Registers<int, 1>& kept, int again, bool* is_spoilt, Sums&... sums) {
  m.each([&](int thread) {
    float probes[4] = {};  // NaN of NaN and infinities, and from then on
    const auto note = [&](const auto& values) {
      RINGSPAN_UNROLL
      for (int index = 0; index < static_cast<int>(sizeof(values) / sizeof(float)); index += 4) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& probe = probes[index / 4 % 2 * 2 + e];
          probe = fmaf(values[index + e], 0.0F, probe);
        }
      }
    };
    (note(sums[thread]), ...);
    const float probe = probes[0] + probes[1] + (probes[2] + probes[3]);
    kept[thread][0] = probe == 0.0F ? 0 : 1;
  });
  m.any_of_warps(kept);
  m.each([&](int thread) {
    const int warp = thread / 32;
    const bool spoilt = again == 0 && kept[thread][0] != 0;
    is_spoilt[warp] = spoilt;  // by all its threads: a branch would keep ptxas from uniform registers, everywhere
    kept[thread][0] = again != 0 ? again >> warp & 1 : spoilt ? 0 : 1;
  });
}

}  // namespace ringspan::cuda
