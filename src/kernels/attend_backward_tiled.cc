#include <algorithm>
#include <limits>

#include "base/check.h"
#include "kernels/attend_tiled.h"
#include "kernels/carver.h"
#include "kernels/dropout.h"
#include "kernels/progress.h"
#include "kernels/score.h"
#include "kernels/task_view.h"
#include "kernels/turnstile.h"

namespace ringspan::kernels {
namespace {

// Lines fetched beside a block of products of pairs: of the next queries, and beside the last queries of a tile of keys.
constexpr int kQueryStep = 6, kKeyStep = 12;
constexpr int kHeadShift = 40;  // rows of a head, in the order in which an item walks over rows
// Units per thread from which on units alone keep the threads busy.
constexpr std::int64_t kEnoughUnits = 4;

// Scratch of one thread.
struct BackwardScratch {
  TileDims dims;
  std::int64_t factor_stride;
  std::byte *key_side, *query_side, *work;
  float *factors, *lse, *delta;
  float** dq;
  std::int64_t* origin;
  std::int32_t *index, *key_begin, *key_end, *row_begin, *row_end;

  BackwardScratch(const TileOps& ops, const AttendShape& shape, std::byte* base, std::int64_t* bytes) {
    Carver carver(base);
    dims = tile_dims(shape, ops.backward_sizes);
    const std::int64_t rows = dims.tile.queries, keys = dims.tile.keys;
    const BackwardBytes bytes_of = ops.backward_bytes(dims);
    key_side = carver.take<std::byte>(bytes_of.key_side);
    query_side = carver.take<std::byte>(bytes_of.query_side);
    work = carver.take<std::byte>(bytes_of.work);
    factor_stride = keys + kScorePad;
    factors = shape.dropout ? carver.take<float>(rows * factor_stride) : nullptr;
    lse = carver.take<float>(rows);
    delta = carver.take<float>(rows);
    dq = carver.take<float*>(rows);
    origin = carver.take<std::int64_t>(rows);
    for (std::int32_t** list : {&index, &key_begin, &key_end}) *list = carver.take<std::int32_t>(rows);
    for (std::int32_t** list : {&row_begin, &row_end}) *list = carver.take<std::int32_t>(keys);
    if (bytes != nullptr) *bytes = carver.bytes();
  }
};

// Keys that some query of the task sees.
IndexRange keys_of_task(const AttendTask& task) {
  const std::int64_t last = task.q_first + (task.q_count - 1) * task.q_step;
  return indices_between(task.k_first, task.k_step, task.k_count, task.q_first + task.lo, last + task.hi);
}

// A tile of keys that a thread computes after another, if there is one.
struct Later {
  const AttendTask* task = nullptr;
  Unit unit;
  IndexRange keys;
};

// The first tile of a task.
Later first_of(const AttendTask& task, Unit unit, std::int64_t key_tile) {
  const IndexRange keys = keys_of_task(task);
  return {&task, unit, {keys.begin, std::min(keys.begin + key_tile, keys.end)}};
}

// Everything one thread does for one unit.
class UnitBackward {
 public:
  UnitBackward(const TileOps& ops, const AttendParams& params, const BackwardScratch& scratch, Progress& progress, Unit unit)
      : ops_(ops), params_(params), s_(scratch), progress_(progress), unit_(unit) {
    tile_.dims = s_.dims;
    tile_.scale = params.scale, tile_.output_scale = params.output_scale;
    tile_.key_side = s_.key_side, tile_.query_side = s_.query_side, tile_.work = s_.work;
    tile_.lse = s_.lse, tile_.delta = s_.delta;
    tile_.key_begin = s_.key_begin, tile_.key_end = s_.key_end;
    tile_.row_begin = s_.row_begin, tile_.row_end = s_.row_end;
    tile_.dq = s_.dq;
    tile_.softcap = params.shape.softcap ? params.softcap : 0.0F;
    tile_.slope = params.shape.alibi ? &slope_ : nullptr;
    tile_.origin = s_.origin;
    tile_.factors = s_.factors;
    tile_.factor_stride = s_.factor_stride;
  }

  void run(const AttendTask& task, const Later& later) {
    const IndexRange keys = keys_of_task(task);
    const std::int64_t key_tile = s_.dims.tile.keys;
    for (std::int64_t begin = keys.begin, end = 0; begin < keys.end; begin = end) {
      end = std::min(begin + key_tile, keys.end);
      run(task, {begin, end}, nullptr, end < keys.end ? Later{&task, unit_, {end, std::min(end + key_tile, keys.end)}} : later);
    }
  }

