// attend_backward as block programs for warpgroups (sm_90a) with roles: a block owns 128 query rows (dq) or 128 key rows (dk
// and dv) of one (batch item, head) and walks over the other side kCols at a time. One warpgroup copies
// (gradient_warpgroup_producer.h), two multiply, 64 rows each: this file. No atomics: the same list, the same bits.
//
// As gradient_block.h has it, with x the owned side and y the other one: x1 = q or k, x2 = do or v, y1 = k or q, y2 = v or do,
//     scores = x1 y1^T, dp = x2 y2^T; dq or dk += ds y1; dv += p y2
// and with three buffers for tiles of y, as in attend_warpgroup_block.h,
//     tile j has arrived | scores and dp of j, sums of j - 1 | wait for scores and dp, p and ds | wait for sums, give j - 1
//     back
// For dk and dv with head_dim > 64 there are not registers for that: the sums of j follow its p and ds. (Two passes, one for
// dk, one for dv, would have them, but cost 5 products instead of 4.)
//
// Softcap, ALiBi and dropout are in kernels of their own (P::kOptions, pair_options.h).
//
// Contract: kernels/attend.h. Cost per tile, in units of 2 kRows kCols kDim operations: dq 3, dk and dv 4.
#pragma once

#include "cuda/gradient_rows.h"
#include "cuda/gradient_warpgroup_tiles.h"
#include "cuda/pair_options.h"
#include "cuda/warpgroup.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

