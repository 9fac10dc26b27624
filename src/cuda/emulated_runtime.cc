#include <fmt/format.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/emulated_capture.h"
#include "cuda/emulated_memory.h"
#include "cuda/emulated_stream.h"
#include "cuda/emulation.h"
#include "cuda/runtime.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

constexpr std::int64_t kMemory = std::int64_t{1} << 40;

template <typename T>
bool is_tagged(T* data) {
  return (reinterpret_cast<std::uintptr_t>(data) & kEmulatedTag) != 0;
}
template <typename T>
T* tagged(T* data) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(data) | kEmulatedTag);
}
template <typename T>
T* reachable(T* data) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(data) & ~kEmulatedTag);
}

template <typename T>
T* on_device(T* data, const char* what) {
  if (data != nullptr && !is_tagged(data)) throw std::logic_error(fmt::format("{} is host memory", what));
  return reachable(data);
}

kernels::AttendTask reachable_task(kernels::AttendTask task) {
  for (kernels::Rows* rows : {&task.q, &task.m, &task.l, &task.acc, &task.d_out, &task.lse, &task.delta, &task.dq}) {
    rows->data = on_device(rows->data, "an operand of attend");
  }
  for (kernels::KeyRows* rows : {&task.k, &task.v, &task.dk, &task.dv}) {
    rows->data = on_device(rows->data, "an operand of attend");
  }
  return task;
}

kernels::RowTask reachable_task(kernels::RowTask task) {
  for (kernels::Operand& operand : task.operands) operand.data = on_device(operand.data, "an operand of rows");
  return task;
}

template <typename Task>
std::vector<Task> reachable_tasks(const Task* tasks, std::int64_t count) {
  std::vector<Task> list;
  const Task* from = on_device(tasks, "a list of tasks");
  for (std::int64_t index = 0; index < count; ++index) list.push_back(reachable_task(from[index]));
  return list;
}

std::int64_t task_count(const AttendArguments& arguments) {
  std::int64_t count = 0;
  for (std::int64_t index = 0; index < arguments.group_count; ++index) {
    const Group& group = reachable(arguments.groups)[index];
    count = std::max(count, group.first_task + group.task_count);
  }
  return count;
}

SinkArguments reachable_sinks(SinkArguments arguments) {
  arguments.sinks = on_device(arguments.sinks, "sinks");
  arguments.gradient = on_device(arguments.gradient, "the gradient of sinks");
  arguments.total = on_device(arguments.total, "dsinks");
  return arguments;
}

class EmulatedRuntime final : public Runtime {
 public:
  EmulatedRuntime(std::uint64_t seed, EmulatedCapture* capture) : capture_(capture), queue_(make_fake_device_queue(seed)) {}

  std::string name() const override { return "cuda-emulated"; }
  bool holds(const void* data) const override { return is_tagged(data); }
  void* stream() override { return &stream_; }
  void with_device(FunctionRef<void()> action) override { action(); }
  void reach(const Runtime& /*other*/) override {}  // its memory is that of all
  int shared_bytes_per_block() const override { return 227 * 1024; }

  bool is_capturing() override { return capture_ != nullptr && capture_->active; }

