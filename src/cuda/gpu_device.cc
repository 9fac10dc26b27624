#include "cuda/gpu_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cuda/row_layout.h"
#include "cuda/select.h"
#include "kernels/dropout.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

static_assert(sizeof(Group) == internal::kTaskGroupBytes);

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + internal::kTaskListAlignment - 1) / internal::kTaskListAlignment * internal::kTaskListAlignment;
}

// Operands of a row launch: elements per row of each, and which are written.
struct RowShape {
  RowOp op;
  std::vector<int> widths;
  unsigned written;
};

RowShape shape_of(const internal::Launch& launch) {
  using internal::LaunchKind;
  const int width = launch.width;
  switch (launch.kind) {
    case LaunchKind::fill:
      return {RowOp::fill, {width}, 0b1};
    case LaunchKind::copy:
      return {RowOp::copy, {width, width}, 0b10};
    case LaunchKind::add:
      return {RowOp::add, {width, width}, 0b10};
    case LaunchKind::merge:
      return {RowOp::merge, {width, 1, 1, 1, width}, 0b11100};
    case LaunchKind::merge_states:
      return {RowOp::merge_states, {1, 1, width, 1, 1, width}, 0b111000};
    case LaunchKind::finalize:
      return {RowOp::finalize, {1, 1, width, width, 1, width}, 0b111000};
    case LaunchKind::delta:
      return {RowOp::delta, {width, width, 1, 1}, 0b100};
    default:
      RINGSPAN_CHECK(false);
  }
  return {};
}

}  // namespace

