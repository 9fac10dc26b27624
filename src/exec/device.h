// Device: where the executor's arena lies and its launches run, when that is not the host. Implemented by src/cuda.
//
// Everything is asynchronous and in order: a launch or a copy sees what those before it wrote. The host may touch memory of
// allocate_host() that a copy reads or writes only when an event recorded after the copy is complete. All operands of a launch
// are memory of the device; the tasks are copied by the call.
//
// Cost: a launch copies its tasks to the device, in storage set aside by reserve(), unless they are there from an earlier pass.
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/function_ref.h"
#include "exec/bindings.h"
#include "exec/queue.h"
#include "kernels/attend.h"
#include "kernels/rowwise.h"
#include "plan/plan_data.h"

namespace ringspan::internal {

// A call of a library's fused attention: heads, positions, band, q, k, v and lse of an AttendTask, and d_out, dq, dk and dv in
// a backward pass, in the storage dtype but for lse; o is written by forward and read by backward. Its results are whole:
// nothing is added to what was there.
struct FusedTask {
  kernels::AttendTask task;
  kernels::Rows o;
};

struct FusedMode {
  bool backward = false;
  bool deterministic = true;  // the same bits run after run
  std::string_view library;   // by name; empty: the device's own
};

struct FusedAnswer {
  std::string kernel;                // "cudnn", "flash_attn"
  std::string refusal;               // empty: it can
  std::int64_t workspace_bytes = 0;  // the most that one of the calls needs
  bool takes_own_memory = false;     // besides the workspace
};

// The tasks of a launch of attention, made only where they are asked for: of the same launch over the same tensors they are the
// same, until the next reserve().
struct AttendCall {
  const Launch* launch = nullptr;  // null: of none that comes again
  const Bindings* bindings = nullptr;
  bool dq = true, dk_dv = true;  // backward: what the tasks are for
  FunctionRef<std::span<const kernels::AttendTask>()> tasks;
};

class Device {
 public:
  virtual ~Device() = default;

  // What is called again and again while ask_fused() or a launch that waits for room keeps its caller; what it throws they
  // throw.
  void show_life_by(std::function<void()> progress) { progress_ = std::move(progress); }

  // "cuda:0 (NVIDIA H200)"
  virtual std::string name() const = 0;
  // Whether the device's kernels can read and write there.
  virtual bool holds(const void* data) const = 0;

  virtual std::byte* allocate(std::int64_t bytes) = 0;  // aligned to 256; throws DeviceError
  virtual void release(std::byte* data) noexcept = 0;
  virtual std::byte* allocate_host(std::int64_t bytes) = 0;  // what copies to and from the device are fastest with
  virtual void release_host(std::byte* data) noexcept = 0;
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;

  // Copies beside the launches, between pinned host memory of the caller and the device: after begin_copies() they see what was
  // enqueued before it; what is enqueued after end_copies() sees them. In between, launches and copies run side by side. None
  // of this waits. A task is {source, destination}, `width` elements per row; without a source nothing is copied.
  virtual bool holds_pinned(const void* data) const = 0;
  virtual void begin_copies() = 0;
  virtual void copy_rows(std::span<const kernels::RowTask> tasks, int width) = 0;
  virtual void end_copies() = 0;

  // PlanOptions::attend_kernel and attend_backward_kernel: "mma" or "wgmma" name the device's own kernels, other names leave
  // the choice to it. Throws Unsupported where the device has no such kernel.
  virtual void name_kernels(std::string_view attend, std::string_view attend_backward) = 0;
  // Which of them computes a shape that has no name, or "own".
  virtual std::string_view own_kernel(const kernels::AttendShape& shape) const = 0;
  // Throws Unsupported unless attend and, with `backward`, attend_backward can do the shape, in tasks of so many queries or
  // keys.
  virtual void check_supported(const kernels::AttendShape& shape, bool backward, std::int64_t most_rows) const = 0;
  // Sets storage aside for the tasks of passes: blocks of so many bytes, see plan/device_memory.h.
  virtual void reserve(std::int64_t task_list_bytes) = 0;
  virtual void begin_pass() = 0;

  // Whether the device's library can compute these, by shapes, strides and alignment of addresses; nothing is read. The answer
  // for a shape is kept, so that asking again is cheap. Asked first, it may load a library and build execution plans.
  virtual FusedAnswer ask_fused(const kernels::AttendParams& params, std::span<const FusedTask> tasks, FusedMode mode) = 0;
  // What ask_fused() did not refuse. `workspace` is as large as it said, aligned to 256.
  virtual void attend_fused(const kernels::AttendParams& params, std::span<const FusedTask> tasks, FusedMode mode,
                            std::byte* workspace) = 0;

  virtual void attend(const kernels::AttendParams& params, const AttendCall& call) = 0;
  virtual void attend_backward(const kernels::AttendParams& params, const AttendCall& call) = 0;
  // fill, copy, add, merge, merge_states, finalize or delta; sinks: of finalize, or nullptr.
  virtual void rows(const Launch& launch, std::span<const kernels::RowTask> tasks, const float* sinks) = 0;
  // gradient (float64, heads) -= ..., see kernels::sink_gradient.
  virtual void sink_gradient(std::span<const kernels::RowTask> tasks, const float* sinks, double* gradient, int heads) = 0;
  // total[h] = sum over ranks of gradients[rank * heads + h], in rank order.
  virtual void sum_sinks(const double* gradients, int heads, int ranks, float* total) = 0;

  virtual Event record() = 0;
  virtual bool is_complete(Event event) = 0;
  virtual void wait(Event event, FunctionRef<void()> progress) = 0;
  // What the driver calls the stream that launches run on, for messages in its order (StreamMessages).
  virtual void* stream() = 0;
  // Returns when launches and copies have ended, or failed: nothing uses any memory any more.
  virtual void finish() noexcept = 0;

 protected:
  void show_life() const {
    if (progress_) progress_();
  }

 private:
  std::function<void()> progress_;
};

}  // namespace ringspan::internal
