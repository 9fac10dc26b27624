// Executor: runs the programs of a plan on one rank: kernels on a queue, messages on a communicator, all memory in one arena.
//
// Every queue is taken to be asynchronous: what a launch writes is sent, and what was received is overwritten, only after the
// event that follows the launch is complete. progress() of the communicator runs inside kernels on the CPU queue, and while
// waiting for the queue otherwise.
//
// An error in one rank (bad tensors) found before any data moved is raised by all ranks and leaves the executor usable. An
// error after that aborts the communicator, so that the peers fail at once, and is thrown again by every later call.
//
// With a Device the arena and the caller's tensors are memory of that device and nothing here touches them: launches and copies
// go to the device in order. Messages lie in the arena where the communicator takes memory of the device
// (PlanOptions::device_messages), else pass through host memory (message_mirror.h). Where the communicator moves them in the
// order of streams the host waits for its peers only; elsewhere it waits for the device before it posts. It never waits at the
// end of a pass: what a pass computed is complete for what the caller enqueues behind it. With
// PlanOptions::host_tensors the caller's tensors are pinned host memory, and only the copies of the plan touch them.
//
// Cost: everything is allocated by the constructor; forward() and backward() allocate nothing of ours unless they throw.
// Thread safety: one thread at a time; the caller's tensors and the arena are ours until the call returns.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "comm/agree.h"
#include "exec/arena.h"
#include "exec/bindings.h"
#include "exec/device.h"
#include "exec/message_mirror.h"
#include "exec/queue.h"
#include "exec/resolve.h"
#include "exec/trace.h"
#include "kernels/attend.h"
#include "kernels/rowwise.h"
#include "plan/plan_data.h"
#include "ringspan/attention.h"
#include "ringspan/communicator.h"

namespace ringspan::internal {

// Rounds of a plan are offsets: the messages of an execution carry (call number << kPlanRoundBits) + round of the plan.
inline constexpr int kPlanRoundBits = 28;

// Whether the communicator moves messages that lie in memory of the device: PlanOptions::device_messages.
bool takes_messages_of(const Communicator& communicator, Device& device);

class Executor {
 public:
  // `plan` must be this rank's. Throws InvalidArgument where plan, communicator, options or arena do not fit together.
  // `device` may be null: the host. A plan for the CPU is booked anew for a device (plan/device_memory.h).
  Executor(const Plan& plan, Communicator& communicator, const ExecuteOptions& options, std::span<std::byte> arena,
           std::unique_ptr<Device> device = nullptr);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void forward(const ForwardTensors& tensors);
  void backward(const BackwardTensors& tensors);
  // Takes part in a pass with the error of a rank that has no tensors for it; all ranks throw.
  [[noreturn]] void refuse(Pass pass, const std::exception_ptr& error);
  void wait();  // for the device; on the host a pass has ended when it returns
  std::span<const std::byte> saved() const;
  void restore_saved(std::span<const std::byte> saved);
  void copy_saved(std::span<std::byte> target);
  void set_seed(std::uint64_t seed) {
    for (PassState& pass : passes_) pass.params.seed = seed;
  }
  void set_deadline(Communicator::Seconds deadline);
  // What agree_on_plan() returned.
  void set_number(std::uint64_t number) { number_ = number; }

  const Plan& plan() const { return shared_plan_; }
  const PassStats& stats(Pass pass) const { return passes_[static_cast<int>(pass)].stats; }
  const Trace& trace() const { return trace_; }

 private:
  using Clock = Trace::Clock;

  // What is fixed of a pass.
  struct PassState {
    const Program* program = nullptr;
    const kernels::AttendKernel* kernel = nullptr;
    kernels::AttendParams params;
    std::vector<Message> messages;  // of all rounds, one after the other
    PassStats stats;
  };
  // A launch in flight: tasks [first, first + launch->count) of row_tasks_, attend_tasks_ or fused_tasks_.
  struct Call {
    Executor* executor = nullptr;
    const Launch* launch = nullptr;
    std::size_t first = 0;
  };

  void prepare(Pass pass);
  void prepare_device();
  void check_space() const;
  void check_fused(Pass pass) const;
  void check_saved(std::size_t bytes) const;
  std::byte* given_saved(std::span<const std::byte> saved) const;
  void copy_bytes(void* to, const void* from, std::size_t bytes);
  template <typename Bind>
  void execute(Pass pass, const Bind& bind_tensors);
  void agree(Pass pass, const std::exception_ptr& own_error);
  void run();
  void run_stage(std::int32_t index, const Stage& stage);
  void post(const Stage& stage);
  void wait_for_messages();
  void enqueue(std::span<const Launch> launches);
  void enqueue(const Launch& launch);
  void drain();
  void add_row_tasks(const Launch& launch);
  void add_attend_tasks(const Launch& launch);
  void attend_on_device(const Launch& launch);
  void launch_on_device(const Launch& launch, std::size_t first);
  void begin_copies(const Stage& stage);
  void copy_messages(const Stage& stage, bool send);
  void fail() noexcept;
  void settle() noexcept;

  static void run_call(void* argument);
  void run_rows(const Launch& launch, std::span<const kernels::RowTask> tasks, const kernels::Context& context);
  void clear_sink_gradients();
  void sum_sinks();
  double* sink_gradient(int rank) const;

  Plan shared_plan_;
  const PlanData* plan_;
  Communicator& communicator_;
  Agreement agreement_;
  ExecuteOptions options_;
  std::unique_ptr<Device> device_;
  std::optional<MessageMirror> mirror_;        // with a device, unless the plan has device_messages
  StreamMessages* stream_messages_ = nullptr;  // with device_messages, where the communicator has them
  Arena arena_;
  ThreadPool pool_;
  Trace trace_;
  PassState passes_[2];

  // Of the pass that runs.
  PassState* pass_ = nullptr;
  Bindings bindings_;
  Memory memory_;
  std::size_t next_message_ = 0;
  Clock::duration waiting_{};

  // Of the stage that runs; as large as the largest stage of both passes.
  std::vector<kernels::RowTask> row_tasks_;
  std::vector<kernels::AttendTask> attend_tasks_;
  std::vector<FusedTask> fused_tasks_;
  std::vector<Call> calls_;
  std::vector<Request> requests_;

  std::uint64_t number_ = 0;       // of this attention among those of the communicator
  std::uint64_t call_number_ = 0;  // of both passes, the same on all ranks
  bool reads_o_ = false;           // backward does
  bool reads_saved_ = false;       // backward reads what forward keeps in the arena
  bool has_forward_ = false;       // that kept it there
  std::int64_t saved_bytes_ = 0;
  std::exception_ptr failure_;
  std::unique_ptr<Queue> queue_;  // last: a device may still run calls when the rest is torn down
};

}  // namespace ringspan::internal
