// attend as a block program: one block owns kBlockRows query rows of one (batch item, query head) and takes in, in list order,
// every task of its group. The state stays in registers from the first task to the last, which may finish the rows.
//
// Keys and values have one tile of shared memory each, which asynchronous copies fill while the block is busy with the other:
//     keys j have arrived | values j are copied, scores = q k_j^T | values j have arrived | keys j + 1 are copied,
//     p = e^(scores - m), acc = acc e^(m_before - m) + p v_j
// so that a tile costs two barriers. A tile that all rows see whole needs no mask. Values are not searched for NaN: where the
// sums are not finite at the end the block begins anew and looks (any_non_finite).
//
// Contract: kernels/attend.h. Cost per tile of kCols keys: 4 kBlockRows kCols kDim operations; k and v are read once per block.
#pragma once

#include "cuda/attend_walk.h"
#include "cuda/pair_options.h"
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
  using Walk = TileWalk<P>;

  RINGSPAN_DEVICE AttendBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        params_(arguments.params),
        has_options_(params_.shape.softcap || params_.shape.alibi || params_.shape.dropout),
        q_tile_(reinterpret_cast<Element*>(shared)),
        k_tile_(reinterpret_cast<Element*>(shared + P::kRowTileBytes)),
        v_tile_(reinterpret_cast<Element*>(shared + P::kRowTileBytes + P::kColTileBytes)),
        stage_(shared + P::kRowTileBytes + 2 * P::kColTileBytes) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const AttendWork work = AttendWork::template of<P>(arguments_, block);
    batch_ = work.batch;
    head_ = work.head;
    first_row_ = work.first_row;
    rows_ = work.rows;
    do {
      load(*work.first_task);
      for (const Task* task = work.first_task; task != work.end_task; ++task) {
        take_in(*task, walk_of<P, M>(work, *task, params_.shape.group), work.begins_queries(task));
      }
    } while (!is_careful_ && (is_careful_ = any_non_finite<P, P::kParts>(m_, sums(), flags_)));
    store(M::hidden(static_cast<int>(block)));
  }

 private:
  static constexpr float kRefused = -0.0F;  // the weight of a pair that is masked, dropped, or of a score of -inf; no other's

  RINGSPAN_DEVICE auto sums() {
    return [this](int part) -> auto& { return state_[part].acc; };
  }
  RINGSPAN_DEVICE auto scores() {
    return [this](int part) -> auto& { return scores_[part]; };
  }
  RINGSPAN_DEVICE RowsOfBlock rows_of(int part) const {  // the last ones are fewer, or none
    return {batch_, head_, first_row_ + part * P::kRows, rows_ - part * P::kRows};
  }

  RINGSPAN_DEVICE void load(const Task& task) {
    RINGSPAN_UNROLL
    for (int part = 0; part < P::kParts; ++part) {
      state_[part].load(m_, task, rows_of(part), params_.shape.head_dim_v);
      state_[part].begin_unit(m_, arguments_);
    }
  }

  // The state, or the results. Finds its work once more: in registers all the time it would be in the way.
  RINGSPAN_DEVICE void store(std::int64_t block) {
    const Group& group = arguments_.groups[find_work(arguments_, block).group];
    const Task& last_task = arguments_.tasks[group.first_task + group.task_count - 1];
    m_.sync();  // nobody reads the queries any more
    RINGSPAN_UNROLL
    for (int part = 0; part < P::kParts; ++part) {
      const RowsOfBlock rows = rows_of(part);
      state_[part].end_unit(m_, arguments_, arguments_.tasks[group.first_task], rows);
      if (last_task.o.data == nullptr) state_[part].note_seen(m_, arguments_, group, rows);
      state_[part].store(m_, params_, last_task, rows, q_tile_ + part * P::kRows * P::kLead);
    }
  }

  RINGSPAN_DEVICE void take_in(const Task& task, const Walk& walk, bool begins_queries) {
    if (walk.tiles == 0) {
      has_queries_ = has_queries_ && !begins_queries;
      return;
    }
    if (begins_queries || !has_queries_) {
      const auto rows = view_of<const Element>(task.q, batch_, head_);
      copy_rows<P, P::kBlockRows>(m_, q_tile_, {rows, first_row_, rows_, params_.shape.head_dim});
      has_queries_ = true;
    }
    copy_rows<P, P::kCols>(m_, k_tile_, keys(task, walk, 0));
    for (int tile = 0; tile < walk.tiles; ++tile) {
      m_.wait_copies();
      m_.sync();
      copy_rows<P, P::kCols>(m_, v_tile_, values(task, walk, tile));
      product_nt<P, P::kParts>(m_, scores(), q_tile_, k_tile_);
      m_.wait_copies();
      m_.sync();
      if (tile + 1 < walk.tiles) copy_rows<P, P::kCols>(m_, k_tile_, keys(task, walk, tile + 1));
      weigh(task, walk, tile);
      if (is_careful_) exclude(task, walk, tile);
      product_rn<P, P::kParts>(m_, sums(), scores(), v_tile_, stage_);
    }
  }

  RINGSPAN_DEVICE TileRows<Element> keys(const Task& task, const Walk& walk, int tile) const {
    return {view_of<const Element>(task.k, batch_, walk.head), walk.first(tile), walk.valid(tile), params_.shape.head_dim};
  }
  RINGSPAN_DEVICE TileRows<Element> values(const Task& task, const Walk& walk, int tile) const {
    return {view_of<const Element>(task.v, batch_, walk.head), walk.first(tile), walk.valid(tile), params_.shape.head_dim_v};
  }

  // Scores become probabilities against the new maxima, and what was summed so far shrinks.
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile) {
    const bool plain = walk.is_full(tile) && !has_options_ && !is_careful_;
    RINGSPAN_UNROLL
    for (int part = 0; part < P::kParts; ++part) {
      if (part > 0 && rows_of(part).count <= 0) continue;  // queries and scores are 0
      if (arguments_.score_unit == 1.0F) scale_scores(part);
      if (plain) {
        weigh_part<true>(task, walk.first(tile), part);
      } else {
        if (params_.shape.alibi) subtract_alibi(task, walk.first(tile), part);
        if (params_.shape.dropout) {
          draw_dropped<P, true>(m_, dropped_, arguments_, task, rows_of(part).first, walk.first(tile), batch_, head_of(task));
        }
        weigh_part<false>(task, walk.first(tile), part);
      }
    }
  }
  RINGSPAN_DEVICE void scale_scores(int part) {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) {
        float& score = scores_[part][thread][index];
        score = params_.shape.softcap ? params_.softcap * tanh_by_parts<P, M>(score * arguments_.softcap_scale)
                                      : score * params_.scale;
      }
    });
  }
  RINGSPAN_DEVICE void subtract_alibi(const Task& task, std::int64_t column0, int part) {
    m_.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      const AlibiRows alibi = alibi_rows<true>(params_, task, rows_of(part).first, column0, batch_, head_of(task), lane);
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) {
        scores_[part][thread][index] -= alibi(index % 4 / 2, index / 4 * 8 + index % 2);
      }
    });
  }
  RINGSPAN_DEVICE std::int64_t head_of(const Task& task) const { return task.head_first + head_ * task.head_step; }

  // kPlain: all pairs are visible, there are no options, and of -inf nothing special is to be remembered.
  template <bool kPlain>
  RINGSPAN_DEVICE void weigh_part(const Task& task, std::int64_t column0, int part) {
    m_.each([&](int thread) { mask_thread<kPlain>(task, column0, part, thread); });
    m_.quad_max(tile_max_);
    m_.each([&](int thread) { weigh_thread<kPlain>(part, thread); });
  }

  template <bool kPlain>
  RINGSPAN_DEVICE void mask_thread(const Task& task, std::int64_t column0, int part, int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    VisibleColumns visible{};
    if constexpr (!kPlain) visible = visible_columns<P, M>(task, rows_of(part), column0, thread);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      float largest = kMinusInfinity;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = scores_[part][thread][j * 4 + half * 2 + e];
          if constexpr (!kPlain) score = visible.sees(half, j * 8 + lane.column + e) ? score : kMinusInfinity;
          largest = fmaxf(largest, score);
        }
      }
      tile_max_[thread][half] = largest;
    }
  }

  template <bool kPlain>
  RINGSPAN_DEVICE void weigh_thread(int part, int thread) {
    StateRows<P, M>& state = state_[part];
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float before = state.max[thread][half];
      const float now = fmaxf(before, tile_max_[thread][half]);
      const float reference = now == kMinusInfinity ? 0.0F : now;  // e^(-inf - 0) = 0 for pairs without weight
      float sum = state.sum[thread][half];
      if (before != now) {  // seldom, after the first tiles
        const float shrink = exponential(before - now);
        sum *= shrink;
        RINGSPAN_UNROLL
        for (int index = half * 2; index < P::kDim / 2; index += 4) {
          state.acc[thread][index] *= shrink;
          state.acc[thread][index + 1] *= shrink;
        }
        state.max[thread][half] = now;
      }
      RINGSPAN_UNROLL
      for (int index = half * 2; index < P::kCols / 2; index += 4) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = scores_[part][thread][index + e];
          float weight = exponential(score - reference);
          sum += weight;
          if constexpr (!kPlain) {
            if (params_.shape.dropout) weight = is_set(dropped_[thread], index + e) ? kRefused : weight * arguments_.keep;
            if (score == kMinusInfinity) weight = kRefused;
          }
          score = weight;
        }
      }
      state.sum[thread][half] = sum;
    }
  }

  // Of a difference of scores, which are in units of arguments_.score_unit (arguments.h).
  RINGSPAN_DEVICE float exponential(float difference) const {
    if constexpr (P::kHalf) return M::template exp2<P::kType>(difference * arguments_.exponent_unit);
    return M::template exp<P::kType>(difference * arguments_.score_unit);
  }

  RINGSPAN_DEVICE void exclude(const Task& task, const Walk& walk, int tile) {
    const auto kind_of = [&](int part, int thread) {
      const auto& weights = scores_[part][thread];
      return [&weights](int, int index, int) {
        return bits_of(weights[index]) == bits_of(kRefused) ? kNoPair : kind_of_weight(weights[index]);
      };
    };
    exclude_non_finite<P, P::kParts>(m_, v_tile_, values(task, walk, tile), sums(), stage_, flags_, kind_of);
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  const bool has_options_;
  Element *q_tile_, *k_tile_, *v_tile_;
  unsigned char* stage_;
  int batch_ = 0, head_ = 0, first_row_ = 0, rows_ = 0;
  bool is_careful_ = false;   // sums were not finite
  bool has_queries_ = false;  // those of the task are in shared memory
  StateRows<P, M> state_[P::kParts];
  Registers<float, P::kCols / 2> scores_[P::kParts];
  Registers<float, 2> tile_max_;
  DroppedPairs<P, M> dropped_;
  Registers<int, 1> flags_;
};

}  // namespace ringspan::cuda
