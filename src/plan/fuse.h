// Fuse: a pass whose every row takes one call of a library's fused attention: no running state, no merge. Pure.
//
// A fused call computes final rows of o and lse from all the keys that they see, or the whole of their dq, dk and dv, in the
// storage dtype. It knows queries and keys by index only: a band on positions becomes one on indices here, and rows that see
// nothing, which a call does not define, are cut off and filled. What a pass cannot be fused for is said in words.
//
// With PlanOptions::partials = storage rows may also take many calls (fuse_partials.cc): what each leaves, in the storage
// dtype, is merged into the running state, or added to the gradients, of the program that was there.
//
// Cost: fuse O(items^2), for at most kMostFusedCalls items, fuse_partials O(items + views); allocates.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan_data.h"

namespace ringspan::internal {

// More calls than this in a pass, or in a launch whose results are merged, are left to kernels that take a list of tasks.
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

// The kv heads of a slice that fused_group() says are read evenly.
Progression fused_kv_heads(const Slice& slice, int group);

// The rows of `to`, which is a part of `from` without some of its ends.
RowRef moved(const RowRef& ref, const Progression& from, const Progression& to);

struct FusedProgram {
  std::string refusal;  // empty: it can be
  Program program;      // without a workspace
};
FusedProgram fuse(const PlanData& data, Pass pass);

// The program of the pass with a fused call in the place of each task, one after the other: its rows lie in a region of their
// own ("partials", as large as the largest call's) until the row launch behind it has taken them in. All else is as it was.
FusedProgram fuse_partials(const PlanData& data, Pass pass);

// Why a fused call can compute no part of the problem, whatever rows it takes; empty: nothing.
std::string fused_problem_refusal(const PlanData& data);

// Gives the program a workspace, behind all its other regions.
void set_fused_workspace(Program* program, std::int64_t bytes);

std::int64_t fused_workspace_bytes(const Program& program);

// Whether the program calls a fused attention.
bool is_fused(const Program& program);

}  // namespace ringspan::internal
