// UnitForward: everything that one thread of the tiled forward kernels does for one unit. attend_tiled.cc deals the units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/attend_tiled.h"
#include "kernels/dropout.h"
#include "kernels/finish_row.h"
#include "kernels/forward_scratch.h"
#include "kernels/position_split.h"
#include "kernels/progress.h"
#include "kernels/score.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {

// Everything one thread does for one unit, for queries in a range of positions.
class UnitForward {
 public:
  UnitForward(const TileOps& ops, const AttendParams& params, const ForwardScratch& scratch, Progress& progress, Unit unit,
              Positions positions)
      : ops_(ops), params_(params), s_(scratch), progress_(progress), unit_(unit), positions_(positions) {
    tile_.dims = s_.dims;
    tile_.scale = params.scale;
    tile_.q = s_.q, tile_.work = s_.work;
    tile_.begin = s_.tile_begin, tile_.end = s_.tile_end;
    tile_.m = s_.m, tile_.l = s_.l;
    tile_.factor_stride = s_.factor_stride;
    tile_.softcap = params.shape.softcap ? params.softcap : 0.0F;
    tile_.slope = params.shape.alibi ? &slope_ : nullptr;
    tile_.distance = s_.distance;
    tile_.factors = s_.factors;
  }

  // next: what this thread computes after this task, for next_unit, or nullptr.
  void run(const AttendTask& task, const AttendTask* next, Unit next_unit) {
    next_ = next, next_unit_ = next_unit;
    const IndexRange heads = heads_of_unit(task, unit_, params_.shape.group);
    if (heads.empty()) return;
    const IndexRange rows = indices_between(task.q_first, task.q_step, task.q_count, positions_.first, positions_.last);
    if (rows.empty()) return;
    const std::int64_t first = task.q_first + rows.begin * task.q_step, last = task.q_first + (rows.end - 1) * task.q_step;
    const IndexRange keys = indices_between(task.k_first, task.k_step, task.k_count, first + task.lo, last + task.hi);
    if (task.o.data != nullptr) finish_unseeing(task, heads, rows);
    if (keys.empty()) return;
    // Tiles begin at multiples of their size, counted from the task's first key, whatever part of it is seen.
    const IndexRange all{keys.begin / key_tile() * key_tile(), keys.end};
    if (is_few(task, heads, all)) return run_few(task, heads, rows, all);
    const std::int64_t tiles = ceil_div(heads.size() * rows.size(), query_tile());
    std::int64_t run_tiles = s_.run_tiles;  // without a state, all in one run
    if (task.m.data != nullptr) {
      const bool is_narrow = keys_of_row(task, (rows.begin + rows.end) / 2).size() <= kNearTiles * key_tile();
      if (tiles <= kAheadTiles) {
        run_tiles = std::min(run_tiles, 2 * tiles);
      } else if (is_narrow) {
        run_tiles = std::min(run_tiles, 2 * kNearTiles);
      }
    }
    const std::int64_t length = key_tile() * run_tiles;
    for (std::int64_t begin = all.begin; begin < all.end; begin += length) {
      const IndexRange run{begin, std::min(begin + length, all.end)};
      IndexRange seeing = rows_of_keys(task, run, first, last);
      if (seeing.empty()) continue;
      if (tiles <= kAheadTiles) look_ahead(task, {run.end, std::min(run.end + length, all.end)}, tiles);
      pack(task, run);
      after_ = {run.end, std::min(run.end + key_tile(), all.end)};
      const std::int64_t together = heads_of_tile(task, seeing, heads);
      for (std::int64_t t = heads.begin, end = 0; t < heads.end; t = end) {
        end = std::min(t + together, heads.end);
        run_heads(task, {t, end}, seeing, run, end == heads.end);
      }
    }
    tile_.ahead = nullptr;
  }

 private:
  // Query tiles up to which keys are fetched ahead: with more of them, reading keys takes little of the time.
  static constexpr std::int64_t kAheadTiles = 4;
  static constexpr std::int64_t kAheadRows = 64;                    // of the next task
  static constexpr int kBurst = 16, kKeyStep = 16, kQueryStep = 4;  // lines
  // Key tiles up to which sums are kept where the task has them: with more, having them side by side is worth copying them.
  static constexpr std::int64_t kTilesInPlace = 2;
  static constexpr std::int64_t kNearTiles = 2;  // that the second cache holds, surely
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();

