// The running state of a block's rows, between memory and accumulator fragments. The sum of a row is kept in four parts, one
// per thread that holds the row, until it is stored.
#pragma once

#include "cuda/block_parts.h"

namespace ringspan::cuda {

template <typename P, typename M>
struct StateRows {
  typename M::template Registers<float, P::kDim / 2> acc;
  typename M::template Registers<float, 2> max, sum;
  typename M::template Registers<int, 2> seen;  // whether the row has taken in any pair

  // Rows first .. first + rows - 1 of (batch, head) of the task; others are empty.
  RINGSPAN_DEVICE void load(M& m, const kernels::AttendTask& task, std::int64_t batch, std::int64_t head, std::int64_t first,
                            int rows, int width) {
    const auto m_rows = view_of<const float>(task.m, batch, head);
    const auto l_rows = view_of<const float>(task.l, batch, head);
    const auto acc_rows = view_of<const float>(task.acc, batch, head);
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        const bool valid = row < rows;
        seen[thread][half] = 0;
        max[thread][half] = valid ? *m_rows.row(first + row) : kMinusInfinity;
        sum[thread][half] = valid && lane.column == 0 ? *l_rows.row(first + row) : 0.0F;  // the others hold later parts
        RINGSPAN_UNROLL
        for (int j = 0; j < P::kDim / 8; ++j) {
          RINGSPAN_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int column = j * 8 + lane.column + e;
            acc[thread][j * 4 + half * 2 + e] = valid && column < width ? acc_rows.row(first + row)[column] : 0.0F;
          }
        }
      }
    });
  }

  // A row without a pair keeps its bits.
  RINGSPAN_DEVICE void store(M& m, const kernels::AttendTask& task, std::int64_t batch, std::int64_t head, std::int64_t first,
                             int rows, int width) {
    m.quad_sum(sum);
    const auto m_rows = view_of<float>(task.m, batch, head);
    const auto l_rows = view_of<float>(task.l, batch, head);
    const auto acc_rows = view_of<float>(task.acc, batch, head);
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        if (row >= rows || seen[thread][half] == 0) continue;
        if (lane.column == 0) {
          *m_rows.row(first + row) = max[thread][half];
          *l_rows.row(first + row) = sum[thread][half];
        }
        RINGSPAN_UNROLL
        for (int j = 0; j < P::kDim / 8; ++j) {
          RINGSPAN_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int column = j * 8 + lane.column + e;
            if (column < width) acc_rows.row(first + row)[column] = acc[thread][j * 4 + half * 2 + e];
          }
        }
      }
    });
  }
};

}  // namespace ringspan::cuda
