#include "exec/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "exec/choose_fused.h"
#include "exec/handshake.h"
#include "plan/fuse.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

constexpr std::uint64_t kCallMask = (std::uint64_t{1} << 32) - 1;
static_assert(kPlanRounds == 0 && (kCallMask + 1) << kPlanRoundBits <= kPlanRoundsEnd);

bool has_saved(const Program& program) {
  return std::any_of(program.regions.begin(), program.regions.end(),
                     [](const Region& region) { return region.component == Component::saved && region.bytes > 0; });
}

void check_fit(const PlanData& plan, const Communicator& communicator, const ExecuteOptions& options) {
  if (communicator.size() != plan.problem.ranks) {
    throw InvalidArgument(
        fmt::format("the communicator has {} ranks, but the plan was made for {}", communicator.size(), plan.problem.ranks));
  }
  if (communicator.rank() != plan.rank) {
    throw InvalidArgument(
        fmt::format("the communicator is rank {}'s, but the plan was made for rank {}", communicator.rank(), plan.rank));
  }
  check_deadline(options.deadline);
}

std::int64_t arena_bytes(const PlanData& plan) { return std::max(plan.forward.arena_bytes, plan.backward.arena_bytes); }

Plan booked(const Plan& plan, Communicator& communicator, Device* device) {
  const PlanOptions& options = plan.options();
  if (device == nullptr) {
    if (options.device == DeviceKind::cpu) return plan;
    throw InvalidArgument(
        fmt::format("the plan was made for {}, but this attention runs on the CPU", to_string(options.device)));
  }
  if (options.device == DeviceKind::cpu) {
    return Plan(std::make_shared<const PlanData>(plan_for_device(plan.data(), takes_messages_of(communicator, *device))));
  }
  if (options.device_messages && !takes_messages_of(communicator, *device)) {
    throw InvalidArgument(
        fmt::format("the plan was made with device_messages, but the communicator takes no memory of {}", device->name()));
  }
  return plan;
}

// The plan as it is booked for what it runs on, with the kernels that it runs there.
Plan plan_for(const Plan& plan, Communicator& communicator, Device* device, const ExecuteOptions& options,
              std::span<const std::byte> arena) {
  const Plan own = booked(plan, communicator, device);
  if (device == nullptr) return own;
  const auto given = static_cast<std::int64_t>(arena.size());
  return Plan(std::make_shared<const PlanData>(choose_fused(own.data(), *device, options.deterministic, given)));
}

}  // namespace

bool takes_messages_of(const Communicator& communicator, Device& device) {
  if (communicator.size() == 1) return false;  // there are none
  std::byte* const sample = device.allocate(1);
  const bool takes = communicator.takes_device_memory(sample);
  device.release(sample);
  return takes;
}

Executor::Executor(const Plan& plan, Communicator& communicator, const ExecuteOptions& options, std::span<std::byte> arena,
                   std::unique_ptr<Device> device)
    : shared_plan_(plan_for(plan, communicator, device.get(), options, arena)),
      plan_((check_fit(plan.data(), communicator, options), &shared_plan_.data())),
      communicator_(communicator),
      agreement_(communicator),
      options_(options),
      device_(std::move(device)),
      arena_(arena_bytes(*plan_), arena, device_.get()),
      pool_(plan_->options.threads),
      trace_(*plan_, options.trace),
      queue_(options.fake_device ? make_fake_device_queue(options.fake_device_seed) : make_cpu_queue()) {
  if (device_ != nullptr) prepare_device();
  prepare(Pass::forward);
  if (!plan_->has_backward) return;
  prepare(Pass::backward);
  reads_o_ = is_touched(plan_->backward, TensorKind::o);
  reads_saved_ = has_saved(plan_->backward);
}

Executor::~Executor() {
  if (device_ != nullptr) device_->finish();  // nothing may still use what is given back
}

// Refuses what only the CPU has, and sets aside what passes need besides the arena.
void Executor::prepare_device() {
  if (options_.fake_device) {
    throw InvalidArgument(fmt::format("fake_device delays work on the CPU, but this attention runs on {}", device_->name()));
  }
  device_->name_kernels(plan_->options.attend_kernel, plan_->options.attend_backward_kernel);
  device_->check_supported(attend_params(*plan_).shape, plan_->has_backward);
  if (!plan_->options.device_messages) mirror_.emplace(*device_, plan_->forward, plan_->backward);
  device_->reserve(task_list_bytes(*plan_));
}

