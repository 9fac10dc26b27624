// A pass, stage by stage: messages, copies, launches, and what a launch calls. The rest of Executor is in executor.cc.
#include "base/check.h"
#include "comm/error_code.h"
#include "exec/choose_fused.h"
#include "exec/executor.h"

namespace ringspan::internal {
namespace {

constexpr std::uint64_t kCallMask = (std::uint64_t{1} << 32) - 1;
static_assert(kPlanRounds == 0 && (kCallMask + 1) << kPlanRoundBits <= kPlanRoundsEnd);

// Whether a device may be given the row tasks of both at once: it keeps the order of those that touch the same rows.
bool are_alike(const Launch& a, const Launch& b) {
  return a.kind == b.kind && a.width == b.width && a.value == b.value && a.with_sinks == b.with_sinks &&
         a.kind != LaunchKind::sum_sinks && a.kind != LaunchKind::sink_gradient && !is_attention(a.kind);
}

}  // namespace

void Executor::run() {
  const Program& program = *pass_->program;
  pass_->params.alibi_slopes = bindings_.alibi_slopes;
  pass_->params.alibi_batch_stride = bindings_.alibi_batch_stride;
  pass_->params.sinks = bindings_.sinks;
  memory_ = {&program, arena_.data(), &bindings_, plan_->problem.group(), saved_bytes_};
  next_message_ = 0;
  if (device_ != nullptr) device_->begin_pass();
  if (bindings_.dsinks != nullptr && pass_ == &passes_[1]) clear_sink_gradients();
  for (std::size_t index = 0; index < program.stages.size(); ++index) {
    run_stage(static_cast<std::int32_t>(index), program.stages[index]);
  }
  RINGSPAN_CHECK(next_message_ == pass_->messages.size());
}

void Executor::clear_sink_gradients() {
  const std::int64_t count = static_cast<std::int64_t>(plan_->problem.ranks) * plan_->problem.heads;
  if (device_ == nullptr) {  // no launch is in flight here, so the host may write
    std::fill_n(sink_gradient(0), count, 0.0);
    return;
  }
  kernels::RowTask task;  // zeros of float64 are those of float32, two of them
  task.batch_count = task.row_count = task.head_count = 1;
  task.operands[0].data = sink_gradient(0);
  Launch launch;
  launch.kind = LaunchKind::fill;
  launch.width = static_cast<int>(2 * count);
  device_->rows(launch, {&task, 1}, nullptr);
}

void Executor::run_stage(std::int32_t index, const Stage& stage) {
  row_tasks_.clear();
  attend_tasks_.clear();
  fused_tasks_.clear();
  calls_.clear();
  requests_.clear();
  const auto begin = Clock::now();
  enqueue(stage.before);
  if (mirror_) copy_messages(stage, true);
  const bool waits = device_ != nullptr ? !stage.rounds.empty() && stream_messages_ == nullptr : !stage.before.empty();
  if (waits) drain();
  const auto prepared = Clock::now();
  if (!stage.copies.empty()) begin_copies(stage);
  post(stage);
  if (!options_.overlap) wait_for_messages();
  const auto posted = Clock::now();
  enqueue(stage.compute);
  if (!stage.compute.empty() && device_ == nullptr) drain();
  const auto computed = Clock::now();
  const bool communicates = !requests_.empty();
  if (options_.overlap) wait_for_messages();
  if (mirror_) copy_messages(stage, false);
  if (!stage.copies.empty()) device_->end_copies();
  const auto end = Clock::now();
  if (!stage.before.empty()) trace_.add(Trace::Lane::compute, index, begin, prepared);
  if (!stage.compute.empty()) trace_.add(Trace::Lane::compute, index, posted, computed);
  if (!communicates) return;
  trace_.add(Trace::Lane::communicate, index, prepared, options_.overlap ? end : posted);
  trace_.add(Trace::Lane::wait, index, options_.overlap ? computed : prepared, options_.overlap ? end : posted);
}

void Executor::wait_for_messages() {
  if (requests_.empty()) return;
  const auto begin = Clock::now();
  for (const Request request : requests_) {
    if (stream_messages_ != nullptr) {
      stream_messages_->wait(device_->stream(), request, options_.deadline);
    } else {
      communicator_.wait(request, options_.deadline);
    }
  }
  waiting_ += Clock::now() - begin;
}

void Executor::post(const Stage& stage) {
  for (const Round& round : stage.rounds) {
    if (round.transfers.empty()) continue;
    const std::span<const Message> batch(pass_->messages.data() + next_message_, round.transfers.size());
    next_message_ += batch.size();
    const std::uint64_t number = (call_number_ & kCallMask) << kPlanRoundBits | round.number;
    requests_.push_back(stream_messages_ != nullptr ? stream_messages_->post(device_->stream(), number, batch)
                                                    : communicator_.post(number, batch));
    for (const Message& message : batch) {
      (message.direction == Message::Direction::send ? pass_->stats.sent_bytes : pass_->stats.received_bytes) += message.bytes;
    }
  }
}

// Between the arena on the device and host memory: what is sent before it is posted, what was received after it arrived.
void Executor::copy_messages(const Stage& stage, bool send) {
  for (const Round& round : stage.rounds) {
    for (const Transfer& transfer : round.transfers) {
      if (transfer.send != send) continue;
      std::byte* const on_device = arena_.data() + transfer.offset;
      std::byte* const on_host = mirror_->at(transfer.offset);
      device_->copy(send ? on_host : on_device, send ? on_device : on_host, transfer.bytes);
    }
  }
}

// Between the caller's tensors on the host and the arena, while the stage computes.
void Executor::begin_copies(const Stage& stage) {
  device_->begin_copies();
  for (const Launch& launch : stage.copies) {
    const std::size_t first = row_tasks_.size();
    add_row_tasks(launch);
    device_->copy_rows({row_tasks_.data() + first, static_cast<std::size_t>(launch.count)}, launch.width);
  }
}

// Row launches that are alike and follow each other are one on a device, where a launch takes longer than most of them run.
void Executor::enqueue(std::span<const Launch> launches) {
  for (std::size_t index = 0; index < launches.size();) {
    const Launch& launch = launches[index];
    if (device_ == nullptr || !are_alike(launch, launch)) {
      enqueue(launch);
      ++index;
      continue;
    }
    const std::size_t first = row_tasks_.size();
    for (; index < launches.size() && are_alike(launch, launches[index]); ++index) add_row_tasks(launches[index]);
    if (row_tasks_.size() == first) continue;
    device_->rows(launch, std::span<const kernels::RowTask>(row_tasks_).subspan(first),
                  launch.with_sinks ? bindings_.sinks : nullptr);
  }
}

void Executor::enqueue(const Launch& launch) {
  if (launch.count == 0 && launch.kind != LaunchKind::sum_sinks) return;
  if (device_ != nullptr && is_attention(launch.kind) && !is_fused(launch.kind)) return attend_on_device(launch);
  Call call{this, &launch, 0};
  if (is_fused(launch.kind)) {
    call.first = fused_tasks_.size();
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const AttendItem& item = memory_.program->attend_items[static_cast<std::size_t>(index)];
      fused_tasks_.push_back(resolve_fused(memory_, launch.kind, item));
    }
  } else if (is_attention(launch.kind)) {
    call.first = attend_tasks_.size();
    add_attend_tasks(launch);
  } else if (launch.kind != LaunchKind::sum_sinks) {
    call.first = row_tasks_.size();
    add_row_tasks(launch);
  }
  if (device_ != nullptr) return launch_on_device(launch, call.first);
  calls_.push_back(call);
  queue_->launch({&Executor::run_call, &calls_.back()});
}

