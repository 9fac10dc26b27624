// The warps of backward's programs (gradient_warpgroup_block.h) that copy: rows of the owned side once per task, or per block
// where its tasks have the same ones, tiles of the other side as buffers become free, with lse and delta where its rows are
// queries. Tiles of an operand with a map are copied by the hardware, all else by all threads.
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
  static constexpr int kAhead = kOwnsQueries ? 6 : 2;  // how many tiles before the end of a block the next one is asked for

  RINGSPAN_DEVICE GradientWarpgroupProducer(M& m, const AttendArguments& arguments, unsigned char* shared)
      : m_(m),
        arguments_(arguments),
        tiles_(m, shared),
        row_ring_(tiles_.row_ring()),
        column_ring_(tiles_.column_ring()),
        landing_(tiles_.landing()),
        work_ring_(tiles_.work_ring()) {}

  RINGSPAN_DEVICE void run() {
    m_.prefetch_maps(arguments_.maps.count);
    copy_each_task(m_, work_ring_, tiles_.work(), [&](const Work& work) { copy(work); });
    row_ring_.finish(m_);
    column_ring_.finish(m_);
  }

 private:
  RINGSPAN_DEVICE void copy(const Work& work) {
    const int flags = M::uniform(work.flags);
    if ((flags & Work::kBeginsRows) != 0) copy_rows(work);
    const int end = M::uniform(work.heads_end);
    const int begin = M::uniform(work.heads_begin);
    const bool asks = (flags & Work::kEnds) != 0;
    if (asks && begin >= end) tiles_.asked().ask(m_);
    for (int t = begin; t < end; ++t) {
      const Walk walk = walk_over<kGradient>(work.walk.template uniform<M>(), t);
      const int mapped = mapped_tiles(work, walk, flags);
      const int last = !asks || t + 1 != end ? -1 : walk.tiles > kAhead ? walk.tiles - kAhead : 0;
      if (last == 0) tiles_.asked().ask(m_);
      if (mapped > 0) copy_mapped_columns(work, walk, mapped, flags, last);
      for (int tile = mapped; tile < walk.tiles; ++tile) {
        if (tile == last && tile != 0) tiles_.asked().ask(m_);
        copy_columns(work, walk, tile, flags);
      }
    }
  }

  // How many tiles of a walk come by the hardware alone: with maps for both operands all, but for a part of a tile at its end
  // that has to be filled up with zeros; none where tiles are looked at.
  RINGSPAN_DEVICE int mapped_tiles(const Work& work, const Walk& walk, int flags) const {
    if (M::uniform(work.first.map) < 0 || M::uniform(work.second.map) < 0 || (flags & Work::kLooks) != 0) return 0;
    const bool fills = M::uniform(work.first.dense && work.second.dense ? 1 : 0) != 0;
    return fills ? walk.tiles : walk.rows / P::kCols;
  }
  // Of a tile with pairs that are masked.
  RINGSPAN_DEVICE bool is_checked(const Walk& walk, int tile, int flags) const {
    return (flags & Work::kWithout) != 0 || !walk.is_full(tile);
  }

  RINGSPAN_DEVICE void copy_rows(const Work& work) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    const kernels::AttendTask& task = work.task;
    const int head = kOwnsQueries ? work.head : static_cast<int>(kernels::kv_index(task, work.head));
    const auto x1 =
        kOwnsQueries ? view_of<const Element>(task.q, work.batch, head) : view_of<const Element>(task.k, work.batch, head);
    const auto x2 =
        kOwnsQueries ? view_of<const Element>(task.d_out, work.batch, head) : view_of<const Element>(task.v, work.batch, head);
    m_.note(Phase::copy_rows);
    row_ring_.acquire(m_);
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.x1(), {x1, work.first_row, work.rows, shape.head_dim});
    copy_swizzled<P::kRows, P::kDim, Element>(m_, tiles_.x2(), {x2, work.first_row, work.rows, shape.head_dim_v});
    row_ring_.publish(m_);
  }

  // A tile that is looked at is waited for and searched.
  RINGSPAN_DEVICE void copy_columns(const Work& work, const Walk& walk, int tile, int flags) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    const int buffer = column_ring_.buffer();
    bool checked = is_checked(walk, tile, flags);
    const bool looks = (flags & Work::kLooks) != 0 && (checked || (P::kOptions && !kOwnsQueries && shape.dropout));
    m_.note(Phase::wait_for_buffer);
    column_ring_.acquire(m_);
    m_.note(Phase::copy);
    const std::uint32_t barrier = looks ? landing_.barrier() : column_ring_.full();
    copy(tiles_.y1(buffer), walk, tile, work.first, barrier, [&] { return y1_rows<kGradient>(work, walk, tile, shape); });
    copy(tiles_.y2(buffer), walk, tile, work.second, barrier, [&] { return y2_rows<kGradient>(work, walk, tile, shape); });
    bool excludes = false;
    if constexpr (!kOwnsQueries) {
      const bool without = copy_statistics(work, walk, tile, buffer);
      excludes = without && (flags & Work::kLooks) != 0;  // all of the tile is taken to hold what may not reach a sum
      checked |= without;
    }
    if (looks) {
      m_.note(Phase::look_at_values);
      landing_.wait(m_);
      constexpr int kSearched = kOwnsQueries ? 1 : 2;  // y1, and y2 behind it
      excludes |= hold_non_finite<P, kSearched>(m_, tiles_.y1(buffer), non_finite_);
      m_.fence_async();
    }
    m_.each([&](int thread) {
      if (thread == 0) *tiles_.flags(buffer) = (checked || looks ? Tiles::kChecked : 0) | (excludes ? Tiles::kExcludes : 0);
    });
    column_ring_.publish(m_);
  }
  template <typename RowsOf>
  RINGSPAN_DEVICE void copy(unsigned char* to, const Walk& walk, int tile, const TilePlace& place, std::uint32_t barrier,
                            RowsOf&& rows_of) {
    copy_tile_from<P::kCols, P::kDim, Element>(m_, to, walk.first(tile), walk.valid(tile), arguments_.maps, place, walk.head,
                                               barrier, rows_of);
  }

  // Returns whether there is a row with lse = -inf. The tile's copies are under way.
  RINGSPAN_DEVICE bool copy_statistics(const Work& work, const Walk& walk, int tile, int buffer) {
    const auto lse = view_of<const float>(work.task.lse, work.batch, walk.head);
    const auto delta = view_of<const float>(work.task.delta, work.batch, walk.head);
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

  // The first `end` tiles, which have maps: in a loop of few instructions, since nobody multiplies faster than tiles come. One
  // thread asks for the tiles, the other warp has lse and delta of the next tile on their way. At tile `last`, which is not the
  // first one, the next block is asked for.
  RINGSPAN_DEVICE void copy_mapped_columns(const Work& work, const Walk& walk, int end, int flags, int last) {
    const int first_map = M::uniform(work.first.map), first_row = M::uniform(work.first.row);
    const int second_map = M::uniform(work.second.map), second_row = M::uniform(work.second.row);
    const int first_item = M::uniform(work.first.item), second_item = M::uniform(work.second.item);
    RowsView<const float> lse{}, delta{};
    if constexpr (!kOwnsQueries) {
      const int batch = M::uniform(work.batch);
      lse = view_of<const float>(work.task.lse, batch, walk.head);
      delta = view_of<const float>(work.task.delta, batch, walk.head);
      load_statistics(lse, delta, walk, 0);
    }
    RINGSPAN_NO_UNROLL
    for (int tile = 0; tile < end; ++tile) {
      if (tile == last && tile != 0) tiles_.asked().ask(m_);
      const int buffer = column_ring_.buffer();
      const int row = walk.first(tile);
      const int tile_flags = is_checked(walk, tile, flags) ? Tiles::kChecked : 0;
      m_.note(Phase::wait_for_buffer);
      column_ring_.acquire(m_);
      m_.note(Phase::copy);
      copy_mapped_tile<P::kCols, P::kDim>(m_, tiles_.y1(buffer), arguments_.maps, first_map,
                                          {0, first_row + row, walk.head, first_item}, column_ring_.full());
      copy_mapped_tile<P::kCols, P::kDim>(m_, tiles_.y2(buffer), arguments_.maps, second_map,
                                          {0, second_row + row, walk.head, second_item}, column_ring_.full());
      if constexpr (kOwnsQueries) {
        m_.each([&](int thread) {
          if (thread == 0) *tiles_.flags(buffer) = tile_flags;
        });
      } else {
        put_statistics(buffer, tile_flags);
        if (tile + 1 < end) load_statistics(lse, delta, walk, tile + 1);
      }
      column_ring_.publish(m_);
    }
  }

  // By the second warp, each thread two rows.
  RINGSPAN_DEVICE void load_statistics(const RowsView<const float>& lse, const RowsView<const float>& delta, const Walk& walk,
                                       int tile) {
    static_assert(P::kCols == 64);
    m_.each([&](int thread) {
      if (thread / 32 != 1) return;
      RINGSPAN_UNROLL
      for (int part = 0; part < 2; ++part) {
        const int index = thread % 32 + part * 32;
        const int row = walk.first(tile) + index;
        const bool valid = index < walk.valid(tile);
        statistics_[thread][part] = valid ? *lse.row(row) : kMinusInfinity;
        statistics_[thread][2 + part] = valid ? *delta.row(row) : 0.0F;
      }
    });
  }
  // And what is to be known of the tile: where a row has lse = -inf, its pairs are masked.
  RINGSPAN_DEVICE void put_statistics(int buffer, int flags) {
    m_.each([&](int thread) {
      if (thread == 32) *tiles_.flags(buffer) = flags;
    });
    m_.sync_warps();
    m_.each([&](int thread) {
      if (thread / 32 != 1) return;
      RINGSPAN_UNROLL
      for (int part = 0; part < 2; ++part) {
        const float lse = statistics_[thread][part];
        tiles_.lse(buffer)[thread % 32 + part * 32] = lse;
        tiles_.delta(buffer)[thread % 32 + part * 32] = statistics_[thread][2 + part];
        if (lse == kMinusInfinity) *tiles_.flags(buffer) = Tiles::kChecked;
      }
    });
  }

  M& m_;
  const AttendArguments& arguments_;
  Tiles tiles_;
  TileRing<1> row_ring_;
  TileRing<Tiles::kBuffers> column_ring_;
  Landing landing_;
  WorkRing work_ring_;
  typename M::template Registers<int, 1> non_finite_;
  typename M::template Registers<float, 4> statistics_;
};

}  // namespace ringspan::cuda
