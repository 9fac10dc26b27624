// attend as a block program: one block owns 64 (or 32) query rows of one (batch item, query head) and takes in, in list order,
// every task of its group. The state stays in registers from the first task to the last, which may finish the rows.
//
// Contract: kernels/attend.h. Cost per tile of kCols keys: 4 kRows kCols kDim operations; k and v are read once per block.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/state_rows.h"
#include "cuda/tile_product.h"

namespace ringspan::cuda {

template <typename P, typename M>
class AttendBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;

  RINGSPAN_DEVICE AttendBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        q_tile_(reinterpret_cast<Element*>(shared)),
        k_tile_(reinterpret_cast<Element*>(shared + P::kRowTileBytes)),
        v_tile_(reinterpret_cast<Element*>(shared + P::kRowTileBytes + P::kColTileBytes)),
        stage_(reinterpret_cast<float*>(shared + P::kRowTileBytes + 2 * P::kColTileBytes)) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const BlockWork work = find_work(arguments_, block);
    const Group& group = arguments_.groups[work.group];
    const Task& head_task = arguments_.tasks[group.first_task];
    batch_ = work.batch;
    head_ = work.head;
    first_row_ = (group.tiles - 1 - work.tile) * P::kRows;  // under a causal mask the last rows have most to do
    const std::int64_t rows_left = head_task.q_count - first_row_;
    rows_ = rows_left < P::kRows ? static_cast<int>(rows_left) : P::kRows;
    state_.load(m_, head_task, batch_, head_, first_row_, rows_, params_.shape.head_dim_v);
    for (std::int64_t index = 0; index < group.task_count; ++index) {
      const Task& task = arguments_.tasks[group.first_task + index];
      if (index == 0 || task.q.data != head_task.q.data) {
        m_.sync();
        load_tile<P, P::kRows, false>(m_, q_tile_, view_of<const Element>(task.q, batch_, head_), first_row_, rows_,
                                      params_.shape.head_dim, flags_);
      }
      take_in(task);
    }
    const Task& last_task = arguments_.tasks[group.first_task + group.task_count - 1];
    state_.store(m_, params_, last_task, batch_, head_, first_row_, rows_, q_tile_);
  }

 private:
  static constexpr float kRefused = -1.0F;

  RINGSPAN_DEVICE std::int64_t position_of_row(const Task& task, int row) const {
    return task.q_first + (first_row_ + row) * task.q_step;
  }

  RINGSPAN_DEVICE void take_in(const Task& task) {
    // Ends of the rows' ranges never decrease, so the tile's keys are those from the first row's first to the last one's last.
    const kernels::IndexRange first = kernels::keys_of_row(task, first_row_);
    const kernels::IndexRange last = kernels::keys_of_row(task, first_row_ + rows_ - 1);
    const std::int64_t begin = first.begin / P::kCols * P::kCols;
    const std::int64_t end = last.end < task.k_count ? last.end : task.k_count;
    const std::int64_t head = task.head_first + head_ * task.head_step;
    const std::int64_t kv = kernels::kv_index(task, head / params_.shape.group);
    const auto k_rows = view_of<const Element>(task.k, batch_, kv);
    const auto v_rows = view_of<const Element>(task.v, batch_, kv);
    for (std::int64_t column = begin; column < end; column += P::kCols) {
      const std::int64_t left = task.k_count - column;
      const int valid = left < P::kCols ? static_cast<int>(left) : P::kCols;
      m_.sync();
      m_.each([&](int thread) { flags_[thread][0] = 0; });
      load_tile<P, P::kCols, false>(m_, k_tile_, k_rows, column, valid, params_.shape.head_dim, flags_);
      load_tile<P, P::kCols, true>(m_, v_tile_, v_rows, column, valid, params_.shape.head_dim_v, flags_);
      const bool non_finite = m_.sync_any(flags_);
      take_in_tile(task, column, head, non_finite ? kRefused : 0.0F);
      if (non_finite) take_in_non_finite(v_rows, column, valid);
      product_rn<P>(m_, state_.acc, scores_, v_tile_, stage_);
    }
  }

  // The values of the tile hold NaN or infinities. Pairs without weight (masked, dropped, of a score of -inf) have kRefused
  // here, so that they differ from weights too small for a float32.
  RINGSPAN_DEVICE void take_in_non_finite(RowsView<const Element> v_rows, std::int64_t column0, int valid) {
    stage_weights<P>(m_, scores_, stage_);
    clean_tile<P, P::kCols>(m_, v_tile_);
    add_non_finite<P>(m_, state_.acc, stage_, v_rows, column0, valid, params_.shape.head_dim_v, visible_,
                      [](int, float weight) { return weight != kRefused; });
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) {
        if (scores_[thread][index] == kRefused) scores_[thread][index] = 0.0F;
      }
    });
  }

  // Scores, maxima, probabilities (left in scores_; `refused` for pairs without weight) and the shrinking of what was summed
  // so far.
  RINGSPAN_DEVICE void take_in_tile(const Task& task, std::int64_t column0, std::int64_t head, float refused) {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) scores_[thread][index] = 0.0F;
    });
    product_nt<P>(m_, scores_, q_tile_, k_tile_);
    const float slope = alibi_slope(params_, task.batch_first + batch_, head);
    m_.each([&](int thread) { score_thread(task, column0, slope, thread); });
    m_.quad_max(tile_max_);
    const kernels::PhiloxKey key = params_.shape.dropout
                                       ? kernels::dropout_key(params_.seed, task.batch_first + batch_, head, task.state)
                                       : kernels::PhiloxKey{};
    m_.each([&](int thread) { weigh_thread(task, column0, key, refused, thread); });
  }

  RINGSPAN_DEVICE void score_thread(const Task& task, std::int64_t column0, float slope, int thread) {
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      kernels::IndexRange range{};
      if (row < rows_) range = kernels::keys_of_row(task, first_row_ + row);
      clip(range, column0, P::kCols, half, visible_[thread][0]);
      if (!range.empty()) state_.seen[thread][half] = 1;
      const std::int64_t i = position_of_row(task, row) + task.diagonal;
      float largest = kMinusInfinity;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = j * 8 + lane.column + e;
          float& score = scores_[thread][j * 4 + half * 2 + e];
          const auto distance = [&] { return task.k_first + (column0 + column) * task.k_step - i; };
          const float value = pair_score(params_, score, slope, distance).value;
          score = visible_[thread][0].sees(half, column) ? value : kMinusInfinity;
          largest = fmaxf(largest, score);
        }
      }
      tile_max_[thread][half] = largest;
    }
  }

  RINGSPAN_DEVICE void weigh_thread(const Task& task, std::int64_t column0, const kernels::PhiloxKey& key, float refused,
                                    int thread) {
    const Lane lane = lane_of(thread);
    const float keep = keep_factor(params_);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = position_of_row(task, lane.row + half * 8);
      const float before = state_.max[thread][half];
      const float now = fmaxf(before, tile_max_[thread][half]);
      const float shrink = before == now ? 1.0F : M::template exp<P::kType>(before - now);  // never -inf - (-inf)
      state_.max[thread][half] = now;
      float sum = state_.sum[thread][half] * shrink;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kDim / 8; ++j) {
        state_.acc[thread][j * 4 + half * 2] *= shrink;
        state_.acc[thread][j * 4 + half * 2 + 1] *= shrink;
      }
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = scores_[thread][j * 4 + half * 2 + e];
          float weight = refused;
          if (score != kMinusInfinity) {
            weight = M::template exp<P::kType>(score - now);
            sum += weight;
            if (params_.shape.dropout) {
              const std::int64_t k = task.k_first + (column0 + j * 8 + lane.column + e) * task.k_step;
              weight = is_dropped(key, arguments_.dropout_threshold, i, k) ? refused : weight * keep;
            }
          }
          score = weight;
        }
      }
      state_.sum[thread][half] = sum;
    }
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  Element *q_tile_, *k_tile_, *v_tile_;
  float* stage_;
  std::int64_t batch_ = 0, head_ = 0, first_row_ = 0;
  int rows_ = 0;
  StateRows<P, M> state_;
  Registers<float, P::kCols / 2> scores_;
  Registers<float, 2> tile_max_;
  Registers<int, 1> flags_;
  Registers<VisibleColumns, 1> visible_;
};

}  // namespace ringspan::cuda
