// Softcap, ALiBi and dropout in the block programs: the formulas of kernels/score.h and the decisions of kernels/dropout.h, for
// a tile at once and without calls of functions, across which few registers live, or branches that threads might take apart,
// which would put products of warpgroups that are under way and the arithmetic beside them one behind the other.
//
// Cost: softcap two special functions and some ten other instructions per pair, ALiBi three, dropout a Philox block of some
// sixty per pair, or per two neighbouring keys, in a loop that is not unrolled.
#pragma once

#include <cmath>

#include "cuda/block_parts.h"
#include "kernels/dropout.h"

namespace ringspan::cuda {

// tanh(x) to 4 units in the last place (6 of the device's exponential). Beyond 0.6 by e^2x, below by an odd polynomial, fitted
// for the least relative error; NaN stays NaN.
template <typename P, typename M>
RINGSPAN_DEVICE float tanh_by_parts(float x) {
  const float size = fabsf(x);
  const float large = 1.0F - 2.0F * M::reciprocal(M::template exp<P::kType>(2.0F * size) + 1.0F);
  const float s = x * x;
  const float p = fmaf(fmaf(fmaf(0.0156126115F, s, -0.0522117913F), s, 0.133131161F), s, -0.333325982F);
  return size < 0.6F ? fmaf(p, x * s, x) : copysignf(large, x);
}

// Global positions of a tile: row r is at row + r row_step, column c at column + c column_step.
struct TilePositions {
  std::int64_t row, row_step, column, column_step;
};

// Rows from first_row on of the side that the block owns, columns from first_column on of the other.
template <bool kOwnsQueries>
RINGSPAN_DEVICE TilePositions positions_of(const kernels::AttendTask& task, std::int64_t first_row, std::int64_t first_column) {
  const std::int64_t q = task.q_first + (kOwnsQueries ? first_row : first_column) * task.q_step;
  const std::int64_t k = task.k_first + (kOwnsQueries ? first_column : first_row) * task.k_step;
  return kOwnsQueries ? TilePositions{q, task.q_step, k, task.k_step} : TilePositions{k, task.k_step, q, task.q_step};
}

// What ALiBi takes from the scores of a thread's two rows and of the columns after its first: slope |begin + column step|;
// slope 0 where there is none. Distances are float32: exact below 2^24, beyond it rounded (twice, which matters to steps of
// 2^17 and more only).
struct AlibiRows {
  float slope = 0.0F, step = 0.0F;
  float begin[2] = {0.0F, 0.0F};
  RINGSPAN_DEVICE float operator()(int half, int column) const {
    return slope * fabsf(fmaf(static_cast<float>(column), step, begin[half]));
  }
};

template <bool kOwnsQueries>
RINGSPAN_DEVICE AlibiRows alibi_rows(const kernels::AttendParams& params, const kernels::AttendTask& task,
                                     std::int64_t first_row, std::int64_t first_column, std::int64_t batch, std::int64_t head,
                                     const Lane& lane) {
  AlibiRows rows;
  if (!params.shape.alibi) return rows;
  const TilePositions at = positions_of<kOwnsQueries>(task, first_row, first_column);
  rows.slope = alibi_slope(params, task.batch_first + batch, head);
  rows.step = static_cast<float>(at.column_step);
  RINGSPAN_UNROLL
  for (int half = 0; half < 2; ++half) {  // |j - i - diagonal|
    const std::int64_t own = at.row + (lane.row + half * 8) * at.row_step;
    const std::int64_t other = at.column + lane.column * at.column_step;
    rows.begin[half] = static_cast<float>(other - own + (kOwnsQueries ? -task.diagonal : task.diagonal));
  }
  return rows;
}

// Which pairs of a tile are dropped: bit i of the words is that of c[thread][i], as scores lie in accumulators.
template <typename P, typename M>
using DroppedPairs = typename M::template Registers<std::uint32_t, (P::kCols + 63) / 64>;
template <typename Words>
RINGSPAN_DEVICE bool is_set(const Words& words, int index) {
  return (words[index / 32] >> (index % 32) & 1U) != 0U;
}

template <typename P, bool kOwnsQueries, typename M>
RINGSPAN_DEVICE void draw_pairs(M& m, DroppedPairs<P, M>& dropped, const AttendArguments& arguments,
                                const kernels::AttendTask& task, const TilePositions& at, std::int64_t batch,
                                std::int64_t head) {
  const kernels::PhiloxKey key = kernels::dropout_key(arguments.params.seed, task.batch_first + batch, head, task.state);
  // Two neighbouring keys, the first one even, share a block of Philox.
  const bool shares = M::uniform(kOwnsQueries && at.column_step == 1 && at.column % 2 == 0) != 0;
  const auto draw = [&](const Lane& lane, int j) {  // of the four pairs of columns 8 j to 8 j + 7
    std::uint32_t bits = 0U;
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::int64_t own = at.row + (lane.row + half * 8) * at.row_step;
      kernels::PhiloxBlock block{};
      RINGSPAN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const std::int64_t other = at.column + (j * 8 + lane.column + e) * at.column_step;
        const std::int64_t k = kOwnsQueries ? other : own;
        if (e == 0 || !shares) block = kernels::dropout_block(kOwnsQueries ? own : other, k, key);
        const std::uint32_t low = (k & 1) == 0 ? block[0] : block[1];
        const std::uint32_t high = (k & 1) == 0 ? block[2] : block[3];
        bits |= static_cast<std::uint32_t>(((k & 2) == 0 ? low : high) < arguments.dropout_threshold) << (half * 2 + e);
      }
    }
    return bits;
  };
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int word = 0; word < (P::kCols + 63) / 64; ++word) {
      std::uint32_t bits = 0U;
      RINGSPAN_NO_UNROLL
      for (int j = 0; j < (P::kCols < 64 ? P::kCols / 8 : 8); ++j) bits |= draw(lane, word * 8 + j) << (4 * j);
      dropped[thread][word] = bits;
    }
  });
}
// Those of the tile of rows from first_row on and columns from first_column on; none where the shape has no dropout.
template <typename P, bool kOwnsQueries, typename M>
RINGSPAN_DEVICE void draw_dropped(M& m, DroppedPairs<P, M>& dropped, const AttendArguments& arguments,
                                  const kernels::AttendTask& task, std::int64_t first_row, std::int64_t first_column,
                                  std::int64_t batch, std::int64_t head) {
  if (arguments.params.shape.dropout) {
    const TilePositions at = positions_of<kOwnsQueries>(task, first_row, first_column);
    return draw_pairs<P, kOwnsQueries>(m, dropped, arguments, task, at, batch, head);
  }
  m.each([&](int thread) {
    RINGSPAN_UNROLL
    for (int word = 0; word < (P::kCols + 63) / 64; ++word) dropped[thread][word] = 0U;
  });
}

}  // namespace ringspan::cuda
