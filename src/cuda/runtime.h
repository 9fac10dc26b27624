// Runtime: what a device does, in order: copies, launches of the kernels of this folder, events. Two of them: CUDA's own
// (device_runtime.cc), and the emulated one, which runs the same block programs on a thread of its own, with memory
// that the host cannot reach by accident (emulated_runtime.cc).
//
// Pointers inside arguments and tasks are memory of the device. Errors of the device are thrown as DeviceError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/function_ref.h"
#include "comm/device_stream.h"
#include "cuda/arguments.h"
#include "cuda/fused.h"
#include "cuda/gradient.h"
#include "exec/queue.h"

namespace ringspan::cuda {

// `height` runs of `width` bytes each, whose begins are so many bytes apart.
struct BlockCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::int64_t width = 0, height = 1;
  std::int64_t to_pitch = 0, from_pitch = 0;  // at least width, unless height is 1
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual std::string name() const = 0;
  virtual bool holds(const void* data) const = 0;
  // What the driver calls the stream: a cudaStream_t; of the emulated device an EmulatedStream (emulated_stream.h).
  virtual void* stream() = 0;
  // Runs the action with the device as the calling thread's current one.
  virtual void with_device(FunctionRef<void()> action) = 0;
  // Lets this device reach the memory of another one of the same kind directly, where the hardware can; elsewhere copies
  // between them are the driver's business.
  virtual void reach(const Runtime& other) = 0;
  // Shared memory that a block may have, in bytes.
  virtual int shared_bytes_per_block() const = 0;
  // Whether TileKernel::wgmma can run.
  virtual bool has_warpgroups() const = 0;
  virtual bool prefers_warpgroups() const = 0;  // where no kernel is named
  // Blocks of TileKernel::wgmma that run at a time: its launches have no more, and count what is left where there are more.
  virtual std::int64_t residents() const = 0;

  // Whether what is enqueued is written down for a CUDA graph instead of run: nothing may be waited for or recorded then.
  virtual bool is_capturing() = 0;

  // Allowed in a capture too.
  virtual std::byte* allocate(std::int64_t bytes) = 0;
  virtual void release(std::byte* data) noexcept = 0;
  virtual std::byte* allocate_host(std::int64_t bytes) = 0;
  virtual void release_host(std::byte* data) noexcept = 0;
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;
  // From pinned host memory, done when it returns, on neither stream and in no capture.
  virtual void copy_at_once(void* to, const void* from, std::int64_t bytes) = 0;

  // A second stream, for copies between pinned host memory and the device. The streams wait for each other by events, the host
  // for neither: after copies_wait() copies see what was enqueued on the first stream, after wait_for_copies() the first stream
  // sees what was copied.
  virtual bool holds_pinned(const void* data) const = 0;
  virtual void copies_wait() = 0;
  virtual void copy_beside(const BlockCopy& block) = 0;
  virtual void wait_for_copies() = 0;

  // A fused attention by its name, on this stream; empty: the device's own. It does not outlive the runtime.
  virtual std::unique_ptr<FusedAttention> make_fused(std::string_view library) = 0;

  virtual void attend(const AttendArguments& arguments, std::int64_t blocks) = 0;
  virtual void gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks) = 0;
  virtual void rows(const RowArguments& arguments, std::int64_t blocks) = 0;
  virtual void sink_gradient(const SinkArguments& arguments) = 0;
  virtual void sum_sinks(const SinkArguments& arguments) = 0;

  virtual Event record() = 0;
  virtual bool is_complete(Event event) = 0;  // by any thread
  virtual void wait(Event event, FunctionRef<void()> progress) = 0;
  // As of DeviceStream. Allowed in a capture, which a stream joins that follows a point of it.
  virtual std::unique_ptr<StreamPoint> make_point() = 0;
  virtual void record(StreamPoint& point, void* stream) = 0;
  virtual void follow(const StreamPoint& point, void* stream) = 0;
  // Returns when nothing runs any more on either stream, whatever came of it.
  virtual void finish() noexcept = 0;
};

struct EmulatedCapture;
// Delays are drawn from `seed`, as by the fake device queue. `capture`, if given, outlives the runtime.
std::unique_ptr<Runtime> make_emulated_runtime(std::uint64_t seed, EmulatedCapture* capture = nullptr);
// Of device `index`, on `stream` (a cudaStream_t), or on a stream of its own where that is null. Throws DeviceError where there
// is no such device, Unsupported where this library was built without CUDA.
std::unique_ptr<Runtime> make_cuda_runtime(int index, void* stream);

}  // namespace ringspan::cuda