  // One tile of keys; `turnstile`: others add to the same rows of dq.
  void run(const AttendTask& task, IndexRange keys, Turnstile::Item* turnstile, const Later& later) {
    const IndexRange heads = heads_of_unit(task, unit_, params_.shape.group), rows = rows_of(task, keys);
    later_ = later;
    if (!heads.empty() && !rows.empty()) run_keys(task, heads, rows, keys, turnstile);
  }

 private:
  // Those that may see one of the keys.
  static IndexRange rows_of(const AttendTask& task, IndexRange keys) {
    return rows_of_keys(task, keys, task.q_first, task.q_first + (task.q_count - 1) * task.q_step);
  }

  // Rows of the storage type from row `row` of head (or kv head) `head` on.
  template <typename View>
  RowSource source(const View& view, const AttendTask& task, std::int64_t head, std::int64_t row, const std::int32_t* index,
                   int rows, int width) const {
    const std::int64_t offset = batch(task) * view.batch_stride + head * view.head_stride + row * view.row_stride;
    return {static_cast<const std::byte*>(view.data) + offset * size_of(params_.shape.dtype), view.row_stride, index, rows,
            width};
  }
  std::int64_t batch(const AttendTask& task) const { return unit_.batch - task.batch_first; }

  void run_keys(const AttendTask& task, IndexRange heads, IndexRange rows, IndexRange keys, Turnstile::Item* turnstile) {
    const std::int64_t kv = kv_index(task, unit_.kv_head);
    const int count = static_cast<int>(keys.size());
    const RowSource k = source(task.k, task, kv, keys.begin, nullptr, count, params_.shape.head_dim);
    const RowSource v = source(task.v, task, kv, keys.begin, nullptr, count, params_.shape.head_dim_v);
    tile_.keys = count;
    tile_.key_first = task.k_first + keys.begin * task.k_step;
    tile_.key_step = task.k_step;
    ops_.begin_keys(tile_, k, v);
    const std::int64_t query_tile = s_.dims.tile.queries;
    for (std::int64_t t = heads.begin; t < heads.end; ++t) {
      for (std::int64_t row = rows.begin; row < rows.end; row += query_tile) {
        const IndexRange part{row, std::min(row + query_tile, rows.end)};
        const std::int64_t place = (t - heads.begin) << kHeadShift | part.end;
        if (turnstile != nullptr) turnstile->pass(place);
        tile_.rows = gather(task, t, part, keys);
        if (tile_.rows > 0) {
          look_ahead(task, t, part);
          if (part.end < rows.end) {
            look_at_queries(task, unit_, t, {part.end, std::min(part.end + query_tile, rows.end)});
          } else if (t + 1 < heads.end) {
            look_at_queries(task, unit_, t + 1, {rows.begin, std::min(rows.begin + query_tile, rows.end)});
          } else {
            look_at_keys();
          }
          run_tile(task, t, row, keys);
        }
        if (turnstile != nullptr) turnstile->leave(place);
      }
    }
    ops_.end_keys(tile_, row_of<float>(task.dk, batch(task), kv, keys.begin), task.dk.row_stride,
                  row_of<float>(task.dv, batch(task), kv, keys.begin), task.dv.row_stride);
  }

  // What this tile adds to.
  void look_ahead(const AttendTask& task, std::int64_t t, IndexRange rows) {
    constexpr std::int64_t element = sizeof(float);
    ahead_ = {{}, 0, kQueryStep};
    ahead_.rows[0] = ahead_rows(row_of<float>(task.dq, batch(task), t, rows.begin), task.dq.row_stride * element,
                                params_.shape.head_dim * element, rows.size());
    tile_.ahead = &ahead_;
  }

  // What the next one reads.
  void look_at_queries(const AttendTask& task, Unit unit, std::int64_t t, IndexRange rows) {
    ahead_.rows[3] = ahead_of(task.q, task, unit, t, rows, params_.shape.head_dim);
    ahead_.rows[4] = ahead_of(task.d_out, task, unit, t, rows, params_.shape.head_dim_v);
  }

  // What is read after the last queries of these keys.
  void look_at_keys() {
    if (later_.task == nullptr || later_.keys.empty()) return;
    const AttendTask& task = *later_.task;
    const IndexRange heads = heads_of_unit(task, later_.unit, params_.shape.group), rows = rows_of(task, later_.keys);
    if (heads.empty() || rows.empty()) return;
    look_at_queries(task, later_.unit, heads.begin, {rows.begin, std::min(rows.begin + s_.dims.tile.queries, rows.end)});
    const std::int64_t kv = kv_index(task, later_.unit.kv_head);
    ahead_.rows[1] = ahead_of(task.k, task, later_.unit, kv, later_.keys, params_.shape.head_dim);
    ahead_.rows[2] = ahead_of(task.v, task, later_.unit, kv, later_.keys, params_.shape.head_dim_v);
    ahead_.step = kKeyStep;
  }

