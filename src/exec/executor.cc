#include "exec/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <system_error>

#include "base/check.h"
#include "exec/check_program.h"
#include "exec/choose_fused.h"
#include "exec/handshake.h"
#include "plan/fuse.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

constexpr const char* kNoForward = "the latest forward() was given memory for it, or none has run";

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

ThreadPool make_pool(int threads, const CallerThreads& caller) {
  try {
    return ThreadPool(threads, caller);
  } catch (const std::system_error& error) {
    throw Error(fmt::format("the system refused a thread of threads ({}): {}", threads, error.what()));
  }
}

std::int64_t arena_bytes(const PlanData& plan) { return std::max(plan.forward.arena_bytes, plan.backward.arena_bytes); }

std::int64_t most_rows(const Program& program) {
  std::int64_t most = 0;
  for (const AttendItem& item : program.attend_items) most = std::max({most, item.slice.q.count, item.slice.k.count});
  return most;
}

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
  if (communicator.size() > 1) device->show_life_by([&communicator] { communicator.progress(); });
  const auto given = static_cast<std::int64_t>(arena.size());
  return Plan(std::make_shared<const PlanData>(choose_fused(own.data(), *device, options.deterministic, given)));
}

}  // namespace

bool takes_messages_of(const Communicator& communicator, Device& device) {
  if (communicator.size() == 1) return false;  // there are none
  const auto release = [&](std::byte* memory) { device.release(memory); };
  const std::unique_ptr<std::byte, decltype(release)> sample(device.allocate(1), release);
  return communicator.takes_device_memory(sample.get());
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
      pool_(make_pool(plan_->options.threads, options.caller_threads)),
      trace_(*plan_, options.trace),
      queue_(options.fake_device ? make_fake_device_queue(options.fake_device_seed) : make_cpu_queue()) {
  saved_bytes_ = static_cast<std::int64_t>(saved().size());
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
  device_->check_supported(attend_params(*plan_).shape, plan_->has_backward,
                           std::max(most_rows(plan_->forward), most_rows(plan_->backward)));
  if (plan_->options.device_messages) {
    stream_messages_ = communicator_.on_streams();
  } else {
    mirror_.emplace(*device_, plan_->forward, plan_->backward);
  }
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
  check(bindings_.saved, "saved");
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
        RINGSPAN_CHECK(transfer.offset >= saved_bytes_);  // which need not lie in the arena
        state.messages.push_back({transfer.send ? Message::Direction::send : Message::Direction::receive, transfer.peer,
                                  mirror_ ? mirror_->at(transfer.offset) : arena_.data() + transfer.offset, transfer.bytes});
      }
    }
  }
}

void Executor::forward(const ForwardTensors& tensors) {
  execute(Pass::forward, [&] {
    Bindings bindings = bind(*plan_, tensors);
    bindings.saved = given_saved(tensors.saved);
    return bindings;
  });
}

void Executor::backward(const BackwardTensors& tensors) {
  execute(Pass::backward, [&] {
    if (!plan_->has_backward)
      throw InvalidArgument("the plan has no backward pass: it was made with backward = false (in C forward_only = 1)");
    if (!has_forward_ && reads_saved_ && tensors.saved.empty()) {
      throw InvalidArgument(std::string("backward() reads what forward() keeps in the arena, but ") + kNoForward);
    }
    Bindings bindings = bind(*plan_, tensors, reads_o_);
    bindings.saved = given_saved(tensors.saved);
    return bindings;
  });
}

void Executor::refuse(Pass pass, const std::exception_ptr& error) {
  const std::exception_ptr thrown =
      error != nullptr ? error : std::make_exception_ptr(InvalidArgument("refused without an error"));
  execute(pass, [&]() -> Bindings { std::rethrow_exception(thrown); });
  std::rethrow_exception(thrown);  // which execute() has done
}

void Executor::wait() {
  if (device_ == nullptr) return;
  try {
    device_->wait(device_->record(), [this] { communicator_.progress(); });
  } catch (...) {  // of a peer, for instance
    device_->finish();
    throw;
  }
}

// Before an error leaves: passes before this one may still be running, and the caller may give its tensors back.
void Executor::settle() noexcept {
  if (communicator_.size() == 1) return;  // of one rank the error is the caller's, and it knows what it has not waited for
  try {
    wait();
  } catch (...) {
    return;  // the first error is the one to report
  }
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
  if (!has_forward_ && !target.empty()) throw InvalidArgument(std::string("there is nothing to copy: ") + kNoForward);
  copy_bytes(target.data(), arena_.data(), target.size());
}

void Executor::set_deadline(Communicator::Seconds deadline) {
  check_deadline(deadline);
  options_.deadline = deadline;
}

void Executor::check_saved(std::size_t bytes) const {
  if (bytes == saved().size()) return;
  throw InvalidArgument(fmt::format("saved has {} bytes, but the plan keeps {}", bytes, saved().size()));
}

std::byte* Executor::given_saved(std::span<const std::byte> saved) const {
  if (saved.empty()) return nullptr;
  check_saved(saved.size());
  if (reinterpret_cast<std::uintptr_t>(saved.data()) % Arena::kAlignment != 0) {
    throw InvalidArgument(fmt::format("saved ({}) is not aligned to {} bytes", fmt::ptr(saved.data()), Arena::kAlignment));
  }
  return const_cast<std::byte*>(saved.data());
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
  pass_ = &passes_[static_cast<int>(pass)];
  std::exception_ptr own_error;
  try {
    bindings_ = bind_tensors();
    if (device_ != nullptr) check_space();
    if (device_ != nullptr) check_fused(pass);
  } catch (...) {  // whatever it is: the other ranks must hear of it
    own_error = std::current_exception();
  }
  try {
    agree(pass, own_error);
  } catch (...) {
    settle();
    throw;
  }
  ++call_number_;  // on all ranks: either they all agreed, or none did
  pass_->stats = {};
  try {
    run();
  } catch (...) {  // whatever it is: a communicator may be the caller's
    failure_ = std::current_exception();
    fail();
    throw;
  }
  if (pass == Pass::forward) has_forward_ = bindings_.saved == nullptr;
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  pass_->stats.seconds = seconds.count();
  pass_->stats.waiting_seconds = std::chrono::duration<double>(waiting_).count();
}

// Before any data moves, all ranks must be about to run the same pass of the same plan, with tensors that each found sound.
void Executor::agree(Pass pass, const std::exception_ptr& own_error) {
  if (communicator_.size() == 1) {
    if (own_error != nullptr) std::rethrow_exception(own_error);
    trace_.begin_pass(pass);
    return;
  }
  const Clock::time_point begin = Clock::now();
  const kernels::AttendParams& params = passes_[static_cast<int>(pass)].params;
  agreement_.agree_pass({.plan = plan_->fingerprint,
                         .attention = number_,
                         .execution = call_number_,
                         .backward = pass == Pass::backward,
                         .seed = params.dropout > 0 ? params.seed : 0},
                        own_error, options_.deadline);
  const Clock::time_point end = Clock::now();
  waiting_ += end - begin;
  trace_.begin_pass(pass);
  trace_.add(Trace::Lane::wait, -1, begin, end);
}

}  // namespace ringspan::internal
