#include "exec/bindings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <span>

#include "base/int128.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

struct Dimension {
  std::int64_t count, stride;
  const char* name;
};

// Offsets in bytes have 64 bits. `reach`, in elements, is that of the dimensions before.
void check_reach(const Dimension& dimension, DType dtype, std::string_view name, Int128* reach) {
  if (dimension.count <= 1) return;
  const Int128 stride = dimension.stride;
  *reach += (dimension.count - 1) * (stride < 0 ? -stride : stride);
  if (*reach * size_of(dtype) <= std::numeric_limits<std::int64_t>::max()) return;
  throw InvalidArgument(fmt::format("{}: the {} stride ({}) is too large: {} steps of it must stay within 2^63 bytes", name,
                                    dimension.name, dimension.stride, dimension.count - 1));
}

// Of a dimension of one element, whatever the caller says: not beyond what the others reach, so that sums of strides stay
// sound.
std::int64_t usable_stride(const Dimension& dimension, Int128 reach) {
  const Int128 stride = dimension.stride;
  const bool is_beyond = dimension.count <= 1 && (stride < 0 ? -stride : stride) > reach;
  return is_beyond ? static_cast<std::int64_t>(reach) : dimension.stride;
}

// Whether two elements may share memory: sorted by stride, each dimension must step over all the smaller ones together.
void check_overlap(std::array<Dimension, 3> dimensions, std::int64_t width, std::string_view name) {
  for (Dimension& dimension : dimensions) dimension.stride = dimension.count <= 1 ? 0 : std::abs(dimension.stride);
  std::sort(dimensions.begin(), dimensions.end(), [](const auto& a, const auto& b) { return a.stride < b.stride; });
  std::int64_t span = width;  // elements covered by the smaller dimensions
  for (const Dimension& dimension : dimensions) {
    if (dimension.count <= 1) continue;
    if (dimension.stride < span) {
      throw InvalidArgument(fmt::format("{} is written and must not overlap itself: its {} stride ({}) must be at least {}",
                                        name, dimension.name, dimension.stride, span));
    }
    span += (dimension.count - 1) * dimension.stride;
  }
}

Binding check(const PlanData& plan, TensorKind kind, const ConstTensor& tensor, bool required, bool output) {
  const TensorShape shape = shape_of(plan, kind);
  const std::string_view name = to_string(kind);
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  Binding binding{const_cast<std::byte*>(static_cast<const std::byte*>(tensor.data)), tensor.batch_stride, tensor.token_stride,
                  tensor.head_stride};
  if (shape.batch * shape.rows * shape.heads == 0) return binding;
  if (tensor.data == nullptr) {
    if (!required) return binding;
    throw InvalidArgument(fmt::format("{}.data is null, but rank {} holds {} x {} x {} rows of it (batch, tokens, heads)", name,
                                      plan.rank, shape.batch, shape.rows, shape.heads));
  }
  if (address % static_cast<std::uintptr_t>(size_of(shape.dtype)) != 0) {
    throw InvalidArgument(fmt::format("{}.data ({}) must be aligned to {} bytes, the size of {}", name, fmt::ptr(tensor.data),
                                      size_of(shape.dtype), to_string(shape.dtype)));
  }
  const std::array<Dimension, 3> dimensions{Dimension{shape.batch, binding.batch_stride, "batch"},
                                            {shape.rows, binding.row_stride, "token"},
                                            {shape.heads, binding.head_stride, "head"}};
  Int128 reach = shape.width;
  for (const Dimension& dimension : dimensions) check_reach(dimension, shape.dtype, name, &reach);
  if (output) check_overlap(dimensions, shape.width, name);
  binding.batch_stride = usable_stride(dimensions[0], reach);
  binding.row_stride = usable_stride(dimensions[1], reach);
  binding.head_stride = usable_stride(dimensions[2], reach);
  return binding;
}

// An output that starts where another tensor, or what is kept for backward, starts would overwrite what is still to be read.
void check_aliases(const PlanData& plan, const Bindings& bindings, std::initializer_list<TensorKind> outputs,
                   std::span<const std::byte> saved, bool writes_saved) {
  struct Given {
    std::string_view name;
    const void* data;  // null where there is nothing to read or write
    bool is_output;
  };
  std::array<Given, kCallerTensors + 4> all;
  for (int index = 0; index < kCallerTensors; ++index) {
    const auto kind = static_cast<TensorKind>(index);
    const TensorShape shape = shape_of(plan, kind);
    const bool has_rows = shape.batch * shape.rows * shape.heads != 0;
    all[static_cast<std::size_t>(index)] = {to_string(kind), has_rows ? bindings[kind].data : nullptr,
                                            std::find(outputs.begin(), outputs.end(), kind) != outputs.end()};
  }
  all[kCallerTensors] = {"alibi_slopes", bindings.alibi_slopes, false};
  all[kCallerTensors + 1] = {"sinks", bindings.sinks, false};
  all[kCallerTensors + 2] = {"dsinks", bindings.dsinks, true};
  all[kCallerTensors + 3] = {"saved", saved.empty() ? nullptr : saved.data(), writes_saved};
  for (const Given& output : all) {
    if (!output.is_output || output.data == nullptr) continue;
    for (const Given& other : all) {
      if (&other == &output || other.data != output.data) continue;
      throw InvalidArgument(fmt::format("{} is written and must not share memory with {}", output.name, other.name));
    }
  }
}

