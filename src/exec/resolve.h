// Resolve: from the items of a program (views, rows, heads) to kernel tasks (pointers, strides).
//
// Pure address arithmetic; no allocation. The kernels get element strides from one query head, kv head, row or batch item of
// the task to the next. check_program() proves once, before anything runs, that no task leaves the memory it may touch.
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
  int group = 1;  // query heads per kv head
};

// How many operands a launch has, those that may be missing included.
int operand_count(LaunchKind kind);

kernels::RowTask resolve_row(const Memory& memory, LaunchKind kind, const RowItem& item);
kernels::AttendTask resolve_attend(const Memory& memory, LaunchKind kind, const AttendItem& item);
FusedTask resolve_fused(const Memory& memory, LaunchKind kind, const AttendItem& item);

// Throws std::logic_error (a bug of the planner) unless every item of every launch lies inside its views, every view and
// message inside the arena, and widths and dtypes are what the kernels expect. O(items).
void check_program(const PlanData& plan, const Program& program);

}  // namespace ringspan::internal