  std::int64_t batch(const AttendTask& task) const { return unit_.batch - task.batch_first; }
  std::int64_t query_tile() const { return s_.dims.tile.queries; }
  std::int64_t key_tile() const { return s_.dims.tile.keys; }

  const std::byte* key_row(const Unit& unit, const AttendTask& task, const KeyRows& rows, std::int64_t c) const {
    return static_cast<const std::byte*>(rows.data) +
           size_of(params_.shape.dtype) * ((unit.batch - task.batch_first) * rows.batch_stride +
                                           kv_index(task, unit.kv_head) * rows.head_stride + c * rows.row_stride);
  }

  const std::byte* query_row(const Unit& unit, const AttendTask& task, std::int64_t t, std::int64_t row) const {
    return static_cast<const std::byte*>(task.q.data) +
           size_of(params_.shape.dtype) *
               ((unit.batch - task.batch_first) * task.q.batch_stride + t * task.q.head_stride + row * task.q.row_stride);
  }

  // Where keys are used by few queries, reading them takes as long as computing: the next ones are fetched meanwhile, and after
  // the last `next_keys` of the next task.
  void look_ahead(const AttendTask& task, IndexRange keys, std::int64_t tiles, std::int64_t next_keys = kAheadRows) {
    ahead_ = {{}, tiles > 1 ? 0 : kBurst, kKeyStep};
    look_at_keys(task, keys, next_keys, ahead_.rows);
    tile_.ahead = &ahead_;
  }

  // Keys of this task, or else the beginning of the next one.
  void look_at_keys(const AttendTask& task, IndexRange keys, std::int64_t next_keys, AheadRows* ahead) const {
    if (!keys.empty()) {
      ahead[0] = ahead_keys(unit_, task, task.k, keys, params_.shape.head_dim);
      ahead[1] = ahead_keys(unit_, task, task.v, keys, params_.shape.head_dim_v);
    } else if (next_ != nullptr) {
      const IndexRange heads = heads_of_unit(*next_, next_unit_, params_.shape.group);
      const IndexRange first{0, std::min(next_->k_count, next_keys)}, rows{0, std::min(next_->q_count, kAheadRows)};
      if (heads.empty()) return;
      ahead[0] = ahead_keys(next_unit_, *next_, next_->k, first, params_.shape.head_dim);
      ahead[1] = ahead_keys(next_unit_, *next_, next_->v, first, params_.shape.head_dim_v);
      ahead[2] = ahead_queries(next_unit_, *next_, heads.begin, rows);
      ahead[3] = ahead_states(next_unit_, *next_, heads.begin, rows);
    }
  }

  // Where keys are used by many: what a query tile will write, and the queries of the next one, after tiles that are packed.
  // Matters under narrow windows.
  void look_ahead(const AttendTask& task, std::int64_t t, IndexRange rows, IndexRange next) {
    ahead_ = {{{}, {}, ahead_states(unit_, task, t, rows)}, 0, kQueryStep};
    if (!next.empty()) ahead_.rows[3] = ahead_queries(unit_, task, t, next);
    tile_.ahead = &ahead_;
  }

  // Of the run, the tile after that from c on, or else the first one of these queries, which the next ones begin with; where
  // they see more than the second cache holds.
  void look_at_packed(IndexRange run, std::int64_t c) {
    const std::int64_t first = s_.begin[0], last = std::min<std::int64_t>(s_.end[tile_.rows - 1], run.size());
    if (last - first <= kNearTiles * key_tile()) return;
    const std::int64_t after = c - run.begin + key_tile(), n = (after < last ? after : first) / key_tile();
    ahead_.rows[0] = ahead_rows(s_.k + n * s_.bytes_of.keys, s_.bytes_of.keys, s_.bytes_of.keys, 1);
    ahead_.rows[1] = ahead_rows(s_.v + n * s_.bytes_of.values, s_.bytes_of.values, s_.bytes_of.values, 1);
    ahead_.done = 0, ahead_.step = kKeyStep;
  }

