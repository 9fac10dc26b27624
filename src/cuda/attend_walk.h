// The rows a block of attend owns, and which tiles of keys it takes in.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/tile_walk.h"

namespace ringspan::cuda {

// The tasks of a block, and which rows of theirs it owns.
struct AttendWork {
  template <typename P>
  static RINGSPAN_DEVICE AttendWork of(const AttendArguments& arguments, std::int64_t block) {
    const BlockWork work = find_work(arguments, block);
    const Group& group = arguments.groups[work.group];
    const kernels::AttendTask* const tasks = arguments.tasks + group.first_task;
    // Under a causal mask the last rows have most to do.
    const int first_row = static_cast<int>(group.tiles - 1 - work.tile) * P::kBlockRows;
    const std::int64_t rows = tasks->q_count - first_row;
    return {tasks,
            tasks + group.task_count,
            static_cast<int>(work.batch),
            static_cast<int>(work.head),
            first_row,
            rows < P::kBlockRows ? static_cast<int>(rows) : P::kBlockRows};
  }
  // Whether a task has other queries than the one before it.
  RINGSPAN_DEVICE bool begins_queries(const kernels::AttendTask* task) const {
    return task == first_task || task->q.data != task[-1].q.data;
  }

  const kernels::AttendTask *first_task, *end_task;
  int batch, head, first_row, rows;
};

// A task's keys and values as a block sees them.
template <typename P, typename M>
RINGSPAN_DEVICE TileWalk<P> walk_of(const AttendWork& work, const kernels::AttendTask& task, int group) {
  return TileWalk<P>::of(kernels::keys_of_row(task, M::hidden(work.first_row)),
                         kernels::keys_of_row(task, M::hidden(work.first_row + work.rows - 1)), task.k_count,
                         kernels::kv_index(task, (task.head_first + work.head * task.head_step) / group))
      .template uniform<M>();
}

// The columns of the tile from column0 on that a thread's rows see.
template <typename P, typename M>
RINGSPAN_DEVICE VisibleColumns visible_columns(const kernels::AttendTask& task, const RowsOfBlock& rows, std::int64_t column0,
                                               int thread) {
  VisibleColumns visible{};
  const Lane lane = lane_of(M::hidden(thread));
  RINGSPAN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + half * 8;
    kernels::IndexRange range{};
    if (row < rows.count) range = kernels::keys_of_row(task, rows.first + row);
    clip(range, column0, P::kCols, half, visible);
  }
  return visible;
}

}  // namespace ringspan::cuda
