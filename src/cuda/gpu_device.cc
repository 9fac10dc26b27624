#include "cuda/gpu_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "cuda/select.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

RowOp op_of(internal::LaunchKind kind) {
  using internal::LaunchKind;
  switch (kind) {
    case LaunchKind::fill:
      return RowOp::fill;
    case LaunchKind::copy:
      return RowOp::copy;
    case LaunchKind::add:
      return RowOp::add;
    case LaunchKind::merge:
      return RowOp::merge;
    case LaunchKind::merge_states:
      return RowOp::merge_states;
    case LaunchKind::finalize:
      return RowOp::finalize;
    default:
      RINGSPAN_CHECK(kind == LaunchKind::delta);
      return RowOp::delta;
  }
}

}  // namespace

GpuDevice::GpuDevice(std::unique_ptr<Runtime> runtime)
    : runtime_(std::move(runtime)), lists_(*runtime_, [this] { show_life(); }) {}

void GpuDevice::name_kernels(std::string_view attend, std::string_view attend_backward) {
  const auto is_named = [](std::string_view name) { return name == "wgmma"; };
  if ((is_named(attend) || is_named(attend_backward)) && !runtime_->has_warpgroups()) {
    throw Unsupported(
        fmt::format("{} has no kernels named 'wgmma': they need compute capability 9.0 and a build for 90a", name()));
  }
  names_warpgroups_ = {is_named(attend), is_named(attend_backward)};
  const auto kernel = [&](std::string_view name) {
    const bool warpgroups = is_named(name) || (name != "mma" && runtime_->prefers_warpgroups());
    return warpgroups ? TileKernel::wgmma : TileKernel::mma;
  };
  attend_ = kernel(attend);
  attend_backward_ = kernel(attend_backward);
}

void GpuDevice::check_supported(const kernels::AttendShape& shape, bool backward, std::int64_t most_rows) const {
  constexpr std::int64_t kMostRows =
      std::numeric_limits<std::int32_t>::max() - 1024;  // kernels count rows in 32 bits, some tiles ahead
  if (most_rows > kMostRows) {
    throw Unsupported(
        fmt::format("a task of this plan has {} queries or keys, but kernels of {} take at most {}; use more ranks, or "
                    "host_tensors",
                    most_rows, name(), kMostRows));
  }
  if (!is_supported(shape)) {
    throw Unsupported(fmt::format("{} has no kernel for head_dim {} and head_dim_v {}: at most 256 each", name(),
                                  shape.head_dim, shape.head_dim_v));
  }
  const bool names_warpgroups = names_warpgroups_[0] || (backward && names_warpgroups_[1]);
  if (names_warpgroups && !warpgroups_support(shape)) {
    throw Unsupported(
        fmt::format("kernels named 'wgmma' are for 16-bit tensors with head_dim at most 128; this is {} with head_dim {} and "
                    "head_dim_v {}",
                    to_string(shape.dtype), shape.head_dim, shape.head_dim_v));
  }
  const int forward_bytes = tile_sizes(tile_kernel(attend_, shape), shape).forward_bytes;
  const int backward_bytes = tile_sizes(tile_kernel(attend_backward_, shape), shape).backward_bytes;
  const int needed = backward ? std::max(forward_bytes, backward_bytes) : forward_bytes;
  if (needed > runtime_->shared_bytes_per_block()) {
    throw Unsupported(fmt::format("{} gives a block {} bytes of shared memory, but {} with head_dim {} needs {}", name(),
                                  runtime_->shared_bytes_per_block(), to_string(shape.dtype), shape.head_dim, needed));
  }
}

