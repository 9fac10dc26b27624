// attend as a block program for warpgroups (sm_90a) with roles: a block owns 128 query rows of one (batch item, query head) and
// takes in, in list order, every task of its group, of which the last may finish the rows, keys and values kCols at a time. One
// warpgroup copies (attend_warpgroup_producer.h), two multiply, 64 rows each: this file. Tiles of keys and of values have two
// buffers each (tile_ring.h).
//
// While a tile is turned from scores into probabilities, the tensor cores take in the values of the one before:
//     keys j and values j - 1 have arrived | scores = q k_j^T, acc += p v_(j-1) | wait for the scores, give keys j back,
//     p = e^(scores - m) | wait for acc, give values j - 1 back, acc *= e^(m_before - m)
// The two take turns at the tensor cores, so that one multiplies while the other weighs.
// A tile that all rows see whole needs no masks. Values that masked pairs meet are looked at where sums come out NaN or
// infinite, and then the block is taken in again (checked_tile.h).
//
// Softcap, ALiBi and dropout are in kernels of their own (P::kOptions, pair_options.h).
//
// Contract: kernels/attend.h. Cost per tile: 4 kRows kCols kDim operations; k and v are read once per block. Rows that do not
// begin and end at multiples of 16 bytes are copied element by element: slow, with the same bits.
#pragma once

#include "cuda/attend_warpgroup_tiles.h"
#include "cuda/pair_options.h"
#include "cuda/state_rows.h"
#include "cuda/warpgroup.h"

namespace ringspan::cuda {

template <typename P, typename M>
class AttendWarpgroupBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Work = TaskWork<P>;
  using Walk = TileWalk<P>;

  RINGSPAN_DEVICE AttendWarpgroupBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        tiles_(m, shared),
        query_ring_(tiles_.query_ring()),
        key_ring_(tiles_.key_ring()),
        value_ring_(tiles_.value_ring()),
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
  RINGSPAN_DEVICE const Work& work() const { return tiles_.work().work[work_ring_.buffer()]; }

  // Returns whether there was any.
  RINGSPAN_DEVICE bool take_in_work() {
    const int flags = M::uniform(work().flags);
    if ((flags & Work::kOver) != 0) return false;
    m_.note(Phase::load);
    if ((flags & Work::kBegins) != 0) load();
    m_.note(Phase::wait_for_rows);
    if ((flags & Work::kBeginsRows) != 0) query_ring_.wait(m_);
    take_in(work().walk.template uniform<M>(), flags);
    m_.note(Phase::store);
    if ((flags & Work::kEnds) != 0) store();
    return true;
  }

  // Queries are given back when there are all scores.
  RINGSPAN_DEVICE void take_in(const Walk& walk, int flags) {
    const bool has_weights = (flags & Work::kHasWeights) != 0, looks = (flags & Work::kLooks) != 0;
    int tile = 0;
    if (walk.tiles > 0 && !has_weights) {
      m_.note(Phase::first_tile);
      take_in_first_tile(walk);
      tile = 1;
    }
    for (; tile < walk.tiles; ++tile) take_in_tile(walk, tile, looks);
    if ((flags & Work::kEndsRows) != 0) query_ring_.release(m_);
    if ((walk.tiles > 0 || has_weights) && (flags & Work::kLeavesWeights) == 0) {
      m_.note(Phase::last_sums);
      add_last_values(walk, looks);
    }
  }

  RINGSPAN_DEVICE RowsOfBlock rows() const {
    return {M::uniform(work().batch), M::uniform(work().head), M::uniform(work().first_row), M::uniform(work().rows)};
  }
  RINGSPAN_DEVICE void load() {
    state_.load(m_, work().task, rows(), params_.shape.head_dim_v);
    state_.begin_unit(m_, arguments_);
  }
  // The state, or the results.
  RINGSPAN_DEVICE void store() {
    find_kept(m_, kept_, M::uniform(work().again), tiles_.work().is_spoilt[work_ring_.buffer()], state_.acc);
    m_.by_warps(kept_, [&] {
      state_.end_unit(m_, arguments_, work().first_task, rows());
      if (work().task.o.data == nullptr) state_.note_seen(m_, work().seen);
      state_.store(m_, params_, work().task, rows(), tiles_.results());
    });
  }

