// attend_backward as block programs for warpgroups (sm_90a): a block of two owns 128 query rows (dq) or 128 key rows (dk and
// dv) of one (batch item, head), 64 each, and walks over the other side kCols at a time. No atomics: the same list, the same
// bits.
//
// As gradient_block.h has it, with x the owned side and y the other one: x1 = q or k, x2 = do or v, y1 = k or q, y2 = v or do,
//     scores = x1 y1^T, dp = x2 y2^T; dq or dk += ds y1; dv += p y2
// and as in attend_warpgroup_block.h one barrier per tile, with three buffers for tiles of y:
//     tile j has arrived | copy j + 1 | scores and dp of j, sums of j - 1 | wait for scores and dp, p and ds | wait for sums
// For dk and dv with head_dim > 64 there are not registers for that: the sums of j follow its p and ds. (Two passes, one for
// dk, one for dv, would have them, but cost 5 products instead of 4.)
//
// Softcap, ALiBi and dropout are in kernels of their own (P::kOptions, warpgroup_options.h).
//
// Contract: kernels/attend.h. Cost per tile, in units of 2 kRows kCols kDim operations: dq 3, dk and dv 4.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/gradient.h"
#include "cuda/gradient_rows.h"
#include "cuda/warpgroup.h"
#include "cuda/warpgroup_non_finite.h"
#include "cuda/warpgroup_options.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

template <typename P, typename M, Gradient kGradient>
class GradientWarpgroupBlock {
 public:
  template <typename T, int kCount>
  using Registers = typename M::template Registers<T, kCount>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Rows = RowsView<const Element>;
  static constexpr bool kOwnsQueries = kGradient == Gradient::dq;
  static_assert(kOwnsQueries || kGradient == Gradient::dk_dv);
  // Sums of a tile beside scores and dp of the next one: where there are registers for both.
  static constexpr bool kOverlaps = kOwnsQueries || P::kDim == 64;