// A tensor in the wrong memory is refused by name.
void Executor::check_space() const {
  const auto check = [&](const void* data, std::string_view name) {
    if (data == nullptr || device_->holds(data)) return;
    throw InvalidArgument(
        fmt::format("{}.data ({}) is not memory of {}, where this attention runs", name, fmt::ptr(data), device_->name()));
  };
  for (int index = 0; index < kCallerTensors; ++index) {
    const auto kind = static_cast<TensorKind>(index);
    const TensorShape shape = shape_of(*plan_, kind);
    const void* const data = bindings_[kind].data;
    if (shape.batch * shape.rows * shape.heads == 0 || data == nullptr) continue;
    if (!plan_->options.host_tensors) {
      check(data, to_string(kind));
    } else if (!device_->holds_pinned(data)) {
      throw InvalidArgument(fmt::format("{}.data ({}) is not pinned host memory, where tensors of a plan with host_tensors lie",
                                        to_string(kind), fmt::ptr(data)));
    }
  }
  check(bindings_.alibi_slopes, "alibi_slopes");
  check(bindings_.sinks, "sinks");
  check(bindings_.dsinks, "dsinks");
}

// What a library's fused attention makes of these tensors is known only now.
void Executor::check_fused(Pass pass) const {
  const Program& program = pass == Pass::forward ? plan_->forward : plan_->backward;
  if (!is_fused(program)) return;
  const char* const option = pass == Pass::forward ? "attend_kernel" : "attend_backward_kernel";
  const std::string& kernel = (pass == Pass::forward ? plan_->attend : plan_->attend_backward).name;
  if (pass == Pass::backward && bindings_[TensorKind::dlse].data != nullptr) {
    throw InvalidArgument(fmt::format("dlse is given, but {} has no gradient through lse; set {} = \"own\"", kernel, option));
  }
  const FusedAnswer answer = ask_fused(*plan_, pass, *device_, options_.deterministic, &bindings_);
  if (!answer.refusal.empty()) {
    throw InvalidArgument(
        fmt::format("{} cannot compute on these tensors: {}; set {} = \"own\"", kernel, answer.refusal, option));
  }
  const std::int64_t given = fused_workspace_bytes(program);
  if (answer.workspace_bytes > given) {
    throw InvalidArgument(
        fmt::format("{} needs a workspace of {} bytes with the strides of these tensors, but the plan gives {}; "
                    "set {} = \"own\"",
                    kernel, answer.workspace_bytes, given, option));
  }
}

// Selects the kernel, proves that the program stays inside its memory, and sets everything aside that running it needs.
void Executor::prepare(Pass pass) {
  PassState& state = passes_[static_cast<int>(pass)];
  state.program = pass == Pass::forward ? &plan_->forward : &plan_->backward;
  state.params = attend_params(*plan_);
  const Tile tile = pass == Pass::forward ? plan_->attend.tile : plan_->attend_backward.tile;
  state.params.shape.tile = {tile.queries, tile.keys};
  if (device_ == nullptr) {
    state.kernel = pass == Pass::forward
                       ? &kernels::select_attend(state.params.shape, plan_->options.attend_kernel)
                       : &kernels::select_attend_backward(state.params.shape, plan_->options.attend_backward_kernel);
  }
  const Program& program = *state.program;
  check_program(*plan_, program);
  for (const Stage& stage : program.stages) {
    std::size_t rows = 0;
    std::size_t attends = 0;
    std::size_t fused = 0;
    for (const auto* launches : {&stage.before, &stage.copies, &stage.compute}) {
      for (const Launch& launch : *launches) {
        std::size_t& counter = is_fused(launch.kind) ? fused : is_attention(launch.kind) ? attends : rows;
        counter += launch.kind == LaunchKind::sum_sinks ? 0 : static_cast<std::size_t>(launch.count);
      }
    }
    row_tasks_.reserve(std::max(row_tasks_.capacity(), rows));
    attend_tasks_.reserve(std::max(attend_tasks_.capacity(), attends));
    fused_tasks_.reserve(std::max(fused_tasks_.capacity(), fused));
    calls_.reserve(std::max(calls_.capacity(), stage.before.size() + stage.compute.size()));
    requests_.reserve(std::max(requests_.capacity(), stage.rounds.size()));
    for (const Round& round : stage.rounds) {
      RINGSPAN_CHECK(round.number < (std::uint64_t{1} << kPlanRoundBits));
      for (const Transfer& transfer : round.transfers) {
        state.messages.push_back({transfer.send ? Message::Direction::send : Message::Direction::receive, transfer.peer,
                                  mirror_ ? mirror_->at(transfer.offset) : arena_.data() + transfer.offset, transfer.bytes});
      }
    }
  }
}