  RINGSPAN_DEVICE std::uint32_t queries() const { return m_.shared_address(tiles_.queries()); }
  RINGSPAN_DEVICE std::uint32_t keys() const { return m_.shared_address(tiles_.keys(key_ring_.buffer())); }
  RINGSPAN_DEVICE std::uint32_t values() const { return m_.shared_address(tiles_.values(value_ring_.buffer())); }

  RINGSPAN_DEVICE void take_in_first_tile(const Walk& walk) {
    key_ring_.wait(m_);
    m_.fence_async();  // threads copy queries
    m_.fence_registers(scores_);
    product_rows<P>(m_, scores_, queries(), keys());
    m_.commit_products();
    draw(walk, 0);
    m_.template wait_products<0>(scores_);
    key_ring_.release(m_);
    weigh(walk, 0);
    shrink_and_pack();
  }

  RINGSPAN_DEVICE void take_in_tile(const Walk& walk, int tile, bool looks) {
    m_.note(Phase::wait_for_tile);
    key_ring_.wait(m_);
    wait_values(walk, tile - 1, looks);
    m_.note(Phase::other_tiles);
    m_.take_turn();
    m_.fence_registers(scores_, state_.acc, weights_);
    product_rows<P>(m_, scores_, queries(), keys());
    m_.commit_products();
    product_weights<P>(m_, state_.acc, weights_, values());
    m_.commit_products();
    m_.pass_turn();
    draw(walk, tile);
    m_.template wait_products<1>(scores_);
    key_ring_.release(m_);
    weigh(walk, tile);
    m_.template wait_products<0>(state_.acc, weights_);
    value_ring_.release(m_);
    shrink_and_pack();
  }

  RINGSPAN_DEVICE void add_last_values(const Walk& walk, bool looks) {
    wait_values(walk, walk.tiles - 1, looks);
    m_.fence_registers(state_.acc, weights_);
    product_weights<P>(m_, state_.acc, weights_, values());
    m_.commit_products();
    m_.template wait_products<0>(state_.acc, weights_);
    value_ring_.release(m_);
  }

  // tile: whose values come next; another task's where its weights were left, and nobody looks.
  RINGSPAN_DEVICE void wait_values(const Walk& walk, int tile, bool looks) {
    value_ring_.wait(m_);
    if (!arguments_.maps.complete) m_.fence_async();  // for the keys of the next tile too; what TMA has written needs none
    if (!looks || !looks_at_tile<P>(walk, tile, params_.shape)) return;
    if (M::uniform(*tiles_.non_finite(value_ring_.buffer())) != 0) exclude_values(walk, tile);
  }

