// What the two roles of backward's programs for warpgroups (gradient_warpgroup_block.h) have in common: where tiles lie in
// shared memory, which rows a block owns, and which tiles of the other side it takes in.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/gradient.h"
#include "cuda/tile_ring.h"
#include "cuda/tile_walk.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

// Shared memory of a block: x1 and x2, three buffers of y1 and y2, a byte per pair of a tile, three buffers of lse and delta of
// the rows of y with a word that says whether an lse among them is -inf (dk and dv only), barriers.
template <typename P>
struct GradientTiles {
  static constexpr int kBuffers = 3;

  template <typename M>
  RINGSPAN_DEVICE GradientTiles(const M& m, unsigned char* shared)
      : begin(shared + (0U - m.shared_address(shared)) % kSwizzleBytes), barriers(m.shared_address(begin) + kBarriers) {}

  RINGSPAN_DEVICE unsigned char* x1() const { return begin; }
  RINGSPAN_DEVICE unsigned char* x2() const { return begin + P::kRowTileBytes; }
  RINGSPAN_DEVICE unsigned char* y1(int buffer) const { return begin + 2 * P::kRowTileBytes + buffer * 2 * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* y2(int buffer) const { return y1(buffer) + P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* pairs() const { return y1(kBuffers); }
  RINGSPAN_DEVICE float* lse(int buffer) const {
    return reinterpret_cast<float*>(pairs() + P::kRows * P::kCols) + buffer * (2 * P::kCols + 1);
  }
  RINGSPAN_DEVICE float* delta(int buffer) const { return lse(buffer) + P::kCols; }
  RINGSPAN_DEVICE float* without(int buffer) const { return lse(buffer) + 2 * P::kCols; }  // 1: an lse is -inf

  RINGSPAN_DEVICE TileRing<1> row_ring() const { return TileRing<1>(barriers); }
  RINGSPAN_DEVICE TileRing<kBuffers> column_ring() const { return TileRing<kBuffers>(barriers + TileRing<1>::kBarrierBytes); }
  // By one thread, before the roles begin.
  template <typename M>
  RINGSPAN_DEVICE void init_barriers(M& m) const {
    row_ring().init(m, P::kProducers, P::kThreads / 32);
    column_ring().init(m, P::kProducers, P::kThreads / 32);
  }

  static constexpr int kStatistics = P::kBackwardStatisticsBytes;
  static_assert(kStatistics >= kBuffers * (2 * P::kCols + 1) * 4 && kStatistics % 8 == 0);
  static constexpr int kBarriers = 2 * P::kRowTileBytes + 2 * kBuffers * P::kColTileBytes + P::kRows * P::kCols + kStatistics;
  unsigned char* begin;  // at a multiple of 1,024
  std::uint32_t barriers;
};

// The rows of a block.
template <typename P, typename M, Gradient kGradient>
class GradientWork {
 public:
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Rows = RowsView<const Element>;
  using Walk = TileWalk<P, M>;
  static constexpr bool kOwnsQueries = kGradient == Gradient::dq;
  static_assert(kOwnsQueries || kGradient == Gradient::dk_dv);

  RINGSPAN_DEVICE GradientWork(const AttendArguments& arguments, std::int64_t block) : arguments_(arguments) {
    const BlockWork work = find_work(arguments, block);
    const Group& group = arguments.groups[work.group];
    const Task& task = arguments.tasks[group.first_task];
    batch = static_cast<int>(work.batch);
    first_row = static_cast<int>(kOwnsQueries ? group.tiles - 1 - work.tile : work.tile) * P::kRows;  // the most work first
    const std::int64_t rows_left = (kOwnsQueries ? task.q_count : task.k_count) - first_row;
    rows = rows_left < P::kRows ? static_cast<int>(rows_left) : P::kRows;
    // Of the tasks' query heads, or the kv head itself.
    head = static_cast<int>(kOwnsQueries ? work.head : task.head_first / arguments.params.shape.group + work.head);
  }
  static RINGSPAN_DEVICE const Group& group_of(const AttendArguments& arguments, std::int64_t block) {
    return arguments.groups[find_work(arguments, block).group];
  }

  // The query heads t of a task that the block takes in.
  RINGSPAN_DEVICE kernels::IndexRange heads_of(const Task& task) const {
    if constexpr (kOwnsQueries) return {head, head + 1};
    const int group = arguments_.params.shape.group;
    const std::int64_t first = std::int64_t{M::hidden(head)} * group;
    return kernels::indices_between(task.head_first, task.head_step, task.head_count, first, first + group - 1);
  }
  static RINGSPAN_DEVICE std::int64_t head_of(const Task& task, int t) { return task.head_first + t * task.head_step; }

  RINGSPAN_DEVICE std::int64_t kv_head(const Task& task, int t) const {
    return kernels::kv_index(task, head_of(task, t) / arguments_.params.shape.group);
  }

  RINGSPAN_DEVICE kernels::IndexRange columns_of_row(const Task& task, int row) const {
    if constexpr (kOwnsQueries) return kernels::keys_of_row(task, first_row + row);
    const std::int64_t j = task.k_first + (first_row + row) * task.k_step;
    return kernels::indices_between(task.q_first, task.q_step, task.q_count, j - task.hi, j - task.lo);
  }

  // The other side of (task, query head t) as the block sees it.
  RINGSPAN_DEVICE Walk walk_of(const Task& task, int t) const {
    return Walk::of(columns_of_row(task, M::hidden(0)), columns_of_row(task, M::hidden(rows) - 1),
                    kOwnsQueries ? task.k_count : task.q_count, kOwnsQueries ? kv_head(task, t) : t);
  }

  // x1 and x2, all rows of them; the rows of a tile of y1 and y2.
  RINGSPAN_DEVICE Rows x1_rows(const Task& task, int t) const {
    return kOwnsQueries ? view_of<const Element>(task.q, batch, t) : view_of<const Element>(task.k, batch, kv_head(task, t));
  }
  RINGSPAN_DEVICE Rows x2_rows(const Task& task, int t) const {
    return kOwnsQueries ? view_of<const Element>(task.d_out, batch, t)
                        : view_of<const Element>(task.v, batch, kv_head(task, t));
  }
  RINGSPAN_DEVICE TileRows<Element> y1_rows(const Task& task, const Walk& walk, int tile) const {
    const Rows all =
        kOwnsQueries ? view_of<const Element>(task.k, batch, walk.head) : view_of<const Element>(task.q, batch, walk.head);
    return {all, walk.first(tile), walk.valid(tile), arguments_.params.shape.head_dim};
  }
  RINGSPAN_DEVICE TileRows<Element> y2_rows(const Task& task, const Walk& walk, int tile) const {
    const Rows all =
        kOwnsQueries ? view_of<const Element>(task.v, batch, walk.head) : view_of<const Element>(task.d_out, batch, walk.head);
    return {all, walk.first(tile), walk.valid(tile), arguments_.params.shape.head_dim_v};
  }

  int batch, head, first_row, rows;

 private:
  const AttendArguments& arguments_;
};

}  // namespace ringspan::cuda
