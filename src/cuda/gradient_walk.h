// The rows a block of attend_backward owns, and which tiles of the other side it takes in.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/copy_tile.h"
#include "cuda/gradient.h"
#include "cuda/tile_walk.h"

namespace ringspan::cuda {

// The rows of a block.
template <typename P, typename M, Gradient kGradient>
class GradientWork {
 public:
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Rows = RowsView<const Element>;
  using Walk = TileWalk<P>;
  static constexpr bool kOwnsQueries = kGradient == Gradient::dq;

  RINGSPAN_DEVICE GradientWork(const AttendArguments& arguments, std::int64_t block) : arguments_(arguments) {
    const BlockWork work = find_work(arguments, block);
    const Group& group = arguments.groups[work.group];
    const Task& task = arguments.tasks[group.first_task];
    batch = static_cast<int>(work.batch);
    first_row =
        static_cast<int>(kOwnsQueries ? group.tiles - 1 - work.tile : work.tile) * P::kBlockRows;  // the most work first
    const std::int64_t rows_left = (kOwnsQueries ? task.q_count : task.k_count) - first_row;
    rows = rows_left < P::kBlockRows ? static_cast<int>(rows_left) : P::kBlockRows;
    head = static_cast<int>(work.head);
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
    return kernels::queries_of_key(task, first_row + row);
  }

  // The other side of (task, query head t) as the block sees it.
  RINGSPAN_DEVICE Walk walk_of(const Task& task, int t) const {
    return Walk::of(columns_of_row(task, M::hidden(0)), columns_of_row(task, M::hidden(rows) - 1),
                    kOwnsQueries ? task.k_count : task.q_count, kOwnsQueries ? kv_head(task, t) : t)
        .template uniform<M>();
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

  // Which of the block's rows have a pair in any task of the group; a query with lse = -inf has none.
  RINGSPAN_DEVICE void note_seen(M& m, typename M::template Registers<int, 2>& seen, const Group& group) const {
    m.each([&](int thread) {
      const Lane lane = lane_of(M::hidden(thread));
      RINGSPAN_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = lane.row + half * 8;
        bool any = false;
        for (std::int64_t index = 0; index < group.task_count && row < rows && !any; ++index) {
          const Task& task = arguments_.tasks[group.first_task + index];
          any = !columns_of_row(task, row).empty() && !heads_of(task).empty();
          if (kOwnsQueries && any) {
            any = *view_of<const float>(task.lse, batch, head).row(first_row + row) != kMinusInfinity;
          }
        }
        seen[thread][half] = any ? 1 : 0;
      }
    });
  }

  int batch, head, first_row, rows;

 private:
  const AttendArguments& arguments_;
};

}  // namespace ringspan::cuda
