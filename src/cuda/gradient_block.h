// attend_backward as block programs. Two passes, neither of which needs atomics, so that the same list gives the same bits:
// one in which a block owns query rows and walks over keys (dq), one in which it owns key rows and walks over the queries of
// every head that reads them (dk, dv; in two passes where the sums of both do not fit into the registers).
//
// With x the side whose rows the block owns and y the other one: x1 = q or k, x2 = do or v, y1 = k or q, y2 = v or do.
//     scores = x1 y1^T, dp = x2 y2^T; dq or dk += ds y1; dv += p y2
// Tiles of y1 and y2 have one place each in shared memory, which asynchronous copies fill as soon as nobody reads it. The first
// product of a tile needs one of them, the early one, while the late one is still on its way:
//     dq, dk       y2 is early: dp | copy the next y2 | scores, p and ds, ds y1
//     dk and dv    y2 is early: dp | scores, p and ds, p y2 | copy the next y2 | ds y1
//     dv           y1 is early: scores | copy the next y1 | p, p y2
// NaN are looked for as in attend_block.h.
//
// Contract: kernels/attend.h. Cost per kRows x kCols tile, in units of 2 kRows kCols kDim: dq 3, dk and dv 4 (apart 3 + 2).
#pragma once

#include "cuda/gradient_rows.h"
#include "cuda/gradient_walk.h"
#include "cuda/pair_options.h"
#include "cuda/tile_product.h"

namespace ringspan::cuda {

template <typename P, typename M, Gradient kGradient>
class GradientBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Work = GradientWork<P, M, kGradient>;
  using Walk = typename Work::Walk;
  static constexpr bool kOwnsQueries = Work::kOwnsQueries;
  static constexpr bool kScoreGradient = kGradient != Gradient::dv;  // dq or dk
  static constexpr bool kValueGradient = kGradient == Gradient::dv || kGradient == Gradient::dk_dv;
  static_assert(P::kParts == 1);

