// What a launch passes to its blocks: plain values and pointers into the memory of the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/tile_maps.h"
#include "kernels/attend.h"
#include "kernels/rowwise.h"

namespace ringspan::cuda {

// Which rows the blocks own and write: of the state, of dq, or of dk and dv.
enum class Owner : std::uint8_t { state, query_gradients, key_gradients };

// Tasks over the same rows (queries, or keys for dk and dv), which one block after the other takes in for its own rows.
// Blocks [first_block, first_block + columns x tiles) belong to it: of `together` columns, a head of a batch item each, first
// the tiles with most work, then the next ones, and so on (find_work). So the last blocks of a launch are small ones, and what
// runs at one time reads the same rows. All its tasks have results (kernels/attend.h), or none.
struct Group {
  std::int64_t first_block = 0;
  std::int64_t first_task = 0;
  std::int32_t task_count = 0;
  std::int32_t tiles = 0;
  // Of its heads, head_first + t head_step: indices of the tasks' query heads, or kv heads.
  std::int32_t head_first = 0, head_step = 1, heads = 0;
  std::int32_t columns = 0, together = 1;
};

// The instructions that products of tiles are made of: mma.sync by warps (machine.h), wgmma by warpgroups (warpgroup.h).
enum class TileKernel : std::uint8_t { mma, wgmma };

struct AttendArguments {
  TileKernel kernel = TileKernel::mma;
  kernels::AttendParams params;
  std::uint32_t dropout_threshold = 0;
  float keep = 1.0F;           // what a kept probability is multiplied with
  float softcap_scale = 0.0F;  // scale / softcap
  // In attend a score without options stays the product q . k, one multiplication less: score_unit of it is a natural one,
  // exponent_unit one of powers of 2. score_unit is scale, or 1 where scale is none that a maximum may do without (negative, 0,
  // above 1, where a maximum may be finite that the score is not, or so small that its inverse could overflow).
  float score_unit = 1.0F, inverse_score_unit = 1.0F, exponent_unit = 0.0F;
  const kernels::AttendTask* tasks = nullptr;  // in the order of the groups
  const Group* groups = nullptr;
  std::int64_t group_count = 0;
  std::int64_t blocks = 0;  // of this launch
  // wgmma: how many blocks residents took beside their first ones (work_list.h); 0 between launches.
  std::int32_t* taken = nullptr;
  TileMaps maps;                       // wgmma: of the side that blocks walk over; may lack any
  const TaskPlaces* places = nullptr;  // wgmma: of each task in these maps
};

enum class RowOp : std::uint8_t { fill, copy, add, merge, merge_states, finalize, delta };

// Tasks that run side by side; task i has blocks [first_blocks[i], first_blocks[i + 1]).
struct RowArguments {
  RowOp op = RowOp::fill;
  int width = 1;
  float value = 0.0F;            // fill: the value; finalize: output_scale
  const float* sinks = nullptr;  // finalize, by head
  // In memory of the device; or, where these are null, a short list here: a launch brings its arguments along, a copy before it
  // would take as long as the launch.
  const kernels::RowTask* tasks = nullptr;
  const std::int64_t* first_blocks = nullptr;
  std::int64_t task_count = 0;
  static constexpr std::size_t kShort = 12;
  kernels::RowTask short_tasks[kShort];
  std::int64_t short_first_blocks[kShort] = {};
  RINGSPAN_DEVICE const kernels::RowTask& task(std::int64_t index) const {
    return (tasks != nullptr ? tasks : short_tasks)[index];
  }
  RINGSPAN_DEVICE std::int64_t first_block(std::int64_t index) const {
    return (first_blocks != nullptr ? first_blocks : short_first_blocks)[index];
  }
};
static_assert(sizeof(RowArguments) <= 4096);  // all that a launch may bring along

struct SinkArguments {
  const kernels::RowTask* tasks = nullptr;
  std::int64_t task_count = 0;
  const float* sinks = nullptr;
  double* gradient = nullptr;  // of this rank (heads); for the total: of all ranks (ranks x heads)
  float* total = nullptr;
  std::int64_t heads = 0, ranks = 0;
};

}  // namespace ringspan::cuda
