#include "exec/resolve.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

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
    base = memory.arena + view.offset;
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

// The kv heads that the query heads read: as a progression where they are one, otherwise a progression that covers them and
// divides all their distances, so that it fits into every store that holds them.
Progression kv_heads_of(const Progression& heads, int group) {
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

kernels::Rows rows_of(const Located& located) {
  return {located.data, located.batch_stride, located.row_stride, located.head_stride};
}
kernels::KeyRows key_rows_of(const Located& located) {
  return {located.data, located.batch_stride, located.row_stride, located.head_stride};
}

}  // namespace

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
  const Progression kv = kv_heads_of(slice.heads, memory.group);
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

namespace {

// Checks one program; the members are what every item needs.
class Checker {
 public:
  Checker(const PlanData& plan, const Program& program) : plan_(plan), program_(program) {}

  void check() const {
    for (const Region& region : program_.regions) {
      RINGSPAN_CHECK(region.offset >= 0 && region.bytes >= 0 && region.offset % 64 == 0);
      RINGSPAN_CHECK(region.offset + region.bytes <= program_.arena_bytes);
    }
    for (const Stage& stage : program_.stages) {
      for (const Launch& launch : stage.before) check(launch);
      for (const Launch& launch : stage.copies) check_copies(launch);
      for (const Round& round : stage.rounds) check(round);
      for (const Launch& launch : stage.compute) check(launch);
      if (!plan_.options.host_tensors) continue;
      for (const auto* launches : {&stage.before, &stage.compute}) {
        for (const Launch& launch : *launches) check_on_device(launch);
      }
    }
  }

 private:
  void check(const Round& round) const {
    for (const Transfer& transfer : round.transfers) {
      RINGSPAN_CHECK(transfer.peer >= 0 && transfer.peer < plan_.problem.ranks && transfer.peer != plan_.rank);
      RINGSPAN_CHECK(transfer.bytes > 0 && transfer.offset >= 0 && transfer.offset + transfer.bytes <= program_.arena_bytes);
    }
  }

  // Kernels do not reach the caller's tensors on the host.
  void check_on_device(const Launch& launch) const {
    const auto is_there = [&](const RowRef& ref) { return ref.view < 0 || view_of(ref).in_arena; };
    const bool attend = is_attention(launch.kind);
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const auto at = static_cast<std::size_t>(index);
      RINGSPAN_CHECK(attend ? std::all_of(std::begin(program_.attend_items[at].operands),
                                          std::end(program_.attend_items[at].operands), is_there)
                            : std::all_of(std::begin(program_.row_items[at].operands),
                                          std::end(program_.row_items[at].operands), is_there));
    }
  }

