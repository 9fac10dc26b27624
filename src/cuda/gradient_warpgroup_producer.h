// The warpgroup of backward's programs (gradient_warpgroup_block.h) that copies: rows of the owned side once per task, tiles of
// the other side as buffers become free, with lse and delta where its rows are queries. Whole tiles of an operand with a map
// are copied by the hardware, all else by all threads.
#pragma once

#include "cuda/gradient_warpgroup_tiles.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {

template <typename P, typename M, Gradient kGradient>
class GradientWarpgroupProducer {
 public:
  using Work = GradientWork<P, M, kGradient>;
  using Element = typename P::Element;
  using Task = kernels::AttendTask;
  using Walk = typename Work::Walk;

  RINGSPAN_DEVICE GradientWarpgroupProducer(M& m, const AttendArguments& arguments, unsigned char* shared, std::int64_t block)
      : m_(m),
        arguments_(arguments),
        tiles_(m, shared),
        row_ring_(tiles_.row_ring()),
        column_ring_(tiles_.column_ring()),
        work_(arguments, block) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    m_.prefetch_maps(arguments_.maps.count);
    const Group& group = Work::group_of(arguments_, block);
    const Task* const begin = arguments_.tasks + group.first_task;
    for (const Task* task = begin; task != begin + group.task_count; ++task) {
      const kernels::IndexRange heads = work_.heads_of(*task);
      if (heads.empty()) continue;
      copy_rows(*task, static_cast<int>(heads.begin));
      find_places(*task, static_cast<int>(heads.end));
      for (auto t = static_cast<int>(heads.begin); t < static_cast<int>(heads.end); ++t) {
        const Walk walk = work_.walk_of(*task, t);
        for (int tile = 0; tile < walk.tiles; ++tile) copy_columns(*task, walk, tile);
      }
    }
    row_ring_.finish(m_);
    column_ring_.finish(m_);
  }

 private:
  RINGSPAN_DEVICE void copy_rows(const Task& task, int t) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    row_ring_.acquire(m_);
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.x1(),
                                              {work_.x1_rows(task, t), work_.first_row, work_.rows, shape.head_dim});
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.x2(),
                                              {work_.x2_rows(task, t), work_.first_row, work_.rows, shape.head_dim_v});
    row_ring_.publish(m_);
  }

  // For the query heads of the task up to `heads`.
  RINGSPAN_DEVICE void find_places(const Task& task, int heads) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    const int batches = work_.batch + 1;
    if constexpr (Work::kOwnsQueries) {
      const auto kv_heads = static_cast<int>(work_.kv_head(task, heads - 1)) + 1;
      y1_ = find_place(arguments_.maps, task.k, shape.head_dim, task.k_count, kv_heads, batches);
      y2_ = find_place(arguments_.maps, task.v, shape.head_dim_v, task.k_count, kv_heads, batches);
    } else {
      y1_ = find_place(arguments_.maps, task.q, shape.head_dim, task.q_count, heads, batches);
      y2_ = find_place(arguments_.maps, task.d_out, shape.head_dim_v, task.q_count, heads, batches);
    }
  }

  RINGSPAN_DEVICE void copy_columns(const Task& task, const Walk& walk, int tile) {
    const int buffer = column_ring_.buffer();
    column_ring_.acquire(m_);
    copy(tiles_.y1(buffer), y1_, walk, work_.y1_rows(task, walk, tile));
    copy(tiles_.y2(buffer), y2_, walk, work_.y2_rows(task, walk, tile));
    if constexpr (!Work::kOwnsQueries) copy_statistics(task, walk, tile, buffer);
    column_ring_.publish(m_);
  }
  RINGSPAN_DEVICE void copy(unsigned char* to, const TilePlace& place, const Walk& walk, const TileRows<Element>& from) {
    copy_tile_from<P::kCols, P::kDim, Element>(m_, to, from, arguments_.maps, place, walk.head, work_.batch,
                                               column_ring_.full());
  }

  // Rows beyond the last one have lse = -inf too, and the tile is not full anyway.
  RINGSPAN_DEVICE void copy_statistics(const Task& task, const Walk& walk, int tile, int buffer) {
    const auto lse = view_of<const float>(task.lse, work_.batch, walk.head);
    const auto delta = view_of<const float>(task.delta, work_.batch, walk.head);
    m_.each([&](int thread) {
      without_[thread][0] = 0;
      if (thread >= P::kCols) return;
      const bool valid = thread < walk.valid(tile);
      const int row = walk.first(tile) + thread;
      const float of_row = valid ? *lse.row(row) : kMinusInfinity;
      tiles_.lse(buffer)[thread] = of_row;
      tiles_.delta(buffer)[thread] = valid ? *delta.row(row) : 0.0F;
      without_[thread][0] = of_row == kMinusInfinity ? 1 : 0;
    });
    const bool any = m_.sync_any(without_);
    m_.each([&](int thread) {
      if (thread == 0) *tiles_.without(buffer) = any ? 1.0F : 0.0F;
    });
  }

  M& m_;
  const AttendArguments& arguments_;
  GradientTiles<P> tiles_;
  TileRing<1> row_ring_;
  TileRing<GradientTiles<P>::kBuffers> column_ring_;
  const Work work_;
  TilePlace y1_, y2_;
  typename M::template Registers<int, 1> without_;
};

}  // namespace ringspan::cuda
