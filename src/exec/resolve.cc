#include "exec/resolve.h"

#include <numeric>

namespace ringspan::internal {
namespace {

// One operand: its first element and the strides between neighbours of the task, in elements.
struct Located {
  std::byte* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
};

Located locate(const Memory& memory, std::int64_t batch_first, const Progression& heads, const RowRef& ref) {
  Located located;
  if (ref.view < 0) return located;
  const View& view = memory.program->views[static_cast<std::size_t>(ref.view)];
  std::byte* base = nullptr;
  if (view.in_arena) {
    const bool elsewhere = memory.bindings->saved != nullptr && view.offset < memory.saved_bytes;
    base = (elsewhere ? memory.bindings->saved : memory.arena) + view.offset;
    located.batch_stride = view.batch_stride;
    located.row_stride = view.row_stride;
    located.head_stride = view.head_stride;
  } else {
    const Binding& binding = (*memory.bindings)[view.kind];
    if (binding.data == nullptr) return located;
    base = binding.data;
    located.batch_stride = binding.batch_stride;
    located.row_stride = binding.row_stride;
    located.head_stride = binding.head_stride;
  }
  const std::int64_t head = (heads.first - view.heads.first) / view.heads.stride;
  const std::int64_t element =
      (batch_first - view.batch_first) * located.batch_stride + ref.row * located.row_stride + head * located.head_stride;
  located.data = base + element * size_of(view.dtype);
  located.dtype = view.dtype;
  located.row_stride *= ref.step;
  located.head_stride *= heads.stride / view.heads.stride;
  return located;
}

kernels::Rows rows_of(const Located& located) {
  return {located.data, located.batch_stride, located.row_stride, located.head_stride};
}
kernels::KeyRows key_rows_of(const Located& located) {
  return {located.data, located.batch_stride, located.row_stride, located.head_stride};
}

}  // namespace

Progression covering_kv_heads(const Progression& heads, int group) {
  const std::int64_t first = heads.first / group;
  const std::int64_t last = heads.last() / group;
  if (first == last) return {first, 1, 1};
  std::int64_t stride = heads.stride / group;
  if (heads.stride % group != 0) {
    stride = 0;
    for (std::int64_t index = 1; index < heads.count && stride != 1; ++index) {
      stride = std::gcd(stride, heads.at(index) / group - first);
    }
  }
  return {first, stride, (last - first) / stride + 1};
}

int operand_count(LaunchKind kind) {
  switch (kind) {
    case LaunchKind::fill:
      return 1;
    case LaunchKind::copy:
    case LaunchKind::add:
    case LaunchKind::sink_gradient:
      return 2;
    case LaunchKind::delta:
      return 4;
    case LaunchKind::merge:
      return 5;
    case LaunchKind::merge_states:
    case LaunchKind::finalize:
      return 6;
    case LaunchKind::attend:
      return kAttendOperands;
    case LaunchKind::attend_backward:
    case LaunchKind::fused:
    case LaunchKind::fused_backward:
      return kAllOperands;
    case LaunchKind::sum_sinks:
      return 0;
  }
  return 0;
}

kernels::RowTask resolve_row(const Memory& memory, LaunchKind kind, const RowItem& item) {
  kernels::RowTask task;
  task.batch_count = item.batch_count;
  task.row_count = item.rows;
  task.head_count = item.heads.count;
  task.head_first = item.heads.first;
  task.head_step = item.heads.stride;
  for (int index = 0; index < operand_count(kind); ++index) {
    const Located located = locate(memory, item.batch_first, item.heads, item.operands[index]);
    task.operands[index] = {located.data, located.dtype, located.batch_stride, located.row_stride, located.head_stride};
  }
  return task;
}

kernels::AttendTask resolve_attend(const Memory& memory, LaunchKind kind, const AttendItem& item) {
  const Slice& slice = item.slice;
  const Progression kv = covering_kv_heads(slice.heads, memory.group);
  const auto query = [&](int operand) {
    return rows_of(locate(memory, slice.batch_first, slice.heads, item.operands[operand]));
  };
  const auto key = [&](int operand) { return key_rows_of(locate(memory, slice.batch_first, kv, item.operands[operand])); };
  kernels::AttendTask task;
  task.batch_first = slice.batch_first;
  task.batch_count = slice.batch_count;
  task.head_first = slice.heads.first;
  task.head_step = slice.heads.stride;
  task.head_count = slice.heads.count;
  task.kv_head_first = kv.first;
  task.kv_head_step = kv.stride;
  task.q_first = slice.q.first;
  task.q_step = slice.q.stride;
  task.q_count = slice.q.count;
  task.k_first = slice.k.first;
  task.k_step = slice.k.stride;
  task.k_count = slice.k.count;
  task.lo = slice.lo;
  task.hi = slice.hi;
  task.diagonal = slice.diagonal;
  task.state = slice.state;
  task.q = query(kQ);
  task.k = key(kK);
  task.v = key(kV);
  if (is_fused(kind)) {
    task.lse = query(kLse);
    if (kind == LaunchKind::fused) return task;
    task.d_out = query(kDOut);
    task.dq = query(kDq);
    task.dk = key(kDk);
    task.dv = key(kDv);
  } else if (kind == LaunchKind::attend) {
    task.m = query(kM);
    task.l = query(kL);
    task.acc = query(kAcc);
    if (item.operands[kResult].view < 0) return task;
    task.o = query(kResult);
    task.lse = query(kResultLse);
    task.o32 = query(kResult32);
  } else {
    task.d_out = query(kDOut);
    task.lse = query(kLse);
    task.delta = query(kDelta);
    task.dq = query(kDq);
    task.dk = key(kDk);
    task.dv = key(kDv);
    task.writes_dq = item.writes_dq;
    task.writes_dk_dv = item.writes_dk_dv;
  }
  return task;
}

FusedTask resolve_fused(const Memory& memory, LaunchKind kind, const AttendItem& item) {
  return {resolve_attend(memory, kind, item),
          rows_of(locate(memory, item.slice.batch_first, item.slice.heads, item.operands[kOut]))};
}

}  // namespace ringspan::internal
