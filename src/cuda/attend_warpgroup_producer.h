// The warps of attend's program (attend_warpgroup_block.h) that copy queries, keys and values of what there is to do
// (work_ring.h) into shared memory, in the order in which buffers become free: keys j + 1 before values j, and the first ones
// of the next task while the last of this are still in use.
#pragma once

#include "cuda/attend_warpgroup_tiles.h"

namespace ringspan::cuda {

template <typename P, typename M>
class AttendWarpgroupProducer {
 public:
  using Element = typename P::Element;
  using Work = TaskWork<P>;
  using Walk = TileWalk<P>;
  static constexpr int kAhead = 1;  // how many tiles before the end of a block the next one is asked for

  RINGSPAN_DEVICE AttendWarpgroupProducer(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        tiles_(m, shared),
        query_ring_(tiles_.query_ring()),
        key_ring_(tiles_.key_ring()),
        value_ring_(tiles_.value_ring()),
        landing_(tiles_.landing()),
        work_ring_(tiles_.work_ring()) {}

  RINGSPAN_DEVICE void run() {
    m_.prefetch_maps(arguments_.maps.count);
    copy_each_task(m_, work_ring_, tiles_.work(), [&](const Work& work) { copy(work); });
    query_ring_.finish(m_);
    key_ring_.finish(m_);
    value_ring_.finish(m_);
  }

 private:
  RINGSPAN_DEVICE void copy(const Work& work) {
    const int flags = M::uniform(work.flags);
    const Walk walk = work.walk.template uniform<M>();
    const int last = walk.tiles > kAhead ? walk.tiles - kAhead : 0;
    for (int tile = 0; tile <= walk.tiles; ++tile) {
      if (tile == last && (flags & Work::kEnds) != 0) tiles_.asked().ask(m_);
      if (tile < walk.tiles) copy_keys(work, walk, tile);
      if (tile == 0 && (flags & Work::kBeginsRows) != 0) copy_queries(work);  // which are in use for longer than keys
      if (tile > 0) copy_values(work, walk, tile - 1);
    }
  }

  RINGSPAN_DEVICE void copy_queries(const Work& work) {
    m_.note(Phase::copy_rows);
    query_ring_.acquire(m_);
    const auto rows = view_of<const Element>(work.task.q, work.batch, work.head);
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.queries(),
                                              {rows, work.first_row, work.rows, arguments_.params.shape.head_dim});
    query_ring_.publish(m_);
  }
  RINGSPAN_DEVICE void copy_keys(const Work& work, const Walk& walk, int tile) {
    m_.note(Phase::wait_for_buffer);
    key_ring_.acquire(m_);
    m_.note(Phase::copy);
    copy(tiles_.keys(key_ring_.buffer()), walk, tile, work.first, key_ring_.full(),
         [&] { return work.tile_rows(work.task.k, walk, tile, arguments_.params.shape.head_dim); });
    key_ring_.publish(m_);
  }
  RINGSPAN_DEVICE void copy_values(const Work& work, const Walk& walk, int tile) {
    m_.note(Phase::wait_for_buffer);
    value_ring_.acquire(m_);
    m_.note(Phase::copy);
    const int buffer = value_ring_.buffer();
    unsigned char* const to = tiles_.values(buffer);
    const bool looks = (M::uniform(work.flags) & Work::kLooks) != 0 && looks_at_tile<P>(walk, tile, arguments_.params.shape);
    copy(to, walk, tile, work.second, looks ? landing_.barrier() : value_ring_.full(),
         [&] { return work.tile_rows(work.task.v, walk, tile, arguments_.params.shape.head_dim_v); });
    if (looks) {
      m_.note(Phase::look_at_values);
      landing_.wait(m_);
      const bool any = hold_non_finite<P, 1>(m_, to, flags_);
      m_.fence_async();
      m_.each([&](int thread) {
        if (thread == 0) *tiles_.non_finite(buffer) = any ? 1 : 0;
      });
    }
    value_ring_.publish(m_);
  }
  template <typename RowsOf>
  RINGSPAN_DEVICE void copy(unsigned char* to, const Walk& walk, int tile, const TilePlace& place, std::uint32_t barrier,
                            RowsOf&& rows_of) {
    copy_tile_from<P::kCols, P::kDim, Element>(m_, to, walk.first(tile), walk.valid(tile), arguments_.maps, place, walk.head,
                                               barrier, rows_of);
  }

  M& m_;
  const AttendArguments& arguments_;
  AttendTiles<P> tiles_;
  TileRing<1> query_ring_;
  TileRing<AttendTiles<P>::kBuffers> key_ring_, value_ring_;
  Landing landing_;
  WorkRing work_ring_;
  typename M::template Registers<int, 1> flags_;
};

}  // namespace ringspan::cuda
