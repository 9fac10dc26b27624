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
    const bool in_loop = M::uniform(work.first.map) >= 0 && M::uniform(work.second.map) >= 0 && !looks_at_all(flags);
    for (int t = M::uniform(work.heads_begin); t < end; ++t) {
      const Walk walk = walk_over<kGradient>(work.walk.template uniform<M>(), t);
      const bool ends = t + 1 == end && (flags & Work::kEnds) != 0;
      for (int tile = 0; tile < walk.tiles;) {
        if (in_loop && walk.is_full(tile)) {
          const int whole_end = walk.full_end < walk.tiles ? walk.full_end : walk.tiles;
          copy_whole_columns(work, walk, tile, whole_end, ends && whole_end == walk.tiles);
          tile = whole_end;
        } else {
          if (ends && tile + 1 == walk.tiles) work_list_.reserve();
          copy_columns(work, walk, tile, looks_at_all(flags));
          ++tile;
        }
      }
    }
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

  // Whether each tile of a task has pairs that have to be looked at.
  RINGSPAN_DEVICE bool looks_at_all(int flags) const {
    return (flags & Work::kWithout) != 0 || (P::kOptions && !kOwnsQueries && arguments_.params.shape.dropout);
  }

  // A tile with pairs that have to be looked at is waited for and searched.
  RINGSPAN_DEVICE void copy_columns(const Work& work, const Walk& walk, int tile, bool looks_at_all) {
    const kernels::AttendShape& shape = arguments_.params.shape;
    const int buffer = column_ring_.buffer();
    const bool looks = looks_at_all || !walk.is_full(tile);
    m_.note(Phase::wait_for_buffer);
    column_ring_.acquire(m_);
    m_.note(Phase::copy);
    const std::uint32_t barrier = looks ? landing_.barrier() : column_ring_.full();
    copy(tiles_.y1(buffer), walk, tile, work.first, barrier, [&] { return y1_rows<kGradient>(work, walk, tile, shape); });
    copy(tiles_.y2(buffer), walk, tile, work.second, barrier, [&] { return y2_rows<kGradient>(work, walk, tile, shape); });
    bool excludes = false;
    if constexpr (!kOwnsQueries) excludes = copy_statistics(work, walk, tile, buffer, looks);
    if (looks) {
      m_.note(Phase::look_at_values);
      landing_.wait(m_);
      constexpr int kSearched = kOwnsQueries ? 1 : 2;  // y1, and y2 behind it
      excludes = hold_non_finite<P, kSearched>(m_, tiles_.y1(buffer), non_finite_);
      m_.fence_async();
    }
    m_.each([&](int thread) {
      if (thread == 0) *tiles_.flags(buffer) = excludes ? Tiles::kChecked | Tiles::kExcludes : looks ? Tiles::kChecked : 0;
    });
    column_ring_.publish(m_);
  }
  template <typename RowsOf>
  RINGSPAN_DEVICE void copy(unsigned char* to, const Walk& walk, int tile, const TilePlace& place, std::uint32_t barrier,
                            RowsOf&& rows_of) {
    copy_tile_from<P::kCols, P::kDim, Element>(m_, to, walk.first(tile), walk.valid(tile), arguments_.maps, place, walk.head,
                                               barrier, rows_of);
  }

  // Returns, of a tile that is not looked at anyway, whether there is a row with lse = -inf: then all of it is taken to have to
  // be looked at. Its copies are under way.
  RINGSPAN_DEVICE bool copy_statistics(const Work& work, const Walk& walk, int tile, int buffer, bool looks) {
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
    return !looks && m_.sync_any(non_finite_);
  }

  // Tiles [begin, end), which all rows see whole and which have maps: in a loop of few instructions, since nobody multiplies
  // faster than tiles come. One thread asks for the tiles, another warp has lse and delta of the next tile on their way.
  RINGSPAN_DEVICE void copy_whole_columns(const Work& work, const Walk& walk, int begin, int end, bool reserves) {
    const int first_map = M::uniform(work.first.map), first_row = M::uniform(work.first.row);
    const int second_map = M::uniform(work.second.map), second_row = M::uniform(work.second.row);
    const int first_item = M::uniform(work.first.item), second_item = M::uniform(work.second.item);
    RowsView<const float> lse{}, delta{};
    if constexpr (!kOwnsQueries) {
      const int batch = M::uniform(work.batch);
      lse = view_of<const float>(work.task.lse, batch, walk.head);
      delta = view_of<const float>(work.task.delta, batch, walk.head);
      load_statistics(lse, delta, walk.first(begin));
    }
    RINGSPAN_NO_UNROLL
    for (int tile = begin; tile < end; ++tile) {
      const int buffer = column_ring_.buffer();
      const int row = walk.first(tile);
      if (reserves && tile + 1 == end) work_list_.reserve();
      m_.note(Phase::wait_for_buffer);
      column_ring_.acquire(m_);
      m_.note(Phase::copy);
      copy_mapped_tile<P::kCols, P::kDim>(m_, tiles_.y1(buffer), arguments_.maps, first_map,
                                          {0, first_row + row, walk.head, first_item}, column_ring_.full());
      copy_mapped_tile<P::kCols, P::kDim>(m_, tiles_.y2(buffer), arguments_.maps, second_map,
                                          {0, second_row + row, walk.head, second_item}, column_ring_.full());
      if constexpr (kOwnsQueries) {
        m_.each([&](int thread) {
          if (thread == 0) *tiles_.flags(buffer) = 0;
        });
      } else {
        put_statistics(buffer);
        if (tile + 1 < end) load_statistics(lse, delta, row + P::kCols);
      }
      column_ring_.publish(m_);
    }
  }

  // By the second warp, each thread two rows.
  RINGSPAN_DEVICE void load_statistics(const RowsView<const float>& lse, const RowsView<const float>& delta, int first) {
    static_assert(P::kCols == 64);
    m_.each([&](int thread) {
      if (thread / 32 != 1) return;
      RINGSPAN_UNROLL
      for (int part = 0; part < 2; ++part) {
        const int row = first + thread % 32 + part * 32;
        statistics_[thread][part] = *lse.row(row);
        statistics_[thread][2 + part] = *delta.row(row);
      }
    });
  }
  // And what is to be known of the tile: where a row has lse = -inf, all of it is taken to have to be looked at.
  RINGSPAN_DEVICE void put_statistics(int buffer) {
    m_.each([&](int thread) {
      if (thread == 32) *tiles_.flags(buffer) = 0;
    });
    m_.sync_warps();
    m_.each([&](int thread) {
      if (thread / 32 != 1) return;
      RINGSPAN_UNROLL
      for (int part = 0; part < 2; ++part) {
        const float lse = statistics_[thread][part];
        tiles_.lse(buffer)[thread % 32 + part * 32] = lse;
        tiles_.delta(buffer)[thread % 32 + part * 32] = statistics_[thread][2 + part];
        if (lse == kMinusInfinity) *tiles_.flags(buffer) = Tiles::kChecked | Tiles::kExcludes;
      }
    });
  }

  M& m_;
  const AttendArguments& arguments_;
  Tiles tiles_;
  TileRing<1> row_ring_;
  TileRing<Tiles::kBuffers> column_ring_;
  Landing landing_;
  WorkList<P, M, kOwnsQueries ? Owner::query_gradients : Owner::key_gradients> work_list_;
  typename M::template Registers<int, 1> non_finite_;
  typename M::template Registers<float, 4> statistics_;
};

}  // namespace ringspan::cuda
