#include "cuda/make_tile_maps.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/task_view.h"

namespace ringspan::cuda {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kMostRows = std::int64_t{1} << 31;         // coordinates are 32 bits wide
constexpr std::int64_t kMostStrideBytes = std::int64_t{1} << 40;  // cuTensorMapEncodeTiled
constexpr int kMostShifts = 16;

bool is_stride(std::int64_t elements) {
  const std::int64_t bytes = elements * kElementBytes;
  return elements > 0 && bytes % 16 == 0 && bytes < kMostStrideBytes;
}
bool can_be_mapped(const TileMap& map) {
  return reinterpret_cast<std::uintptr_t>(map.begin) % 16 == 0 && map.rows > 0 && is_stride(map.row_stride) &&
         (map.heads == 1 || is_stride(map.head_stride)) && (map.batches == 1 || is_stride(map.batch_stride));
}

// A map, which operand it began with (the first ones are kept where there are too many), and how many bytes behind a multiple
// of a row it begins.
struct Entry {
  TileMap map;
  std::size_t place;
  std::uintptr_t offset;
};
Entry entry_of(const TileMap& map, std::size_t place) {
  const auto row_bytes = static_cast<std::uintptr_t>(map.row_stride * kElementBytes);
  return {map, place, reinterpret_cast<std::uintptr_t>(map.begin) % row_bytes};
}

// Operands whose rows lie whole rows apart: of one tensor, say, or of two that happen to.
auto lattice_of(const Entry& entry) {
  const TileMap& map = entry.map;
  return std::tuple(map.row_stride, map.head_stride, map.batch_stride, map.width, entry.offset);
}
std::int64_t elements_between(const TileMap& map, const TileMap& later) {
  return (static_cast<const char*>(later.begin) - static_cast<const char*>(map.begin)) / kElementBytes;
}
std::int64_t rows_between(const TileMap& map, const TileMap& later) { return elements_between(map, later) / map.row_stride; }

// Rows of nobody between the two, or, negative, rows of both; none where one map cannot have both.
std::optional<std::int64_t> gap_between(const Entry& entry, const Entry& later) {
  if (lattice_of(entry) != lattice_of(later) || entry.map.shifts > 1 || later.map.shifts > 1) return std::nullopt;
  const std::int64_t row = rows_between(entry.map, later.map);
  if (std::max(entry.map.rows, row + later.map.rows) > kMostRows) return std::nullopt;
  return row - entry.map.rows;
}
bool touches(const Entry& entry, const Entry& later) { return gap_between(entry, later).value_or(1) <= 0; }
void take_in(Entry& entry, const Entry& later) {
  TileMap& map = entry.map;
  const TileMap& other = later.map;
  const std::int64_t row = rows_between(map, other);
  map.dense = map.dense && other.dense && row <= map.rows && map.heads == other.heads && map.batches == other.batches;
  map.rows = std::max(map.rows, row + other.rows);
  map.heads = std::max(map.heads, other.heads);
  map.batches = std::max(map.batches, other.batches);
  entry.place = std::min(entry.place, later.place);
}

// Tasks mostly come in the order of their rows, each with two operands: what continues one of the latest is not looked at
// again.
void append(std::vector<Entry>& entries, const Entry& entry) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(2, entries.size()); ++back) {
    Entry& latest = entries[entries.size() - back];
    if (latest.map.begin <= entry.map.begin && touches(latest, entry)) return take_in(latest, entry);
  }
  entries.push_back(entry);
}

// What touches becomes one.
std::vector<Entry> runs_of(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tuple(lattice_of(a), a.map.begin, a.place) < std::tuple(lattice_of(b), b.map.begin, b.place);
  });
  std::vector<Entry> runs;
  for (const Entry& entry : entries) {
    if (!runs.empty() && touches(runs.back(), entry)) {
      take_in(runs.back(), entry);
    } else {
      runs.push_back(entry);
    }
  }
  return runs;
}

// Whether the run can be one view more of those of the map, not whole rows behind.
bool continues(const TileMap& map, const TileMap& later) {
  if (map.row_stride != later.row_stride || map.head_stride != later.head_stride || map.batch_stride != later.batch_stride ||
      map.width != later.width || std::abs(map.rows - later.rows) > 1 || map.shifts == kMostShifts) {
    return false;
  }
  const std::int64_t distance = elements_between(map, later);
  const std::int64_t stride = map.shifts > 1 ? map.shift_stride : distance;
  if (!is_stride(stride) || stride % map.row_stride == 0 || distance != map.shifts * stride) return false;
  if (std::max(map.batches, later.batches) == 1) return true;
  return map.batch_stride % stride == 0 && map.batch_stride / stride < kMostRows / std::max(map.batches, later.batches);
}