void Executor::forward(const ForwardTensors& tensors) {
  execute(Pass::forward, [&] { return bind(*plan_, tensors); });
}

void Executor::backward(const BackwardTensors& tensors) {
  if (!plan_->has_backward) throw InvalidArgument("the plan has no backward pass: it was made with backward = false");
  execute(Pass::backward, [&] {
    if (!has_forward_ && reads_saved_) {
      throw InvalidArgument("backward() reads what forward() keeps in the arena, but forward() has not run");
    }
    return bind(*plan_, tensors, reads_o_);
  });
}

void Executor::wait() {
  if (device_ != nullptr) device_->wait(device_->record(), [this] { communicator_.progress(); });
}

// The saved regions lie at the beginning of the arena, at the same places in both programs.
std::span<const std::byte> Executor::saved() const {
  if (!plan_->has_backward) return {};
  std::int64_t end = 0;
  for (const Region& region : plan_->forward.regions) {
    if (region.component == Component::saved) end = std::max(end, region.offset + region.bytes);
  }
  return {arena_.data(), static_cast<std::size_t>(end)};
}

void Executor::restore_saved(std::span<const std::byte> saved) {
  check_saved(saved.size());
  copy_bytes(arena_.data(), saved.data(), saved.size());
  has_forward_ = true;
}

void Executor::copy_saved(std::span<std::byte> target) {
  check_saved(target.size());
  copy_bytes(target.data(), arena_.data(), target.size());
}

void Executor::check_saved(std::size_t bytes) const {
  if (bytes == saved().size()) return;
  throw InvalidArgument(fmt::format("saved has {} bytes, but the plan keeps {}", bytes, saved().size()));
}

void Executor::copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (device_ != nullptr) return device_->copy(to, from, static_cast<std::int64_t>(bytes));
  std::memcpy(to, from, bytes);
}

template <typename Bind>
void Executor::execute(Pass pass, const Bind& bind_tensors) {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  const Clock::time_point begin = Clock::now();
  waiting_ = {};
  trace_.begin_pass(pass);
  pass_ = &passes_[static_cast<int>(pass)];
  pass_->stats = {};
  std::exception_ptr own_error;
  try {
    bindings_ = bind_tensors();
    if (device_ != nullptr) check_space();
    if (device_ != nullptr) check_fused(pass);
  } catch (const InvalidArgument&) {
    own_error = std::current_exception();
  }
  ++call_number_;
  agree(pass, own_error);
  try {
    run();
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    fail(error.what());
    throw;
  }
  has_forward_ = has_forward_ || pass == Pass::forward;
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  pass_->stats.seconds = seconds.count();
  pass_->stats.waiting_seconds = std::chrono::duration<double>(waiting_).count();
}

// Before any data moves, all ranks must be about to run the same pass of the same plan, with tensors that each found sound.
void Executor::agree(Pass pass, const std::exception_ptr& own_error) {
  if (communicator_.size() == 1) {
    if (own_error != nullptr) std::rethrow_exception(own_error);
    return;
  }
  const Clock::time_point begin = Clock::now();
  const std::uint64_t execution = 2 * call_number_ + (pass == Pass::backward ? 1 : 0);
  agreement_.agree_fingerprint(plan_->fingerprint, execution, own_error, options_.deadline);
  const Clock::time_point end = Clock::now();
  waiting_ += end - begin;
  trace_.add(Trace::Lane::wait, -1, begin, end);
}

