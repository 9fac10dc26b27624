// attend_backward as block programs for warpgroups (sm_90a) with roles: a block owns 128 query rows (dq) or 128 key rows (dk
// and dv) of one (batch item, head) and walks over the other side kCols at a time. One warpgroup copies
// (gradient_warpgroup_producer.h), two multiply, 64 rows each: this file. No atomics: the same list, the same bits.
//
// As gradient_block.h has it, with x the owned side and y the other one: x1 = q or k, x2 = do or v, y1 = k or q, y2 = v or do,
//     scores = x1 y1^T, dp = x2 y2^T; dq or dk += ds y1; dv += p y2
// and with buffers for tiles of y, as in attend_warpgroup_block.h,
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

namespace ringspan::cuda {

template <typename P, typename M, Gradient kGradient>
class GradientWarpgroupBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Tiles = GradientTiles<P>;
  using Work = TaskWork<P>;
  using Walk = TileWalk<P>;
  static constexpr bool kOwnsQueries = kGradient == Gradient::dq;
  // Sums of a tile beside scores and dp of the next one: where there are registers for both.
  static constexpr bool kOverlaps = kOwnsQueries || P::kDim == 64;

  RINGSPAN_DEVICE GradientWarpgroupBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        tiles_(m, shared),
        row_ring_(tiles_.row_ring()),
        column_ring_(tiles_.column_ring()),
        work_ring_(tiles_.work_ring()) {}