  template <typename View>
  AheadRows ahead_of(const View& view, const AttendTask& task, Unit unit, std::int64_t head, IndexRange rows,
                     std::int64_t width) const {
    const std::int64_t size = size_of(params_.shape.dtype);
    const std::int64_t offset = (unit.batch - task.batch_first) * view.batch_stride + head * view.head_stride;
    return ahead_rows(static_cast<const std::byte*>(view.data) + (offset + rows.begin * view.row_stride) * size,
                      view.row_stride * size, width * size, rows.size());
  }

  void run_tile(const AttendTask& task, std::int64_t t, std::int64_t row, IndexRange keys) {
    const std::int64_t head = task.head_first + t * task.head_step;
    slope_ = alibi_slope(params_, unit_.batch, head);
    const bool are_neighbours = s_.index[tile_.rows - 1] - s_.index[0] == tile_.rows - 1;
    const std::int64_t first = are_neighbours ? row + s_.index[0] : row;
    const std::int32_t* const index = are_neighbours ? nullptr : s_.index;
    const RowSource q = source(task.q, task, t, first, index, tile_.rows, params_.shape.head_dim);
    const RowSource d_out = source(task.d_out, task, t, first, index, tile_.rows, params_.shape.head_dim_v);
    ops_.begin_queries(tile_, q, d_out);
    if (params_.shape.dropout) set_factors(task, head, row, keys);
    ops_.attend_backward(tile_);
    progress_.tick();
  }

  // The rows that take part: they see a key of the tile and their lse is not -inf. Both orders of the visible pairs.
  int gather(const AttendTask& task, std::int64_t t, IndexRange rows, IndexRange keys) {
    int count = 0;
    std::fill_n(s_.row_begin, keys.size(), 0);
    std::fill_n(s_.row_end, keys.size(), 0);
    std::int32_t opened = 0;  // keys below it have their first row; ranges of rows only move forward
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const IndexRange seen = keys_of_row(task, row);
      const auto begin = static_cast<std::int32_t>(std::max(seen.begin, keys.begin) - keys.begin);
      const auto end = static_cast<std::int32_t>(std::min(seen.end, keys.end) - keys.begin);
      if (begin >= end) continue;
      const float lse = *row_of<const float>(task.lse, batch(task), t, row);
      if (lse == -std::numeric_limits<float>::infinity()) continue;
      s_.index[count] = static_cast<std::int32_t>(row - rows.begin);
      s_.key_begin[count] = begin;
      s_.key_end[count] = end;
      s_.lse[count] = lse;
      s_.delta[count] = *row_of<const float>(task.delta, batch(task), t, row);
      s_.dq[count] = row_of<float>(task.dq, batch(task), t, row);
      s_.origin[count] = task.q_first + row * task.q_step + task.diagonal;
      for (opened = std::max(opened, begin); opened < end; ++opened) s_.row_begin[opened] = count;
      ++count;
    }
    // A key is seen last by the last row that has begun at or before it and ends after it.
    std::int32_t open_end = static_cast<std::int32_t>(keys.size());
    for (int r = count - 1; r >= 0; --r) {
      for (open_end = std::min(open_end, s_.key_end[r]); open_end > s_.key_begin[r]; --open_end)
        s_.row_end[open_end - 1] = r + 1;
    }
    return count;
  }

  void set_factors(const AttendTask& task, std::int64_t head, std::int64_t row, IndexRange keys) {
    const DropoutRow dropout(params_.seed, params_.dropout, unit_.batch, head, task.state);
    const float keep = dropout_keep(params_);
    for (int r = 0; r < tile_.rows; ++r) {
      const std::int64_t i = task.q_first + (row + s_.index[r]) * task.q_step;
      const std::int64_t first = task.k_first + (keys.begin + s_.key_begin[r]) * task.k_step;
      dropout.factors(i, first, task.k_step, s_.key_end[r] - s_.key_begin[r], keep,
                      s_.factors + r * s_.factor_stride + s_.key_begin[r]);
    }
  }

