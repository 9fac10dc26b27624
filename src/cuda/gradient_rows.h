// How a block's sums reach the rows of a gradient in memory.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/gradient.h"
#include "cuda/store_rows.h"

namespace ringspan::cuda {

// factor x the sums of a block's rows, added to rows first .. first + count - 1; a row that has not seen a pair keeps its bits.
// Several reads are under way at a time: a compiler does not move one before a write that might be to the same place.
template <typename P, typename M>
RINGSPAN_DEVICE void add_rows(M& m, RowsView<float> rows, std::int64_t first, int count, int width, float factor,
                              typename M::template Registers<float, P::kDim / 2>& sums,
                              typename M::template Registers<int, 2>& seen) {
  constexpr int kTogether = 8;  // runs of 8 columns, of which a thread has two
  const bool pairs = are_pairs(rows) && width == P::kDim;
  m.each([&](int thread) {
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      if (row >= count || seen[thread][half] == 0) continue;
      float* const to = rows.row(first + row) + lane.column;
      RINGSPAN_UNROLL
      for (int begin = 0; begin < P::kDim / 8; begin += kTogether) {
        FloatPair before[kTogether];
        RINGSPAN_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          const int column = (begin + i) * 8;
          before[i] =
              pairs ? *reinterpret_cast<const FloatPair*>(to + column) : load_pair(to + column, width - lane.column - column);
        }
        RINGSPAN_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          const int column = (begin + i) * 8;
          const float* const sum = sums[thread] + (begin + i) * 4 + half * 2;
          const FloatPair now{before[i].low + factor * sum[0], before[i].high + factor * sum[1]};
          if (pairs) {
            *reinterpret_cast<FloatPair*>(to + column) = now;
          } else {
            store_pair(to + column, width - lane.column - column, now);
          }
        }
      }
    }
  });
}

// The same, or where the task writes: in the storage type, in place of what was there, zeros of rows that have not seen a pair.
// The sums are lost; `tile` as in store_rows.h.
template <typename P, typename Operand, typename M>
RINGSPAN_DEVICE void put_rows(M& m, const Operand& operand, bool writes, std::int64_t batch, std::int64_t head,
                              std::int64_t first, int count, int width, float factor,
                              typename M::template Registers<float, P::kDim / 2>& sums,
                              typename M::template Registers<int, 2>& seen, typename P::Element* tile) {
  if (!writes) return add_rows<P>(m, view_of<float>(operand, batch, head), first, count, width, factor, sums, seen);
  m.each([&](int thread) {
    RINGSPAN_UNROLL
    for (int index = 0; index < P::kDim / 2; ++index) {
      float& sum = sums[thread][index];
      sum = seen[thread][index % 4 / 2] != 0 ? factor * sum + 0.0F : 0.0F;  // as added to +0
    }
  });
  const auto rows = view_of<typename P::Element>(operand, batch, head);
  if constexpr (P::kType == DType::float32) {
    store_floats<P, false>(m, sums, seen, rows, first, count, width);
  } else {
    store_rounded<P>(m, sums, rows, first, count, width, tile);
  }
}

// The sums of a block, of ds y1 (`first`) and p y2 (`second`, to be multiplied by dv_factor), to dq, to dk and dv, or to one of
// these, as kGradient says. task: the first of the block's; rows.head: of its query heads, or the kv head itself. `tile` as in
// store_rows.h.
template <typename P, Gradient kGradient, typename M>
RINGSPAN_DEVICE void put_gradients(M& m, const kernels::AttendParams& params, const kernels::AttendTask& task,
                                   const RowsOfBlock& rows, float dv_factor,
                                   typename M::template Registers<float, P::kDim / 2>& first,
                                   typename M::template Registers<float, P::kDim / 2>& second,
                                   typename M::template Registers<int, 2>& seen, typename P::Element* tile) {
  const auto put = [&](const auto& operand, bool writes, std::int64_t head, int width, float factor, auto& sums) {
    put_rows<P>(m, operand, writes, rows.batch, head, rows.first, rows.count, width, factor, sums, seen, tile);
  };
  if constexpr (kGradient == Gradient::dq) {
    put(task.dq, task.writes_dq, rows.head, params.shape.head_dim, params.scale, first);
  } else {
    const std::int64_t kv = kernels::kv_index(task, rows.head);
    if constexpr (kGradient != Gradient::dv) {
      put(task.dk, task.writes_dk_dv, kv, params.shape.head_dim, params.scale, first);
    }
    if constexpr (kGradient != Gradient::dk) put(task.dv, task.writes_dk_dv, kv, params.shape.head_dim_v, dv_factor, second);
  }
}

}  // namespace ringspan::cuda
