// Rows of accumulator fragments to memory: of a state, of results, of gradients. A thread has two neighbouring columns of each
// run of eight.
#pragma once

#include "cuda/block_parts.h"

namespace ringspan::cuda {

// Rows first .. first + rows - 1, or (kSeen) those of them that were seen; a quad writes 32 bytes side by side.
template <typename P, bool kSeen = true, typename M>
RINGSPAN_DEVICE void store_floats(M& m, typename M::template Registers<float, P::kDim / 2>& values,
                                  typename M::template Registers<int, 2>& seen, RowsView<float> to, std::int64_t first,
                                  int rows, int width) {
  const bool pairs = are_pairs(to);
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      if (row >= rows || (kSeen && seen[thread][half] == 0)) continue;
      float* const out = to.row(first + row);
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kDim / 8; ++j) {
        const int column = j * 8 + lane.column;
        const float low = values[thread][j * 4 + half * 2];
        const float high = values[thread][j * 4 + half * 2 + 1];
        if (pairs && column + 1 < width) {
          *reinterpret_cast<FloatPair*>(out + column) = {low, high};
        } else {
          store_pair(out + column, width - column, {low, high});
        }
      }
    }
  });
}

// All rows in 16 bits, through shared memory (`tile`, kRows x (kDim + 8) elements that nobody uses after the next barrier), so
// that whole runs of 16 bytes are written.
template <typename P, typename M>
RINGSPAN_DEVICE void store_rounded(M& m, typename M::template Registers<float, P::kDim / 2>& values,
                                   RowsView<typename P::Element> to, std::int64_t first, int rows, int width,
                                   typename P::Element* tile) {
  constexpr int kLead = P::kDim + 8;  // spreads eight rows over all banks
  m.sync();
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int index = 0; index < P::kDim / 4; ++index) {
      const int row = lane.row + index % 2 * 8;
      const int column = index / 2 * 8 + lane.column;
      *reinterpret_cast<std::uint32_t*>(tile + row * kLead + column) =
          M::template pack<P::kType>(values[thread][2 * index], values[thread][2 * index + 1]);
    }
  });
  m.sync();
  store_tile<P::kRows, P::kDim, kLead>(m, tile, to, first, rows, width);
}

}  // namespace ringspan::cuda
