// How a block's sums reach the rows of a gradient in memory.
#pragma once

#include "cuda/block_parts.h"

namespace ringspan::cuda {

// factor x the sums of a block's rows, added to rows first .. first + count - 1; a row that has not seen a pair keeps its bits.
template <typename P, typename M>
RINGSPAN_DEVICE void add_rows(M& m, RowsView<float> rows, std::int64_t first, int count, int width, float factor,
                              typename M::template Registers<float, P::kDim / 2>& sums,
                              typename M::template Registers<int, 2>& seen) {
  m.each([&](int thread) {
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      if (row >= count || seen[thread][half] == 0) continue;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kDim / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = j * 8 + lane.column + e;
          if (column < width) rows.row(first + row)[column] += factor * sums[thread][j * 4 + half * 2 + e];
        }
      }
    }
  });
}

}  // namespace ringspan::cuda
