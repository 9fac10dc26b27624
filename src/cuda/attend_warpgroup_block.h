// attend as a block program for warpgroups (sm_90a): a block of two owns 128 query rows, 64 each, of one (batch item, query
// head) and takes in, in list order, every task of its group, of which the last may finish the rows, keys and values kCols at a
// time.
//
// While a tile is turned from scores into probabilities, the tensor cores take in the values of the one before, and the next
// keys and these values are copied: tiles of both have two buffers. Per tile one barrier:
//     keys j and values j - 1 have arrived | copy keys j + 1, values j | scores = q k_j^T, acc += p v_(j-1) |
//     wait for the scores, p = e^(scores - m) | wait for acc, acc *= e^(m_before - m)
// A tile that all rows see whole needs neither masks nor a look at its values. In others a value that is not finite is set to 0
// in shared memory and reaches the rows that see it one by one: 0 x NaN must not.
//
// Softcap, ALiBi and dropout are in kernels of their own (P::kOptions, warpgroup_options.h).
//
// Contract: kernels/attend.h. Cost per tile: 4 kRows kCols kDim operations; k and v are read once per block. Rows that do not
// begin and end at multiples of 16 bytes are copied element by element: slow, with the same bits.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/state_rows.h"
#include "cuda/warpgroup.h"
#include "cuda/warpgroup_non_finite.h"
#include "cuda/warpgroup_options.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

