// The warpgroup of attend's program (attend_warpgroup_block.h) that copies queries, keys and values into shared memory, in the
// order in which buffers become free: keys j + 1 before values j, and the first ones of the next task while the last of this
// are still in use.
#pragma once

#include "cuda/attend_warpgroup_tiles.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

template <typename P, typename M>
class AttendWarpgroupProducer {
 public:
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Walk = TileWalk<P, M>;

  RINGSPAN_DEVICE AttendWarpgroupProducer(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        tiles_(m, shared),
        query_ring_(tiles_.query_ring()),
        key_ring_(tiles_.key_ring()),
        value_ring_(tiles_.value_ring()),
        blocks_(tiles_.blocks()) {}

  RINGSPAN_DEVICE void run(int first, int residents) {
    m_.prefetch_maps(arguments_.maps.count);
    for (int block = first; block < arguments_.blocks;) {
      const int next = blocks_.take(m_, arguments_, residents);
      copy_block(block);
      block = next;
    }
    query_ring_.finish(m_);
    key_ring_.finish(m_);
    value_ring_.finish(m_);
  }

 private:
  RINGSPAN_DEVICE void copy_block(int block) {
    const AttendWork work = AttendWork::template of<P>(arguments_, block);
    for (const Task* task = work.first_task; task != work.end_task; ++task) {
      if (work.begins_queries(task)) copy_queries(work, *task);
      const Walk walk = walk_of<P, M>(work, *task, arguments_.params.shape.group);
      const TilePlace keys = find(task->k, arguments_.params.shape.head_dim, *task, walk, work);
      const TilePlace values = find(task->v, arguments_.params.shape.head_dim_v, *task, walk, work);
      for (int tile = 0; tile < walk.tiles; ++tile) {
        copy_keys(work, *task, walk, keys, tile);
        if (tile > 0) copy_values(work, *task, walk, values, tile - 1);
      }
      if (walk.tiles > 0) copy_values(work, *task, walk, values, walk.tiles - 1);
    }
  }

  RINGSPAN_DEVICE TilePlace find(const kernels::KeyRows& operand, int width, const Task& task, const Walk& walk,
                                 const AttendWork& work) const {
    return find_place(arguments_.maps, operand, width, task.k_count, walk.head + 1, work.batch + 1);
  }

  RINGSPAN_DEVICE void copy_queries(const AttendWork& work, const Task& task) {
    query_ring_.acquire(m_);
    const auto rows = view_of<const Element>(task.q, work.batch, work.head);
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.queries(),
                                              {rows, work.first_row, work.rows, arguments_.params.shape.head_dim});
    query_ring_.publish(m_);
  }
  RINGSPAN_DEVICE void copy_keys(const AttendWork& work, const Task& task, const Walk& walk, const TilePlace& place, int tile) {
    key_ring_.acquire(m_);
    copy(work, task.k, walk, place, tile, key_ring_.full(), tiles_.keys(key_ring_.buffer()), arguments_.params.shape.head_dim);
    key_ring_.publish(m_);
  }
  RINGSPAN_DEVICE void copy_values(const AttendWork& work, const Task& task, const Walk& walk, const TilePlace& place,
                                   int tile) {
    value_ring_.acquire(m_);
    copy(work, task.v, walk, place, tile, value_ring_.full(), tiles_.values(value_ring_.buffer()),
         arguments_.params.shape.head_dim_v);
    value_ring_.publish(m_);
  }
  RINGSPAN_DEVICE void copy(const AttendWork& work, const kernels::KeyRows& operand, const Walk& walk, const TilePlace& place,
                            int tile, std::uint32_t barrier, unsigned char* to, int width) {
    const auto rows = view_of<const Element>(operand, work.batch, walk.head);
    copy_tile_from<P::kCols, P::kDim, Element>(m_, to, {rows, walk.first(tile), walk.valid(tile), width}, arguments_.maps,
                                               place, walk.head, work.batch, barrier);
  }

  M& m_;
  const AttendArguments& arguments_;
  AttendTiles<P> tiles_;
  TileRing<1> query_ring_;
  TileRing<2> key_ring_, value_ring_;
  BlockQueue blocks_;
};

}  // namespace ringspan::cuda
