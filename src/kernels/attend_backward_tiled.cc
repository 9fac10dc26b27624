#include <algorithm>
#include <limits>

#include "base/check.h"
#include "kernels/attend_tiled.h"
#include "kernels/carver.h"
#include "kernels/dropout.h"
#include "kernels/progress.h"
#include "kernels/score.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {
namespace {

constexpr std::int64_t kScoreStride = kGradQueryTile + kScorePad;

// Keys of a tile: many, because the queries are packed once for each; few enough for the second cache. Multiples of kRowBlock.
int key_tile_of(const AttendShape& shape) {
  const int width = std::max(shape.head_dim, shape.head_dim_v);
  return width <= 64 ? 384 : width <= 128 ? 240 : 120;
}

// Scratch of one thread.
struct BackwardScratch {
  int key_tile;
  std::int64_t k_stride, v_stride;  // of rows and gradients of keys, padded
  float *k_rows, *v_rows, *k_panels, *dk, *dv;
  float *q_columns, *q_panels, *d_out_columns, *d_out_panels;
  float *p, *ds, *factors, *lse, *delta;
  float** dq;
  std::int64_t* origin;
  std::int32_t *index, *key_begin, *key_end, *row_begin, *row_end;

  BackwardScratch(const TileOps& ops, const AttendShape& shape, std::byte* base, std::int64_t* bytes) {
    Carver carver(base);
    key_tile = key_tile_of(shape);
    k_stride = round_up(shape.head_dim, ops.width);
    v_stride = round_up(shape.head_dim_v, ops.width);
    for (float** rows : {&k_rows, &k_panels, &dk}) *rows = carver.take<float>(key_tile * k_stride);
    for (float** rows : {&v_rows, &dv}) *rows = carver.take<float>(key_tile * v_stride);
    for (float** rows : {&q_columns, &q_panels}) *rows = carver.take<float>(kGradQueryTile * k_stride);
    for (float** rows : {&d_out_columns, &d_out_panels}) *rows = carver.take<float>(kGradQueryTile * v_stride);
    for (float** scores : {&p, &ds}) *scores = carver.take<float>(key_tile * kScoreStride);
    factors = shape.dropout ? carver.take<float>(key_tile * kScoreStride) : nullptr;
    lse = carver.take<float>(kGradQueryTile);
    delta = carver.take<float>(kGradQueryTile);
    dq = carver.take<float*>(kGradQueryTile);
    origin = carver.take<std::int64_t>(kGradQueryTile);
    for (std::int32_t** list : {&index, &key_begin, &key_end}) *list = carver.take<std::int32_t>(kGradQueryTile);
    for (std::int32_t** list : {&row_begin, &row_end}) *list = carver.take<std::int32_t>(key_tile);
    if (bytes != nullptr) *bytes = carver.bytes();
  }
};

// Everything one thread does for one unit.
class UnitBackward {
 public:
  UnitBackward(const TileOps& ops, const AttendParams& params, const BackwardScratch& scratch, Progress& progress, Unit unit)
      : ops_(ops),
        params_(params),
        s_(scratch),
        progress_(progress),
        unit_(unit),
        dtype_(static_cast<int>(params.shape.dtype)) {
    tile_.head_dim = params.shape.head_dim;
    tile_.head_dim_v = params.shape.head_dim_v;
    tile_.q_columns = s_.q_columns, tile_.q_panels = s_.q_panels;
    tile_.d_out_columns = s_.d_out_columns, tile_.d_out_panels = s_.d_out_panels;
    tile_.k_rows = s_.k_rows, tile_.v_rows = s_.v_rows, tile_.k_panels = s_.k_panels;
    tile_.k_stride = tile_.dk_stride = s_.k_stride;
    tile_.v_stride = tile_.dv_stride = s_.v_stride;
    tile_.lse = s_.lse, tile_.delta = s_.delta;
    tile_.key_begin = s_.key_begin, tile_.key_end = s_.key_end;
    tile_.row_begin = s_.row_begin, tile_.row_end = s_.row_end;
    tile_.p = s_.p, tile_.ds = s_.ds, tile_.score_stride = kScoreStride;
    tile_.dk = s_.dk, tile_.dv = s_.dv, tile_.dq = s_.dq;
    tile_.softcap = params.shape.softcap ? params.softcap : 0.0F;
    tile_.slope = params.shape.alibi ? &slope_ : nullptr;
    tile_.origin = s_.origin;
    tile_.factors = s_.factors;
  }

  void run(const AttendTask& task) {
    const IndexRange heads = heads_of_unit(task, unit_, params_.shape.group);
    if (heads.empty()) return;
    const std::int64_t last = task.q_first + (task.q_count - 1) * task.q_step;
    const IndexRange keys = indices_between(task.k_first, task.k_step, task.k_count, task.q_first + task.lo, last + task.hi);
    for (std::int64_t begin = keys.begin; begin < keys.end; begin += s_.key_tile) {
      const IndexRange part{begin, std::min(begin + s_.key_tile, keys.end)};
      const IndexRange rows = rows_of_keys(task, part, task.q_first, last);
      if (!rows.empty()) run_keys(task, heads, rows, part);
    }
  }

