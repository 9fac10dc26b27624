// What the two roles of attend's program for warpgroups (attend_warpgroup_block.h) have in common: where tiles lie in shared
// memory, which rows a block owns, and which tiles of keys it takes in.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/tile_ring.h"

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

// One task as a block sees it, in keys from `begin` on: tile t is keys t kCols and on. Views are made from the task anew where
// they are needed: registers are scarce.
template <typename P, typename M>
struct AttendWalk {
  // Ends of the rows' ranges never decrease, so the keys are those from the first row's first to the last one's last, and all
  // rows see those from the last one's first to the first one's last.
  static RINGSPAN_DEVICE AttendWalk of(const AttendWork& work, const kernels::AttendTask& task, int group) {
    const kernels::IndexRange first = kernels::keys_of_row(task, M::hidden(work.first_row));
    const kernels::IndexRange last = kernels::keys_of_row(task, M::hidden(work.first_row + work.rows - 1));
    const std::int64_t end = last.end < task.k_count ? last.end : task.k_count;
    const std::int64_t keys = end > first.begin ? end - first.begin : 0;
    AttendWalk walk;
    walk.begin = static_cast<int>(first.begin);
    walk.kv = static_cast<int>(kernels::kv_index(task, (task.head_first + work.head * task.head_step) / group));
    walk.keys = static_cast<int>(keys);
    walk.tiles = M::uniform(static_cast<int>((keys + P::kCols - 1) / P::kCols));
    walk.full_begin = M::uniform(static_cast<int>((last.begin - first.begin + P::kCols - 1) / P::kCols));
    walk.full_end = M::uniform(static_cast<int>((first.end - first.begin) / P::kCols));
    return walk;
  }

  RINGSPAN_DEVICE int first(int tile) const { return begin + tile * P::kCols; }
  RINGSPAN_DEVICE int valid(int tile) const {
    const int left = keys - tile * P::kCols;
    return left < P::kCols ? left : P::kCols;
  }
  RINGSPAN_DEVICE bool is_full(int tile) const { return tile >= full_begin && tile < full_end; }

  int begin;
  int kv;                                 // head of k and v
  int keys, tiles, full_begin, full_end;  // tiles [full_begin, full_end) are seen whole by all rows
};

}  // namespace ringspan::cuda