  // What those who find out say (work_ring.h).
  RINGSPAN_DEVICE void run() {
    m_.begin_turns();
    for (bool over = false; !over;) {
      m_.note(Phase::wait_for_work);
      work_ring_.wait(m_);
      over = !take_in_work();
      work_ring_.release(m_);
    }
    m_.end_turns();
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

  RINGSPAN_DEVICE const Work& work() const { return tiles_.work().work[work_ring_.buffer()]; }

  // Returns whether there was any.
  RINGSPAN_DEVICE bool take_in_work() {
    const int flags = M::uniform(work().flags);
    if ((flags & Work::kOver) != 0) return false;
    m_.note(Phase::load);
    if ((flags & Work::kBegins) != 0) clear();
    if ((flags & Work::kBeginsRows) != 0) {
      if constexpr (kOwnsQueries) load_row_statistics();
      m_.note(Phase::wait_for_rows);
      row_ring_.wait(m_);
      begins_rows_ = true;
    }
    take_in_heads(flags);
    m_.note(Phase::store);
    if ((flags & Work::kEnds) != 0) put();
    return true;
  }

  RINGSPAN_DEVICE RowsOfBlock rows() const {
    return {M::uniform(work().batch), M::uniform(work().head), M::uniform(work().first_row), M::uniform(work().rows)};
  }
  RINGSPAN_DEVICE void put() {
    m_.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) seen_[thread][half] = work().seen[lane.row + half * 8] ? 1 : 0;
    });
    bool* const is_spoilt = tiles_.work().is_spoilt[work_ring_.buffer()];
    const int again = M::uniform(work().again);
    if constexpr (kOwnsQueries) {
      find_kept(m_, kept_, again, is_spoilt, first_);
    } else {
      find_kept(m_, kept_, again, is_spoilt, first_, second_);
    }
    m_.by_warps(kept_, [&] {
      put_gradients<P, kGradient>(m_, params_, work().first_task, rows(), params_.output_scale, first_, second_, seen_,
                                  tiles_.results());
    });
  }

  // The block's rows are given back when there are all scores.
  RINGSPAN_DEVICE void take_in_heads(int flags) {
    const bool ends_rows = (flags & Work::kEndsRows) != 0, looks = (flags & Work::kLooks) != 0;
    bool has_weights = (flags & Work::kHasWeights) != 0;
    const Walk walk = work().walk.template uniform<M>();
    const int begin = M::uniform(work().heads_begin), end = walk.tiles > 0 ? M::uniform(work().heads_end) : begin;
    for (int t = begin; t < end; ++t) {
      const bool is_last = t + 1 == end;
      const bool leaves_weights = is_last ? (flags & Work::kLeavesWeights) != 0 : !looks;
      take_in_head(walk_over<kGradient>(walk, t), is_last && ends_rows, has_weights, leaves_weights);
      has_weights = leaves_weights;
    }
    if (begin < end || !ends_rows) return;
    row_ring_.release(m_);
    if (kOverlaps && has_weights) add_sums(walk, 0, 0);
  }

  // Of a head whose walk has tiles.
  RINGSPAN_DEVICE void take_in_head(const Walk& walk, bool ends_rows, bool has_weights, bool leaves_weights) {
    if constexpr (kOverlaps) {
      int flags = has_weights ? 0 : take_in_scores(walk, 0);
      for (int tile = has_weights ? 0 : 1; tile < walk.tiles; ++tile) flags = take_in_tile(walk, tile, flags);
      if (ends_rows) row_ring_.release(m_);
      if (leaves_weights) return;
      m_.note(Phase::last_sums);
      add_sums(walk, walk.tiles - 1, flags);
    } else {
      for (int tile = 0; tile < walk.tiles; ++tile) {
        const int flags = take_in_scores(walk, tile);
        if (ends_rows && tile + 1 == walk.tiles) row_ring_.release(m_);
        add_sums(walk, tile, flags);
      }
    }
  }

  RINGSPAN_DEVICE void load_row_statistics() {
    m_.each([&](int thread) {
      const Lane lane = lane_of(thread);
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        row_lse_[thread][half] = work().lse[lane.row + half * 8];
        row_delta_[thread][half] = work().delta[lane.row + half * 8];
      }
    });
  }

  // Waits for the tile that is `ahead` of the one to be given back next. Returns its flags: checked where some pairs are
  // masked, or a query's lse is -inf (of rows beyond the block's own it does not matter, they are never stored).
  RINGSPAN_DEVICE int arrive(int ahead) {
    m_.note(Phase::wait_for_tile);
    column_ring_.wait(m_, ahead);
    m_.note(Phase::other_tiles);
    // Threads copy the block's own rows. What TMA has written needs none.
    if (begins_rows_ || !arguments_.maps.complete) m_.fence_async();
    begins_rows_ = false;
    return M::uniform(*tiles_.flags(column_ring_.buffer(ahead)));
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

  // Tiles return their flags.
  RINGSPAN_DEVICE int take_in_scores(const Walk& walk, int tile) {
    const int flags = arrive(0);
    m_.fence_registers(p_, ds_);
    begin_scores(column_ring_.buffer());
    draw(walk, tile);
    m_.template wait_products<0>(p_, ds_);
    weigh(walk, tile, flags, column_ring_.buffer());
    pack();
    return flags;
  }

  RINGSPAN_DEVICE int take_in_tile(const Walk& walk, int tile, int flags_before) {
    const int flags = arrive(1);
    exclude(walk, tile - 1, flags_before);
    m_.take_turn();
    fence_all();
    begin_scores(column_ring_.buffer(1));
    begin_sums();
    m_.pass_turn();
    draw(walk, tile);
    m_.template wait_products<1>(p_, ds_);
    weigh(walk, tile, flags, column_ring_.buffer(1));
    wait_for_sums();
    column_ring_.release(m_);
    pack();
    return flags;
  }

  RINGSPAN_DEVICE void add_sums(const Walk& walk, int tile, int flags) {
    exclude(walk, tile, flags);
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

  RINGSPAN_DEVICE Visible visible_pairs(const Walk& walk, int tile, int buffer, int thread) {
    Visible visible{work().visible(M::hidden(thread), walk.first(tile)), tiles_.lse(buffer)};
    if constexpr (kOwnsQueries) {
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (row_lse_[thread][half] == kMinusInfinity) visible.columns.end[half] = 0;
      }
    }
    return visible;
  }

  RINGSPAN_DEVICE std::int64_t query_head(const Walk& walk) const {
    const kernels::AttendTask& task = work().task;
    return task.head_first + (kOwnsQueries ? M::uniform(work().head) : walk.head) * task.head_step;
  }

  // The pairs of a tile that are dropped, while its products run.
  RINGSPAN_DEVICE void draw(const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      draw_dropped<P, kOwnsQueries>(m_, dropped_, arguments_, work().task, M::uniform(work().first_row), walk.first(tile),
                                    M::uniform(work().batch), query_head(walk));
    }
  }

  RINGSPAN_DEVICE void weigh(const Walk& walk, int tile, int flags, int buffer) {
    if constexpr (P::kOptions) {
      if (params_.shape.softcap) return weigh<true>(walk, tile, flags, buffer);
    }
    weigh<false>(walk, tile, flags, buffer);
  }
  template <bool kCaps>
  RINGSPAN_DEVICE void weigh(const Walk& walk, int tile, int flags, int buffer) {
    if ((flags & Tiles::kChecked) != 0) {
      m_.each([&](int thread) { weigh_thread<true, kCaps>(walk, tile, buffer, thread); });
    } else {
      m_.each([&](int thread) { weigh_thread<false, kCaps>(walk, tile, buffer, thread); });
    }
  }

  // p_ = drop p and ds_ = p (c drop dp - delta) ds/d(scale q k), 0 where a pair is masked; p_ is -0 where it is dropped. c, the
  // scale of the output, comes to dv at its end.
  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void weigh_thread(const Walk& walk, int tile, int buffer, int thread) {
    const Lane lane = lane_of(thread);
    [[maybe_unused]] Visible visible{};
    if constexpr (kMasked) visible = visible_pairs(walk, tile, buffer, thread);
    [[maybe_unused]] AlibiRows alibi;
    if constexpr (P::kOptions) {
      alibi = alibi_rows<kOwnsQueries>(params_, work().task, M::uniform(work().first_row), walk.first(tile),
                                       M::uniform(work().batch), query_head(walk), lane);
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
  RINGSPAN_DEVICE void exclude(const Walk& walk, int tile, int flags) {
    if ((flags & Tiles::kExcludes) == 0) return;
    const int buffer = column_ring_.buffer();
    const auto visible = [&](int thread) { return visible_pairs(walk, tile, buffer, thread); };
    exclude_non_finite<P, false>(m_, tiles_.y1(buffer), y1_rows<kGradient>(work(), walk, tile, params_.shape), first_,
                                 ds_weights_, tiles_.pairs(), visible);
    if constexpr (!kOwnsQueries) {
      exclude_non_finite<P, P::kOptions>(m_, tiles_.y2(buffer), y2_rows<kGradient>(work(), walk, tile, params_.shape), second_,
                                         p_weights_, tiles_.pairs(), visible);
    }
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  Tiles tiles_;
  TileRing<1> row_ring_;
  TileRing<Tiles::kBuffers> column_ring_;
  WorkRing work_ring_;
  bool begins_rows_ = false;  // no products have read the rows yet
  Registers<float, P::kDim / 2> first_, second_;
  Registers<float, P::kCols / 2> p_, ds_;
  Registers<std::uint32_t, P::kCols / 4> p_weights_, ds_weights_;
  Registers<float, 2> row_lse_, row_delta_;
  DroppedPairs<P, M> dropped_;  // with options
  Registers<int, 2> seen_;
  Registers<int, 1> kept_;
};

}  // namespace ringspan::cuda
