#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/emulated_accesses.h"
#include "cuda/emulated_capture.h"
#include "cuda/emulated_memory.h"
#include "cuda/emulated_order.h"
#include "cuda/emulated_stream.h"
#include "cuda/emulation.h"
#include "cuda/fused.h"
#include "cuda/provided_fused.h"
#include "cuda/runtime.h"
#include "plan/kernel_choice.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

constexpr std::int64_t kMemory = std::int64_t{1} << 40;

template <typename T>
T* on_device(T* data, const char* what) {
  if (data != nullptr && !is_tagged(data)) throw std::logic_error(fmt::format("{} is host memory", what));
  return reachable(data);
}

kernels::AttendTask reachable_task(kernels::AttendTask task) {
  for (kernels::Rows* rows :
       {&task.q, &task.m, &task.l, &task.acc, &task.o, &task.o32, &task.lse, &task.d_out, &task.delta, &task.dq}) {
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
  for (std::int64_t index = 0; index < count; ++index) list.push_back(reachable_task(tasks[index]));
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

// Pinned host memory of all emulated devices of the process.
class PinnedMemory {
 public:
  static PinnedMemory& instance() {
    static PinnedMemory memory;
    return memory;
  }
  void add(const std::byte* data, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    Block& block = blocks_[data];
    block.bytes = std::max(block.bytes, bytes);
    ++block.uses;
  }
  void remove(const std::byte* data) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(data);
    if (block != blocks_.end() && --block->second.uses == 0) blocks_.erase(block);
  }
  bool holds(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto* const address = static_cast<const std::byte*>(data);
    const auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return false;
    const auto& [begin, block] = *std::prev(after);
    return address < begin + block.bytes;
  }

 private:
  struct Block {
    std::int64_t bytes = 0;
    int uses = 0;
  };
  std::mutex mutex_;
  std::map<const std::byte*, Block> blocks_;
};

// Of a stream, or of a capture. The queue goes when nobody waits for it any more.
struct EmulatedPoint final : StreamPoint {
  std::shared_ptr<Queue> queue;
  Event event = 0;
  EmulatedGraph* graph = nullptr;
  std::uint64_t captured = 0;
};

class EmulatedRuntime final : public Runtime {
 public:
  EmulatedRuntime(std::uint64_t seed, EmulatedCapture* capture)
      : capture_(capture),
        seed_(seed),
        graph_(capture == nullptr ? nullptr : capture->graph),
        queue_(make_fake_device_queue(seed)) {}

  ~EmulatedRuntime() override { EmulatedRuntime::finish(); }  // one stream may wait for the other
  void finish() noexcept override {
    for (Queue* queue : {queue_.get(), copies_.get()}) {
      try {
        if (queue != nullptr) queue->wait(queue->record(), [] {});
      } catch (const Error&) {
        continue;  // a failed stream runs nothing more
      }
    }
  }

  std::string name() const override { return "cuda-emulated"; }
  bool holds(const void* data) const override { return is_tagged(data); }
  void* stream() override { return &stream_; }
  void with_device(FunctionRef<void()> action) override { action(); }
  void reach(const Runtime& /*other*/) override {}  // its memory is that of all
  int shared_bytes_per_block() const override { return 227 * 1024; }
  bool has_warpgroups() const override { return true; }
  bool prefers_warpgroups() const override { return false; }  // as devices that do not have them
  std::int64_t residents() const override { return kEmulatedResidents; }

  bool is_capturing() override { return graph_ != nullptr && graph_.load()->is_capturing(); }

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
    PinnedMemory::instance().add(data, bytes);
    return data;
  }
  void release_host(std::byte* data) noexcept override {
    if (capture_ != nullptr) uncount(data, capture_->host);
    PinnedMemory::instance().remove(data);
    ::operator delete(data, std::align_val_t{256});
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    enqueue([to = reachable(to), from = reachable(from), bytes] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); },
            copy_accesses(to, from, bytes));
  }
  void copy_at_once(void* to, const void* from, std::int64_t bytes) override {
    if (!holds_pinned(from)) throw std::logic_error("a copy at once is of pageable memory");
    std::memcpy(reachable(to), from, static_cast<std::size_t>(bytes));
  }

  bool holds_pinned(const void* data) const override { return PinnedMemory::instance().holds(data); }
  void copies_wait() override {
    if (copies_ == nullptr) copies_ = make_fake_device_queue(seed_ + 1);
    order_streams(StreamOrder::kCompute, *queue_, StreamOrder::kCopies, *copies_);
  }
  void copy_beside(const BlockCopy& block) override {
    const auto span = [&](std::int64_t pitch) { return (block.height - 1) * pitch + block.width; };
    if (is_tagged(block.to) == is_tagged(block.from)) throw std::logic_error("a copy beside is between host and device");
    if (!holds_pinned(is_tagged(block.to) ? block.from : block.to))
      throw std::logic_error("a copy beside is of pageable memory");
    if (capture_ != nullptr) {
      (is_tagged(block.to) ? capture_->copied_to_device : capture_->copied_to_host) += block.width * block.height;
    }
    std::vector<Access> accesses = copy_accesses(block.to, block.from, 0);
    accesses[0].end = accesses[0].begin + static_cast<std::uintptr_t>(span(block.to_pitch));
    accesses[1].end = accesses[1].begin + static_cast<std::uintptr_t>(span(block.from_pitch));
    const auto work = [block] {
      auto* const to = static_cast<std::byte*>(reachable(block.to));
      const auto* const from = static_cast<const std::byte*>(reachable(block.from));
      for (std::int64_t run = 0; run < block.height; ++run) {
        std::memcpy(to + run * block.to_pitch, from + run * block.from_pitch, static_cast<std::size_t>(block.width));
      }
    };
    if (is_capturing()) return graph_.load()->add(copies_.get(), work);
    const StreamOrder::Point point = order_.issue(StreamOrder::kCopies);
    launch(*copies_, [this, point, work, accesses = std::move(accesses)] {
      order_.note(point, accesses);
      work();
    });
  }
  void wait_for_copies() override { order_streams(StreamOrder::kCopies, *copies_, StreamOrder::kCompute, *queue_); }

  std::unique_ptr<FusedAttention> make_fused(std::string_view library) override {
    const bool provided = internal::is_provided_kernel(library);
    return std::make_unique<Fused>(*this, provided ? make_provided(library, {}) : nullptr);
  }

  void attend(const AttendArguments& arguments, std::int64_t blocks) override {
    enqueue_tasks([this, arguments, blocks](const auto& note) {
      with_reachable(arguments, [&](const AttendArguments& own, std::int64_t tasks) {
        note(attend_accesses(own, tasks));
        emulate_attend(own, blocks, pool_, [] {});
      });
    });
  }
  void gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks) override {
    enqueue_tasks([this, gradient, arguments, blocks](const auto& note) {
      with_reachable(arguments, [&](const AttendArguments& own, std::int64_t tasks) {
        note(attend_accesses(own, tasks));
        emulate_gradient(gradient, own, blocks, pool_, [] {});
      });
    });
  }
  void rows(const RowArguments& arguments, std::int64_t blocks) override {
    enqueue_tasks([arguments, blocks](const auto& note) {
      const std::vector<kernels::RowTask> tasks =
          reachable_tasks(arguments.tasks != nullptr ? on_device(arguments.tasks, "a list of tasks") : arguments.short_tasks,
                          arguments.task_count);
      note(row_accesses(tasks, operands_of(arguments.op, arguments.width)));
      RowArguments own = arguments;
      own.tasks = tasks.data();
      own.first_blocks = on_device(arguments.first_blocks, "first_blocks");
      own.sinks = on_device(arguments.sinks, "sinks");
      emulate_rows(own, blocks);
    });
  }
  void sink_gradient(const SinkArguments& arguments) override {
    enqueue_tasks([arguments](const auto& note) {
      const std::vector<kernels::RowTask> tasks =
          reachable_tasks(on_device(arguments.tasks, "a list of tasks"), arguments.task_count);
      note(row_accesses(tasks, {{1, 1}, 0}));
      SinkArguments own = reachable_sinks(arguments);
      own.tasks = tasks.data();
      emulate_sink_gradient(own);
    });
  }
  void sum_sinks(const SinkArguments& arguments) override {
    enqueue_plain([arguments] { emulate_sum_sinks(reachable_sinks(arguments)); });
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

  std::unique_ptr<StreamPoint> make_point() override { return std::make_unique<EmulatedPoint>(); }
  void record(StreamPoint& point, void* stream) override { of(stream).record_here(static_cast<EmulatedPoint&>(point)); }
  void follow(const StreamPoint& point, void* stream) override {
    of(stream).follow_here(static_cast<const EmulatedPoint&>(point));
  }

 private:
  static EmulatedRuntime& of(void* stream) {
    return *static_cast<EmulatedRuntime*>(static_cast<EmulatedStream*>(stream)->runtime);
  }
  void record_here(EmulatedPoint& point) {
    if (is_capturing()) {
      point.graph = graph_;
      point.captured = point.graph->record(queue_.get());
      return;
    }
    point.graph = nullptr;
    point.queue = queue_;
    point.event = queue_->record();
  }
  void follow_here(const EmulatedPoint& point) {
    if (point.graph == nullptr && is_capturing()) {
      throw DeviceError("cuda-emulated captures, and is told to wait for what is not captured");
    }
    if (point.graph == nullptr) {
      return launch(*queue_, [queue = point.queue, event = point.event] { queue->wait(event, [] {}); });
    }
    if (!point.graph->is_capturing())
      throw DeviceError("cuda-emulated is told to wait for a point of a capture that has ended");
    graph_ = point.graph;
    point.graph->follow(queue_.get(), point.captured);
  }

  class Fused final : public FusedAttention {
   public:
    Fused(EmulatedRuntime& runtime, std::unique_ptr<FusedAttention> provided)
        : runtime_(runtime), provided_(std::move(provided)) {}
    std::string name() const override { return provided_ ? provided_->name() : "cudnn_emulated"; }
    std::string refusal(const FusedShape& s) override { return provided_ ? provided_->refusal(s) : emulated_refusal(s); }
    std::int64_t workspace_bytes(const FusedShape& shape) override {
      return provided_ ? provided_->workspace_bytes(shape) : emulated_workspace_bytes(shape);
    }
    bool takes_own_memory() const override { return provided_ && provided_->takes_own_memory(); }
    bool reads_packed_lse() const override { return !provided_; }  // as cuDNN before 9.26
    void run(const FusedCall& call) override {
      std::string wrong = refusal(call.shape) + misalignment(call);
      if (call.shape.backward && reads_packed_lse() && !has_packed_lse(call.shape)) wrong += "lse is not packed";
      if (!wrong.empty()) throw std::logic_error("a fused call is wrong: " + wrong);
      FusedCall own = call;
      for (void** data : {&own.q, &own.k, &own.v, &own.o, &own.lse, &own.d_out, &own.dq, &own.dk, &own.dv}) {
        *data = on_device(*data, "an operand of a fused call");
      }
      own.workspace = on_device(own.workspace, "the workspace of a fused call");
      if (provided_ != nullptr) {  // it enqueues on no stream, but computes
        runtime_.wait(runtime_.record(), [] {});
        return provided_->run(own);
      }
      runtime_.enqueue([own] { emulate_fused(own); }, fused_accesses(own));
    }

   private:
    EmulatedRuntime& runtime_;
    std::unique_ptr<FusedAttention> provided_;
  };

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

  // What is enqueued on `later` from now on runs after what is on `earlier` now.
  void order_streams(StreamOrder::Stream earlier, Queue& from, StreamOrder::Stream later, Queue& to) {
    if (capture_ != nullptr && capture_->events++ == capture_->forgotten_event) return;
    if (is_capturing()) return graph_.load()->follow(&to, graph_.load()->record(&from));
    order_.start();
    const std::uint64_t known = order_.signal(earlier, later);
    launch(to, [this, &from, event = from.record(), earlier, known] {
      from.wait(event, [] {});
      order_.forget(earlier, known);
    });
  }

  // Work whose operands are known only when it runs, because they are in a list of tasks.
  template <typename Work>
  void enqueue_tasks(Work work) {
    const StreamOrder::Point point = order_.issue(StreamOrder::kCompute);
    enqueue_plain([this, point, work] { work([&](const std::vector<Access>& accesses) { order_.note(point, accesses); }); });
  }
  void enqueue(const std::function<void()>& work, std::vector<Access> accesses) {
    enqueue_tasks([work, accesses = std::move(accesses)](const auto& note) {
      note(accesses);
      work();
    });
  }
  void enqueue_plain(std::function<void()> work) {
    if (is_capturing()) return graph_.load()->add(queue_.get(), std::move(work));
    launch(*queue_, std::move(work));
  }
  static void launch(Queue& queue, std::function<void()> work) {
    queue.launch({[](void* argument) {
                    const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(argument));
                    (*own)();
                  },
                  new std::function<void()>(std::move(work))});
  }

  template <typename Run>
  static void with_reachable(const AttendArguments& arguments, Run&& run) {
    const std::vector<kernels::AttendTask> tasks =
        reachable_tasks(on_device(arguments.tasks, "a list of tasks"), task_count(arguments));
    AttendArguments own = arguments;
    own.tasks = tasks.data();
    own.groups = on_device(arguments.groups, "groups");
    own.taken = on_device(arguments.taken, "a counter");
    own.places = on_device(arguments.places, "places of tiles");
    own.params.alibi_slopes = on_device(arguments.params.alibi_slopes, "alibi_slopes");
    own.params.sinks = on_device(arguments.params.sinks, "sinks");
    for (int index = 0; index < own.maps.count; ++index) {
      own.maps.maps[index].begin = on_device(arguments.maps.maps[index].begin, "an operand");
    }
    run(own, static_cast<std::int64_t>(tasks.size()));
  }

  ThreadPool pool_{1};
  EmulatedCapture* capture_;
  std::map<const std::byte*, std::int64_t> allocated_;  // while someone counts
  std::uint64_t seed_;
  std::atomic<EmulatedGraph*> graph_;  // that captures this stream, or did
  StreamOrder order_;
  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Queue> copies_;  // made when it is first used
  EmulatedStream stream_{
      [](void* queue, void (*function)(void*), void* argument) { static_cast<Queue*>(queue)->launch({function, argument}); },
      queue_.get(), this};
};

}  // namespace

void pin_on_emulated_device(const void* data, std::int64_t bytes) {
  PinnedMemory::instance().add(static_cast<const std::byte*>(data), bytes);
}
void unpin_on_emulated_device(const void* data) noexcept {
  PinnedMemory::instance().remove(static_cast<const std::byte*>(data));
}

std::unique_ptr<Runtime> make_emulated_runtime(std::uint64_t seed, EmulatedCapture* capture) {
  return std::make_unique<EmulatedRuntime>(seed, capture);
}

}  // namespace ringspan::cuda
