// What the two roles of attend's program for warpgroups (attend_warpgroup_block.h) have in common: where tiles lie in shared
// memory, which rows a block owns, and which tiles of keys it takes in.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/tile_ring.h"
#include "cuda/tile_walk.h"

namespace ringspan::cuda {

// Shared memory of a block: the queries, two buffers of keys, two of values, a byte per pair of a tile, barriers.
template <typename P>
struct AttendTiles {
  template <typename M>
  RINGSPAN_DEVICE AttendTiles(const M& m, unsigned char* shared)
      : begin(shared + (0U - m.shared_address(shared)) % kSwizzleBytes), barriers(m.shared_address(begin) + kBarriers) {}

  RINGSPAN_DEVICE unsigned char* queries() const { return begin; }
  RINGSPAN_DEVICE unsigned char* keys(int buffer) const { return begin + P::kRowTileBytes + buffer * P::kColTileBytes; }
  RINGSPAN_DEVICE unsigned char* values(int buffer) const { return keys(2 + buffer); }
  RINGSPAN_DEVICE unsigned char* pairs() const { return keys(4); }
  RINGSPAN_DEVICE TileRing<1> query_ring() const { return TileRing<1>(barriers); }
  RINGSPAN_DEVICE TileRing<2> key_ring() const { return TileRing<2>(barriers + TileRing<1>::kBarrierBytes); }
  RINGSPAN_DEVICE TileRing<2> value_ring() const {
    return TileRing<2>(barriers + TileRing<1>::kBarrierBytes + TileRing<2>::kBarrierBytes);
  }

  // By one thread, before the roles begin.
  template <typename M>
  RINGSPAN_DEVICE void init_barriers(M& m) const {
    query_ring().init(m, P::kProducers, P::kThreads / 32);
    key_ring().init(m, P::kProducers, P::kThreads / 32);
    value_ring().init(m, P::kProducers, P::kThreads / 32);
  }

  static constexpr int kBarriers = P::kRowTileBytes + 4 * P::kColTileBytes + P::kRows * P::kCols;
  unsigned char* begin;  // at a multiple of 1,024
  std::uint32_t barriers;
};

// The tasks of a block, and which rows of theirs it owns.
struct AttendWork {
  template <typename P>
  static RINGSPAN_DEVICE AttendWork of(const AttendArguments& arguments, std::int64_t block) {
    const BlockWork work = find_work(arguments, block);
    const Group& group = arguments.groups[work.group];
    const kernels::AttendTask* const tasks = arguments.tasks + group.first_task;
    // Under a causal mask the last rows have most to do.
    const int first_row = static_cast<int>(group.tiles - 1 - work.tile) * P::kRows;
    const std::int64_t rows = tasks->q_count - first_row;
    return {tasks,
            tasks + group.task_count,
            static_cast<int>(work.batch),
            static_cast<int>(work.head),
            first_row,
            rows < P::kRows ? static_cast<int>(rows) : P::kRows};
  }
  // Whether a task has other queries than the one before it, or after it.
  RINGSPAN_DEVICE bool begins_queries(const kernels::AttendTask* task) const {
    return task == first_task || task->q.data != task[-1].q.data;
  }
  RINGSPAN_DEVICE bool ends_queries(const kernels::AttendTask* task) const {
    return task + 1 == end_task || task->q.data != task[1].q.data;
  }

  const kernels::AttendTask *first_task, *end_task;
  int batch, head, first_row, rows;
};

// A task's keys and values as a block sees them.
template <typename P, typename M>
RINGSPAN_DEVICE TileWalk<P, M> walk_of(const AttendWork& work, const kernels::AttendTask& task, int group) {
  return TileWalk<P, M>::of(kernels::keys_of_row(task, M::hidden(work.first_row)),
                            kernels::keys_of_row(task, M::hidden(work.first_row + work.rows - 1)), task.k_count,
                            kernels::kv_index(task, (task.head_first + work.head * task.head_step) / group));
}

}  // namespace ringspan::cuda