  const TileOps& ops_;
  const AttendParams& params_;
  const BackwardScratch& s_;
  Progress& progress_;
  Unit unit_;
  BackwardTile tile_{};
  Later later_;
  Ahead ahead_{};
  float slope_ = 0.0F;
};

std::int64_t gradient_thread_bytes(const TileOps& ops, const AttendShape& shape) {
  std::int64_t bytes = 0;
  const BackwardScratch layout(ops, shape, nullptr, &bytes);
  return bytes;
}

// At the beginning of the scratch; not every call uses it.
std::int64_t turnstile_bytes(const AttendShape& shape) { return shape.threads > 1 ? Turnstile::bytes(shape.threads) : 0; }

// Deals the work of a list to the threads; how does not change a bit.
class Dealer {
 public:
  Dealer(const TileOps& ops, const AttendParams& params, std::span<const AttendTask> tasks, const Context& context)
      : ops_(ops),
        params_(params),
        tasks_(tasks),
        context_(context),
        units_(tasks, params.shape.group),
        bytes_(gradient_thread_bytes(ops, params.shape)) {}

  void run() const {
    const std::int64_t threads = context_.pool.size(), units = units_.count();
    if (units % threads == 0 || units >= kEnoughUnits * threads) return deal(tasks_);
    std::size_t done = 0;
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      if (keys_of_task(tasks_[i]).size() < 2 * threads * key_tile()) continue;
      deal(tasks_.subspan(done, i - done));
      for (std::int64_t unit = 0; unit < units; ++unit) pass_on(tasks_[i], units_.at(unit));
      done = i + 1;
    }
    deal(tasks_.subspan(done));
  }

 private:
  std::int64_t key_tile() const { return tile_dims(params_.shape, ops_.backward_sizes).tile.keys; }
  template <typename Function>
  void with_unit(Unit unit, int thread, const Function& function) const {
    const BackwardScratch scratch(ops_, params_.shape, context_.scratch + turnstile_bytes(params_.shape) + thread * bytes_,
                                  nullptr);
    Progress progress(context_, thread);
    UnitBackward backward(ops_, params_, scratch, progress, unit);
    function(backward, progress);
  }

  // Whole units.
  void deal(std::span<const AttendTask> tasks) const {
    if (tasks.empty()) return;
    const auto run_unit = [&](std::int64_t item, int thread) {
      const Unit unit = units_.at(item);
      const std::int64_t next = item + context_.pool.size();  // of this thread, likely
      const Later later = next < units_.count() ? first_of(tasks[0], units_.at(next), key_tile()) : Later{};
      with_unit(unit, thread, [&](UnitBackward& backward, Progress&) {
        for (std::size_t i = 0; i < tasks.size(); ++i)
          backward.run(tasks[i], i + 1 < tasks.size() ? first_of(tasks[i + 1], unit, key_tile()) : later);
      });
    };
    context_.pool.parallel_for(units_.count(), run_unit, context_.progress);
  }

  // Key tiles of one unit and task, which follow each other over the queries.
  void pass_on(const AttendTask& task, Unit unit) const {
    const IndexRange keys = keys_of_task(task);
    const std::int64_t size = key_tile();
    Turnstile turnstile(context_.scratch, params_.shape.threads);
    const auto tile = [&](std::int64_t item) {
      const std::int64_t begin = keys.begin + item * size;
      return IndexRange{begin, std::min(begin + size, keys.end)};
    };
    const auto run_tile = [&](std::int64_t item, int thread) {
      with_unit(unit, thread, [&](UnitBackward& backward, Progress& progress) {
        Turnstile::Item place(turnstile, item, progress);
        backward.run(task, tile(item), &place, {&task, unit, tile(item + context_.pool.size())});
      });
    };
    context_.pool.parallel_for(ceil_div(keys.size(), size), run_tile, context_.progress);
  }

  const TileOps& ops_;
  const AttendParams& params_;
  std::span<const AttendTask> tasks_;
  const Context& context_;
  Units units_;
  std::int64_t bytes_;
};

}  // namespace

std::int64_t attend_backward_tiled_scratch_bytes(const TileOps& ops, const AttendShape& shape) {
  return turnstile_bytes(shape) + gradient_thread_bytes(ops, shape) * shape.threads;
}

void attend_backward_tiled(const TileOps& ops, const AttendParams& params, std::span<const AttendTask> tasks,
                           const Context& context) {
  RINGSPAN_CHECK(context.pool.size() <= params.shape.threads);
  for (const AttendTask& task : tasks) RINGSPAN_CHECK(!task.writes_dq && !task.writes_dk_dv);
  Dealer(ops, params, tasks, context).run();
}

}  // namespace ringspan::kernels
