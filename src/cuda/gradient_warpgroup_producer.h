// The warpgroup of backward's programs (gradient_warpgroup_block.h) that finds out what there is to do (work_ring.h) and
// copies: rows of the owned side once per task, tiles of the other side as buffers become free, with lse and delta where its
// rows are queries. Tiles of an operand with a map are copied by the hardware, all else by all threads.
#pragma once

#include "cuda/gradient_warpgroup_tiles.h"

namespace ringspan::cuda {

template <typename P, typename M, Gradient kGradient>
class GradientWarpgroupProducer {
 public:
  static constexpr bool kOwnsQueries = kGradient == Gradient::dq;
  using Element = typename P::Element;
  using Tiles = GradientTiles<P>;
  using Work = TaskWork<P>;
  using Walk = TileWalk<P>;

  RINGSPAN_DEVICE GradientWarpgroupProducer(M& m, const AttendArguments& arguments, unsigned char* shared, int first,
                                            int residents)
      : m_(m),
        arguments_(arguments),
        tiles_(m, shared),
        row_ring_(tiles_.row_ring()),
        column_ring_(tiles_.column_ring()),
        landing_(tiles_.landing()),
        work_list_(m, arguments, tiles_.work_ring(), tiles_.work(), first, residents) {}

  RINGSPAN_DEVICE void run() {
    m_.prefetch_maps(arguments_.maps.count);
    while (const Work* work = work_list_.next()) copy(*work);
    work_list_.finish();
    row_ring_.finish(m_);
    column_ring_.finish(m_);
  }

 private:
  RINGSPAN_DEVICE void copy(const Work& work) {
    const int flags = M::uniform(work.flags);
    if ((flags & Work::kBeginsRows) != 0) copy_rows(work);
    const int end = M::uniform(work.heads_end);
    for (int t = M::uniform(work.heads_begin); t < end; ++t) {
      const Walk walk = walk_over<kGradient>(work.walk.template uniform<M>(), t);
      for (int tile = 0; tile < walk.tiles; ++tile) {
        if (t + 1 == end && tile + 1 == walk.tiles && (flags & Work::kEnds) != 0) work_list_.reserve();
        copy_columns(work, walk, tile, (flags & Work::kWithout) != 0);
      }
    }
  }

  RINGSPAN_DEVICE void copy_rows(const Work& work) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    const kernels::AttendTask& task = *work.task;
    const int head = kOwnsQueries ? work.head : static_cast<int>(kernels::kv_index(task, work.head));
    const auto x1 =
        kOwnsQueries ? view_of<const Element>(task.q, work.batch, head) : view_of<const Element>(task.k, work.batch, head);
    const auto x2 =
        kOwnsQueries ? view_of<const Element>(task.d_out, work.batch, head) : view_of<const Element>(task.v, work.batch, head);
    row_ring_.acquire(m_);
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.x1(), {x1, work.first_row, work.rows, shape.head_dim});
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.x2(), {x2, work.first_row, work.rows, shape.head_dim_v});
    row_ring_.publish(m_);
  }

  // A tile with pairs that have to be looked at is waited for and searched.
  RINGSPAN_DEVICE void copy_columns(const Work& work, const Walk& walk, int tile, bool row_without) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    const int buffer = column_ring_.buffer();
    column_ring_.acquire(m_);
    bool checked = row_without || !walk.is_full(tile) || (P::kOptions && !kOwnsQueries && shape.dropout);
    if constexpr (!kOwnsQueries) checked = copy_statistics(work, walk, tile, buffer) || checked;
    const std::uint32_t barrier = checked ? landing_.barrier() : column_ring_.full();
    copy(tiles_.y1(buffer), work, walk, tile, work.first, barrier, [&] { return y1_rows<kGradient>(work, walk, tile, shape); });
    copy(tiles_.y2(buffer), work, walk, tile, work.second, barrier,
         [&] { return y2_rows<kGradient>(work, walk, tile, shape); });
    int flags = 0;
    if (checked) {
      landing_.wait(m_);
      flags = Tiles::kChecked;
      if (holds_non_finite<P>(m_, tiles_.y1(buffer), non_finite_)) flags |= Tiles::kFirst;
      if (!kOwnsQueries && holds_non_finite<P>(m_, tiles_.y2(buffer), non_finite_)) flags |= Tiles::kSecond;
      m_.fence_async();
    }
    m_.each([&](int thread) {
      if (thread == 0) *tiles_.flags(buffer) = flags;
    });
    column_ring_.publish(m_);
  }
  template <typename RowsOf>
  RINGSPAN_DEVICE void copy(unsigned char* to, const Work& work, const Walk& walk, int tile, const TilePlace& place,
                            std::uint32_t barrier, RowsOf&& rows_of) {
    copy_tile_from<P::kCols, P::kDim, Element>(m_, to, walk.first(tile), walk.valid(tile), arguments_.maps, place, walk.head,
                                               work.batch, barrier, rows_of);
  }

  // Returns whether there is a row with lse = -inf; rows beyond the last one have that too, and the tile is not full anyway.
  RINGSPAN_DEVICE bool copy_statistics(const Work& work, const Walk& walk, int tile, int buffer) {
    const auto lse = view_of<const float>(work.task->lse, work.batch, walk.head);
    const auto delta = view_of<const float>(work.task->delta, work.batch, walk.head);
    m_.each([&](int thread) {
      non_finite_[thread][0] = 0;
      if (thread >= P::kCols) return;
      const bool valid = thread < walk.valid(tile);
      const int row = walk.first(tile) + thread;
      const float of_row = valid ? *lse.row(row) : kMinusInfinity;
      tiles_.lse(buffer)[thread] = of_row;
      tiles_.delta(buffer)[thread] = valid ? *delta.row(row) : 0.0F;
      non_finite_[thread][0] = of_row == kMinusInfinity ? 1 : 0;
    });
    return m_.sync_any(non_finite_);
  }

  M& m_;
  const AttendArguments& arguments_;
  Tiles tiles_;
  TileRing<1> row_ring_;
  TileRing<Tiles::kBuffers> column_ring_;
  Landing landing_;
  WorkList<P, M, kOwnsQueries ? Owner::query_gradients : Owner::key_gradients> work_list_;
  typename M::template Registers<int, 1> non_finite_;
};

}  // namespace ringspan::cuda