template <typename P, typename M, Gradient kGradient>
class GradientWarpgroupBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Work = GradientWork<P, M, kGradient>;
  using Walk = typename Work::Walk;
  static constexpr bool kOwnsQueries = Work::kOwnsQueries;
  // Sums of a tile beside scores and dp of the next one: where there are registers for both.
  static constexpr bool kOverlaps = kOwnsQueries || P::kDim == 64;

  RINGSPAN_DEVICE GradientWarpgroupBlock(M& m, const AttendArguments& arguments, unsigned char* shared, std::int64_t block)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        tiles_(m, shared),
        row_ring_(tiles_.row_ring()),
        column_ring_(tiles_.column_ring()),
        work_(arguments, block) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    clear();
    const Group& group = Work::group_of(arguments_, block);
    const Task* const begin = arguments_.tasks + group.first_task;
    m_.begin_turns();
    for (const Task* task = begin; task != begin + group.task_count; ++task) take_in(*task);
    m_.end_turns();
    put_gradients<P, kGradient>(m_, work_, arguments_, M::hidden(static_cast<int>(block)), params_.output_scale, first_,
                                second_, seen_, reinterpret_cast<Element*>(tiles_.begin));
  }

 private:
  // Which pairs of a tile a thread's rows see; a query with lse = -inf sees nothing.
  struct Visible {
    VisibleColumns columns;
    const float* column_lse;
    RINGSPAN_DEVICE bool sees(int half, int column) const {
      return columns.sees(half, column) && (kOwnsQueries || column_lse[column] != kMinusInfinity);
    }
  };

  RINGSPAN_DEVICE void clear() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) {
        first_[thread][index] = 0.0F;
        if constexpr (!kOwnsQueries) second_[thread][index] = 0.0F;
      }
    });
  }

  RINGSPAN_DEVICE void take_in(const Task& task) {
    const kernels::IndexRange heads = work_.heads_of(task);
    if (heads.empty()) return;
    if constexpr (kOwnsQueries) load_row_statistics(task);
    row_ring_.wait(m_);
    for (auto t = static_cast<int>(heads.begin); t < static_cast<int>(heads.end); ++t) {
      const Walk walk = work_.walk_of(task, t);
      if (walk.tiles > 0) take_in_head(task, walk);
    }
    row_ring_.release(m_);
  }

  RINGSPAN_DEVICE void take_in_head(const Task& task, const Walk& walk) {
    if constexpr (kOverlaps) {
      bool checked = take_in_scores(task, walk, 0);
      for (int tile = 1; tile < walk.tiles; ++tile) checked = take_in_tile(task, walk, tile, checked);
      add_sums(task, walk, walk.tiles - 1, checked);
    } else {
      for (int tile = 0; tile < walk.tiles; ++tile) {
        const bool checked = take_in_scores(task, walk, tile);
        add_sums(task, walk, tile, checked);
      }
    }
  }

  RINGSPAN_DEVICE void load_row_statistics(const Task& task) {
    const auto lse = view_of<const float>(task.lse, work_.batch, work_.head);
    const auto delta = view_of<const float>(task.delta, work_.batch, work_.head);
    m_.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      flags_[thread][0] = 0;
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        const bool valid = row < work_.rows;
        row_lse_[thread][half] = valid ? *lse.row(work_.first_row + row) : kMinusInfinity;
        row_delta_[thread][half] = valid ? *delta.row(work_.first_row + row) : 0.0F;
        if (valid && row_lse_[thread][half] == kMinusInfinity) flags_[thread][0] = 1;
      }
    });
    row_without_ = m_.sync_any(flags_);
  }

  // Waits for the tile that is `ahead` of the one to be given back next. Returns whether its pairs have to be looked at one by
  // one: where some are masked, or a query's lse is -inf (of rows beyond the block's own it does not matter, they are never
  // stored), and where one may be dropped, so that no value of a dropped pair reaches dv.
  RINGSPAN_DEVICE bool arrive(const Walk& walk, int tile, int ahead) {
    column_ring_.wait(m_, ahead);
    // Threads copy the block's own rows, and a tile that is not whole. What TMA has written needs none.
    if (tile == 0 || !arguments_.maps.complete || walk.valid(tile) < P::kCols) m_.fence_async();
    bool without = row_without_;
    if constexpr (!kOwnsQueries) without = M::uniform(*tiles_.without(column_ring_.buffer(ahead)) != 0.0F ? 1 : 0) != 0;
    return without || !walk.is_full(tile) || (P::kOptions && !kOwnsQueries && params_.shape.dropout);
  }
  RINGSPAN_DEVICE void begin_scores(int buffer) {
    product_rows<P>(m_, p_, m_.shared_address(tiles_.x1()), m_.shared_address(tiles_.y1(buffer)));
    product_rows<P>(m_, ds_, m_.shared_address(tiles_.x2()), m_.shared_address(tiles_.y2(buffer)));
    m_.commit_products();
  }
  RINGSPAN_DEVICE void begin_sums() {
    const int buffer = column_ring_.buffer();
    if constexpr (!kOwnsQueries) product_weights<P>(m_, second_, p_weights_, m_.shared_address(tiles_.y2(buffer)));
    product_weights<P>(m_, first_, ds_weights_, m_.shared_address(tiles_.y1(buffer)));
    m_.commit_products();
  }

  // Tiles return whether their pairs had to be looked at.
  RINGSPAN_DEVICE bool take_in_scores(const Task& task, const Walk& walk, int tile) {
    const bool checked = arrive(walk, tile, 0);
    m_.fence_registers(p_, ds_);
    begin_scores(column_ring_.buffer());
    draw(task, walk, tile);
    m_.template wait_products<0>(p_, ds_);
    weigh(task, walk, tile, checked, column_ring_.buffer());
    pack();
    return checked;
  }

  RINGSPAN_DEVICE bool take_in_tile(const Task& task, const Walk& walk, int tile, bool checked_before) {
    const bool checked = arrive(walk, tile, 1);
    if (checked_before) exclude(task, walk, tile - 1);
    m_.take_turn();
    fence_all();
    begin_scores(column_ring_.buffer(1));
    begin_sums();
    m_.pass_turn();
    draw(task, walk, tile);
    m_.template wait_products<1>(p_, ds_);
    weigh(task, walk, tile, checked, column_ring_.buffer(1));
    wait_for_sums();
    column_ring_.release(m_);
    pack();
    return checked;
  }

  RINGSPAN_DEVICE void add_sums(const Task& task, const Walk& walk, int tile, bool checked) {
    if (checked) exclude(task, walk, tile);
    fence_all();
    begin_sums();
    wait_for_sums();
    column_ring_.release(m_);
  }

  RINGSPAN_DEVICE void fence_all() {
    if constexpr (kOwnsQueries) {
      m_.fence_registers(p_, ds_, first_, ds_weights_);
    } else {
      m_.fence_registers(p_, ds_, first_, second_, ds_weights_, p_weights_);
    }
  }
  RINGSPAN_DEVICE void wait_for_sums() {
    if constexpr (kOwnsQueries) {
      m_.template wait_products<0>(first_, ds_weights_);
    } else {
      m_.template wait_products<0>(first_, second_, ds_weights_, p_weights_);
    }
  }

  RINGSPAN_DEVICE Visible visible_pairs(const Task& task, const Walk& walk, int tile, int buffer, int thread) {
    Visible visible{{}, tiles_.lse(buffer)};
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      kernels::IndexRange range{};
      if (row < work_.rows && !(kOwnsQueries && row_lse_[thread][half] == kMinusInfinity)) {
        range = work_.columns_of_row(task, row);
      }
      clip(range, walk.first(tile), P::kCols, half, visible.columns);
    }
    return visible;
  }

  RINGSPAN_DEVICE std::int64_t query_head(const Task& task, const Walk& walk) const {
    return Work::head_of(task, kOwnsQueries ? work_.head : walk.head);
  }

  // The pairs of a tile that are dropped, while its products run.
  RINGSPAN_DEVICE void draw(const Task& task, const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      draw_dropped<P, kOwnsQueries>(m_, dropped_, arguments_, task, work_.first_row, walk.first(tile), work_.batch,
                                    query_head(task, walk));
    }
  }

  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile, bool checked, int buffer) {
    if constexpr (P::kOptions) {
      if (params_.shape.softcap) return weigh<true>(task, walk, tile, checked, buffer);
    }
    weigh<false>(task, walk, tile, checked, buffer);
  }
  template <bool kCaps>
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile, bool checked, int buffer) {
    if (checked) {
      m_.each([&](int thread) { weigh_thread<true, kCaps>(task, walk, tile, buffer, thread); });
    } else {
      m_.each([&](int thread) { weigh_thread<false, kCaps>(task, walk, tile, buffer, thread); });
    }
  }

  // p_ = drop p and ds_ = p (c drop dp - delta) ds/d(scale q k), 0 where a pair is masked; p_ is -0 where it is dropped. c, the
  // scale of the output, comes to dv at its end.
  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void weigh_thread(const Task& task, const Walk& walk, int tile, int buffer, int thread) {
    const Lane lane = lane_of(thread);
    [[maybe_unused]] Visible visible{};
    if constexpr (kMasked) visible = visible_pairs(task, walk, tile, buffer, thread);
    [[maybe_unused]] AlibiRows alibi;
    if constexpr (P::kOptions) {
      alibi =
          alibi_rows<kOwnsQueries>(params_, task, work_.first_row, walk.first(tile), work_.batch, query_head(task, walk), lane);
    }
    RINGSPAN_UNROLL
    for (int j = 0; j < P::kCols / 8; ++j) {
      const int first =
          kOwnsQueries && !kMasked ? 0 : M::hidden(j * 8 + lane.column);  // not all columns' lse and delta at once
      RINGSPAN_UNROLL
      for (int e = 0; e < 2; ++e) {
        RINGSPAN_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int index = j * 4 + half * 2 + e;
          const float lse = kOwnsQueries ? row_lse_[thread][half] : tiles_.lse(buffer)[first + e];
          const float delta = kOwnsQueries ? row_delta_[thread][half] : tiles_.delta(buffer)[first + e];
          const float t = kCaps ? tanh_by_parts<P, M>(p_[thread][index] * arguments_.softcap_scale) : 0.0F;
          float exponent;
          if constexpr (P::kOptions) {
            exponent = (kCaps ? params_.softcap * t : params_.scale * p_[thread][index]) - alibi(half, j * 8 + e) - lse;
          } else {
            exponent = fmaf(params_.scale, p_[thread][index], -lse);  // not in powers of 2: lse would be rounded once more
          }
          const float p = M::template exp<P::kType>(M::min_or_nan(exponent, 0.0F));
          float weight = p;
          float dp = ds_[thread][index];
          if constexpr (P::kOptions) {
            const bool dropped = is_set(dropped_[thread], index);
            weight = dropped ? -0.0F : weight * arguments_.keep;
            dp = dropped ? 0.0F : dp * arguments_.keep;
          }
          float ds = p * fmaf(dp, params_.output_scale, -delta);
          if constexpr (kCaps) ds *= 1.0F - t * t;
          const bool sees = !kMasked || visible.sees(half, first + e);
          p_[thread][index] = sees ? weight : 0.0F;
          ds_[thread][index] = sees ? ds : 0.0F;
        }
      }
    }
  }

  RINGSPAN_DEVICE void pack() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 4; ++index) {
        if constexpr (!kOwnsQueries) {
          p_weights_[thread][index] = M::template pack<P::kType>(p_[thread][2 * index], p_[thread][2 * index + 1]);
        }
        ds_weights_[thread][index] = M::template pack<P::kType>(ds_[thread][2 * index], ds_[thread][2 * index + 1]);
      }
    });
  }

  // NaN and infinities of the tile that is to be given back next, before its sums.
  RINGSPAN_DEVICE void exclude(const Task& task, const Walk& walk, int tile) {
    const int buffer = column_ring_.buffer();
    const auto visible = [&](int thread) { return visible_pairs(task, walk, tile, buffer, thread); };
    exclude_non_finite<P, false>(m_, tiles_.y1(buffer), work_.y1_rows(task, walk, tile), first_, ds_weights_, tiles_.pairs(),
                                 flags_, visible);
    if constexpr (!kOwnsQueries) {
      m_.sync();
      exclude_non_finite<P, P::kOptions>(m_, tiles_.y2(buffer), work_.y2_rows(task, walk, tile), second_, p_weights_,
                                         tiles_.pairs(), flags_, visible);
    }
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  GradientTiles<P> tiles_;
  TileRing<1> row_ring_;
  TileRing<GradientTiles<P>::kBuffers> column_ring_;
  const Work work_;
  bool row_without_ = false;  // a query of the block has lse = -inf
  Registers<float, P::kDim / 2> first_, second_;
  Registers<float, P::kCols / 2> p_, ds_;
  Registers<std::uint32_t, P::kCols / 4> p_weights_, ds_weights_;
  Registers<float, 2> row_lse_, row_delta_;
  DroppedPairs<P, M> dropped_;  // with options
  Registers<int, 2> seen_;
  Registers<int, 1> flags_;
};

}  // namespace ringspan::cuda