template <typename P, typename M>
class AttendWarpgroupBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Rows = RowsView<const Element>;

  RINGSPAN_DEVICE AttendWarpgroupBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m), arguments_(arguments), params_(arguments.params), tiles_(shared + padding(m.shared_address(shared))) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const BlockWork work = find_work(arguments_, block);
    const Group& group = arguments_.groups[work.group];
    const Task& head_task = arguments_.tasks[group.first_task];
    batch_ = static_cast<int>(work.batch);
    head_ = static_cast<int>(work.head);
    first_row_ = static_cast<int>(group.tiles - 1 - work.tile) * P::kRows;  // under a causal mask the last rows have most to do
    const std::int64_t rows_left = head_task.q_count - first_row_;
    rows_ = rows_left < P::kRows ? static_cast<int>(rows_left) : P::kRows;
    state_.load(m_, head_task, batch_, head_, first_row_, rows_, params_.shape.head_dim_v);
    bool first = true;
    const Task* const end = &head_task + group.task_count;
    for (const Task* task = &head_task; task != end; ++task) {
      take_in(*task, first || task->q.data != task[-1].q.data);
      first = false;
    }
    store(M::hidden(static_cast<int>(block)));
  }

 private:
  // One task as this block sees it, in keys from `begin` on: tile t is keys t kCols and on.
  struct Walk {
    Rows k, v;
    std::int64_t begin;
    int keys, tiles, full_begin, full_end;  // tiles [full_begin, full_end) are seen whole by all rows
    static RINGSPAN_DEVICE int first(int tile) { return tile * P::kCols; }
    RINGSPAN_DEVICE int valid(int tile) const { return keys - first(tile) < P::kCols ? keys - first(tile) : P::kCols; }
    RINGSPAN_DEVICE bool is_full(int tile) const { return tile >= full_begin && tile < full_end; }
  };

  static RINGSPAN_DEVICE std::uint32_t padding(std::uint32_t address) { return (0U - address) % kSwizzleBytes; }
  RINGSPAN_DEVICE unsigned char* q_tile() const { return tiles_; }
  RINGSPAN_DEVICE unsigned char* k_tile(int tile) const { return tiles_ + P::kRowTileBytes + tile % 2 * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* v_tile(int tile) const { return k_tile(tile) + 2 * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* pairs() const { return tiles_ + P::kRowTileBytes + 4 * P::kColTileBytes; }

  // Ends of the rows' ranges never decrease, so the keys are those from the first row's first to the last one's last, and all
  // rows see those from the last one's first to the first one's last.
  RINGSPAN_DEVICE Walk walk_of(const Task& task) const {
    const kernels::IndexRange first = kernels::keys_of_row(task, M::hidden(first_row_));
    const kernels::IndexRange last = kernels::keys_of_row(task, M::hidden(first_row_ + rows_ - 1));
    const std::int64_t end = last.end < task.k_count ? last.end : task.k_count;
    const std::int64_t keys = end > first.begin ? end - first.begin : 0;
    const std::int64_t kv = kernels::kv_index(task, head_of(task) / params_.shape.group);
    const auto from_begin = [&](Rows rows) { return Rows{rows.row(first.begin), rows.stride}; };
    return {from_begin(view_of<const Element>(task.k, batch_, kv)),
            from_begin(view_of<const Element>(task.v, batch_, kv)),
            first.begin,
            static_cast<int>(keys),
            M::uniform(static_cast<int>((keys + P::kCols - 1) / P::kCols)),
            M::uniform(static_cast<int>((last.begin - first.begin + P::kCols - 1) / P::kCols)),
            M::uniform(static_cast<int>((first.end - first.begin) / P::kCols))};
  }

  RINGSPAN_DEVICE void take_in(const Task& task, bool new_queries) {
    const Walk walk = walk_of(task);
    m_.sync();  // the tiles of the task before are not read any more
    if (new_queries) {
      copy_tile<P::kRows, P::kDim, Element>(m_, q_tile(), view_of<const Element>(task.q, batch_, head_), first_row_, rows_,
                                            params_.shape.head_dim);
    }
    if (walk.tiles > 0) copy_keys(walk, 0);
    m_.commit_copies();
    if (walk.tiles == 0) return arrive();
    take_in_first_tile(task, walk);
    for (int tile = 1; tile < walk.tiles; ++tile) take_in_tile(task, walk, tile);
    arrive();
    add_last_values(task, walk);
  }

  // The state, or the results. Finds its work once more, and which rows have seen a key: in registers all the time these would
  // be in the way.
  RINGSPAN_DEVICE void store(std::int64_t block) {
    const Group& group = arguments_.groups[find_work(arguments_, block).group];
    const Task& last_task = arguments_.tasks[group.first_task + group.task_count - 1];
    if (last_task.o.data == nullptr) note_seen_rows(group);
    state_.store(m_, params_, last_task, batch_, head_, first_row_, rows_, reinterpret_cast<Element*>(tiles_));
  }

  RINGSPAN_DEVICE void note_seen_rows(const Group& group) {
    m_.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        bool seen = false;
        for (std::int64_t index = 0; index < group.task_count && row < rows_ && !seen; ++index) {
          seen = !kernels::keys_of_row(arguments_.tasks[group.first_task + index], first_row_ + row).empty();
        }
        state_.seen[thread][half] = seen ? 1 : 0;
      }
    });
  }

  RINGSPAN_DEVICE void copy_keys(const Walk& walk, int tile) {
    copy_tile<P::kCols, P::kDim, Element>(m_, k_tile(tile), walk.k, walk.first(tile), walk.valid(tile), params_.shape.head_dim);
  }
  // What was copied is there for the products of all threads, and what the products before this have read may be written.
  RINGSPAN_DEVICE void arrive() {
    m_.template wait_copies<0>();
    m_.fence_async();
    m_.sync();
  }

  RINGSPAN_DEVICE void begin_tile(const Walk& walk, int tile) {
    if (tile + 1 < walk.tiles) copy_keys(walk, tile + 1);
    copy_tile<P::kCols, P::kDim, Element>(m_, v_tile(tile), walk.v, walk.first(tile), walk.valid(tile),
                                          params_.shape.head_dim_v);
    m_.commit_copies();
  }

  RINGSPAN_DEVICE void take_in_first_tile(const Task& task, const Walk& walk) {
    arrive();
    begin_tile(walk, 0);
    m_.fence_registers(scores_);
    product_rows<P>(m_, scores_, m_.shared_address(q_tile()), m_.shared_address(k_tile(0)));
    m_.commit_products();
    draw(task, walk, 0);
    m_.template wait_products<0>(scores_);
    weigh(task, walk, 0);
    shrink_and_pack();
  }

  RINGSPAN_DEVICE void take_in_tile(const Task& task, const Walk& walk, int tile) {
    arrive();
    if (looks_at_values(walk, tile - 1)) exclude_values(task, walk, tile - 1);
    m_.fence_registers(scores_, state_.acc, weights_);
    product_rows<P>(m_, scores_, m_.shared_address(q_tile()), m_.shared_address(k_tile(tile)));
    m_.commit_products();
    product_weights<P>(m_, state_.acc, weights_, m_.shared_address(v_tile(tile - 1)));
    m_.commit_products();
    begin_tile(walk, tile);
    draw(task, walk, tile);
    m_.template wait_products<1>(scores_);
    weigh(task, walk, tile);
    m_.template wait_products<0>(state_.acc, weights_);
    shrink_and_pack();
  }

  RINGSPAN_DEVICE void add_last_values(const Task& task, const Walk& walk) {
    const int tile = walk.tiles - 1;
    if (looks_at_values(walk, tile)) exclude_values(task, walk, tile);
    m_.fence_registers(state_.acc, weights_);
    product_weights<P>(m_, state_.acc, weights_, m_.shared_address(v_tile(tile)));
    m_.commit_products();
    m_.template wait_products<0>(state_.acc, weights_);
  }

  // Scores become probabilities against the new maximum; shrink_ is what earlier sums have to be multiplied by. All of it in
  // both branches: what stands behind them, ptxas moves behind the wait for the product before, which is to run meanwhile.
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      if (params_.shape.softcap) return weigh<true>(task, walk, tile);
    }
    weigh<false>(task, walk, tile);
  }
  template <bool kCaps>
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile) {
    if (walk.is_full(tile)) {
      weigh<false, kCaps>(task, walk, tile);
    } else {
      weigh<true, kCaps>(task, walk, tile);
    }
  }
  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile) {
    m_.each([&](int thread) { scale_thread<kMasked, kCaps>(task, walk.begin + walk.first(tile), thread); });
    m_.quad_max(tile_max_);
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float before = state_.max[thread][half];
        const float now = fmaxf(before, tile_max_[thread][half]);
        const float reference = now == kMinusInfinity ? 0.0F : now;  // e^(-inf - 0) = 0 for pairs without weight
        shrink_[thread][half] = before == now ? 1.0F : M::template exp<P::kType>(before - now);
        state_.max[thread][half] = now;
        float sum = state_.sum[thread][half] * shrink_[thread][half];
        RINGSPAN_UNROLL
        for (int index = half * 2; index < P::kCols / 2; index += 4) {
          RINGSPAN_UNROLL
          for (int e = 0; e < 2; ++e) {
            float& score = scores_[thread][index + e];
            score = M::template exp<P::kType>(score - reference);
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

  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void scale_thread(const Task& task, std::int64_t column0, int thread) {
    [[maybe_unused]] VisibleColumns visible{};
    if constexpr (kMasked) visible = visible_columns(task, column0, thread);
    const Lane lane = lane_of(thread);
    [[maybe_unused]] AlibiRows alibi;
    if constexpr (P::kOptions) {
      alibi = alibi_rows<true>(params_, task, first_row_, column0, batch_, head_of(task), lane);
    }
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      float largest = kMinusInfinity;
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols / 8; ++j) {
        RINGSPAN_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = scores_[thread][j * 4 + half * 2 + e];
          score = kCaps ? params_.softcap * tanh_by_parts<P, M>(score * arguments_.softcap_scale) : score * params_.scale;
          if constexpr (P::kOptions) score -= alibi(half, j * 8 + e);
          if constexpr (kMasked) score = visible.sees(half, j * 8 + lane.column + e) ? score : kMinusInfinity;
          largest = fmaxf(largest, score);
        }
      }
      tile_max_[thread][half] = largest;
    }
  }

  RINGSPAN_DEVICE VisibleColumns visible_columns(const Task& task, std::int64_t column0, int thread) const {
    VisibleColumns visible{};
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      kernels::IndexRange range{};
      if (row < rows_) range = kernels::keys_of_row(task, first_row_ + row);
      clip(range, column0, P::kCols, half, visible);
    }
    return visible;
  }

  RINGSPAN_DEVICE void shrink_and_pack() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) state_.acc[thread][index] *= shrink_[thread][index % 4 / 2];
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 4; ++index) {
        weights_[thread][index] = M::template pack<P::kType>(scores_[thread][2 * index], scores_[thread][2 * index + 1]);
      }
    });
  }

  // The pairs of a tile that are dropped, while its products run.
  RINGSPAN_DEVICE void draw(const Task& task, const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      const std::int64_t first = walk.begin + walk.first(tile);
      draw_dropped<P, true>(m_, dropped_, arguments_, task, first_row_, first, batch_, head_of(task));
    }
  }
  RINGSPAN_DEVICE std::int64_t head_of(const Task& task) const { return task.head_first + head_ * task.head_step; }

  RINGSPAN_DEVICE bool looks_at_values(const Walk& walk, int tile) const {
    return !walk.is_full(tile) || (P::kOptions && params_.shape.dropout);
  }
  // Values of a tile with masked or dropped pairs, before they are multiplied.
  RINGSPAN_DEVICE void exclude_values(const Task& task, const Walk& walk, int tile) {
    exclude_non_finite<P, P::kOptions>(
        m_, v_tile(tile), {walk.v, walk.first(tile), walk.valid(tile), params_.shape.head_dim_v}, state_.acc, weights_, pairs(),
        flags_, [&](int thread) { return visible_columns(task, walk.begin + walk.first(tile), thread); });
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  unsigned char* tiles_;
  int batch_ = 0, head_ = 0, first_row_ = 0, rows_ = 0;
  StateRows<P, M> state_;
  Registers<float, P::kCols / 2> scores_;
  Registers<std::uint32_t, P::kCols / 4> weights_;
  Registers<float, 2> tile_max_, shrink_;
  DroppedPairs<P, M> dropped_;  // with options
  Registers<int, 1> flags_;
};

}  // namespace ringspan::cuda