void Executor::add_row_tasks(const Launch& launch) {
  for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
    row_tasks_.push_back(resolve_row(memory_, launch.kind, memory_.program->row_items[static_cast<std::size_t>(index)]));
  }
}

void Executor::add_attend_tasks(const Launch& launch) {
  for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
    const AttendItem& item = memory_.program->attend_items[static_cast<std::size_t>(index)];
    attend_tasks_.push_back(resolve_attend(memory_, launch.kind, item));
  }
}

void Executor::attend_on_device(const Launch& launch) {
  const std::size_t first = attend_tasks_.size();
  const AttendItem& item = memory_.program->attend_items[static_cast<std::size_t>(launch.first)];
  const auto tasks = [&] {
    if (attend_tasks_.size() == first) add_attend_tasks(launch);
    return std::span<const kernels::AttendTask>(attend_tasks_).subspan(first);
  };
  const AttendCall call{&launch, &bindings_, item.operands[kDq].view >= 0, item.operands[kDk].view >= 0, tasks};
  if (launch.kind == LaunchKind::attend) return device_->attend(pass_->params, call);
  device_->attend_backward(pass_->params, call);
}

void Executor::launch_on_device(const Launch& launch, std::size_t first) {
  const auto count = static_cast<std::size_t>(launch.count);
  if (is_fused(launch.kind)) {
    const Pass pass = launch.kind == LaunchKind::fused ? Pass::forward : Pass::backward;
    const FusedMode mode = fused_mode(*plan_, pass, options_.deterministic);
    std::byte* const workspace = arena_.data() + memory_.program->scratch_offset;
    return device_->attend_fused(pass_->params, {fused_tasks_.data() + first, count}, mode, workspace);
  }
  if (launch.kind == LaunchKind::sum_sinks) {
    return device_->sum_sinks(sink_gradient(0), plan_->problem.heads, plan_->problem.ranks, bindings_.dsinks);
  }
  RINGSPAN_CHECK(launch.kind == LaunchKind::sink_gradient);
  const std::span<const kernels::RowTask> tasks(row_tasks_.data() + first, count);
  device_->sink_gradient(tasks, bindings_.sinks, sink_gradient(plan_->rank), plan_->problem.heads);
}