void Executor::run() {
  const Program& program = *pass_->program;
  pass_->params.alibi_slopes = bindings_.alibi_slopes;
  pass_->params.alibi_batch_stride = bindings_.alibi_batch_stride;
  memory_ = {&program, arena_.data(), &bindings_, plan_->problem.group()};
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
  for (const Launch& launch : stage.before) enqueue(launch);
  if (mirror_) copy_messages(stage, true);
  if (device_ != nullptr ? !stage.rounds.empty() : !stage.before.empty()) drain();
  const auto prepared = Clock::now();
  if (!stage.copies.empty()) begin_copies(stage);
  post(stage);
  if (!options_.overlap) wait_for_messages();
  const auto posted = Clock::now();
  for (const Launch& launch : stage.compute) enqueue(launch);
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
  for (const Request request : requests_) communicator_.wait(request, options_.deadline);
  waiting_ += Clock::now() - begin;
}

void Executor::post(const Stage& stage) {
  for (const Round& round : stage.rounds) {
    if (round.transfers.empty()) continue;
    const std::span<const Message> batch(pass_->messages.data() + next_message_, round.transfers.size());
    next_message_ += batch.size();
    requests_.push_back(communicator_.post((call_number_ & kCallMask) << kPlanRoundBits | round.number, batch));
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
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      row_tasks_.push_back(resolve_row(memory_, launch.kind, memory_.program->row_items[static_cast<std::size_t>(index)]));
    }
    device_->copy_rows({row_tasks_.data() + first, static_cast<std::size_t>(launch.count)}, launch.width);
  }
}

void Executor::enqueue(const Launch& launch) {
  if (launch.count == 0 && launch.kind != LaunchKind::sum_sinks) return;
  Call call{this, &launch, 0};
  if (is_fused(launch.kind)) {
    call.first = fused_tasks_.size();
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const AttendItem& item = memory_.program->attend_items[static_cast<std::size_t>(index)];
      fused_tasks_.push_back(resolve_fused(memory_, launch.kind, item));
    }
  } else if (is_attention(launch.kind)) {
    call.first = attend_tasks_.size();
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const AttendItem& item = memory_.program->attend_items[static_cast<std::size_t>(index)];
      attend_tasks_.push_back(resolve_attend(memory_, launch.kind, item));
    }
  } else if (launch.kind != LaunchKind::sum_sinks) {
    call.first = row_tasks_.size();
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      row_tasks_.push_back(resolve_row(memory_, launch.kind, memory_.program->row_items[static_cast<std::size_t>(index)]));
    }
  }
  if (device_ != nullptr) return launch_on_device(launch, call.first);
  calls_.push_back(call);
  queue_->launch({&Executor::run_call, &calls_.back()});
}

void Executor::launch_on_device(const Launch& launch, std::size_t first) {
  const auto count = static_cast<std::size_t>(launch.count);
  if (is_fused(launch.kind)) {
    const FusedMode mode{launch.kind == LaunchKind::fused_backward, options_.deterministic};
    std::byte* const workspace = arena_.data() + memory_.program->scratch_offset;
    return device_->attend_fused(pass_->params, {fused_tasks_.data() + first, count}, mode, workspace);
  }
  if (is_attention(launch.kind)) {
    const std::span<const kernels::AttendTask> tasks(attend_tasks_.data() + first, count);
    if (launch.kind == LaunchKind::attend) return device_->attend(pass_->params, tasks);
    return device_->attend_backward(pass_->params, tasks);
  }
  if (launch.kind == LaunchKind::sum_sinks) {
    return device_->sum_sinks(sink_gradient(0), plan_->problem.heads, plan_->problem.ranks, bindings_.dsinks);
  }
  const std::span<const kernels::RowTask> tasks(row_tasks_.data() + first, count);
  if (launch.kind == LaunchKind::sink_gradient) {
    return device_->sink_gradient(tasks, bindings_.sinks, sink_gradient(plan_->rank), plan_->problem.heads);
  }
  device_->rows(launch, tasks, launch.with_sinks ? bindings_.sinks : nullptr);
}

// Waits for everything launched so far.
void Executor::drain() {
  if (device_ != nullptr) return device_->wait(device_->record(), [this] { communicator_.progress(); });
  if (queue_->memory_space() != MemorySpace::host) communicator_.progress();  // the kernels have begun, or will: move messages
  queue_->wait(queue_->record(), [this] { communicator_.progress(); });
}

// The peers learn of it first; then nothing of ours may touch the caller's tensors any more.
void Executor::fail(const char* what) noexcept {
  communicator_.abort(what);
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