 private:
  // Rows of the storage type from row `row` of head (or kv head) `head` on.
  template <typename View>
  RowSource source(const View& view, const AttendTask& task, std::int64_t head, std::int64_t row, const std::int32_t* index,
                   int rows, int width) const {
    const std::int64_t offset = batch(task) * view.batch_stride + head * view.head_stride + row * view.row_stride;
    return {static_cast<const std::byte*>(view.data) + offset * size_of(params_.shape.dtype), view.row_stride, index, rows,
            width};
  }
  std::int64_t batch(const AttendTask& task) const { return unit_.batch - task.batch_first; }

  void run_keys(const AttendTask& task, IndexRange heads, IndexRange rows, IndexRange keys) {
    const std::int64_t kv = kv_index(task, unit_.kv_head);
    const int count = static_cast<int>(keys.size());
    const RowSource k = source(task.k, task, kv, keys.begin, nullptr, count, params_.shape.head_dim);
    const RowSource v = source(task.v, task, kv, keys.begin, nullptr, count, params_.shape.head_dim_v);
    ops_.pack_rows[dtype_](s_.k_rows, s_.k_stride, k, 1.0F);
    ops_.pack_rows[dtype_](s_.v_rows, s_.v_stride, v, 1.0F);
    tile_.keys_finite = ops_.pack_panels[dtype_](s_.k_panels, k, params_.scale);
    tile_.keys = count;
    tile_.key_first = task.k_first + keys.begin * task.k_step;
    tile_.key_step = task.k_step;
    std::fill_n(s_.dk, count * s_.k_stride, 0.0F);
    std::fill_n(s_.dv, count * s_.v_stride, 0.0F);
    for (std::int64_t t = heads.begin; t < heads.end; ++t) {
      for (std::int64_t row = rows.begin; row < rows.end; row += kGradQueryTile) {
        tile_.rows = gather(task, t, {row, std::min(row + kGradQueryTile, rows.end)}, keys);
        if (tile_.rows > 0) run_tile(task, t, row, keys);
      }
    }
    add(task.dk, task, kv, keys, s_.dk, s_.k_stride, params_.shape.head_dim);
    add(task.dv, task, kv, keys, s_.dv, s_.v_stride, params_.shape.head_dim_v);
  }

  void run_tile(const AttendTask& task, std::int64_t t, std::int64_t row, IndexRange keys) {
    const std::int64_t head = task.head_first + t * task.head_step;
    slope_ = alibi_slope(params_, unit_.batch, head);
    const RowSource q = source(task.q, task, t, row, s_.index, tile_.rows, params_.shape.head_dim);
    const RowSource d_out = source(task.d_out, task, t, row, s_.index, tile_.rows, params_.shape.head_dim_v);
    ops_.pack_columns[dtype_](s_.q_columns, q, params_.scale);
    ops_.pack_columns[dtype_](s_.d_out_columns, d_out, params_.output_scale);
    const bool q_finite = ops_.pack_panels[dtype_](s_.q_panels, q, params_.scale);
    const bool d_out_finite = ops_.pack_panels[dtype_](s_.d_out_panels, d_out, params_.output_scale);
    tile_.queries_finite = q_finite && d_out_finite;
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
                      s_.factors + s_.key_begin[r] * kScoreStride + r, kScoreStride);
    }
  }

  void add(const KeyRows& rows, const AttendTask& task, std::int64_t kv, IndexRange keys, const float* gradient,
           std::int64_t stride, int width) const {
    for (std::int64_t c = keys.begin; c < keys.end; ++c, gradient += stride) {
      float* sum = row_of<float>(rows, batch(task), kv, c);
      for (int e = 0; e < width; ++e) sum[e] += gradient[e];
    }
  }

  const TileOps& ops_;
  const AttendParams& params_;
  const BackwardScratch& s_;
  Progress& progress_;
  Unit unit_;
  int dtype_;
  BackwardTile tile_{};
  float slope_ = 0.0F;
};

}  // namespace

std::int64_t attend_backward_tiled_scratch_bytes(const TileOps& ops, const AttendShape& shape) {
  std::int64_t bytes = 0;
  const BackwardScratch layout(ops, shape, nullptr, &bytes);
  return bytes * shape.threads;
}

void attend_backward_tiled(const TileOps& ops, const AttendParams& params, std::span<const AttendTask> tasks,
                           const Context& context) {
  RINGSPAN_CHECK(context.pool.size() <= params.shape.threads);
  const Units units(tasks, params.shape.group);
  const std::int64_t scratch_bytes = attend_backward_tiled_scratch_bytes(ops, params.shape) / params.shape.threads;
  context.pool.parallel_for(
      units.count(),
      [&](std::int64_t item, int thread) {
        const BackwardScratch scratch(ops, params.shape, context.scratch + thread * scratch_bytes, nullptr);
        Progress progress(context, thread);
        UnitBackward backward(ops, params, scratch, progress, units.at(item));
        for (const AttendTask& task : tasks) backward.run(task);
      },
      context.progress);
}

}  // namespace ringspan::kernels
