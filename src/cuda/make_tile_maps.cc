#include "cuda/make_tile_maps.h"

#include <algorithm>

#include "kernels/task_view.h"

namespace ringspan::cuda {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kMostRows = std::int64_t{1} << 31;         // coordinates are 32 bits wide
constexpr std::int64_t kMostStrideBytes = std::int64_t{1} << 40;  // cuTensorMapEncodeTiled

bool is_stride(std::int64_t elements) {
  const std::int64_t bytes = elements * kElementBytes;
  return elements > 0 && bytes % 16 == 0 && bytes < kMostStrideBytes;
}
bool can_be_mapped(const TileMap& map) {
  return reinterpret_cast<std::uintptr_t>(map.begin) % 16 == 0 && map.rows > 0 && is_stride(map.row_stride) &&
         (map.heads == 1 || is_stride(map.head_stride)) && (map.batches == 1 || is_stride(map.batch_stride));
}

// Whether `map` takes in the rows of `other`, which lie some whole rows before or behind its own.
bool extend(TileMap& map, const TileMap& other) {
  if (map.row_stride != other.row_stride || map.head_stride != other.head_stride || map.batch_stride != other.batch_stride ||
      map.width != other.width) {
    return false;
  }
  const std::int64_t row_bytes = map.row_stride * kElementBytes;
  const std::int64_t distance = static_cast<const char*>(other.begin) - static_cast<const char*>(map.begin);
  if (distance % row_bytes != 0) return false;
  const std::int64_t row = distance / row_bytes;
  const std::int64_t first = std::min<std::int64_t>(row, 0);
  const std::int64_t end = std::max(map.rows, row + other.rows);
  if (end - first > kMostRows) return false;
  const bool touches = row <= map.rows && row + other.rows >= 0;
  map.dense = map.dense && touches && map.heads == other.heads && map.batches == other.batches;
  if (row < 0) map.begin = other.begin;
  map.rows = end - first;
  map.heads = std::max(map.heads, other.heads);
  map.batches = std::max(map.batches, other.batches);
  return true;
}

// Returns whether the operand's rows are in a map.
bool is_taken_in(TileMaps& maps, const TileMap& map) {
  if (!can_be_mapped(map)) return false;
  for (int index = 0; index < maps.count; ++index) {
    if (extend(maps.maps[index], map)) return true;
  }
  if (maps.count == TileMaps::kMost) return false;
  maps.maps[maps.count++] = map;
  return true;
}

void add(TileMaps& maps, const TileMap& map) {
  if (map.rows > 0 && !is_taken_in(maps, map)) maps.complete = false;
}

template <typename Operand>
TileMap map_of(const kernels::AttendTask& task, const Operand& operand, std::int64_t rows, std::int64_t heads, int width) {
  return {operand.data, operand.row_stride, operand.head_stride, operand.batch_stride, rows, heads, task.batch_count, width};
}

}  // namespace

TileMaps tile_maps_of(const kernels::AttendShape& shape, std::span<const kernels::AttendTask> tasks, Owner owner) {
  TileMaps maps;
  maps.complete = true;
  for (const kernels::AttendTask& task : tasks) {
    if (owner == Owner::key_gradients) {
      add(maps, map_of(task, task.q, task.q_count, task.head_count, shape.head_dim));
      add(maps, map_of(task, task.d_out, task.q_count, task.head_count, shape.head_dim_v));
    } else {
      const std::int64_t last_head = task.head_first + (task.head_count - 1) * task.head_step;
      const std::int64_t heads = kernels::kv_index(task, last_head / shape.group) + 1;
      add(maps, map_of(task, task.k, task.k_count, heads, shape.head_dim));
      add(maps, map_of(task, task.v, task.k_count, heads, shape.head_dim_v));
    }
  }
  for (int index = 0; index < maps.count; ++index) maps.complete = maps.complete && maps.maps[index].dense;
  return maps;
}

}  // namespace ringspan::cuda