  // One side is the caller's on the host, the other in the arena.
  void check_copies(const Launch& launch) const {
    check(launch);
    RINGSPAN_CHECK(plan_.options.host_tensors && launch.kind == LaunchKind::copy);
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const RowItem& item = program_.row_items[static_cast<std::size_t>(index)];
      const View& source = view_of(item.operands[0]);
      const View& target = view_of(item.operands[1]);
      RINGSPAN_CHECK(source.in_arena != target.in_arena && source.dtype == target.dtype);
    }
  }

  void check(const Launch& launch) const {
    const bool attend = is_attention(launch.kind);
    if (launch.kind == LaunchKind::sum_sinks) return;
    const std::size_t items = attend ? program_.attend_items.size() : program_.row_items.size();
    RINGSPAN_CHECK(launch.first >= 0 && launch.count >= 0 && launch.first + launch.count <= static_cast<std::int64_t>(items));
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      attend ? check(launch.kind, program_.attend_items[static_cast<std::size_t>(index)])
             : check(launch, program_.row_items[static_cast<std::size_t>(index)]);
    }
  }

  void check(const Launch& launch, const RowItem& item) const {
    RINGSPAN_CHECK(item.batch_count > 0 && item.rows > 0 && !item.heads.empty());
    for (int index = 0; index < operand_count(launch.kind); ++index) {
      const RowRef& ref = item.operands[index];
      const bool optional =
          (launch.kind == LaunchKind::finalize && index == 5) || (launch.kind == LaunchKind::delta && index == 3);
      if (ref.view < 0 && optional) continue;
      const View& view = view_of(ref);
      RINGSPAN_CHECK(view.width == width_of(launch, index));
      check_span(view, item.batch_first, item.batch_count, item.heads, ref, item.rows);
    }
  }

  // Elements per row of an operand: the launch's, or one per row.
  static int width_of(const Launch& launch, int operand) {
    switch (launch.kind) {
      case LaunchKind::merge:
        return operand == 0 || operand == 4 ? launch.width : 1;
      case LaunchKind::merge_states:
        return operand == 2 || operand == 5 ? launch.width : 1;
      case LaunchKind::finalize:
        return operand == 2 || operand == 3 || operand == 5 ? launch.width : 1;
      case LaunchKind::delta:
        return operand < 2 ? launch.width : 1;
      case LaunchKind::sink_gradient:
        return 1;
      default:
        return launch.width;
    }
  }

  void check(LaunchKind kind, const AttendItem& item) const {
    const Slice& slice = item.slice;
    RINGSPAN_CHECK(slice.batch_count > 0 && !slice.heads.empty() && !slice.q.empty() && !slice.k.empty());
    const Progression kv = kv_heads_of(slice.heads, plan_.problem.group());
    const bool finishes = kind == LaunchKind::attend && item.operands[kResult].view >= 0;
    for (int index = 0; index < operand_count(kind) + (finishes ? 3 : 0); ++index) {
      const bool is_state = index == kM || index == kL || index == kAcc;
      if (finishes && (index == kResult32 || is_state) && item.operands[index].view < 0) continue;
      if (index >= kDq && item.operands[index].view < 0 && plan_.options.host_tensors) continue;  // dq, or dk and dv, only
      if (kind == LaunchKind::fused && (index == kDOut || index >= kDq)) continue;
      const bool forward = kind == LaunchKind::attend;
      const bool key = index == kK || index == kV || (!forward && (index == kDk || index == kDv));
      const View& view = view_of(item.operands[index]);
      const bool fused = is_fused(kind);
      const bool value = index == kV || (forward ? index == kAcc || index == kResult || index == kResult32
                                                 : index == kDv || index == kDOut || (fused && index == kOut));
      const bool per_row =
          forward ? index == kM || index == kL || index == kResultLse : index == kLse || (!fused && index == kDelta);
      const bool written = !forward && (index == kDq ? item.writes_dq : index >= kDk && item.writes_dk_dv);
      const bool storage = index <= kV || written || (fused ? index != kLse : index == (forward ? kResult : kDOut));
      RINGSPAN_CHECK(view.dtype == (storage ? plan_.problem.dtype : DType::float32));
      RINGSPAN_CHECK(view.width == (per_row ? 1 : value ? plan_.problem.head_dim_v : plan_.problem.head_dim));
      check_span(view, slice.batch_first, slice.batch_count, key ? kv : slice.heads, item.operands[index],
                 key ? slice.k.count : slice.q.count);
    }
  }

  const View& view_of(const RowRef& ref) const {
    RINGSPAN_CHECK(ref.view >= 0 && ref.view < static_cast<std::int64_t>(program_.views.size()));
    return program_.views[static_cast<std::size_t>(ref.view)];
  }

  // The rows lie inside the caller's tensor, or inside the arena.
  void check_span(const View& view, std::int64_t batch_first, std::int64_t batch_count, const Progression& heads,
                  const RowRef& ref, std::int64_t rows) const {
    RINGSPAN_CHECK(view.heads.stride > 0 && view.heads.contains(heads.first) && view.heads.contains(heads.last()));
    RINGSPAN_CHECK(heads.count == 1 || heads.stride % view.heads.stride == 0);
    const std::int64_t last_row = ref.row + (rows - 1) * ref.step;
    const std::int64_t last_batch = batch_first + batch_count - 1 - view.batch_first;
    RINGSPAN_CHECK(batch_first >= view.batch_first && std::min(ref.row, last_row) >= 0);
    if (!view.in_arena) {
      RINGSPAN_CHECK(static_cast<int>(view.kind) < kCallerTensors);
      const TensorShape shape = shape_of(plan_, view.kind);
      RINGSPAN_CHECK(view.dtype == shape.dtype && view.width == shape.width && view.batch_first == 0);
      RINGSPAN_CHECK(std::max(ref.row, last_row) < shape.rows && last_batch < shape.batch);
      RINGSPAN_CHECK(view.heads == (Progression{0, 1, shape.heads}));
      return;
    }
    const std::int64_t last_head = (heads.last() - view.heads.first) / view.heads.stride;
    const std::int64_t last = last_batch * view.batch_stride + std::max(ref.row, last_row) * view.row_stride +
                              last_head * view.head_stride + view.width;
    RINGSPAN_CHECK(view.offset >= 0 && view.offset + last * size_of(view.dtype) <= program_.arena_bytes);
  }

  const PlanData& plan_;
  const Program& program_;
};

}  // namespace

void check_program(const PlanData& plan, const Program& program) { Checker(plan, program).check(); }

}  // namespace ringspan::internal
