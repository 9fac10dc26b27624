// attend_backward as block programs. Two passes, neither of which needs atomics, so that the same list gives the same bits:
// one in which a block owns query rows and walks over keys (dq), one in which it owns key rows and walks over the queries of
// every head that reads them (dk, dv; in two passes where the sums of both do not fit into the registers).
//
// Contract: kernels/attend.h. Cost per kRows x kCols tile, in units of 2 kRows kCols kDim: dq 3, dk and dv 4 (apart 3 + 2).
#pragma once

#include "cuda/block_parts.h"
#include "cuda/gradient.h"
#include "cuda/gradient_rows.h"
#include "cuda/tile_product.h"

namespace ringspan::cuda {

// With x the side whose rows the block owns and y the other one: x1 = q or k, x2 = do or v, y1 = k or q, y2 = v or do.
// scores = x1 y1^T, dp = x2 y2^T; dq or dk += ds y1; dv += p y2.
template <typename P, typename M, Gradient kGradient>
class GradientBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  static constexpr bool kOwnsQueries = kGradient == Gradient::dq;
  static constexpr bool kScoreGradient = kGradient != Gradient::dv;  // dq or dk
  static constexpr bool kValueGradient = kGradient == Gradient::dv || kGradient == Gradient::dk_dv;

  RINGSPAN_DEVICE GradientBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        x1_tile_(reinterpret_cast<Element*>(shared)),
        x2_tile_(reinterpret_cast<Element*>(shared + P::kRowTileBytes)),
        y1_tile_(reinterpret_cast<Element*>(shared + 2 * P::kRowTileBytes)),
        y2_tile_(reinterpret_cast<Element*>(shared + 2 * P::kRowTileBytes + P::kColTileBytes)),
        stage_(reinterpret_cast<float*>(shared + 2 * P::kRowTileBytes + 2 * P::kColTileBytes)),
        column_lse_(stage_ + P::kRows * P::kStageLead),
        column_delta_(column_lse_ + P::kCols) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const BlockWork work = find_work(arguments_, block);
    const Group& group = arguments_.groups[work.group];
    const Task& head_task = arguments_.tasks[group.first_task];
    batch_ = work.batch;
    first_row_ = (kOwnsQueries ? group.tiles - 1 - work.tile : work.tile) * P::kRows;  // the most work first, if causal
    const std::int64_t rows_left = (kOwnsQueries ? head_task.q_count : head_task.k_count) - first_row_;
    rows_ = rows_left < P::kRows ? static_cast<int>(rows_left) : P::kRows;
    kv_head_ = kOwnsQueries ? 0 : head_task.head_first / params_.shape.group + work.head;
    clear();
    for (std::int64_t index = 0; index < group.task_count; ++index) {
      const Task& task = arguments_.tasks[group.first_task + index];
      if constexpr (kOwnsQueries) {
        take_in_head(task, work.head);
      } else {
        const std::int64_t first_head = kv_head_ * params_.shape.group;
        const kernels::IndexRange heads = kernels::indices_between(task.head_first, task.head_step, task.head_count, first_head,
                                                                   first_head + params_.shape.group - 1);
        for (std::int64_t t = heads.begin; t < heads.end; ++t) take_in_head(task, t);
      }
    }
    if constexpr (kOwnsQueries) {
      put(head_task.dq, head_task.writes_dq, work.head, params_.shape.head_dim, params_.scale, first_);
    } else {
      const std::int64_t kv = kernels::kv_index(head_task, kv_head_);
      if constexpr (kScoreGradient)
        put(head_task.dk, head_task.writes_dk_dv, kv, params_.shape.head_dim, params_.scale, first_);
      if constexpr (kValueGradient) put(head_task.dv, head_task.writes_dk_dv, kv, params_.shape.head_dim_v, 1.0F, second_);
    }
  }

 private:
  static constexpr float kRefused = -1.0F;

  RINGSPAN_DEVICE void clear() {
    m_.each([&](int thread) {
      seen_[thread][0] = seen_[thread][1] = 0;
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) {
        if constexpr (kScoreGradient) first_[thread][index] = 0.0F;
        if constexpr (kValueGradient) second_[thread][index] = 0.0F;
      }
    });
  }

  template <typename Operand>
  RINGSPAN_DEVICE void put(const Operand& operand, bool writes, std::int64_t head, int width, float factor,
                           Registers<float, P::kDim / 2>& sums) {
    put_rows<P>(m_, operand, writes, batch_, head, first_row_, rows_, width, factor, sums, seen_, x1_tile_);
  }

  // Everything of one task and one query head.
  RINGSPAN_DEVICE void take_in_head(const Task& task, std::int64_t t) {
    const std::int64_t head = task.head_first + t * task.head_step;
    const std::int64_t kv = kernels::kv_index(task, head / params_.shape.group);
    const auto q = view_of<const Element>(task.q, batch_, t);
    const auto k = view_of<const Element>(task.k, batch_, kv);
    const auto v = view_of<const Element>(task.v, batch_, kv);
    const auto d_out = view_of<const Element>(task.d_out, batch_, t);
    const auto lse = view_of<const float>(task.lse, batch_, t);
    const auto delta = view_of<const float>(task.delta, batch_, t);
    const kernels::IndexRange columns = columns_of_tile(task);
    if (columns.empty()) return;
    m_.sync();
    load_tile<P, P::kRows, false>(m_, x1_tile_, kOwnsQueries ? q : k, first_row_, rows_, params_.shape.head_dim, flags_);
    if constexpr (kScoreGradient) {
      load_tile<P, P::kRows, false>(m_, x2_tile_, kOwnsQueries ? d_out : v, first_row_, rows_, params_.shape.head_dim_v,
                                    flags_);
    }
    if constexpr (kOwnsQueries) load_row_statistics(lse, delta);
    const std::int64_t count = kOwnsQueries ? task.k_count : task.q_count;
    for (std::int64_t column = columns.begin; column < columns.end; column += P::kCols) {
      const std::int64_t left = count - column;
      const int valid = left < P::kCols ? static_cast<int>(left) : P::kCols;
      const auto y1 = kOwnsQueries ? k : q;
      const auto y2 = kOwnsQueries ? v : d_out;
      m_.sync();
      m_.each([&](int thread) { flags_[thread][0] = 0; });
      load_tile<P, P::kCols, kScoreGradient>(m_, y1_tile_, y1, column, valid, params_.shape.head_dim, flags_);
      load_tile<P, P::kCols, kValueGradient>(m_, y2_tile_, y2, column, valid, params_.shape.head_dim_v, flags_);
      if constexpr (!kOwnsQueries) load_column_statistics(lse, delta, column, valid);
      const bool non_finite = m_.sync_any(flags_);
      weigh_tile(task, column, head, non_finite ? kRefused : 0.0F);
      if constexpr (kValueGradient) {
        if (non_finite) {
          add_apart(second_, p_, y2, y2_tile_, column, valid, params_.shape.head_dim_v,
                    [](int, float weight) { return weight != kRefused; });
        }
        product_rn<P>(m_, second_, p_, y2_tile_, stage_);
      }
      if constexpr (kScoreGradient) {
        if (non_finite) {
          add_apart(first_, ds_, y1, y1_tile_, column, valid, params_.shape.head_dim,
                    [&](int c, float) { return kOwnsQueries || column_lse_[c] != kMinusInfinity; });
        }
        product_rn<P>(m_, first_, ds_, y1_tile_, stage_);
      }
    }
  }

  // What the cleaned tile lacks, for the rows that see it; weights kRefused become 0.
  template <typename Takes>
  RINGSPAN_DEVICE void add_apart(Registers<float, P::kDim / 2>& sums, Registers<float, P::kCols / 2>& weights,
                                 RowsView<const Element> rows, Element* tile, std::int64_t column, int valid, int width,
                                 Takes&& takes) {
    m_.sync();
    stage_weights<P>(m_, weights, stage_);
    clean_tile<P, P::kCols>(m_, tile);
    add_non_finite<P>(m_, sums, stage_, rows, column, valid, width, visible_, takes);
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) {
        if (kValueGradient && &weights == &p_ && p_[thread][index] == kRefused) p_[thread][index] = 0.0F;
      }
    });
  }

  // The columns that any row of the tile may see, rounded down to a multiple of kCols.
  RINGSPAN_DEVICE kernels::IndexRange columns_of_tile(const Task& task) const {
    const kernels::IndexRange first = columns_of_row(task, 0);
    const kernels::IndexRange last = columns_of_row(task, rows_ - 1);
    const std::int64_t count = kOwnsQueries ? task.k_count : task.q_count;
    return {first.begin / P::kCols * P::kCols, last.end < count ? last.end : count};
  }

  RINGSPAN_DEVICE kernels::IndexRange columns_of_row(const Task& task, int row) const {
    if constexpr (kOwnsQueries) return kernels::keys_of_row(task, first_row_ + row);
    const std::int64_t j = task.k_first + (first_row_ + row) * task.k_step;
    return kernels::indices_between(task.q_first, task.q_step, task.q_count, j - task.hi, j - task.lo);
  }

  RINGSPAN_DEVICE void load_row_statistics(RowsView<const float> lse, RowsView<const float> delta) {
    m_.each([&](int thread) {
      const Lane lane = lane_of(thread);
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        row_lse_[thread][half] = row < rows_ ? *lse.row(first_row_ + row) : kMinusInfinity;
        row_delta_[thread][half] = row < rows_ ? *delta.row(first_row_ + row) : 0.0F;
      }
    });
  }
  RINGSPAN_DEVICE void load_column_statistics(RowsView<const float> lse, RowsView<const float> delta, std::int64_t first,
                                              int valid) {
    m_.each([&](int thread) {
      for (int column = thread; column < P::kCols; column += M::kThreads) {
        column_lse_[column] = column < valid ? *lse.row(first + column) : kMinusInfinity;
        column_delta_[column] = column < valid ? *delta.row(first + column) : 0.0F;
      }
    });
  }

  // p_ = c drop p and ds_ = p (dp - delta) ds/d(scale q k) of the tile, 0 where a pair is masked; `refused` in p_ where it is
  // masked or dropped.
  RINGSPAN_DEVICE void weigh_tile(const Task& task, std::int64_t column0, std::int64_t head, float refused) {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) {
        p_[thread][index] = 0.0F;
        if constexpr (kScoreGradient) ds_[thread][index] = 0.0F;
      }
    });
    product_nt<P>(m_, p_, x1_tile_, y1_tile_);
    if constexpr (kScoreGradient) product_nt<P>(m_, ds_, x2_tile_, y2_tile_);
    const float slope = alibi_slope(params_, task.batch_first + batch_, head);
    const kernels::PhiloxKey key = params_.shape.dropout
                                       ? kernels::dropout_key(params_.seed, task.batch_first + batch_, head, task.state)
                                       : kernels::PhiloxKey{};
    m_.each([&](int thread) { weigh_thread(task, column0, slope, key, refused, thread); });
  }

  RINGSPAN_DEVICE void weigh_thread(const Task& task, std::int64_t column0, float slope, const kernels::PhiloxKey& key,
                                    float refused, int thread) {
    const Lane lane = lane_of(thread);
    const float factor = params_.output_scale * keep_factor(params_);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      kernels::IndexRange range{};
      if (row < rows_) range = columns_of_row(task, row);
      if (kOwnsQueries && row_lse_[thread][half] == kMinusInfinity) range = {};
      clip(range, column0, P::kCols, half, visible_[thread][0]);
      if (!range.empty()) seen_[thread][half] = 1;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = j * 8 + lane.column + e;
          const int index = j * 4 + half * 2 + e;
          const float lse = kOwnsQueries ? row_lse_[thread][half] : column_lse_[column];
          const float delta = kOwnsQueries ? row_delta_[thread][half] : column_delta_[column];
          if (!visible_[thread][0].sees(half, column) || lse == kMinusInfinity) {
            p_[thread][index] = refused;
            if constexpr (kScoreGradient) ds_[thread][index] = 0.0F;
            continue;
          }
          const std::int64_t own = first_row_ + row;
          const std::int64_t other = column0 + column;
          const std::int64_t i = task.q_first + (kOwnsQueries ? own : other) * task.q_step;
          const std::int64_t k = task.k_first + (kOwnsQueries ? other : own) * task.k_step;
          const Score score = pair_score(params_, p_[thread][index], slope, [&] { return k - i - task.diagonal; });
          const float exponent = score.value - lse;
          const float p = exponent > 0.0F ? 1.0F : M::template exp<P::kType>(exponent);  // NaN stays NaN
          const bool dropped = params_.shape.dropout && is_dropped(key, arguments_.dropout_threshold, i, k);
          p_[thread][index] = dropped ? refused : factor * p;
          if constexpr (kScoreGradient) {
            const float dp = dropped ? 0.0F : factor * ds_[thread][index];
            ds_[thread][index] = p * (dp - delta) * score.derivative;
          }
        }
      }
    }
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  Element *x1_tile_, *x2_tile_, *y1_tile_, *y2_tile_;
  float *stage_, *column_lse_, *column_delta_;
  std::int64_t batch_ = 0, kv_head_ = 0, first_row_ = 0;
  int rows_ = 0;
  Registers<float, P::kDim / 2> first_, second_;
  Registers<float, P::kCols / 2> p_, ds_;
  Registers<float, 2> row_lse_, row_delta_;
  Registers<int, 2> seen_;
  Registers<int, 1> flags_;
  Registers<VisibleColumns, 1> visible_;
};

}  // namespace ringspan::cuda
