#include "cuda/emulated_accesses.h"

#include <algorithm>
#include <span>

#include "cuda/emulated_memory.h"

namespace ringspan::cuda {

std::vector<Access> copy_accesses(const void* to, const void* from, std::int64_t bytes) {
  const auto begin = [](const void* data) { return reinterpret_cast<std::uintptr_t>(reachable(data)); };
  const auto count = static_cast<std::uintptr_t>(bytes);
  return {{0, begin(to), begin(to) + count, true}, {0, begin(from), begin(from) + count, false}};
}

std::vector<Access> row_accesses(const std::vector<kernels::RowTask>& tasks, const RowOperands& operands) {
  std::vector<Access> accesses;
  for (const kernels::RowTask& task : tasks) add_accesses(task, 0, operands.written, operands.widths, accesses);
  return accesses;
}

std::vector<Access> attend_accesses(const AttendArguments& arguments, std::int64_t count) {
  std::vector<Access> accesses;
  const kernels::AttendShape& shape = arguments.params.shape;
  for (std::int64_t index = 0; index < count; ++index) {
    const kernels::AttendTask& task = arguments.tasks[index];
    kernels::RowTask rows;
    rows.batch_count = task.batch_count;
    const auto add = [&](const auto& view, DType dtype, int width, bool writes) {
      rows.operands[0] = {view.data, dtype, view.batch_stride, view.row_stride, view.head_stride};
      add_accesses(rows, 0, writes ? 1 : 0, std::span<const int>(&width, 1), accesses);
    };
    rows.row_count = task.q_count;
    rows.head_count = task.head_count;
    add(task.q, shape.dtype, shape.head_dim, false);
    add(task.d_out, shape.dtype, shape.head_dim_v, false);
    add(task.delta, DType::float32, 1, false);
    add(task.lse, DType::float32, 1, task.o.data != nullptr);
    add(task.o, shape.dtype, shape.head_dim_v, true);
    add(task.o32, DType::float32, shape.head_dim_v, true);
    for (const kernels::Rows* view : {&task.m, &task.l}) add(*view, DType::float32, 1, true);
    add(task.acc, DType::float32, shape.head_dim_v, true);
    add(task.dq, task.writes_dq ? shape.dtype : DType::float32, shape.head_dim, true);
    rows.row_count = task.k_count;
    const std::int64_t last_head = (task.head_first + (task.head_count - 1) * task.head_step) / shape.group;
    rows.head_count = (last_head - task.kv_head_first) / std::max<std::int64_t>(task.kv_head_step, 1) + 1;
    add(task.k, shape.dtype, shape.head_dim, false);
    add(task.v, shape.dtype, shape.head_dim_v, false);
    const DType sums = task.writes_dk_dv ? shape.dtype : DType::float32;
    add(task.dk, sums, shape.head_dim, true);
    add(task.dv, sums, shape.head_dim_v, true);
  }
  return accesses;
}

std::vector<Access> fused_accesses(const FusedCall& call) {
  const FusedShape& s = call.shape;
  std::vector<Access> accesses;
  const auto add = [&](void* data, const FusedStrides& strides, bool keys, DType dtype, int width, bool writes) {
    if (data == nullptr) return;
    kernels::RowTask rows;
    rows.batch_count = s.batch;
    rows.head_count = keys ? s.kv_heads : s.heads;
    rows.row_count = keys ? s.keys : s.queries;
    rows.operands[0] = {data, dtype, strides.batch, strides.row, strides.head};
    add_accesses(rows, 0, writes ? 1 : 0, std::span<const int>(&width, 1), accesses);
  };
  add(call.q, s.q, false, s.dtype, s.head_dim, false);
  add(call.k, s.k, true, s.dtype, s.head_dim, false);
  add(call.v, s.v, true, s.dtype, s.head_dim_v, false);
  add(call.o, s.o, false, s.dtype, s.head_dim_v, !s.backward);
  add(call.lse, s.lse, false, DType::float32, 1, !s.backward);
  add(call.d_out, s.d_out, false, s.dtype, s.head_dim_v, false);
  add(call.dq, s.dq, false, s.dtype, s.head_dim, true);
  add(call.dk, s.dk, true, s.dtype, s.head_dim, true);
  add(call.dv, s.dv, true, s.dtype, s.head_dim_v, true);
  return accesses;
}

}  // namespace ringspan::cuda
