#include "ringspan/attention.h"

#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "comm/rounds.h"
#include "cuda/select_device.h"
#include "exec/executor.h"
#include "exec/handshake.h"
#include "ringspan/error.h"
#include "ringspan/tuning.h"

namespace ringspan {
namespace {

// In a thread of its own where there are other ranks: this one shows them meanwhile that it lives, as planning may take longer
// than a deadline.
Plan plan_alive(const Problem& problem, const PlanOptions& options, Communicator& communicator) {
  const int rank = communicator.rank();
  if (communicator.size() == 1) return make_plan(problem, options, rank);
  std::future<Plan> plan = std::async([&] { return make_plan(problem, options, rank); });  // here where no thread can be had
  while (plan.wait_for(std::chrono::milliseconds(1)) == std::future_status::timeout) communicator.progress();
  return plan.get();
}

}  // namespace

struct Attention::Impl {
  std::optional<internal::Executor> executor;

  // Collective. What fails here may fail on one rank only (memory, a kernel's name, the caller's arena), so all ranks agree
  // that it did not before anyone counts on the others.
  template <typename MakePlan>
  void construct(const MakePlan& plan, Communicator& communicator, const ExecuteOptions& execute, std::span<std::byte> arena) {
    std::exception_ptr own_error;
    try {
      std::unique_ptr<internal::Device> device = cuda::make_device(execute.device, execute.stream, execute.fake_device_seed);
      executor.emplace(plan(device.get()), communicator, execute, arena, std::move(device));
    } catch (...) {  // whatever it is: a communicator may be the caller's
      own_error = std::current_exception();
    }
    const std::uint64_t number =
        internal::agree_on_plan(communicator, executor ? &executor->plan() : nullptr, own_error, execute.deadline);
    if (own_error != nullptr) std::rethrow_exception(own_error);
    executor->set_number(number);
  }
};

Attention::Attention(const Problem& problem, const PlanOptions& options, Communicator& communicator, ExecuteOptions execute)
    : impl_(std::make_unique<Impl>()) {
  const bool on_cpu = execute.device.empty() || execute.device == "cpu";
  PlanOptions tuned = options;
  tuned.device = on_cpu ? DeviceKind::cpu : DeviceKind::cuda;  // whatever the caller said
  try {
    if (on_cpu) tuned = with_tuned_sizes(problem, tuned);
  } catch (...) {  // the other ranks are told instead of left to wait
    internal::refuse(communicator, std::current_exception(), execute.deadline, kAgreeRounds);
  }
  PlanOptions agreed = internal::agree_on_problem(communicator, problem, tuned, execute.deadline);
  const auto plan = [&](internal::Device* device) {
    PlanOptions own = agreed;
    own.device = device == nullptr ? DeviceKind::cpu : DeviceKind::cuda;
    own.device_messages = device != nullptr && internal::takes_messages_of(communicator, *device);
    return plan_alive(problem, own, communicator);
  };
  impl_->construct(plan, communicator, execute, {});
}

Attention::Attention(const Plan& plan, Communicator& communicator, ExecuteOptions execute, std::span<std::byte> arena)
    : impl_(std::make_unique<Impl>()) {
  impl_->construct([&](internal::Device* /*device*/) { return plan; }, communicator, execute, arena);
}

Attention::~Attention() = default;
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;

const Plan& Attention::plan() const { return impl_->executor->plan(); }
void Attention::forward(const ForwardTensors& tensors) { impl_->executor->forward(tensors); }
void Attention::backward(const BackwardTensors& tensors) { impl_->executor->backward(tensors); }
void Attention::wait() { impl_->executor->wait(); }
void Attention::refuse(Pass pass, const std::exception_ptr& error) { impl_->executor->refuse(pass, error); }
std::span<const std::byte> Attention::saved() const { return impl_->executor->saved(); }
void Attention::restore_saved(std::span<const std::byte> saved) { impl_->executor->restore_saved(saved); }
void Attention::copy_saved(std::span<std::byte> target) { impl_->executor->copy_saved(target); }
void Attention::set_seed(std::uint64_t seed) { impl_->executor->set_seed(seed); }
void Attention::set_deadline(Communicator::Seconds deadline) { impl_->executor->set_deadline(deadline); }
const PassStats& Attention::stats(Pass pass) const { return impl_->executor->stats(pass); }
std::string Attention::trace_json() const { return impl_->executor->trace().json(); }

}  // namespace ringspan