  RINGSPAN_DEVICE GradientWarpgroupBlock(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m), arguments_(arguments), params_(arguments.params), tiles_(shared + padding(m.shared_address(shared))) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    const BlockWork work = find_work(arguments_, block);
    const Group& group = arguments_.groups[work.group];
    const Task& head_task = arguments_.tasks[group.first_task];
    batch_ = static_cast<int>(work.batch);
    first_row_ = static_cast<int>(kOwnsQueries ? group.tiles - 1 - work.tile : work.tile) * P::kRows;  // the most work first
    const std::int64_t rows_left = (kOwnsQueries ? head_task.q_count : head_task.k_count) - first_row_;
    rows_ = rows_left < P::kRows ? static_cast<int>(rows_left) : P::kRows;
    // Of the tasks' query heads, or the kv head itself.
    head_ = static_cast<int>(kOwnsQueries ? work.head : head_task.head_first / params_.shape.group + work.head);
    clear();
    const Task* const end = &head_task + group.task_count;
    for (const Task* task = &head_task; task != end; ++task) {
      if constexpr (kOwnsQueries) {
        take_in_head(*task, head_, true);
      } else {
        bool first = true;
        for (auto t = static_cast<int>(heads_of(*task).begin); t < static_cast<int>(heads_of(*task).end); ++t) {
          take_in_head(*task, t, first);
          first = false;
        }
      }
    }
    store(M::hidden(static_cast<int>(block)));
  }

 private:
  // One (task, query head) as this block sees it, in rows of y from `begin` on. Views are made from the task anew for each
  // tile: registers are scarce.
  struct Walk {
    int head;  // of y in the task
    int begin, rows, tiles, full_begin, full_end;
    static RINGSPAN_DEVICE int first(int tile) { return tile * P::kCols; }
    RINGSPAN_DEVICE int valid(int tile) const { return rows - first(tile) < P::kCols ? rows - first(tile) : P::kCols; }
    RINGSPAN_DEVICE bool is_full(int tile) const { return tile >= full_begin && tile < full_end; }
  };
  // Which pairs of a tile a thread's rows see; a query with lse = -inf sees nothing.
  struct Visible {
    VisibleColumns columns;
    const float* column_lse;
    RINGSPAN_DEVICE bool sees(int half, int column) const {
      return columns.sees(half, column) && (kOwnsQueries || column_lse[column] != kMinusInfinity);
    }
  };

  static RINGSPAN_DEVICE std::uint32_t padding(std::uint32_t address) { return (0U - address) % kSwizzleBytes; }
  RINGSPAN_DEVICE unsigned char* x1_tile() const { return tiles_; }
  RINGSPAN_DEVICE unsigned char* x2_tile() const { return tiles_ + P::kRowTileBytes; }
  RINGSPAN_DEVICE unsigned char* y1_tile(int tile) const {
    return tiles_ + 2 * P::kRowTileBytes + tile % 3 * 2 * P::kColTileBytes;
  }
  RINGSPAN_DEVICE unsigned char* y2_tile(int tile) const { return y1_tile(tile) + P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* pairs() const { return tiles_ + 2 * P::kRowTileBytes + 6 * P::kColTileBytes; }
  RINGSPAN_DEVICE float* column_lse(int tile) const {
    return reinterpret_cast<float*>(pairs() + P::kRows * P::kCols) + tile % 3 * 2 * P::kCols;
  }
  RINGSPAN_DEVICE float* column_delta(int tile) const { return column_lse(tile) + P::kCols; }

  RINGSPAN_DEVICE void clear() {
    m_.each([&](int thread) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) {
        first_[thread][index] = 0.0F;
        if constexpr (!kOwnsQueries) second_[thread][index] = 0.0F;
      }
    });
  }

  // The query heads t of a task that this block takes in.
  RINGSPAN_DEVICE kernels::IndexRange heads_of(const Task& task) const {
    if constexpr (kOwnsQueries) return {head_, head_ + 1};
    const std::int64_t first = std::int64_t{M::hidden(head_)} * params_.shape.group;
    return kernels::indices_between(task.head_first, task.head_step, task.head_count, first, first + params_.shape.group - 1);
  }

  RINGSPAN_DEVICE kernels::IndexRange columns_of_row(const Task& task, int row) const {
    if constexpr (kOwnsQueries) return kernels::keys_of_row(task, first_row_ + row);
    const std::int64_t j = task.k_first + (first_row_ + row) * task.k_step;
    return kernels::indices_between(task.q_first, task.q_step, task.q_count, j - task.hi, j - task.lo);
  }

  // Finds its work once more: what is needed only here would be in registers all the time.
  RINGSPAN_DEVICE void store(std::int64_t block) {
    const Group& group = arguments_.groups[find_work(arguments_, block).group];
    const Task& head_task = arguments_.tasks[group.first_task];
    note_seen_rows(group);
    if constexpr (kOwnsQueries) {
      put(head_task.dq, head_task.writes_dq, head_, params_.shape.head_dim, params_.scale, first_);
    } else {
      const std::int64_t kv = kernels::kv_index(head_task, head_);
      put(head_task.dk, head_task.writes_dk_dv, kv, params_.shape.head_dim, params_.scale, first_);
      put(head_task.dv, head_task.writes_dk_dv, kv, params_.shape.head_dim_v, 1.0F, second_);
    }
  }

  RINGSPAN_DEVICE void note_seen_rows(const Group& group) {
    m_.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        bool seen = false;
        for (std::int64_t index = 0; index < group.task_count && row < rows_ && !seen; ++index) {
          const Task& task = arguments_.tasks[group.first_task + index];
          seen = !columns_of_row(task, row).empty() && !heads_of(task).empty();
          if (kOwnsQueries && seen) {
            seen = *view_of<const float>(task.lse, batch_, head_).row(first_row_ + row) != kMinusInfinity;
          }
        }
        seen_[thread][half] = seen ? 1 : 0;
      }
    });
  }

  template <typename Operand>
  RINGSPAN_DEVICE void put(const Operand& operand, bool writes, std::int64_t head, int width, float factor,
                           Registers<float, P::kDim / 2>& sums) {
    put_rows<P>(m_, operand, writes, batch_, head, first_row_, rows_, width, factor, sums, seen_,
                reinterpret_cast<Element*>(tiles_));
  }

  RINGSPAN_DEVICE Walk walk_of(const Task& task, int t) const {
    const kernels::IndexRange first = columns_of_row(task, M::hidden(0));
    const kernels::IndexRange last = columns_of_row(task, M::hidden(rows_) - 1);
    const std::int64_t count = kOwnsQueries ? task.k_count : task.q_count;
    const std::int64_t end = last.end < count ? last.end : count;
    const std::int64_t rows = end > first.begin ? end - first.begin : 0;
    const std::int64_t kv = kernels::kv_index(task, head_of(task, t) / params_.shape.group);
    Walk walk;
    walk.begin = static_cast<int>(first.begin);
    walk.head = kOwnsQueries ? static_cast<int>(kv) : t;
    walk.rows = static_cast<int>(rows);
    walk.tiles = M::uniform(static_cast<int>((rows + P::kCols - 1) / P::kCols));
    walk.full_begin = M::uniform(static_cast<int>((last.begin - first.begin + P::kCols - 1) / P::kCols));
    walk.full_end = M::uniform(static_cast<int>((first.end - first.begin) / P::kCols));
    return walk;
  }

  RINGSPAN_DEVICE TileRows<Element> y1_rows(const Task& task, const Walk& walk, int tile) const {
    const Rows rows =
        kOwnsQueries ? view_of<const Element>(task.k, batch_, walk.head) : view_of<const Element>(task.q, batch_, walk.head);
    return {rows, std::int64_t{walk.begin} + walk.first(tile), walk.valid(tile), params_.shape.head_dim};
  }
  RINGSPAN_DEVICE TileRows<Element> y2_rows(const Task& task, const Walk& walk, int tile) const {
    const Rows rows = kOwnsQueries ? view_of<const Element>(task.v, batch_, walk.head)
                                   : view_of<const Element>(task.d_out, batch_, walk.head);
    return {rows, std::int64_t{walk.begin} + walk.first(tile), walk.valid(tile), params_.shape.head_dim_v};
  }

  RINGSPAN_DEVICE void take_in_head(const Task& task, int t, bool new_rows) {
    const Walk walk = walk_of(task, t);
    if (walk.tiles == 0 && !new_rows) return;
    m_.sync();  // the tiles of what came before are not read any more
    if (new_rows) copy_rows(task, t);
    if (walk.tiles > 0) copy_columns(task, walk, 0);
    m_.commit_copies();
    if constexpr (kOwnsQueries) load_row_statistics(task);
    if (walk.tiles == 0) return static_cast<void>(arrive(0));
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

  RINGSPAN_DEVICE void copy_rows(const Task& task, int t) {
    const std::int64_t kv = kernels::kv_index(task, head_of(task, t) / params_.shape.group);
    const Rows x1 = kOwnsQueries ? view_of<const Element>(task.q, batch_, t) : view_of<const Element>(task.k, batch_, kv);
    const Rows x2 = kOwnsQueries ? view_of<const Element>(task.d_out, batch_, t) : view_of<const Element>(task.v, batch_, kv);
    copy_tile<P::kRows, P::kDim, Element>(m_, x1_tile(), x1, first_row_, rows_, params_.shape.head_dim);
    copy_tile<P::kRows, P::kDim, Element>(m_, x2_tile(), x2, first_row_, rows_, params_.shape.head_dim_v);
  }

  RINGSPAN_DEVICE void copy_columns(const Task& task, const Walk& walk, int tile) {
    const auto copy = [&](unsigned char* to, const TileRows<Element>& from) {
      copy_tile<P::kCols, P::kDim, Element>(m_, to, from.rows, from.first, from.valid, from.width);
    };
    copy(y1_tile(tile), y1_rows(task, walk, tile));
    copy(y2_tile(tile), y2_rows(task, walk, tile));
    if constexpr (!kOwnsQueries) {
      const auto lse = view_of<const float>(task.lse, batch_, walk.head);
      const auto delta = view_of<const float>(task.delta, batch_, walk.head);
      m_.each([&](int thread) {
        if (thread >= P::kCols) return;
        const bool valid = thread < walk.valid(tile);
        const std::int64_t row = std::int64_t{walk.begin} + walk.first(tile) + thread;
        column_lse(tile)[thread] = valid ? *lse.row(row) : kMinusInfinity;
        column_delta(tile)[thread] = valid ? *delta.row(row) : 0.0F;
      });
    }
  }

  RINGSPAN_DEVICE void load_row_statistics(const Task& task) {
    const auto lse = view_of<const float>(task.lse, batch_, head_);
    const auto delta = view_of<const float>(task.delta, batch_, head_);
    m_.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        row_lse_[thread][half] = row < rows_ ? *lse.row(first_row_ + row) : kMinusInfinity;
        row_delta_[thread][half] = row < rows_ ? *delta.row(first_row_ + row) : 0.0F;
      }
    });
  }

  // Returns whether the tile has queries with lse = -inf; rows beyond the block's own do not count, they are never stored.
  RINGSPAN_DEVICE bool arrive(int tile) {
    m_.template wait_copies<0>();
    m_.fence_async();
    m_.each([&](int thread) {
      bool without = false;
      if constexpr (kOwnsQueries) {
        const Lane lane = lane_of(M::hidden(thread));
        without = (lane.row < rows_ && row_lse_[thread][0] == kMinusInfinity) ||
                  (lane.row + 8 < rows_ && row_lse_[thread][1] == kMinusInfinity);
      } else {
        without = thread < P::kCols && column_lse(tile)[thread] == kMinusInfinity;  // which this thread has written
      }
      flags_[thread][0] = without ? 1 : 0;
    });
    return m_.sync_any(flags_);
  }

  RINGSPAN_DEVICE void begin_tile(const Task& task, const Walk& walk, int tile) {
    if (tile + 1 < walk.tiles) copy_columns(task, walk, tile + 1);
    m_.commit_copies();
  }
  RINGSPAN_DEVICE void begin_scores(int tile) {
    product_rows<P>(m_, p_, m_.shared_address(x1_tile()), m_.shared_address(y1_tile(tile)));
    product_rows<P>(m_, ds_, m_.shared_address(x2_tile()), m_.shared_address(y2_tile(tile)));
    m_.commit_products();
  }
  RINGSPAN_DEVICE void begin_sums(int tile) {
    if constexpr (!kOwnsQueries) product_weights<P>(m_, second_, p_weights_, m_.shared_address(y2_tile(tile)));
    product_weights<P>(m_, first_, ds_weights_, m_.shared_address(y1_tile(tile)));
    m_.commit_products();
  }

  // Whether the pairs of a tile that has arrived have to be looked at one by one: also where one may be dropped, so that no
  // value of a dropped pair reaches dv.
  RINGSPAN_DEVICE bool arrive_checked(const Walk& walk, int tile) {
    const bool any = arrive(tile) || !walk.is_full(tile);
    return P::kOptions && !kOwnsQueries ? any || params_.shape.dropout : any;
  }

  // Tiles return whether their pairs had to be looked at.
  RINGSPAN_DEVICE bool take_in_scores(const Task& task, const Walk& walk, int tile) {
    const bool checked = arrive_checked(walk, tile);
    m_.fence_registers(p_, ds_);
    begin_scores(tile);
    begin_tile(task, walk, tile);
    draw(task, walk, tile);
    m_.template wait_products<0>(p_, ds_);
    weigh(task, walk, tile, checked);
    pack();
    return checked;
  }

  RINGSPAN_DEVICE bool take_in_tile(const Task& task, const Walk& walk, int tile, bool checked_before) {
    const bool checked = arrive_checked(walk, tile);
    if (checked_before) exclude(task, walk, tile - 1);
    fence_all();
    begin_scores(tile);
    begin_sums(tile - 1);
    begin_tile(task, walk, tile);
    draw(task, walk, tile);
    m_.template wait_products<1>(p_, ds_);
    weigh(task, walk, tile, checked);
    wait_for_sums();
    pack();
    return checked;
  }

  RINGSPAN_DEVICE void add_sums(const Task& task, const Walk& walk, int tile, bool checked) {
    if (checked) {
      m_.sync();  // scores and dp of all threads are done
      exclude(task, walk, tile);
    }
    fence_all();
    begin_sums(tile);
    wait_for_sums();
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

  RINGSPAN_DEVICE Visible visible_pairs(const Task& task, const Walk& walk, int tile, int thread) {
    Visible visible{{}, column_lse(tile)};
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      kernels::IndexRange range{};
      if (row < rows_ && !(kOwnsQueries && row_lse_[thread][half] == kMinusInfinity)) range = columns_of_row(task, row);
      clip(range, std::int64_t{walk.begin} + walk.first(tile), P::kCols, half, visible.columns);
    }
    return visible;
  }

  static RINGSPAN_DEVICE std::int64_t head_of(const Task& task, int t) { return task.head_first + t * task.head_step; }
  RINGSPAN_DEVICE std::int64_t query_head(const Task& task, const Walk& walk) const {
    return head_of(task, kOwnsQueries ? head_ : walk.head);
  }

  // The pairs of a tile that are dropped, while its products run.
  RINGSPAN_DEVICE void draw(const Task& task, const Walk& walk, int tile) {
    if constexpr (P::kOptions) {
      const std::int64_t first = std::int64_t{walk.begin} + walk.first(tile);
      draw_dropped<P, kOwnsQueries>(m_, dropped_, arguments_, task, first_row_, first, batch_, query_head(task, walk));
    }
  }

  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile, bool checked) {
    if constexpr (P::kOptions) {
      if (params_.shape.softcap) return weigh<true>(task, walk, tile, checked);
    }
    weigh<false>(task, walk, tile, checked);
  }
  template <bool kCaps>
  RINGSPAN_DEVICE void weigh(const Task& task, const Walk& walk, int tile, bool checked) {
    if (checked) {
      m_.each([&](int thread) { weigh_thread<true, kCaps>(task, walk, tile, thread); });
    } else {
      m_.each([&](int thread) { weigh_thread<false, kCaps>(task, walk, tile, thread); });
    }
  }

  // p_ = c drop p and ds_ = p (c drop dp - delta) ds/d(scale q k), 0 where a pair is masked; p_ is -0 where it is dropped.
  template <bool kMasked, bool kCaps>
  RINGSPAN_DEVICE void weigh_thread(const Task& task, const Walk& walk, int tile, int thread) {
    const Lane lane = lane_of(thread);
    [[maybe_unused]] Visible visible{};
    if constexpr (kMasked) visible = visible_pairs(task, walk, tile, thread);
    [[maybe_unused]] AlibiRows alibi;
    if constexpr (P::kOptions) {
      const std::int64_t first = std::int64_t{walk.begin} + walk.first(tile);
      alibi = alibi_rows<kOwnsQueries>(params_, task, first_row_, first, batch_, query_head(task, walk), lane);
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
          const float lse = kOwnsQueries ? row_lse_[thread][half] : column_lse(tile)[first + e];
          const float delta = kOwnsQueries ? row_delta_[thread][half] : column_delta(tile)[first + e];
          const float t = kCaps ? tanh_by_parts<P, M>(p_[thread][index] * arguments_.softcap_scale) : 0.0F;
          float score = kCaps ? params_.softcap * t : params_.scale * p_[thread][index];
          if constexpr (P::kOptions) score -= alibi(half, j * 8 + e);
          const float exponent = score - lse;
          const float p = exponent > 0.0F ? 1.0F : M::template exp<P::kType>(exponent);  // NaN stays NaN
          float weight = params_.output_scale * p;
          float dp = params_.output_scale * ds_[thread][index];
          if constexpr (P::kOptions) {
            const bool dropped = is_set(dropped_[thread], index);
            weight = dropped ? -0.0F : weight * arguments_.keep;
            dp = dropped ? 0.0F : dp * arguments_.keep;
          }
          float ds = p * (dp - delta);
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

  // NaN and infinities of the tile, before its sums, after a barrier behind its scores and dp.
  RINGSPAN_DEVICE void exclude(const Task& task, const Walk& walk, int tile) {
    const auto visible = [&](int thread) { return visible_pairs(task, walk, tile, thread); };
    exclude_non_finite<P, false>(m_, y1_tile(tile), y1_rows(task, walk, tile), first_, ds_weights_, pairs(), flags_, visible);
    if constexpr (!kOwnsQueries) {
      m_.sync();
      exclude_non_finite<P, P::kOptions>(m_, y2_tile(tile), y2_rows(task, walk, tile), second_, p_weights_, pairs(), flags_,
                                         visible);
    }
  }

  M& m_;
  const AttendArguments& arguments_;
  const kernels::AttendParams& params_;
  unsigned char* tiles_;
  int batch_ = 0, head_ = 0, first_row_ = 0, rows_ = 0;
  Registers<float, P::kDim / 2> first_, second_;
  Registers<float, P::kCols / 2> p_, ds_;
  Registers<std::uint32_t, P::kCols / 4> p_weights_, ds_weights_;
  Registers<float, 2> row_lse_, row_delta_;
  DroppedPairs<P, M> dropped_;  // with options
  Registers<int, 2> seen_;
  Registers<int, 1> flags_;
};

}  // namespace ringspan::cuda
