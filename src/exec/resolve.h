// Resolve: from the items of a program (views, rows, heads) to kernel tasks (pointers, strides).
//
// Pure address arithmetic; no allocation. The kernels get element strides from one query head, kv head, row or batch item of
// the task to the next.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exec/bindings.h"
#include "exec/device.h"
#include "kernels/attend.h"
#include "kernels/rowwise.h"
#include "plan/plan_data.h"

namespace ringspan::internal {

// Where the views of one program lie during one pass.
struct Memory {
  const Program* program = nullptr;
  std::byte* arena = nullptr;
  const Bindings* bindings = nullptr;
  int group = 1;                 // query heads per kv head
  std::int64_t saved_bytes = 0;  // at the arena's begin, or where the bindings say
};

// The kv heads that the query heads read: as a progression where they are one, otherwise a progression that covers them and
// divides all their distances, so that it fits into every store that holds them.
Progression covering_kv_heads(const Progression& heads, int group);

// How many operands a launch has, those that may be missing included.
int operand_count(LaunchKind kind);

kernels::RowTask resolve_row(const Memory& memory, LaunchKind kind, const RowItem& item);
kernels::AttendTask resolve_attend(const Memory& memory, LaunchKind kind, const AttendItem& item);
FusedTask resolve_fused(const Memory& memory, LaunchKind kind, const AttendItem& item);

}  // namespace ringspan::internal