  AheadRows ahead_keys(const Unit& unit, const AttendTask& task, const KeyRows& rows, IndexRange keys,
                       std::int64_t width) const {
    const std::int64_t element = size_of(params_.shape.dtype);
    return ahead_rows(key_row(unit, task, rows, keys.begin), rows.row_stride * element, width * element, keys.size());
  }
  AheadRows ahead_queries(const Unit& unit, const AttendTask& task, std::int64_t t, IndexRange rows) const {
    const std::int64_t element = size_of(params_.shape.dtype);
    return ahead_rows(query_row(unit, task, t, rows.begin), task.q.row_stride * element, params_.shape.head_dim * element,
                      rows.size());
  }
  // What is written of the rows: their results, or their states.
  AheadRows ahead_states(const Unit& unit, const AttendTask& task, std::int64_t t, IndexRange rows) const {
    const std::int64_t b = unit.batch - task.batch_first;
    if (task.o.data != nullptr) {
      const std::int64_t size = size_of(params_.shape.dtype);
      const std::int64_t first = b * task.o.batch_stride + t * task.o.head_stride + rows.begin * task.o.row_stride;
      return ahead_rows(static_cast<const std::byte*>(task.o.data) + first * size, task.o.row_stride * size,
                        params_.shape.head_dim_v * size, rows.size());
    }
    constexpr std::int64_t element = sizeof(float);
    return ahead_rows(row_of<float>(task.acc, b, t, rows.begin), task.acc.row_stride * element,
                      params_.shape.head_dim_v * element, rows.size());
  }

  void pack(const AttendTask& task, IndexRange run) {
    const Packed wanted{key_row(unit_, task, task.k, run.begin), key_row(unit_, task, task.v, run.begin), task.k.row_stride,
                        task.v.row_stride, run.size()};
    if (wanted == packed_) return;
    packed_ = wanted;
    for (std::int64_t c = run.begin, n = 0; c < run.end; c += key_tile(), ++n) {
      const IndexRange tile{c, std::min(c + key_tile(), run.end)};
      k_finite_[n] =
          ops_.pack_keys(s_.dims, s_.k + n * s_.bytes_of.keys, key_source(task, task.k, tile, params_.shape.head_dim));
      v_finite_[n] =
          ops_.pack_values(s_.dims, s_.v + n * s_.bytes_of.values, key_source(task, task.v, tile, params_.shape.head_dim_v));
    }
  }

  // Few queries: heads of the group share a tile, as rows. Not with options that depend on the head.
  std::int64_t heads_of_tile(const AttendTask& task, IndexRange rows, IndexRange heads) const {
    if (params_.shape.alibi || params_.shape.dropout) return 1;
    const std::int64_t together = std::clamp<std::int64_t>(query_tile() / rows.size(), 1, heads.size());
    const std::int64_t reach = together * std::abs(task.q.head_stride) + rows.size() * std::abs(task.q.row_stride);
    return reach <= std::numeric_limits<std::int32_t>::max() ? together : 1;
  }

  // Decided by the task and unit alone, not by the rows of this call: the bits are not those of packed tiles.
  bool is_few(const AttendTask& task, IndexRange heads, IndexRange keys) const {
    return ops_.few_pays[s_.dims.dtype] && !params_.shape.alibi && !params_.shape.dropout &&
           heads.size() * task.q_count <= kFewRows && keys.end <= std::numeric_limits<std::int32_t>::max() &&
           heads_of_tile(task, {0, task.q_count}, heads) == heads.size();
  }

  // One tile of queries: its state is read and written once. Keys that all queries of the task see are read in place.
  void run_few(const AttendTask& task, IndexRange heads, IndexRange rows, IndexRange keys) {
    const IndexRange first = keys_of_row(task, 0), last = keys_of_row(task, task.q_count - 1);
    const IndexRange common{std::max(first.begin, last.begin), std::min(first.end, last.end)};
    tile_.rows = gather(task, heads, rows, keys);
    if (tile_.rows == 0) return;
    tile_.task_rows = static_cast<int>(heads.size() * task.q_count);
    load(task, heads.begin, heads.size(), rows.begin, false);
    for (std::int64_t c = keys.begin; c < keys.end; c += key_tile()) {
      const IndexRange here{c, std::min(c + key_tile(), keys.end)};
      look_ahead(task, {here.end, std::min(here.end + key_tile(), keys.end)}, 1, key_tile());
      // By the task's last key, not by that of the rows of this call, which may be fewer.
      const std::int64_t whole_end = std::min(c + key_tile(), std::max(first.end, last.end));
      if (here.begin >= common.begin && whole_end <= common.end) {
        tile_.keys = static_cast<int>(here.size());
        std::fill_n(s_.tile_begin, tile_.rows, 0);
        std::fill_n(s_.tile_end, tile_.rows, tile_.keys);
        ops_.attend_few(tile_, few_source(task, &AttendTask::k, here, keys.end, params_.shape.head_dim),
                        few_source(task, &AttendTask::v, here, keys.end, params_.shape.head_dim_v), s_.k, s_.v);
        packed_ = {};
        settle(false);  // nobody has looked at these values
      } else if (clip(keys, c, 0)) {
        pack(task, here);
        clip(keys, c, 0);
        ops_.attend(tile_);
        settle(tile_.v_finite);
      }
      progress_.tick();
    }
    tile_.ahead = nullptr;
    store(task, heads.begin, rows.begin, keys);
  }