// Where there is no room for all: views that are alike, and of which each begins as far behind the one before, have one map, as
// those of a branch of LongNet, which begin with another row for each head. Of lattices with one run of each operand.
std::vector<Entry> with_shifts(std::vector<Entry> runs) {
  if (runs.size() <= TileMaps::kMost) return runs;
  std::vector<Entry> result, views;
  for (std::size_t begin = 0, end = 0; begin < runs.size(); begin = end) {  // lattice after lattice
    while (end < runs.size() && lattice_of(runs[end]) == lattice_of(runs[begin])) ++end;
    std::vector<Entry>& place = end - begin <= 2 ? views : result;
    place.insert(place.end(), runs.begin() + static_cast<std::ptrdiff_t>(begin),
                 runs.begin() + static_cast<std::ptrdiff_t>(end));
  }
  const auto strides_of = [](const TileMap& map) {
    return std::tuple(map.row_stride, map.head_stride, map.batch_stride, map.width, map.begin);
  };
  std::sort(views.begin(), views.end(), [&](const Entry& a, const Entry& b) { return strides_of(a.map) < strides_of(b.map); });
  for (const Entry& run : views) {
    if (result.empty() || !continues(result.back().map, run.map)) {
      result.push_back(run);
      continue;
    }
    Entry& entry = result.back();
    TileMap& map = entry.map;
    const bool alike = map.rows == run.map.rows && map.heads == run.map.heads && map.batches == run.map.batches;
    if (map.shifts == 1) map.shift_stride = elements_between(map, run.map);
    ++map.shifts;
    map.dense = map.dense && run.map.dense && alike;
    map.rows = std::max(map.rows, run.map.rows);
    map.heads = std::max(map.heads, run.map.heads);
    map.batches = std::max(map.batches, run.map.batches);
    if (map.batches > 1) map.item_step = static_cast<int>(map.batch_stride / map.shift_stride);
    entry.place = std::min(entry.place, run.place);
  }
  return result;
}

// As many as there may be, if that can be: runs with the smallest gaps between them become one.
std::vector<Entry> at_most(std::size_t most, std::vector<Entry> runs) {
  if (runs.size() <= most) return runs;
  std::vector<std::pair<std::int64_t, std::size_t>> gaps;  // before which run
  for (std::size_t index = 1; index < runs.size(); ++index) {
    if (const auto gap = gap_between(runs[index - 1], runs[index])) gaps.emplace_back(*gap, index);
  }
  const std::size_t count = std::min(runs.size() - most, gaps.size());
  std::nth_element(gaps.begin(), gaps.begin() + static_cast<std::ptrdiff_t>(count), gaps.end());
  std::vector<bool> is_joined(runs.size());
  for (std::size_t index = 0; index < count; ++index) is_joined[gaps[index].second] = true;
  std::vector<Entry> result;
  for (std::size_t index = 0; index < runs.size(); ++index) {
    if (is_joined[index] && gap_between(result.back(), runs[index])) {
      take_in(result.back(), runs[index]);
    } else {
      result.push_back(runs[index]);
    }
  }
  return result;
}

// The operands on the side that blocks of this owner walk over, as they would be by themselves.
struct OperandMaps {
  TileMap first, second;
};
OperandMaps operands_of(const kernels::AttendShape& shape, const kernels::AttendTask& task, Owner owner) {
  const auto map_of = [&](const auto& operand, std::int64_t rows, std::int64_t heads, int width) {
    return TileMap{operand.data, operand.row_stride, operand.head_stride, operand.batch_stride, rows, heads, task.batch_count,
                   width};
  };
  if (owner == Owner::key_gradients) {
    return {map_of(task.q, task.q_count, task.head_count, shape.head_dim),
            map_of(task.d_out, task.q_count, task.head_count, shape.head_dim_v)};
  }
  const std::int64_t last_head = task.head_first + (task.head_count - 1) * task.head_step;
  const std::int64_t heads = kernels::kv_index(task, last_head / shape.group) + 1;
  return {map_of(task.k, task.k_count, heads, shape.head_dim), map_of(task.v, task.k_count, heads, shape.head_dim_v)};
}

}  // namespace

TileMaps tile_maps_of(const kernels::AttendShape& shape, std::span<const kernels::AttendTask> tasks, Owner owner) {
  TileMaps maps;
  maps.complete = true;
  std::vector<Entry> entries;
  std::size_t place = 0;
  const auto add = [&](const TileMap& map) {
    if (map.rows <= 0) return;
    if (can_be_mapped(map)) {
      append(entries, entry_of(map, place++));
    } else {
      maps.complete = false;
    }
  };
  for (const kernels::AttendTask& task : tasks) {
    const OperandMaps operands = operands_of(shape, task, owner);
    add(operands.first);
    add(operands.second);
  }
  std::vector<Entry> runs = at_most(TileMaps::kMost, with_shifts(runs_of(std::move(entries))));
  std::sort(runs.begin(), runs.end(), [](const Entry& a, const Entry& b) { return a.place < b.place; });
  for (const Entry& run : runs) {
    maps.complete = maps.complete && run.map.dense && maps.count < TileMaps::kMost;
    if (maps.count < TileMaps::kMost) maps.maps[maps.count++] = run.map;
  }
  return maps;
}

TilePlace place_in(const TileMaps& maps, const TileMap& operand) {
  for (int index = 0; index < maps.count; ++index) {
    const TileMap& map = maps.maps[index];
    if (map.row_stride != operand.row_stride || map.head_stride != operand.head_stride ||
        map.batch_stride != operand.batch_stride || map.width != operand.width || operand.heads > map.heads ||
        operand.batches > map.batches) {
      continue;
    }
    std::int64_t distance = elements_between(map, operand);
    for (int shift = 0; shift < map.shifts && distance >= 0; ++shift, distance -= map.shift_stride) {
      const std::int64_t row = distance / map.row_stride;
      if (row * map.row_stride == distance && row + operand.rows <= map.rows)
        return {index, static_cast<int>(row), map.dense, shift};
    }
  }
  return {};
}

std::vector<TaskPlaces> places_in(const TileMaps& maps, const kernels::AttendShape& shape,
                                  std::span<const kernels::AttendTask> tasks, Owner owner) {
  std::vector<TaskPlaces> places;
  places.reserve(tasks.size());
  for (const kernels::AttendTask& task : tasks) {
    const OperandMaps operands = operands_of(shape, task, owner);
    places.push_back({place_in(maps, operands.first), place_in(maps, operands.second)});
  }
  return places;
}

}  // namespace ringspan::cuda
