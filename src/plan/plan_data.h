// PlanData: the plan of one rank in full, as the executor runs it. Values only.
//
// A program is a list of stages. Executing a stage:
//   1. run the launches of `before` and wait for everything launched so far;
//   2. begin `copies`, and post every round of `rounds` (one Communicator::post each, in order);
//   3. run the launches of `compute` while copies and messages move;
//   4. wait for the launches, then for copies and requests.
// So a launch reads what was received (copied) in an earlier stage, a send (copy) reads what was written in an earlier stage or
// in `before`, and a buffer is received (copied) into only after the stage that last used it has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/int128.h"
#include "pattern/slice.h"
#include "ringspan/plan.h"

namespace ringspan::internal {

// Rows of some kv or query heads of some batch items: stored densely as (batch, positions, heads, width).
struct Box {
  std::int64_t batch_first = 0;
  std::int64_t batch_count = 0;
  Progression heads;
  Progression positions;

  std::int64_t rows() const { return batch_count * positions.count * heads.count; }  // (batch, position, head) rows
  bool operator==(const Box&) const = default;
};

// The tensors that rows belong to. The caller's tensors, and what only travels or lives in the arena.
enum class TensorKind : std::uint8_t {
  q,
  k,
  v,
  o,
  lse,
  d_out,
  dlse,
  dq,
  dk,
  dv,  // the caller's
  delta,
  m,
  l,
  acc,
  partial_o,
  partial_lse,
  o_float32,
  sink_gradient  // ours
};
inline constexpr int kCallerTensors = 10;
std::string_view to_string(TensorKind kind);
inline bool is_key_side(TensorKind kind) {
  return kind == TensorKind::k || kind == TensorKind::v || kind == TensorKind::dk || kind == TensorKind::dv;
}

// One tensor's memory as rows: either a caller's tensor (address and strides known at execution) or a part of the arena.
struct View {
  TensorKind kind = TensorKind::q;
  bool in_arena = false;
  DType dtype = DType::float32;
  int width = 0;                                                   // elements of a row
  std::int64_t offset = 0;                                         // bytes into the arena
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;  // elements; in the arena only
  std::int64_t batch_first = 0;
  Progression heads;  // query heads, or kv heads on the key side
};

// Rows row, row + step, ... of a view.
struct RowRef {
  std::int32_t view = -1;  // -1: none
  std::int64_t row = 0;
  std::int64_t step = 1;
};

// A rowwise task: the same (batch, heads, rows) of several operands, see kernels/rowwise.h for their order.
struct RowItem {
  std::int64_t batch_first = 0, batch_count = 0;
  Progression heads;  // of the operands' own side
  std::int64_t rows = 0;
  RowRef operands[6];
};

// Names of the operands of an AttendItem.
enum AttendOperand : int {
  kQ,
  kK,
  kV,
  kM,
  kL,
  kAcc,
  kAttendOperands,
  kDOut = kM,
  kLse = kL,
  kDelta = kAcc,
  kDq = 6,
  kDk,
  kDv,
  kAllOperands,
  kOut = kDelta,  // of a fused call, which has lse where backward has it
  kResult = kDq,  // of a forward task that is the last over its rows: o, lse and, or none, o in float32
  kResultLse = kDk,
  kResult32 = kDv
};

// One affine (q, k, band) piece; forward uses q k v m l acc, and the results where it is the last over its rows
// (plan/settle.h), backward q k v d_out lse delta dq dk dv. A fused call (plan/fuse.h) uses q k v lse o, backward d_out dq dk
// dv too, all but lse in the storage dtype.
struct AttendItem {
  Slice slice;  // batch, query heads, q, k, band, diagonal, state
  RowRef operands[kAllOperands];
  bool writes_dq = false, writes_dk_dv = false;  // of backward: these are the caller's (plan/settle_gradients.h)
};

enum class LaunchKind : std::uint8_t {
  fill,
  copy,
  add,
  merge,
  merge_states,
  finalize,
  delta,
  attend,
  attend_backward,
  sink_gradient,
  sum_sinks,
  fused,
  fused_backward
};
inline constexpr int kLaunchKinds = 13;
std::string_view to_string(LaunchKind kind);
inline bool is_fused(LaunchKind kind) { return kind == LaunchKind::fused || kind == LaunchKind::fused_backward; }
// Whether its items are attend_items.
inline bool is_attention(LaunchKind kind) {
  return kind == LaunchKind::attend || kind == LaunchKind::attend_backward || is_fused(kind);
}

// Items [first, first + count) of the program's row_items (or attend_items).
struct Launch {
  LaunchKind kind = LaunchKind::copy;
  std::int64_t first = 0;
  std::int64_t count = 0;
  int width = 1;            // elements per row
  float value = 0.0F;       // fill: the value; finalize: output_scale
  bool with_sinks = false;  // finalize
};

struct Part {
  TensorKind kind = TensorKind::k;
  DType dtype = DType::float32;
  int width = 0;
  int state = 0;
  bool operator==(const Part&) const = default;
};

// What a message or a slot holds: for each part, for each box, the dense rows. float32 parts come first.
struct Bundle {
  std::vector<Box> boxes;
  std::vector<Part> parts;
  std::int64_t bytes = 0;
};

enum class TransferOp : std::uint8_t { copy, add, merge };

struct Transfer {
  bool send = false;
  int peer = 0;
  std::int64_t offset = 0;  // into the arena
  std::int64_t bytes = 0;
  std::int32_t bundle = -1;  // of the program
  int source = 0;            // the rank whose rows these are (a relay passes on others')
  TransferOp op = TransferOp::copy;
};

struct Round {
  std::uint64_t number = 0;
  std::vector<Transfer> transfers;
};

struct Stage {
  std::string name;
  std::vector<Launch> before;
  std::vector<Launch> copies;  // between a caller's tensor on the host and the arena on a device; kind copy, one dtype
  std::vector<Round> rounds;
  std::vector<Launch> compute;
};

enum class Component : std::uint8_t { buckets, staging, state, gradients, saved, scratch };
std::string_view to_string(Component component);

// A part of the arena. Offsets are multiples of 64; regions of one program do not overlap; `saved` regions lie at the same
// place in both programs.
struct Region {
  std::string name;
  Component component = Component::buckets;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct Program {
  std::vector<View> views;
  std::vector<RowItem> row_items;
  std::vector<AttendItem> attend_items;
  std::vector<Bundle> bundles;
  std::vector<Stage> stages;
  std::vector<Region> regions;
  std::int64_t scratch_offset = 0;        // kernel scratch, one of the regions
  std::int64_t sink_gradient_offset = 0;  // ranks x heads float64, one of the regions (backward with sinks)
  std::int64_t arena_bytes = 0;
  Int128 pairs = 0;
  std::int64_t excess_rows = 0;
  std::int64_t visited_slices = 0;  // by the lowering, while this program was planned (ring routes not counted)
  std::int64_t joined_shards = 0;   // into the rows that a rank gathers, while this program was planned
  std::int64_t tried_pairs = 0;     // of rows of queries and of keys that may share a slice, while this program was planned
};

// What it keeps in memory.
std::int64_t bytes_of(const Program& program);

// Of a launch of Stage::copies.
void add_host_bytes(const Program& program, const Launch& launch, Plan::HostBytes* bytes);

struct PlanData {
  Problem problem;
  PlanOptions options;  // strategy and bucket_rows resolved
  SizeSource bucket_source = SizeSource::standard;
  KernelChoice attend, attend_backward;
  int rank = 0;
  Shard shard_q;
  Shard shard_k;
  Program forward;
  Program backward;  // empty unless options.backward
  bool has_backward = false;
  Int128 nanoseconds = 0;          // by the cost model
  Int128 slowest_nanoseconds = 0;  // of the ranks that the choice looked at
  int ranks_looked_at = 0;
  std::vector<Rejected> rejected;
  std::uint64_t fingerprint = 0;
  bool has_own_arena = false;          // laid out anew for this rank's device: planning says nothing of other ranks' arenas
  std::shared_ptr<const void> choice;  // kept for who plans other ranks: see choose_together.h
};

}  // namespace ringspan::internal
