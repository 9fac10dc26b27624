// Fuse: a pass whose every row takes one call of a library's fused attention: no running state, no merge. Pure.
//
// A fused call computes final rows of o and lse from all the keys that they see, or the whole of their dq, dk and dv, in the
// storage dtype. It knows queries and keys by index only: a band on positions becomes one on indices here, and rows that see
// nothing, which a call does not define, are cut off and filled. What a pass cannot be fused for is said in words.
//
// Cost: O(items^2), for at most kMostFusedCalls items; allocates.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan_data.h"

namespace ringspan::internal {

// More calls than this are left to kernels that take a list of tasks in one launch.
inline constexpr std::int64_t kMostFusedCalls = 64;

// Query t of `queries` sees key u of `keys` where low <= u - t <= high, both in order of position.
struct IndexBand {
  std::int64_t low = 0, high = 0;
  bool has_low = false, has_high = false;  // whether any pair is beyond the bound
  bool operator==(const IndexBand&) const = default;
};

// The band of a slice on indices; nothing where positions in different steps make it none. `empty` where no pair is inside.
struct IndexedSlice {
  Slice slice;  // without queries and keys that see nothing at its ends
  IndexBand band;
  bool empty = false;
};
std::optional<IndexedSlice> index_slice(const Slice& slice);

// Query heads of the slice per kv head that they read, if each kv head is read by as many, one after the other; else 0.
std::int64_t fused_group(const Progression& heads, int group);

struct FusedProgram {
  std::string refusal;  // empty: it can be
  Program program;      // without a workspace
};
FusedProgram fuse(const PlanData& data, Pass pass);

// Gives the program a workspace, its only region besides what forward keeps.
void set_fused_workspace(Program* program, std::int64_t bytes);

std::int64_t fused_workspace_bytes(const Program& program);

// Whether the program calls a fused attention.
bool is_fused(const Program& program);

}  // namespace ringspan::internal