  RowSource key_source(const AttendTask& task, const KeyRows& rows, IndexRange keys, int width) const {
    return {key_row(unit_, task, rows, keys.begin), rows.row_stride, nullptr,
            static_cast<int>(keys.size()),          width,           tile_.ahead};
  }

  // With what is read after it: more keys of the task up to `end`, or the first of the next one.
  RowSource few_source(const AttendTask& task, KeyRows AttendTask::*rows, IndexRange keys, std::int64_t end, int width) const {
    RowSource source = key_source(task, task.*rows, keys, width);
    if (keys.end < end) {
      source.next = key_row(unit_, task, task.*rows, keys.end);
      source.next_stride = source.stride;
    } else if (next_ != nullptr && next_->k_count > 0 && !heads_of_unit(*next_, next_unit_, params_.shape.group).empty()) {
      source.next = key_row(next_unit_, *next_, next_->*rows, 0);
      source.next_stride = (next_->*rows).row_stride;
    }
    return source;
  }

  // are_last: of the heads that see the run.
  void run_heads(const AttendTask& task, IndexRange heads, IndexRange rows, IndexRange run, bool are_last) {
    const std::int64_t head = task.head_first + heads.begin * task.head_step;
    slope_ = alibi_slope(params_, unit_.batch, head);
    const std::int64_t tile_rows = query_tile() / heads.size();
    const bool ahead_of_keys = tile_.ahead != nullptr;
    for (std::int64_t row = rows.begin; row < rows.end; row += tile_rows) {
      const std::int64_t next = std::min(row + tile_rows, rows.end);
      tile_.rows = gather(task, heads, {row, next}, run);
      if (tile_.rows == 0) continue;
      load(task, heads.begin, heads.size(), row, run.size() <= kTilesInPlace * key_tile());
      if (!ahead_of_keys) {
        look_ahead(task, heads.begin, {row, next}, {next, std::min(next + tile_rows, rows.end)});
        if (are_last && next == rows.end) look_at_keys(task, after_, key_tile(), ahead_.rows + 3), ahead_.step = kKeyStep;
      }
      for (std::int64_t c = run.begin; c < run.end; c += key_tile()) {
        if (!clip(run, c, (c - run.begin) / key_tile())) continue;
        if (params_.shape.alibi) set_distances(task, row, c);
        if (params_.shape.dropout) set_factors(task, head, row, c);
        if (!ahead_of_keys) look_at_packed(run, c);
        ops_.attend(tile_);
        settle(tile_.v_finite);
        progress_.tick();
      }
      store(task, heads.begin, row, run);
    }
    if (!ahead_of_keys) tile_.ahead = nullptr;
  }

  // After a tile, states are what they would be if they had been stored and loaded: whenever that happens, bits are the same.
  // Where m is still -inf only NaN was seen, which stays, or nothing with a weight: products of no weight and values that are
  // not finite are NaN.
  void settle(bool v_finite) {
    bool is_any_empty = false;
    for (int r = 0; r < tile_.rows; ++r) is_any_empty |= s_.m[r] == kNothing;
    if (!is_any_empty) return;
    for (int r = 0; r < tile_.rows; ++r) {
      if (s_.m[r] != kNothing) continue;
      if (s_.l[r] != 0.0F) {
        s_.m[r] = 0.0F;
      } else if (!v_finite) {
        std::fill_n(tile_.acc + r * tile_.acc_stride, params_.shape.head_dim_v, 0.0F);
      }
    }
  }