void check_vector(bool wanted, const float* given, const char* name, const char* field) {
  if (wanted && given == nullptr) throw InvalidArgument(fmt::format("{} is null, but the problem has {} = true", name, field));
  if (!wanted && given != nullptr)
    throw InvalidArgument(fmt::format("{} is given, but the problem has {} = false", name, field));
  if (reinterpret_cast<std::uintptr_t>(given) % alignof(float) != 0) {
    throw InvalidArgument(fmt::format("{} ({}) must be aligned to {} bytes", name, fmt::ptr(given), alignof(float)));
  }
}

template <typename Tensors>
void bind_vectors(const PlanData& plan, const Tensors& tensors, Bindings* bindings) {
  check_vector(plan.problem.alibi, tensors.alibi_slopes, "alibi_slopes", "alibi");
  check_vector(plan.problem.sinks, tensors.sinks, "sinks", "sinks");
  const std::int64_t stride = tensors.alibi_batch_stride;
  const std::int64_t heads = plan.problem.heads;
  if (plan.problem.alibi && stride != 0 && stride > -heads && stride < heads) {
    throw InvalidArgument(fmt::format("alibi_batch_stride ({}) must be 0 or at least heads ({})", stride, heads));
  }
  Int128 reach = heads;
  if (plan.problem.alibi) check_reach({plan.problem.batch, stride, "batch"}, DType::float32, "alibi_slopes", &reach);
  bindings->alibi_slopes = tensors.alibi_slopes;
  bindings->alibi_batch_stride = stride;
  bindings->sinks = tensors.sinks;
}

}  // namespace

TensorShape shape_of(const PlanData& plan, TensorKind kind) {
  const Problem& problem = plan.problem;
  TensorShape shape;
  shape.batch = problem.batch;
  shape.rows = is_key_side(kind) ? plan.shard_k.rows : problem.replicated_q ? problem.tokens_q : plan.shard_q.rows;
  shape.heads = is_key_side(kind) ? problem.kv_heads : problem.heads;
  const bool per_row = kind == TensorKind::lse || kind == TensorKind::dlse;
  shape.dtype = per_row ? DType::float32 : problem.dtype;
  switch (kind) {
    case TensorKind::q:
    case TensorKind::k:
    case TensorKind::dq:
    case TensorKind::dk:
      shape.width = problem.head_dim;
      break;
    default:
      shape.width = per_row ? 1 : problem.head_dim_v;
  }
  return shape;
}

bool is_touched(const Program& program, TensorKind kind) {
  const auto is_of_kind = [&](const RowRef& ref) {
    if (ref.view < 0) return false;
    const View& view = program.views[static_cast<std::size_t>(ref.view)];
    return !view.in_arena && view.kind == kind;
  };
  const auto is_in = [&](const auto& item) {
    return std::any_of(std::begin(item.operands), std::end(item.operands), is_of_kind);
  };
  return std::any_of(program.row_items.begin(), program.row_items.end(), is_in) ||
         std::any_of(program.attend_items.begin(), program.attend_items.end(), is_in);
}

Bindings bind(const PlanData& plan, const ForwardTensors& tensors) {
  Bindings bindings;
  const auto input = [&](TensorKind kind, const ConstTensor& tensor) {
    bindings[kind] = check(plan, kind, tensor, true, false);
  };
  const auto output = [&](TensorKind kind, const Tensor& tensor) { bindings[kind] = check(plan, kind, tensor, true, true); };
  input(TensorKind::q, tensors.q);
  input(TensorKind::k, tensors.k);
  input(TensorKind::v, tensors.v);
  output(TensorKind::o, tensors.o);
  output(TensorKind::lse, tensors.lse);
  bind_vectors(plan, tensors, &bindings);
  check_aliases(plan, bindings, {TensorKind::o, TensorKind::lse}, tensors.saved, true);
  return bindings;
}

Bindings bind(const PlanData& plan, const BackwardTensors& tensors, bool reads_o) {
  Bindings bindings;
  const auto input = [&](TensorKind kind, const ConstTensor& tensor, bool required = true) {
    bindings[kind] = check(plan, kind, tensor, required, false);
  };
  const auto output = [&](TensorKind kind, const Tensor& tensor) { bindings[kind] = check(plan, kind, tensor, true, true); };
  input(TensorKind::q, tensors.q);
  input(TensorKind::k, tensors.k);
  input(TensorKind::v, tensors.v);
  input(TensorKind::o, tensors.o, reads_o);
  input(TensorKind::lse, tensors.lse);
  input(TensorKind::d_out, tensors.d_out);
  input(TensorKind::dlse, tensors.dlse, false);
  output(TensorKind::dq, tensors.dq);
  output(TensorKind::dk, tensors.dk);
  output(TensorKind::dv, tensors.dv);
  bind_vectors(plan, tensors, &bindings);
  check_vector(plan.problem.sinks, tensors.dsinks, "dsinks", "sinks");
  bindings.dsinks = tensors.dsinks;
  check_aliases(plan, bindings, {TensorKind::dq, TensorKind::dk, TensorKind::dv}, tensors.saved, false);
  return bindings;
}

}  // namespace ringspan::internal