GpuDevice::GpuDevice(std::unique_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

GpuDevice::~GpuDevice() {
  release_sides();
  for (Side& side : captured_) release(side);
}

GpuDevice::Side GpuDevice::make_side() const {
  Side side;
  side.host = runtime_->allocate_host(capacity_);
  try {
    side.device = runtime_->allocate(capacity_);
  } catch (...) {
    runtime_->release_host(side.host);
    throw;
  }
  return side;
}

void GpuDevice::release(Side& side) noexcept {
  if (side.host != nullptr) runtime_->release_host(side.host);
  if (side.device != nullptr) runtime_->release(side.device);
  side = {};
}

void GpuDevice::release_sides() noexcept {
  for (Side& side : sides_) release(side);
}

void GpuDevice::check_supported(const kernels::AttendShape& shape, bool backward) const {
  if (!is_supported(shape)) {
    throw Unsupported(fmt::format("{} has no kernel for head_dim {} and head_dim_v {}: at most 256 each", name(),
                                  shape.head_dim, shape.head_dim_v));
  }
  const int needed = with_policy(
      shape, [&](auto policy) { return backward ? decltype(policy)::kBackwardBytes : decltype(policy)::kForwardBytes; });
  if (needed > runtime_->shared_bytes_per_block()) {
    throw Unsupported(fmt::format("{} gives a block {} bytes of shared memory, but {} with head_dim {} needs {}", name(),
                                  runtime_->shared_bytes_per_block(), to_string(shape.dtype), shape.head_dim, needed));
  }
}

void GpuDevice::reserve(std::int64_t task_list_bytes) {
  capacity_ = task_list_bytes;
  release_sides();
  for (Side& side : sides_) side = make_side();
}

void GpuDevice::begin_pass() {
  in_capture_ = runtime_->is_capturing();
  used_ = 0;
  if (in_capture_) {
    captured_.reserve(captured_.size() + 1);
    captured_.push_back(make_side());
    return;
  }
  sides_[side_].last_use = runtime_->record();
  side_ = 1 - side_;
  runtime_->wait(sides_[side_].last_use, [] {});  // of the pass before the last one
}

template <typename T>
const T* GpuDevice::send(std::span<const T> values) {
  const auto bytes = static_cast<std::int64_t>(values.size_bytes());
  RINGSPAN_CHECK(used_ + bytes <= capacity_);
  const Side& side = in_capture_ ? captured_.back() : sides_[side_];
  std::memcpy(side.host + used_, values.data(), values.size_bytes());
  runtime_->copy(side.device + used_, side.host + used_, bytes);
  const auto* sent = reinterpret_cast<const T*>(side.device + used_);
  used_ = aligned(used_ + bytes);
  return sent;
}

void GpuDevice::for_waves(const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks, Owner owner,
                          FunctionRef<void(const AttendArguments&, std::int64_t)> launch) {
  const Schedule schedule = schedule_attend(tasks, owner, params.shape.group, tile_rows(params.shape));
  if (schedule.waves.empty()) return;
  std::vector<kernels::AttendTask> ordered;
  ordered.reserve(schedule.order.size());
  for (const std::int64_t index : schedule.order) ordered.push_back(tasks[static_cast<std::size_t>(index)]);
  AttendArguments arguments;
  arguments.params = params;
  arguments.dropout_threshold = kernels::dropout_threshold(params.dropout);
  arguments.tasks = send(std::span<const kernels::AttendTask>(ordered));
  const Group* groups = send(std::span<const Group>(schedule.groups));
  for (const Wave& wave : schedule.waves) {
    arguments.groups = groups + wave.first;
    arguments.group_count = wave.count;
    launch(arguments, wave.blocks);
  }
}

void GpuDevice::attend(const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks) {
  for_waves(params, tasks, Owner::state,
            [&](const AttendArguments& arguments, std::int64_t blocks) { runtime_->attend(arguments, blocks); });
}

void GpuDevice::attend_backward(const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks) {
  const auto pass = [&](Owner owner, Gradient gradient) {
    for_waves(params, tasks, owner,
              [&](const AttendArguments& arguments, std::int64_t blocks) { runtime_->gradient(gradient, arguments, blocks); });
  };
  pass(Owner::query_gradients, Gradient::dq);
  if (fuses_key_gradients(params.shape)) return pass(Owner::key_gradients, Gradient::dk_dv);
  pass(Owner::key_gradients, Gradient::dk);
  pass(Owner::key_gradients, Gradient::dv);
}

void GpuDevice::rows(const internal::Launch& launch, std::span<const kernels::RowTask> tasks, const float* sinks) {
  const RowShape shape = shape_of(launch);
  std::vector<Access> accesses;
  for (std::size_t index = 0; index < tasks.size(); ++index) {
    add_accesses(tasks[index], static_cast<std::int64_t>(index), shape.written, shape.widths, accesses);
  }
  const std::vector<std::int64_t> waves = waves_of(std::move(accesses), static_cast<std::int64_t>(tasks.size()));
  const std::int64_t last = waves.empty() ? -1 : *std::max_element(waves.begin(), waves.end());
  for (std::int64_t wave = 0; wave <= last; ++wave) {
    std::vector<kernels::RowTask> members;
    std::vector<std::int64_t> first_blocks;
    std::int64_t blocks = 0;
    for (std::size_t index = 0; index < tasks.size(); ++index) {
      const std::int64_t count = tasks[index].batch_count * tasks[index].row_count * tasks[index].head_count;
      if (waves[index] != wave || count == 0) continue;
      members.push_back(tasks[index]);
      first_blocks.push_back(blocks);
      blocks += (count + rows_per_block(launch.width) - 1) / rows_per_block(launch.width);
    }
    if (members.empty()) continue;
    RowArguments arguments;
    arguments.op = shape.op;
    arguments.width = launch.width;
    arguments.value = launch.value;
    arguments.sinks = sinks;
    arguments.tasks = send(std::span<const kernels::RowTask>(members));
    arguments.first_blocks = send(std::span<const std::int64_t>(first_blocks));
    arguments.task_count = static_cast<std::int64_t>(members.size());
    runtime_->rows(arguments, blocks);
  }
}

void GpuDevice::sink_gradient(std::span<const kernels::RowTask> tasks, const float* sinks, double* gradient, int heads) {
  SinkArguments arguments;
  arguments.tasks = send(tasks);
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