// As few blocks as the strides allow: rows of all heads where heads lie side by side, and one run where rows do.
void GpuDevice::copy_rows(std::span<const kernels::RowTask> tasks, int width) {
  for (const kernels::RowTask& task : tasks) {
    const kernels::Operand& from = task.operands[0];
    const kernels::Operand& to = task.operands[1];
    if (from.data == nullptr || task.batch_count * task.row_count * task.head_count == 0) continue;
    const std::int64_t size = size_of(from.dtype);
    const bool dense = task.head_count == 1 || (from.head_stride == width && to.head_stride == width);
    const std::int64_t run = (dense ? task.head_count : 1) * width * size;
    const auto copy_block = [&](std::int64_t batch, std::int64_t head, std::int64_t row, std::int64_t rows) {
      const auto at = [&](const kernels::Operand& operand) {
        const std::int64_t element = batch * operand.batch_stride + head * operand.head_stride + row * operand.row_stride;
        return static_cast<std::byte*>(operand.data) + element * size;
      };
      BlockCopy block{at(to), at(from), run, rows, to.row_stride * size, from.row_stride * size};
      if (block.to_pitch == run && block.from_pitch == run) block.width *= rows, block.height = 1;
      runtime_->copy_beside(block);
    };
    // Rows that overlap or run backwards (strides of an input) are copied one by one.
    const bool is_block = std::min(from.row_stride, to.row_stride) * size >= run;
    for (std::int64_t batch = 0; batch < task.batch_count; ++batch) {
      for (std::int64_t head = 0; head < (dense ? 1 : task.head_count); ++head) {
        for (std::int64_t row = 0; row < (is_block ? 1 : task.row_count); ++row) {
          copy_block(batch, head, row, is_block ? task.row_count : 1);
        }
      }
    }
  }
}

FusedAttention& GpuDevice::fused(std::string_view library) {
  auto found = fused_.find(library);
  if (found == fused_.end()) found = fused_.emplace(library, runtime_->make_fused(library)).first;
  return *found->second;
}