  // The rows that see a key of the run, and which (relative to the run, and one more if there are any after it); the others are
  // not touched.
  int gather(const AttendTask& task, IndexRange heads, IndexRange rows, IndexRange run) {
    int count = 0;
    const IndexRange first = keys_of_row(task, rows.begin), last = keys_of_row(task, rows.end - 1);
    const bool all_see_more = first.end > run.end, none_sees_more = last.end <= run.end;
    if (heads.size() == 1 && last.begin <= run.begin && first.end >= run.end && (all_see_more || none_sees_more)) {
      count = static_cast<int>(rows.size());  // all see the whole run
      for (int r = 0; r < count; ++r) s_.index[r] = r;
      std::fill_n(s_.head, count, 0);
      std::fill_n(s_.begin, count, 0);
      std::fill_n(s_.end, count, static_cast<std::int32_t>(run.size() + (all_see_more ? 1 : 0)));
      return count;
    }
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      const IndexRange keys = keys_of_row(task, row);
      const std::int64_t begin = std::max(keys.begin, run.begin), end = std::min(keys.end, run.end);
      if (begin >= end) continue;
      for (std::int64_t t = 0; t < heads.size(); ++t, ++count) {
        s_.index[count] = static_cast<std::int32_t>(row - rows.begin);
        s_.head[count] = static_cast<std::int32_t>(t);
        s_.begin[count] = static_cast<std::int32_t>(begin - run.begin);
        s_.end[count] = static_cast<std::int32_t>(std::min(keys.end, run.end + 1) - run.begin);
      }
    }
    return count;
  }

  // Sets the tile to the keys from c on, the n-th that are packed; false where no row sees one.
  bool clip(IndexRange run, std::int64_t c, std::int64_t n) {
    const auto first = static_cast<std::int32_t>(c - run.begin);
    tile_.keys = static_cast<int>(std::min(key_tile(), run.end - c));
    if (s_.begin[tile_.rows - 1] >= first + tile_.keys && s_.begin[0] >= first + tile_.keys) return false;
    const std::int32_t *const begin = s_.begin, *const end = s_.end;
    std::int32_t *const tile_begin = s_.tile_begin, *const tile_end = s_.tile_end;
    const int rows = tile_.rows, keys = tile_.keys;
    std::int32_t seen = 0;  // a sum: such a loop goes into vectors
    for (int r = 0; r < rows; ++r) {
      const std::int32_t b = begin[r] - first, e = end[r] - first;
      tile_begin[r] = b < 0 ? 0 : b > keys ? keys : b;
      tile_end[r] = e < 0 ? 0 : e > keys ? keys : e;
      seen += tile_begin[r] < tile_end[r] ? 1 : 0;
    }
    tile_.k = s_.k + n * s_.bytes_of.keys;
    tile_.v = s_.v + n * s_.bytes_of.values;
    tile_.k_finite = k_finite_[n];
    tile_.v_finite = v_finite_[n];
    return seen > 0;
  }

  std::int64_t position(const AttendTask& task, std::int64_t row, int r) const {
    return task.q_first + (row + s_.index[r]) * task.q_step;
  }

  void set_distances(const AttendTask& task, std::int64_t row, std::int64_t c) {
    tile_.distance_step = task.k_step;
    for (int r = 0; r < tile_.rows; ++r)
      s_.distance[r] = task.k_first + c * task.k_step - position(task, row, r) - task.diagonal;
  }

  void set_factors(const AttendTask& task, std::int64_t head, std::int64_t row, std::int64_t c) {
    const DropoutRow dropout(params_.seed, params_.dropout, unit_.batch, head, task.state);
    const float keep = dropout_keep(params_);
    for (int r = 0; r < tile_.rows; ++r) {
      const std::int64_t first = c + s_.tile_begin[r];
      dropout.factors(position(task, row, r), task.k_first + first * task.k_step, task.k_step,
                      s_.tile_end[r] - s_.tile_begin[r], keep, s_.factors + r * s_.factor_stride + s_.tile_begin[r]);
    }
  }

  // in_place: adds to sums where the task has them, if vectors can.
  void load(const AttendTask& task, std::int64_t t, std::int64_t heads, std::int64_t row, bool in_place) {
    const std::int64_t b = batch(task);
    tile_.acc = s_.acc, tile_.acc_stride = s_.acc_stride;
    RowSource source{query_row(unit_, task, t, row), task.q.row_stride, s_.index, tile_.rows, params_.shape.head_dim};
    const bool are_neighbours = heads == 1 && s_.index[tile_.rows - 1] - s_.index[0] == tile_.rows - 1;
    if (are_neighbours) {
      source.data = query_row(unit_, task, t, row + s_.index[0]), source.index = nullptr;
    } else if (heads > 1) {  // rows are at multiples of nothing but an element
      for (int r = 0; r < tile_.rows; ++r)
        s_.offset[r] = static_cast<std::int32_t>(s_.head[r] * task.q.head_stride + s_.index[r] * task.q.row_stride);
      source.stride = 1, source.index = s_.offset;
    }
    tile_.q_finite = ops_.pack_queries(s_.dims, s_.q, source, params_.scale);
    if (task.m.data == nullptr) return clear();
    const std::int64_t width = params_.shape.head_dim_v;
    const float *const m = row_of<const float>(task.m, b, t, row), *const l = row_of<const float>(task.l, b, t, row);
    const float* const acc = row_of<const float>(task.acc, b, t, row);
    in_place = in_place && are_neighbours && width == s_.acc_stride;
    if (in_place) tile_.acc = row_of<float>(task.acc, b, t, row + s_.index[0]), tile_.acc_stride = task.acc.row_stride;
    for (int r = 0; r < tile_.rows; ++r) {
      s_.m[r] = m[at(task.m, r)];
      float* const sums = tile_.acc + r * tile_.acc_stride;
      const bool has_seen = s_.m[r] != kNothing;
      const std::int64_t present = has_seen ? width : 0;
      s_.l[r] = has_seen ? l[at(task.l, r)] : 0.0F;
      if (!in_place) std::copy_n(acc + at(task.acc, r), present, sums);
      std::fill(sums + present, sums + s_.acc_stride, 0.0F);
    }
  }

  // States of rows that had nothing before.
  void clear() {
    std::fill_n(s_.m, tile_.rows, kNothing);
    std::fill_n(s_.l, tile_.rows, 0.0F);
    std::fill_n(s_.acc, tile_.rows * s_.acc_stride, 0.0F);
  }

  // After keys of the run: results of rows that see none after it, where the task has them, and states.
  void store(const AttendTask& task, std::int64_t t, std::int64_t row, IndexRange run) {
    const std::int64_t b = batch(task);
    const bool has_state = task.m.data != nullptr;
    float* const m = has_state ? row_of<float>(task.m, b, t, row) : nullptr;
    float* const l = has_state ? row_of<float>(task.l, b, t, row) : nullptr;
    float* const acc = has_state ? row_of<float>(task.acc, b, t, row) : nullptr;
    const auto bytes = static_cast<std::size_t>(params_.shape.head_dim_v) * sizeof(float);
    for (int r = 0; r < tile_.rows; ++r) {
      const float* const sums = tile_.acc + r * tile_.acc_stride;
      if (task.o.data != nullptr && s_.end[r] <= run.size()) {
        finish_task_row(params_, task, b, t + s_.head[r], row + s_.index[r], s_.m[r], s_.l[r], sums);
        continue;
      }
      m[at(task.m, r)] = s_.m[r];
      l[at(task.l, r)] = s_.l[r];
      if (acc + at(task.acc, r) != sums) std::memcpy(acc + at(task.acc, r), sums, bytes);
    }
  }

  // Rows that no tile touches.
  void finish_unseeing(const AttendTask& task, IndexRange heads, IndexRange rows) {
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      if (!keys_of_row(task, row).empty()) continue;
      for (std::int64_t t = heads.begin; t < heads.end; ++t) finish_task_row(params_, task, batch(task), t, row);
    }
  }

  // Of row r of the tile, from the first head and row.
  std::int64_t at(const Rows& rows, int r) const { return s_.head[r] * rows.head_stride + s_.index[r] * rows.row_stride; }

  // What is packed now.
  struct Packed {
    const std::byte *k = nullptr, *v = nullptr;
    std::int64_t k_stride = 0, v_stride = 0, count = 0;
    bool operator==(const Packed&) const = default;
  };

  const TileOps& ops_;
  const AttendParams& params_;
  const ForwardScratch& s_;
  Progress& progress_;
  Unit unit_;
  Positions positions_;
  ForwardTile tile_{};
  Packed packed_;
  const AttendTask* next_ = nullptr;
  Unit next_unit_;
  IndexRange after_;  // keys of this task that are read after those of the run
  Ahead ahead_{};
  bool k_finite_[kMaxRunTiles] = {}, v_finite_[kMaxRunTiles] = {};
  float slope_ = 0.0F;
};

}  // namespace ringspan::kernels