  std::byte* allocate(std::int64_t bytes) override {
    if (bytes > kMemory) {
      throw DeviceError(fmt::format("cannot allocate {} bytes on cuda-emulated, which has {}", bytes, kMemory));
    }
    auto* data = static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{256}));
    std::memset(data, 0xff, static_cast<std::size_t>(bytes));  // NaN
    if (capture_ != nullptr) count(tagged(data), bytes, capture_->device);
    return tagged(data);
  }
  void release(std::byte* data) noexcept override {
    if (capture_ != nullptr) uncount(data, capture_->device);
    ::operator delete(reachable(data), std::align_val_t{256});
  }
  std::byte* allocate_host(std::int64_t bytes) override {
    auto* data = static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{256}));
    if (capture_ != nullptr) count(data, bytes, capture_->host);
    return data;
  }
  void release_host(std::byte* data) noexcept override {
    if (capture_ != nullptr) uncount(data, capture_->host);
    ::operator delete(data, std::align_val_t{256});
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    enqueue([to = reachable(to), from = reachable(from), bytes] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  }

  void attend(const AttendArguments& arguments, std::int64_t blocks) override {
    enqueue([this, arguments, blocks] {
      with_reachable(arguments, [&](const AttendArguments& own) { emulate_attend(own, blocks, pool_, [] {}); });
    });
  }
  void gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks) override {
    enqueue([this, gradient, arguments, blocks] {
      with_reachable(arguments, [&](const AttendArguments& own) { emulate_gradient(gradient, own, blocks, pool_, [] {}); });
    });
  }
  void rows(const RowArguments& arguments, std::int64_t blocks) override {
    enqueue([arguments, blocks] {
      const std::vector<kernels::RowTask> tasks = reachable_tasks(arguments.tasks, arguments.task_count);
      RowArguments own = arguments;
      own.tasks = tasks.data();
      own.first_blocks = on_device(arguments.first_blocks, "first_blocks");
      own.sinks = on_device(arguments.sinks, "sinks");
      emulate_rows(own, blocks);
    });
  }
  void sink_gradient(const SinkArguments& arguments) override {
    enqueue([arguments] {
      const std::vector<kernels::RowTask> tasks = reachable_tasks(arguments.tasks, arguments.task_count);
      SinkArguments own = reachable_sinks(arguments);
      own.tasks = tasks.data();
      emulate_sink_gradient(own);
    });
  }
  void sum_sinks(const SinkArguments& arguments) override {
    enqueue([arguments] { emulate_sum_sinks(reachable_sinks(arguments)); });
  }

  Event record() override {
    refuse_in_capture("recorded");
    return queue_->record();
  }
  bool is_complete(Event event) override {
    refuse_in_capture("asked about");
    return queue_->is_complete(event);
  }
  void wait(Event event, FunctionRef<void()> progress) override {
    refuse_in_capture("waited for");
    if (capture_ != nullptr) ++capture_->waits;
    queue_->wait(event, progress);
  }

 private:
  void count(const std::byte* data, std::int64_t bytes, EmulatedCapture::Bytes& counter) {
    ++capture_->allocations;
    allocated_[data] = bytes;
    counter.add(bytes);
  }
  void uncount(const std::byte* data, EmulatedCapture::Bytes& counter) noexcept {
    if (const auto found = allocated_.find(data); found != allocated_.end()) {
      counter.now -= found->second;
      allocated_.erase(found);
    }
  }

  void refuse_in_capture(const char* what) {
    if (is_capturing()) throw DeviceError(fmt::format("an event is {} while cuda-emulated captures", what));
  }

  void enqueue(std::function<void()> work) {
    if (is_capturing()) return capture_->work.push_back(std::move(work));
    queue_->launch({[](void* argument) {
                      const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(argument));
                      (*own)();
                    },
                    new std::function<void()>(std::move(work))});
  }

  template <typename Run>
  static void with_reachable(const AttendArguments& arguments, Run&& run) {
    const std::vector<kernels::AttendTask> tasks = reachable_tasks(arguments.tasks, task_count(arguments));
    AttendArguments own = arguments;
    own.tasks = tasks.data();
    own.groups = on_device(arguments.groups, "groups");
    own.params.alibi_slopes = on_device(arguments.params.alibi_slopes, "alibi_slopes");
    run(own);
  }

  ThreadPool pool_{1};
  EmulatedCapture* capture_;
  std::map<const std::byte*, std::int64_t> allocated_;  // while someone counts
  std::unique_ptr<Queue> queue_;
  EmulatedStream stream_{
      [](void* queue, void (*function)(void*), void* argument) { static_cast<Queue*>(queue)->launch({function, argument}); },
      queue_.get()};
};

}  // namespace

std::unique_ptr<Runtime> make_emulated_runtime(std::uint64_t seed, EmulatedCapture* capture) {
  return std::make_unique<EmulatedRuntime>(seed, capture);
}

}  // namespace ringspan::cuda