namespace {

constexpr std::int64_t kPackedAlignment = 256;

// Where a library reads lse only packed and it is not, a copy that is: behind the library's own workspace.
struct PackedLse {
  explicit PackedLse(FusedAttention& library, const FusedCall& call)
      : needed(call.shape.backward && library.reads_packed_lse() && !has_packed_lse(call.shape)), shape(call.shape) {
    if (needed) shape.lse = packed_lse(shape);
  }
  std::int64_t offset(FusedAttention& library) const {
    return (library.workspace_bytes(shape) + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
  }
  std::int64_t workspace_bytes(FusedAttention& library) const {
    return needed ? offset(library) + shape.batch * shape.lse.batch * std::int64_t{sizeof(float)}
                  : library.workspace_bytes(shape);
  }

  bool needed;
  FusedShape shape;  // as the library is called
};

}  // namespace

internal::FusedAnswer GpuDevice::ask_fused(const kernels::AttendParams& params, std::span<const internal::FusedTask> tasks,
                                           internal::FusedMode mode) {
  FusedAttention& library = fused(mode.library);
  internal::FusedAnswer answer{library.name(), {}, 0, library.takes_own_memory()};
  for (const internal::FusedTask& task : tasks) {
    show_life();  // a shape may take seconds
    const FusedCall call = fused_call(params, task, mode);
    const PackedLse packed(library, call);
    answer.refusal = misalignment(call);
    if (answer.refusal.empty()) answer.refusal = library.refusal(packed.shape);
    if (!answer.refusal.empty()) return answer;
    answer.workspace_bytes = std::max(answer.workspace_bytes, packed.workspace_bytes(library));
  }
  return answer;
}

void GpuDevice::attend_fused(const kernels::AttendParams& params, std::span<const internal::FusedTask> tasks,
                             internal::FusedMode mode, std::byte* workspace) {
  FusedAttention& library = fused(mode.library);
  for (const internal::FusedTask& task : tasks) {
    FusedCall call = fused_call(params, task, mode);
    call.workspace = workspace;
    if (const PackedLse packed(library, call); packed.needed) {
      std::byte* const to = workspace + packed.offset(library);
      copy_lse(call, to);
      call.shape = packed.shape;
      call.lse = to;
    }
    library.run(call);
  }
}

void GpuDevice::copy_lse(const FusedCall& call, std::byte* to) {
  const FusedShape& s = call.shape;
  const FusedStrides target = packed_lse(s);
  kernels::RowTask task;
  task.batch_count = s.batch;
  task.head_count = s.heads;
  task.row_count = s.queries;
  task.operands[0] = {call.lse, DType::float32, s.lse.batch, s.lse.row, s.lse.head};
  task.operands[1] = {to, DType::float32, target.batch, target.row, target.head};
  internal::Launch launch;
  launch.kind = internal::LaunchKind::copy;
  rows(launch, {&task, 1}, nullptr);
}

void GpuDevice::for_waves(TileKernel named, const kernels::AttendParams& params, const internal::AttendCall& call, Owner owner,
                          FunctionRef<void(const AttendArguments&, std::int64_t)> launch) {
  const TileKernel kernel = tile_kernel(named, params.shape);
  const AttendLists& lists = lists_.attend(kernel, owner, params.shape, call);
  if (lists.waves.empty()) return;
  AttendArguments arguments;
  arguments.kernel = kernel;
  set_params(arguments, params);
  arguments.maps = lists.maps;
  arguments.places = lists.places;
  arguments.tasks = lists.tasks;
  for (std::size_t index = 0; index < lists.waves.size(); ++index) {
    const Wave& wave = lists.waves[index];
    arguments.groups = lists.groups + wave.first;
    arguments.group_count = wave.count;
    arguments.blocks = wave.blocks;
    arguments.taken = lists.taken + index;
    launch(arguments, wave.blocks);
  }
}

void GpuDevice::attend(const kernels::AttendParams& params, const internal::AttendCall& call) {
  for_waves(attend_, params, call, Owner::state,
            [&](const AttendArguments& arguments, std::int64_t blocks) { runtime_->attend(arguments, blocks); });
}

void GpuDevice::attend_backward(const kernels::AttendParams& params, const internal::AttendCall& call) {
  const auto pass = [&](Owner owner, Gradient gradient) {
    for_waves(attend_backward_, params, call, owner,
              [&](const AttendArguments& arguments, std::int64_t blocks) { runtime_->gradient(gradient, arguments, blocks); });
  };
  if (call.dq) pass(Owner::query_gradients, Gradient::dq);
  if (!call.dk_dv) return;
  if (tile_sizes(tile_kernel(attend_backward_, params.shape), params.shape).fuses_key_gradients)
    return pass(Owner::key_gradients, Gradient::dk_dv);
  pass(Owner::key_gradients, Gradient::dk);
  pass(Owner::key_gradients, Gradient::dv);
}

void GpuDevice::rows(const internal::Launch& launch, std::span<const kernels::RowTask> tasks, const float* sinks) {
  const RowOp op = op_of(launch.kind);
  const RowLists& lists = lists_.rows({op, launch.width}, tasks);
  for (const RowLists::Wave& wave : lists.waves) {
    RowArguments arguments;
    arguments.op = op;
    arguments.width = launch.width;
    arguments.value = launch.value;
    arguments.sinks = sinks;
    if (wave.count <= static_cast<std::int64_t>(RowArguments::kShort)) {
      std::copy_n(lists.ordered.begin() + wave.first, wave.count, arguments.short_tasks);
      std::copy_n(lists.first_blocks.begin() + wave.first, wave.count, arguments.short_first_blocks);
    } else {
      arguments.tasks = lists.tasks + wave.first;
      arguments.first_blocks = lists.first_blocks_there + wave.first;
    }
    arguments.task_count = wave.count;
    runtime_->rows(arguments, wave.blocks);
  }
}

void GpuDevice::sink_gradient(std::span<const kernels::RowTask> tasks, const float* sinks, double* gradient, int heads) {
  SinkArguments arguments;
  arguments.tasks = lists_.as_they_are(tasks);
  arguments.task_count = static_cast<std::int64_t>(tasks.size());
  arguments.sinks = sinks;
  arguments.gradient = gradient;
  arguments.heads = heads;
  runtime_->sink_gradient(arguments);
}

void GpuDevice::sum_sinks(const double* gradients, int heads, int ranks, float* total) {
  SinkArguments arguments;
  arguments.gradient = const_cast<double*>(gradients);
  arguments.total = total;
  arguments.heads = heads;
  arguments.ranks = ranks;
  runtime_->sum_sinks(arguments);
}

}  // namespace ringspan::cuda
