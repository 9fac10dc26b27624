// The tiled kernels: drivers that walk tasks and cut them into tiles, over the TileOps of one instruction set.
//
// Forward: for each unit, task and run of key tiles (packed once, for all query heads of the group and for the next task if it
// reads the same keys), the query tiles that see them; states are read and written once per run. Where units are fewer than
// threads, also by ranges of query positions; where queries are few, by parts of the keys (key_split.h).
// Backward: key tiles outside, query tiles inside; dk and dv gather in scratch. Where units are few, key tiles are dealt, and
// each follows the one before over the queries (turnstile.h).
//
// Cost: flops of the visible pairs, rounded up to register tiles at the edges of the band; scratch independent of the number
// of rows: at most 3 MiB per thread, with the kernels' own tile sizes.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attend.h"
#include "kernels/task_view.h"
#include "kernels/tile.h"

namespace ringspan::kernels {

// The dims of a shape; its tile sizes become those of the implementation where they are 0.
TileDims tile_dims(const AttendShape& shape, TileSizes (*sizes)(const TileDims&));

// `count` rows of `width` bytes, `stride` bytes apart, that will be read or added to.
inline AheadRows ahead_rows(const void* data, std::int64_t stride, std::int64_t width, std::int64_t count) {
  constexpr std::int64_t kLine = 64;
  const char* const first = static_cast<const char*>(data);
  const auto offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) % kLine);  // in its line
  if (stride == width) return {first - offset, kLine, 1, ceil_div(offset + count * width, kLine), 0};
  if (stride % kLine == 0) return {first - offset, stride, ceil_div(offset + width, kLine), count, 0};
  return {first, stride, ceil_div(kLine - 1 + width, kLine), count, 0};  // as many as any of them may touch
}

std::int64_t attend_tiled_scratch_bytes(const TileOps& ops, const AttendShape& shape);
// Keys of a task that are packed at once, so that no row has to wait for more.
std::int64_t attend_tiled_keys_without_state(const TileOps& ops, const AttendShape& shape);
void attend_tiled(const TileOps& ops, const AttendParams& params, std::span<const AttendTask> tasks, const Context& context);

std::int64_t attend_backward_tiled_scratch_bytes(const TileOps& ops, const AttendShape& shape);
void attend_backward_tiled(const TileOps& ops, const AttendParams& params, std::span<const AttendTask> tasks,
                           const Context& context);

}  // namespace ringspan::kernels