// Waits for everything launched so far.
void Executor::drain() {
  if (device_ != nullptr) return device_->wait(device_->record(), [this] { communicator_.progress(); });
  if (queue_->memory_space() != MemorySpace::host) communicator_.progress();  // the kernels have begun, or will: move messages
  queue_->wait(queue_->record(), [this] { communicator_.progress(); });
}

// The peers learn of it first; then nothing of ours may touch the caller's tensors any more.
void Executor::fail() noexcept {
  communicator_.abort(describe_error(failure_).text);
  if (device_ != nullptr) return device_->finish();
  try {
    queue_->wait(queue_->record(), [] {});
  } catch (...) {
    return;  // the first error is the one to report; a failed device runs nothing more
  }
}

// On the queue: the communicator is driven from here only where the queue is the calling thread itself.
void Executor::run_call(void* argument) {
  const Call& call = *static_cast<const Call*>(argument);
  Executor& self = *call.executor;
  const Launch& launch = *call.launch;
  const bool on_caller = self.queue_->memory_space() == MemorySpace::host;
  const auto progress = [&self, on_caller] {
    if (on_caller) self.communicator_.progress();
  };
  const kernels::Context context{self.pool_, self.arena_.data() + self.memory_.program->scratch_offset, progress};
  if (is_attention(launch.kind)) {
    const std::span<const kernels::AttendTask> tasks(self.attend_tasks_.data() + call.first,
                                                     static_cast<std::size_t>(launch.count));
    self.pass_->kernel->run(self.pass_->params, tasks, context);
  } else if (launch.kind == LaunchKind::sum_sinks) {
    self.sum_sinks();
  } else {
    self.run_rows(launch, {self.row_tasks_.data() + call.first, static_cast<std::size_t>(launch.count)}, context);
  }
}

void Executor::run_rows(const Launch& launch, std::span<const kernels::RowTask> tasks, const kernels::Context& context) {
  switch (launch.kind) {
    case LaunchKind::fill:
      return kernels::fill_rows(tasks, launch.width, launch.value, context);
    case LaunchKind::copy:
      return kernels::copy_rows(tasks, launch.width, context);
    case LaunchKind::add:
      return kernels::add_rows(tasks, launch.width, context);
    case LaunchKind::merge:
      return kernels::merge_rows(tasks, launch.width, context);
    case LaunchKind::merge_states:
      return kernels::merge_states(tasks, launch.width, context);
    case LaunchKind::finalize:
      return kernels::finalize_rows(tasks, launch.width, launch.value, launch.with_sinks ? bindings_.sinks : nullptr, context);
    case LaunchKind::delta:
      return kernels::delta_rows(tasks, launch.width, context);
    case LaunchKind::sink_gradient:
      return kernels::sink_gradient(tasks, bindings_.sinks, sink_gradient(plan_->rank), context);
    default:
      RINGSPAN_CHECK(false);
  }
}

double* Executor::sink_gradient(int rank) const {
  return reinterpret_cast<double*>(arena_.data() + plan_->backward.sink_gradient_offset) +
         static_cast<std::int64_t>(rank) * plan_->problem.heads;
}

// The rows of all ranks, in rank order whoever sums, so that all ranks get the same bits.
void Executor::sum_sinks() {
  for (int head = 0; head < plan_->problem.heads; ++head) {
    double sum = 0;
    for (int rank = 0; rank < plan_->problem.ranks; ++rank) sum += sink_gradient(rank)[head];
    bindings_.dsinks[head] = static_cast<float>(sum);
  }
}

}  // namespace ringspan::internal