  RINGSPAN_DEVICE GradientBlock(M& m, const AttendArguments& arguments, unsigned char* shared, std::int64_t block)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        has_options_(params_.shape.softcap || params_.shape.alibi || params_.shape.dropout),
        x1_tile_(reinterpret_cast<Element*>(shared)),
        x2_tile_(reinterpret_cast<Element*>(shared + P::kRowTileBytes)),
        y1_tile_(reinterpret_cast<Element*>(shared + 2 * P::kRowTileBytes)),
        y2_tile_(reinterpret_cast<Element*>(shared + 2 * P::kRowTileBytes + P::kColTileBytes)),
        stage_(shared + 2 * P::kRowTileBytes + 2 * P::kColTileBytes),
        column_lse_(reinterpret_cast<float*>(stage_ + P::kStageBytes)),
        column_delta_(column_lse_ + P::kCols),
        work_(arguments, block) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const Group& group = Work::group_of(arguments_, block);
    const Task* const begin = arguments_.tasks + group.first_task;
    do {
      clear();
      for (const Task* task = begin; task != begin + group.task_count; ++task) take_in(*task);
    } while (!is_careful_ && (is_careful_ = has_non_finite()));
    put(M::hidden(static_cast<int>(block)));
  }

 private:
  static constexpr float kRefused = -0.0F;  // in p_: a pair that is masked or dropped; no other's weight

  RINGSPAN_DEVICE void clear() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) {
        if constexpr (kScoreGradient) first_[thread][index] = 0.0F;
        if constexpr (kValueGradient) second_[thread][index] = 0.0F;
      }
    });
  }
  RINGSPAN_DEVICE bool has_non_finite() {
    bool any = false;
    if constexpr (kScoreGradient) any = any_non_finite<P, 1>(m_, first(), flags_);
    if constexpr (kValueGradient) any = any_non_finite<P, 1>(m_, second(), flags_) || any;
    return any;
  }
  RINGSPAN_DEVICE auto first() {
    return [this](int) -> auto& { return first_; };
  }
  RINGSPAN_DEVICE auto second() {
    return [this](int) -> auto& { return second_; };
  }
  RINGSPAN_DEVICE auto p() {
    return [this](int) -> auto& { return p_; };
  }
  RINGSPAN_DEVICE auto ds() {
    return [this](int) -> auto& { return ds_; };
  }

  RINGSPAN_DEVICE void take_in(const Task& task) {
    const kernels::IndexRange heads = work_.heads_of(task);
    bool has_rows = false;
    for (auto t = static_cast<int>(heads.begin); t < static_cast<int>(heads.end); ++t) {
      const Walk walk = work_.walk_of(task, t);
      if (walk.tiles == 0) continue;
      if (!has_rows) copy_own_rows(task, t);
      has_rows = true;
      take_in_head(task, walk);
    }
  }

  // Of one query head (dq), or for all of a kv head (dk, dv).
  RINGSPAN_DEVICE void copy_own_rows(const Task& task, int t) {
    m_.sync();
    copy_rows<P, P::kRows>(m_, x1_tile_, {work_.x1_rows(task, t), work_.first_row, work_.rows, params_.shape.head_dim});
    if constexpr (kScoreGradient) {
      copy_rows<P, P::kRows>(m_, x2_tile_, {work_.x2_rows(task, t), work_.first_row, work_.rows, params_.shape.head_dim_v});
    }
    if constexpr (kOwnsQueries) load_row_statistics(task);
  }

  // Everything of one task and one query head. The early tile is free: what read it last has a barrier behind it.
  RINGSPAN_DEVICE void take_in_head(const Task& task, const Walk& walk) {
    copy_early(task, walk, 0);
    for (int tile = 0; tile < walk.tiles; ++tile) {
      m_.wait_copies();
      m_.sync();
      copy_late(task, walk, tile);
      if constexpr (!kOwnsQueries) load_column_statistics(task, walk, tile);  // stored when the product no longer waits for it
      if constexpr (kScoreGradient) {
        product_nt<P, 1>(m_, ds(), x2_tile_, y2_tile_);
      } else {
        product_nt<P, 1>(m_, p(), x1_tile_, y1_tile_);
      }
      if constexpr (!kOwnsQueries) store_column_statistics();
      m_.wait_copies();
      m_.sync();
      constexpr bool kFree = !(kScoreGradient && kValueGradient);  // the early tile, by now
      if constexpr (kFree) copy_early(task, walk, tile + 1);
      if constexpr (kScoreGradient) product_nt<P, 1>(m_, p(), x1_tile_, y1_tile_);
      weigh(task, walk, tile);
      if constexpr (kValueGradient) {
        if (is_careful_) exclude_from_second(task, walk, tile);
        product_rn<P, 1>(m_, second(), p(), y2_tile_, stage_);
      }
      if constexpr (!kFree) {
        m_.sync();
        copy_early(task, walk, tile + 1);
      }
      if constexpr (kScoreGradient) {
        if (is_careful_) exclude_from_first(task, walk, tile);
        product_rn<P, 1>(m_, first(), ds(), y1_tile_, stage_);
      }
    }
  }

  RINGSPAN_DEVICE void copy_early(const Task& task, const Walk& walk, int tile) {
    if (tile >= walk.tiles) return;
    if constexpr (kScoreGradient) {
      copy_rows<P, P::kCols>(m_, y2_tile_, work_.y2_rows(task, walk, tile));
    } else {
      copy_rows<P, P::kCols>(m_, y1_tile_, work_.y1_rows(task, walk, tile));
    }
  }
  RINGSPAN_DEVICE void copy_late(const Task& task, const Walk& walk, int tile) {
    if constexpr (kScoreGradient) {
      copy_rows<P, P::kCols>(m_, y1_tile_, work_.y1_rows(task, walk, tile));
    } else {
      copy_rows<P, P::kCols>(m_, y2_tile_, work_.y2_rows(task, walk, tile));
    }
  }

  // Of a query that sees nothing lse is -inf. As +inf it makes every p 0, without a question to each pair; what comes of that
  // and of NaN is not finite.
  RINGSPAN_DEVICE float usable_lse(float lse) const { return lse == kMinusInfinity && !is_careful_ ? -kMinusInfinity : lse; }

  RINGSPAN_DEVICE void load_row_statistics(const Task& task) {
    const auto lse = view_of<const float>(task.lse, work_.batch, work_.head);
    const auto delta = view_of<const float>(task.delta, work_.batch, work_.head);
    m_.each([&](int thread) {
      const Lane lane = lane_of(thread);
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        const bool valid = row < work_.rows;
        row_lse_[thread][half] = usable_lse(valid ? *lse.row(work_.first_row + row) : kMinusInfinity);
        row_delta_[thread][half] = valid ? *delta.row(work_.first_row + row) : 0.0F;
      }
    });
  }
  RINGSPAN_DEVICE void load_column_statistics(const Task& task, const Walk& walk, int tile) {
    const auto lse = view_of<const float>(task.lse, work_.batch, walk.head);
    const auto delta = view_of<const float>(task.delta, work_.batch, walk.head);
    const int first = walk.first(tile);
    const int valid = walk.valid(tile);
    static_assert(P::kCols <= M::kThreads);
    m_.each([&](int thread) {
      const bool there = thread < valid;
      row_lse_[thread][0] = usable_lse(there ? *lse.row(first + thread) : kMinusInfinity);
      row_delta_[thread][0] = there ? *delta.row(first + thread) : 0.0F;
    });
  }
  RINGSPAN_DEVICE void store_column_statistics() {
    m_.each([&](int thread) {
      if (thread >= P::kCols) return;
      column_lse_[thread] = row_lse_[thread][0];
      column_delta_[thread] = row_delta_[thread][0];
    });
  }

  // p_ = c drop p and ds_ = p (dp - delta) ds/d(scale q k) of the tile, 0 where a pair is masked.
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile) {
    if (walk.is_full(tile) && !has_options_ && !is_careful_) {
      m_.each([&](int thread) { weigh_thread<true>(task, walk, tile, thread); });
      return;
    }
    if (params_.shape.softcap) cap_scores();
    if (params_.shape.dropout) {
      draw_dropped<P, kOwnsQueries>(m_, dropped_, arguments_, task, work_.first_row, walk.first(tile), work_.batch,
                                    query_head(task, walk));
    }
    m_.each([&](int thread) { weigh_thread<false>(task, walk, tile, thread); });
  }
  RINGSPAN_DEVICE std::int64_t query_head(const Task& task, const Walk& walk) const {
    return Work::head_of(task, kOwnsQueries ? work_.head : walk.head);
  }
  RINGSPAN_DEVICE void cap_scores() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) {
        p_[thread][index] = params_.softcap * tanh_by_parts<P, M>(p_[thread][index] * arguments_.softcap_scale);
      }
    });
  }

  // kPlain: all pairs are visible, and there are no options.
  template <bool kPlain>
  RINGSPAN_DEVICE void weigh_thread(const Task& task, const Walk& walk, int tile, int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    const float factor = params_.output_scale * arguments_.keep;
    const bool caps = !kPlain && params_.shape.softcap;
    const bool drops = !kPlain && params_.shape.dropout;
    const float inverse_cap = caps ? 1.0F / params_.softcap : 0.0F;
    VisibleColumns visible{};
    AlibiRows alibi;
    if constexpr (!kPlain) {
      visible = visible_columns(task, walk.first(tile), thread);
      alibi =
          alibi_rows<kOwnsQueries>(params_, task, work_.first_row, walk.first(tile), work_.batch, query_head(task, walk), lane);
    }
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = j * 8 + lane.column + e;
          const int index = j * 4 + half * 2 + e;
          const float lse = kOwnsQueries ? row_lse_[thread][half] : column_lse_[column];
          const float delta = kOwnsQueries ? row_delta_[thread][half] : column_delta_[column];
          const float capped = p_[thread][index];
          float shift = -lse;
          if constexpr (!kPlain) shift -= alibi(half, j * 8 + e);
          // fmaf: the same bits, plain or not, whatever products and sums a compiler joins
          const float exponent = caps ? capped + shift : fmaf(params_.scale, capped, shift);
          const float p = exponent > 0.0F ? 1.0F : M::template exp<P::kType>(exponent);  // NaN stays NaN
          const bool dropped = drops && is_set(dropped_[thread], index);
          const bool sees = kPlain || (visible.sees(half, column) && lse != kMinusInfinity);
          p_[thread][index] = sees && !dropped ? factor * p : kRefused;
          if constexpr (kScoreGradient) {
            float ds = p * (dropped ? -delta : fmaf(factor, ds_[thread][index], -delta));
            if (caps) {
              const float t = capped * inverse_cap;
              ds *= 1.0F - t * t;
            }
            ds_[thread][index] = sees ? ds : 0.0F;
          }
        }
      }
    }
  }

  // Finds the block's work once more: what is needed only here would be in registers all the time.
  RINGSPAN_DEVICE void put(std::int64_t block) {
    const Group& group = Work::group_of(arguments_, block);
    work_.note_seen(m_, seen_, group);
    m_.sync();  // nobody reads the block's rows any more
    put_gradients<P, kGradient>(m_, params_, arguments_.tasks[group.first_task],
                                {work_.batch, work_.head, work_.first_row, work_.rows}, 1.0F, first_, second_, seen_, x1_tile_);
  }

  RINGSPAN_DEVICE VisibleColumns visible_columns(const Task& task, std::int64_t column0, int thread) const {
    VisibleColumns visible{};
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      kernels::IndexRange range{};
      if (row < work_.rows) range = work_.columns_of_row(task, row);
      clip(range, column0, P::kCols, half, visible);
    }
    return visible;
  }

  RINGSPAN_DEVICE void exclude_from_second(const Task& task, const Walk& walk, int tile) {
    const auto kind_of = [&](int, int thread) {
      const auto& weights = p_[thread];
      return [&weights](int, int index, int) {
        return bits_of(weights[index]) == bits_of(kRefused) ? kNoPair : kind_of_weight(weights[index]);
      };
    };
    exclude_non_finite<P, 1>(m_, y2_tile_, work_.y2_rows(task, walk, tile), second(), stage_, flags_, kind_of);
  }
  // Dropped pairs take part: their ds is -p delta.
  RINGSPAN_DEVICE void exclude_from_first(const Task& task, const Walk& walk, int tile) {
    const auto kind_of = [&](int, int thread) {
      const auto& weights = ds_[thread];
      const auto& row_lse = row_lse_[thread];
      return [&weights, &row_lse, columns = column_lse_, visible = visible_columns(task, walk.first(tile), thread)](
                 int half, int index, int column) {
        const float lse = kOwnsQueries ? row_lse[half] : columns[column];
        return visible.sees(half, column) && lse != kMinusInfinity ? kind_of_weight(weights[index]) : kNoPair;
      };
    };
    exclude_non_finite<P, 1>(m_, y1_tile_, work_.y1_rows(task, walk, tile), first(), stage_, flags_, kind_of);
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  const bool has_options_;
  Element *x1_tile_, *x2_tile_, *y1_tile_, *y2_tile_;
  unsigned char* stage_;
  float *column_lse_, *column_delta_;
  const Work work_;
  bool is_careful_ = false;  // sums were not finite
  Registers<float, P::kDim / 2> first_, second_;
  Registers<float, P::kCols / 2> p_, ds_;
  Registers<float, 2> row_lse_, row_delta_;  // for dk and dv: of one column of the tile, on its way to shared memory
  DroppedPairs<P, M> dropped_;
  Registers<int, 2> seen_;
  Registers<int, 1> flags_;
};

}  // namespace ringspan::cuda
