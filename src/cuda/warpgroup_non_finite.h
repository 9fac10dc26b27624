// NaN and infinities in a tile whose rows some of the block's rows do not see, or drop: their weight is 0, but 0 x NaN must not
// reach a sum. Such elements become 0 in shared memory and reach the rows that see them one by one. For tiles with masked or
// dropped pairs only; seldom more than a look.
#pragma once

#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

// Raises a thread's flag where the tile holds NaN or infinities. No barrier.
template <typename P, typename M>
RINGSPAN_DEVICE void find_non_finite(M& m, const unsigned char* tile, typename M::template Registers<int, 1>& flags) {
  m.each([&](int number) {
    const int thread = M::hidden(number);
    flags[number][0] = 0;
    RINGSPAN_NO_UNROLL
    for (int offset = thread * 16; offset < P::kColTileBytes; offset += M::kThreads * 16) {
      const Chunk chunk = m.load_shared(number, tile + offset);
      RINGSPAN_UNROLL
      for (int word = 0; word < 4; ++word) {
        if (!is_finite_word<P::kType>(chunk.words[word])) flags[number][0] = 1;
      }
    }
  });
}

// Sets elements that are not finite to 0. A thread writes what it read itself. No barrier, no fence.
template <typename P, typename M>
RINGSPAN_DEVICE void clear_non_finite(M& m, unsigned char* tile) {
  m.each([&](int number) {
    const int thread = M::hidden(number);
    RINGSPAN_NO_UNROLL
    for (int offset = thread * 16; offset < P::kColTileBytes; offset += M::kThreads * 16) {
      Chunk chunk = m.load_shared(number, tile + offset);
      RINGSPAN_UNROLL
      for (int word = 0; word < 4; ++word) chunk.words[word] = without_non_finite<P::kType>(chunk.words[word]);
      m.store_shared(number, tile + offset, chunk);
    }
  });
}

// For each pair of the tile: 0 not visible, or dropped; the weight is 1 positive, 2 negative, 3 zero (too small for the storage
// type) or NaN. kDropped: -0 is the weight of a dropped pair, which no other one has.
template <typename P, bool kDropped, typename M, typename Visible>
RINGSPAN_DEVICE void note_pairs(M& m, unsigned char* pairs,
                                typename M::template Registers<std::uint32_t, P::kCols / 4>& weights, Visible&& visible_of) {
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    const auto visible = visible_of(thread);
    RINGSPAN_UNROLL
    for (int index = 0; index < P::kCols / 4; ++index) {
      RINGSPAN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int half = index % 2;
        const int column = M::hidden(index / 2 * 8 + lane.column + e);
        const auto bits = static_cast<std::uint16_t>(weights[thread][index] >> (16 * e));
        const float weight = P::Storage::load(bits);
        const bool takes = visible.sees(half, column) && !(kDropped && bits == 0x8000U);
        const int kind = !takes ? 0 : weight > 0.0F ? 1 : weight < 0.0F ? 2 : 3;
        pairs[(lane.row + half * 8) * P::kCols + column] = static_cast<unsigned char>(kind);
      }
    }
  });
}

template <typename P, typename M>
RINGSPAN_DEVICE void add_non_finite(M& m, typename M::template Registers<float, P::kDim / 2>& sums, const unsigned char* pairs,
                                    const TileRows<typename P::Element>& from) {
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_NO_UNROLL
    for (int column = 0; column < from.valid; ++column) {
      const typename P::Element* row = from.rows.row(from.first + column);
      const int kinds[2] = {pairs[lane.row * P::kCols + column], pairs[(lane.row + 8) * P::kCols + column]};
      if (kinds[0] + kinds[1] == 0) continue;
      RINGSPAN_UNROLL
      for (int pair = 0; pair < P::kDim / 4; ++pair) {
        const int e = M::hidden(pair / 2 * 8 + lane.column + pair % 2);
        const float value = e < from.width ? P::Storage::load(row[e]) : 0.0F;
        const float nan = value - value;
        if (nan == 0.0F) continue;
        RINGSPAN_UNROLL
        for (int half = 0; half < 2; ++half) {
          if (kinds[half] == 0) continue;
          sums[thread][pair / 2 * 4 + half * 2 + pair % 2] += kinds[half] == 1 ? value : kinds[half] == 2 ? -value : nan;
        }
      }
    }
  });
}

// Before `weights` are multiplied by the tile, with no product under way. `pairs`: kRows x kCols bytes of shared memory;
// visible_of(thread) has sees(half, column). Barriers.
template <typename P, bool kDropped, typename M, typename Visible>
RINGSPAN_DEVICE void exclude_non_finite(M& m, unsigned char* tile, const TileRows<typename P::Element>& from,
                                        typename M::template Registers<float, P::kDim / 2>& sums,
                                        typename M::template Registers<std::uint32_t, P::kCols / 4>& weights,
                                        unsigned char* pairs, typename M::template Registers<int, 1>& flags,
                                        Visible&& visible_of) {
  find_non_finite<P>(m, tile, flags);
  if (!m.sync_any(flags)) return;
  note_pairs<P, kDropped>(m, pairs, weights, visible_of);
  clear_non_finite<P>(m, tile);
  m.fence_async();
  m.sync();
  add_non_finite<P>(m, sums, pairs, from);
}

}  // namespace ringspan::cuda