  // Scores become probabilities against the new maximum; shrink_ is what earlier sums have to be multiplied by. All of it in
  // both branches: what stands behind them, ptxas moves behind the wait for the product before, which is to run meanwhile.
  RINGSPAN_DEVICE void weigh(const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      if (params_.shape.softcap) return weigh<true>(walk, tile);
    } else if (arguments_.score_unit == 1.0F) {
      scale_scores();
    }
    weigh<false>(walk, tile);
  }
  template <bool kCaps>
  RINGSPAN_DEVICE void weigh(const Walk& walk, int tile) {
    if (walk.is_full(tile)) {
      weigh<false, kCaps>(walk, tile);
    } else {
      weigh<true, kCaps>(walk, tile);
    }
  }
  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void weigh(const Walk& walk, int tile) {
    m_.each([&](int thread) { scale_thread<kMasked, kCaps>(walk.first(tile), thread); });
    m_.quad_max(tile_max_);
    m_.each([&](int thread) {
      float reference[2];  // the maxima in powers of 2; rounded, but all that a row adds up has the same rounding
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float before = state_.max[thread][half];
        const float now = fmaxf(before, tile_max_[thread][half]);
        reference[half] = now == kMinusInfinity ? 0.0F : now * arguments_.exponent_unit;  // e^(-inf - 0) = 0: no weight
        shrink_[thread][half] = before == now ? 1.0F : exp2(before * arguments_.exponent_unit - reference[half]);
        state_.max[thread][half] = now;
      }
      if (fmaxf(fabsf(reference[0]), fabsf(reference[1])) == kInfinity) subtract_maxima(reference, thread);
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum = state_.sum[thread][half] * shrink_[thread][half];
        RINGSPAN_UNROLL
        for (int index = half * 2; index < P::kCols / 2; index += 4) {
          RINGSPAN_UNROLL
          for (int e = 0; e < 2; ++e) {
            float& score = scores_[thread][index + e];
            score = exp2(fmaf(score, arguments_.exponent_unit, -reference[half]));
            sum += score;
            if constexpr (P::kOptions) {
              const bool dropped = is_set(dropped_[thread], index + e);
              score = dropped ? -0.0F : score * arguments_.keep;
            }
          }
        }
        state_.sum[thread][half] = sum;
      }
    });
  }

  RINGSPAN_DEVICE float exp2(float exponent) const { return M::template exp2<P::kType>(exponent); }
  // Where a maximum, or its score itself, is beyond float32 in powers of 2: scores become differences from it. What a row took
  // in before is e^-huge of it, or nothing where the maximum is the same.
  RINGSPAN_DEVICE void subtract_maxima(float (&reference)[2], int thread) {
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (fabsf(reference[half]) != kInfinity) continue;
      reference[half] = 0.0F;
      if (shrink_[thread][half] != 1.0F) shrink_[thread][half] = 0.0F;
      RINGSPAN_UNROLL
      for (int index = half * 2; index < P::kCols / 2; index += 4) {
        scores_[thread][index] -= state_.max[thread][half];
        scores_[thread][index + 1] -= state_.max[thread][half];
      }
    }
  }
  RINGSPAN_DEVICE void scale_scores() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) scores_[thread][index] *= params_.scale;
    });
  }

  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void scale_thread(int column0, int thread) {
    [[maybe_unused]] VisibleColumns visible{};
    if constexpr (kMasked) visible = work().visible(M::hidden(thread), column0);
    const Lane lane = lane_of(thread);
    [[maybe_unused]] AlibiRows alibi;
    if constexpr (P::kOptions) {
      const RowsOfBlock of = rows();
      alibi = alibi_rows<true>(params_, work().task, of.first, column0, of.batch, query_head(of), lane);
    }
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      float largest = kMinusInfinity;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = scores_[thread][j * 4 + half * 2 + e];
          if constexpr (kCaps) score = params_.softcap * tanh_by_parts<P, M>(score * arguments_.softcap_scale);
          if constexpr (P::kOptions && !kCaps) score *= params_.scale;
          if constexpr (P::kOptions) score -= alibi(half, j * 8 + e);
          if constexpr (kMasked) score = visible.sees(half, j * 8 + lane.column + e) ? score : kMinusInfinity;
          largest = fmaxf(largest, score);
        }
      }
      tile_max_[thread][half] = largest;
    }
  }

  RINGSPAN_DEVICE void shrink_and_pack() {
    m_.each([&](int thread) {
      // After the first tiles maxima seldom move.
      if (M::any_lane(shrink_[thread][0] != 1.0F || shrink_[thread][1] != 1.0F)) {
        RINGSPAN_UNROLL
        for (int index = 0; index < P::kDim / 2; ++index) state_.acc[thread][index] *= shrink_[thread][index % 4 / 2];
      }
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 4; ++index) {
        weights_[thread][index] = M::template pack<P::kType>(scores_[thread][2 * index], scores_[thread][2 * index + 1]);
      }
    });
  }

  // The pairs of a tile that are dropped, while its products run.
  RINGSPAN_DEVICE void draw(const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      const RowsOfBlock of = rows();
      draw_dropped<P, true>(m_, dropped_, arguments_, work().task, of.first, walk.first(tile), of.batch, query_head(of));
    }
  }
  RINGSPAN_DEVICE std::int64_t query_head(const RowsOfBlock& of) const {
    return work().task.head_first + of.head * work().task.head_step;
  }

  RINGSPAN_DEVICE void exclude_values(const Walk& walk, int tile) {
    const auto values = view_of<const Element>(work().task.v, M::uniform(work().batch), walk.head);
    exclude_non_finite<P, P::kOptions>(
        m_, tiles_.values(value_ring_.buffer()), {values, walk.first(tile), walk.valid(tile), params_.shape.head_dim_v},
        state_.acc, weights_, tiles_.pairs(), [&](int thread) { return work().visible(M::hidden(thread), walk.first(tile)); });
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  AttendTiles<P> tiles_;
  TileRing<1> query_ring_;
  TileRing<AttendTiles<P>::kBuffers> key_ring_, value_ring_;
  WorkRing work_ring_;
  StateRows<P, M> state_;
  Registers<float, P::kCols / 2> scores_;
  Registers<std::uint32_t, P::kCols / 4> weights_;
  Registers<float, 2> tile_max_, shrink_;
  DroppedPairs<P, M> dropped_;  // with options
  Registers<int, 1> kept_;
};

}  // namespace ringspan::cuda
