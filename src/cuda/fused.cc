#include "cuda/fused.h"

#include <fmt/format.h>

#include "base/check.h"

namespace ringspan::cuda {
namespace {

constexpr std::uintptr_t kAlignment = 16;

struct Extent {
  std::int64_t batch, heads, rows;
  int width;
};

// Of dimensions of one any stride will do; this one makes like calls alike.
template <typename Rows>
FusedStrides strides_of(const Rows& rows, const Extent& extent) {
  const std::int64_t row = extent.rows == 1 ? extent.heads * extent.width : rows.row_stride;
  const std::int64_t head = extent.heads == 1 ? extent.width : rows.head_stride;
  return {extent.batch == 1 ? extent.rows * extent.heads * extent.width : rows.batch_stride, head, row};
}

FusedStrides strides_of_lse(const kernels::Rows& rows, const FusedShape& s) {
  const FusedStrides packed = packed_lse(s);
  return {s.batch == 1 ? packed.batch : rows.batch_stride, s.heads == 1 ? packed.head : rows.head_stride,
          s.queries == 1 ? packed.row : rows.row_stride};
}

}  // namespace

FusedCall fused_call(const kernels::AttendParams& params, const internal::FusedTask& fused, internal::FusedMode mode) {
  const kernels::AttendTask& task = fused.task;
  const kernels::AttendShape& shape = params.shape;
  const Progression heads{task.head_first, task.head_step, task.head_count};
  const std::int64_t each = internal::fused_group(heads, shape.group);
  RINGSPAN_CHECK(each > 0);
  Slice slice;
  slice.heads = heads;
  slice.q = {task.q_first, task.q_step, task.q_count};
  slice.k = {task.k_first, task.k_step, task.k_count};
  slice.lo = task.lo;
  slice.hi = task.hi;
  const auto indexed = internal::index_slice(slice);
  RINGSPAN_CHECK(indexed && !indexed->empty && indexed->slice.q.count == task.q_count &&
                 indexed->slice.k.count == task.k_count);

  FusedCall call;
  FusedShape& s = call.shape;
  s.dtype = shape.dtype;
  s.backward = mode.backward;
  s.deterministic = mode.deterministic;
  s.batch = task.batch_count;
  s.heads = task.head_count;
  s.kv_heads = task.head_count / each;
  s.queries = task.q_count;
  s.keys = task.k_count;
  s.head_dim = shape.head_dim;
  s.head_dim_v = shape.head_dim_v;
  s.scale = params.scale;
  s.low = indexed->band.low;
  s.high = indexed->band.high;
  s.has_low = indexed->band.has_low;
  s.has_high = indexed->band.has_high;
  const auto query = [&](const kernels::Rows& rows, int width, FusedStrides& strides) {
    strides = strides_of(rows, {s.batch, s.heads, s.queries, width});
    return rows.data;
  };
  const auto key = [&](const kernels::KeyRows& rows, int width, FusedStrides& strides) {
    strides = strides_of(rows, {s.batch, s.kv_heads, s.keys, width});
    return rows.data;
  };
  call.q = query(task.q, s.head_dim, s.q);
  call.k = key(task.k, s.head_dim, s.k);
  call.v = key(task.v, s.head_dim_v, s.v);
  call.o = query(fused.o, s.head_dim_v, s.o);
  call.lse = task.lse.data;
  s.lse = strides_of_lse(task.lse, s);
  if (!mode.backward) return call;
  call.d_out = query(task.d_out, s.head_dim_v, s.d_out);
  call.dq = query(task.dq, s.head_dim, s.dq);
  call.dk = key(task.dk, s.head_dim, s.dk);
  call.dv = key(task.dv, s.head_dim_v, s.dv);
  return call;
}

FusedStrides packed_lse(const FusedShape& shape) { return {shape.heads * shape.queries, shape.queries, 1}; }

std::string misalignment(const FusedCall& call) {
  const FusedShape& s = call.shape;
  struct Operand {
    const char* name;
    const void* data;
    const FusedStrides& strides;
  };
  const Operand operands[] = {{"q", call.q, s.q},          {"k", call.k, s.k},    {"v", call.v, s.v},    {"o", call.o, s.o},
                              {"do", call.d_out, s.d_out}, {"dq", call.dq, s.dq}, {"dk", call.dk, s.dk}, {"dv", call.dv, s.dv}};
  for (const Operand& operand : operands) {
    if (operand.data == nullptr) continue;
    if (reinterpret_cast<std::uintptr_t>(operand.data) % kAlignment != 0) {
      return fmt::format("rows of {} begin at {}, which is not aligned to {} bytes", operand.name, fmt::ptr(operand.data),
                         kAlignment);
    }
    for (const auto& [what, stride] : {std::pair{"batch", operand.strides.batch}, std::pair{"head", operand.strides.head},
                                       std::pair{"token", operand.strides.row}}) {
      if (stride > 0 && stride * size_of(s.dtype) % static_cast<std::int64_t>(kAlignment) == 0) continue;
      return fmt::format("the {} stride of {} is {} elements, but must be positive and a multiple of {} bytes", what,
                         operand.name, stride, kAlignment);
    }
  }
  return {};
}

}  // namespace ringspan::cuda
