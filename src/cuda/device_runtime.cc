// The runtime of a CUDA device: a stream, and another one for copies beside it; see runtime.h. The runtime library of CUDA is
// linked statically and looks for the driver when it is first called, so that this library loads where there is none.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/cudnn.h"
#include "cuda/device_launch.h"
#include "cuda/provided_fused.h"
#include "cuda/runtime.h"
#include "plan/kernel_choice.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

// CUDA keeps a thread's last error until somebody asks for it, and a launch would report it as its own.
void forget_error() { static_cast<void>(cudaGetLastError()); }

void ignore(cudaError_t status) {
  if (status != cudaSuccess) forget_error();
}
template <typename... Arguments>
void check(cudaError_t status, fmt::format_string<Arguments...> what, Arguments&&... arguments) {
  if (status == cudaSuccess) return;
  forget_error();
  throw DeviceError(fmt::format("{}: {} ({})", fmt::format(what, std::forward<Arguments>(arguments)...),
                                cudaGetErrorString(status), cudaGetErrorName(status)));
}

// The calling thread's current device is the caller's business: it is restored.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    check(cudaGetDevice(&before_), "cannot ask for the current device");
    if (before_ != index) check(cudaSetDevice(index), "cannot use cuda:{}", index);
    changed_ = before_ != index;
  }
  ~CurrentDevice() {
    if (changed_) ignore(cudaSetDevice(before_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// In a stream capture a thread may allocate only while it says that it knows what it does: the memory is none that the capture
// uses yet.
class RelaxedCapture {
 public:
  RelaxedCapture() { ignore(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { ignore(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Asked for once: CUDA takes a millisecond, and every device buffer has a runtime.
const cudaDeviceProp& properties_of(int index) {
  static std::mutex mutex;
  static std::map<int, cudaDeviceProp> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cannot ask for the properties of cuda:{}", index);
  return known.emplace(index, properties).first->second;
}

class CudaPoint final : public StreamPoint {
 public:
  explicit CudaPoint(const std::string& device) {
    const RelaxedCapture relaxed;
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cannot create an event on {}", device);
  }
  ~CudaPoint() override { ignore(cudaEventDestroy(event_)); }
  CudaPoint(const CudaPoint&) = delete;
  CudaPoint& operator=(const CudaPoint&) = delete;
  cudaEvent_t event() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaRuntime final : public Runtime {
 public:
  CudaRuntime(int index, void* stream)
      : index_(index), stream_(static_cast<cudaStream_t>(stream)), owns_stream_(stream == nullptr) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cannot use CUDA");
    if (index < 0 || index >= count)
      throw DeviceError(fmt::format("there is no cuda:{}: this machine has {} CUDA devices", index, count));
    const CurrentDevice current(index);
    const cudaDeviceProp& properties = properties_of(index);
    name_ = fmt::format("cuda:{} ({})", index, properties.name);
    if (properties.major < 8) {
      throw Unsupported(fmt::format("{} has compute capability {}.{}; the kernels need 8.0 or newer", name_, properties.major,
                                    properties.minor));
    }
    check_kernels(properties);
    compute_capability_ = 10 * properties.major + properties.minor;
    shared_bytes_ = static_cast<int>(properties.sharedMemPerBlockOptin);
    multiprocessors_ = properties.multiProcessorCount;
    has_warpgroups_ = RINGSPAN_CUDA_SM90A && properties.major == 9 && properties.minor == 0;
    if (owns_stream_) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cannot create a stream on {}", name_);
    for (cudaEvent_t& event : events_)
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cannot create an event on {}", name_);
  }

  void check_kernels(const cudaDeviceProp& properties) const {
    const RelaxedCapture relaxed;  // what is loaded here may be allocated
    const cudaError_t status = find_kernels();
    // Which of both depends on the call that loads them.
    const bool has_no_code = status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction;
    if (!has_no_code) return check(status, "cannot load kernels for {}", name_);
    forget_error();
    throw Unsupported(
        fmt::format("{} has compute capability {}.{}, and this library was compiled for {}: build it with "
                    "RINGSPAN_CUDA_ARCHITECTURES=native",
                    name_, properties.major, properties.minor, RINGSPAN_CUDA_ARCHITECTURES));
  }

  ~CudaRuntime() override {
    for (cudaEvent_t event : events_) ignore(cudaEventDestroy(event));
    for (cudaEvent_t event : {computed_, copied_}) {
      if (event != nullptr) ignore(cudaEventDestroy(event));
    }
    for (cudaStream_t stream : {copy_stream_, at_once_}) {
      if (stream != nullptr) ignore(cudaStreamDestroy(stream));
    }
    if (owns_stream_) ignore(cudaStreamDestroy(stream_));
  }

  std::string name() const override { return name_; }
  void* stream() override { return stream_; }
  void with_device(FunctionRef<void()> action) override {
    const CurrentDevice current(index_);
    action();
  }
  void reach(const Runtime& other) override {
    const auto* peer = dynamic_cast<const CudaRuntime*>(&other);
    if (peer == nullptr || peer->index_ == index_) return;
    const CurrentDevice current(index_);
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, index_, peer->index_), "cannot ask {} about {}", name_, peer->name_);
    if (can == 0) return;
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer->index_, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) return forget_error();
    check(status, "{} cannot reach {}", name_, peer->name_);
  }
  int shared_bytes_per_block() const override { return shared_bytes_; }
  bool has_warpgroups() const override { return has_warpgroups_; }
  bool prefers_warpgroups() const override { return has_warpgroups_; }
  std::int64_t residents() const override { return multiprocessors_; }
  bool holds(const void* data) const override {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
      forget_error();
      return false;
    }
    return attributes.type == cudaMemoryTypeManaged || (attributes.type == cudaMemoryTypeDevice && attributes.device == index_);
  }

  bool is_capturing() override {
    const CurrentDevice current(index_);
    cudaStreamCaptureStatus status{};
    check(cudaStreamIsCapturing(stream_, &status), "{} cannot take part in the capture of another stream", name_);
    return status == cudaStreamCaptureStatusActive;
  }

  std::byte* allocate(std::int64_t bytes) override {
    const CurrentDevice current(index_);
    const RelaxedCapture relaxed;
    void* data = nullptr;
    check(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "cannot allocate {} bytes on {}", bytes, name_);
    return static_cast<std::byte*>(data);
  }
  void release(std::byte* data) noexcept override {
    const RelaxedCapture relaxed;  // another thread may capture, here and below
    ignore(cudaFree(data));
  }
  std::byte* allocate_host(std::int64_t bytes) override {
    const CurrentDevice current(index_);
    const RelaxedCapture relaxed;
    void* data = nullptr;
    check(cudaHostAlloc(&data, static_cast<std::size_t>(bytes), cudaHostAllocPortable),
          "cannot allocate {} bytes of pinned host memory for {}", bytes, name_);
    return static_cast<std::byte*>(data);
  }
  void release_host(std::byte* data) noexcept override {
    const RelaxedCapture relaxed;
    ignore(cudaFreeHost(data));
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    const CurrentDevice current(index_);
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_), "cannot copy {} bytes on {}",
          bytes, name_);
  }
  void copy_at_once(void* to, const void* from, std::int64_t bytes) override {
    const CurrentDevice current(index_);
    const RelaxedCapture relaxed;
    if (at_once_ == nullptr) {
      check(cudaStreamCreateWithFlags(&at_once_, cudaStreamNonBlocking), "cannot create a stream on {}", name_);
    }
    constexpr const char* kWhat = "cannot copy {} bytes on {}";
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, at_once_), kWhat, bytes, name_);
    check(cudaStreamSynchronize(at_once_), kWhat, bytes, name_);
  }

  bool holds_pinned(const void* data) const override {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
      forget_error();
      return false;
    }
    return attributes.type == cudaMemoryTypeHost;
  }
  void copies_wait() override {
    const CurrentDevice current(index_);
    make_copy_stream();
    order(stream_, computed_, copy_stream_);
  }
  void copy_beside(const BlockCopy& block) override {
    const CurrentDevice current(index_);
    const auto width = static_cast<std::size_t>(block.width);
    const cudaError_t status = block.height == 1
                                   ? cudaMemcpyAsync(block.to, block.from, width, cudaMemcpyDefault, copy_stream_)
                                   : cudaMemcpy2DAsync(block.to, static_cast<std::size_t>(block.to_pitch), block.from,
                                                       static_cast<std::size_t>(block.from_pitch), width,
                                                       static_cast<std::size_t>(block.height), cudaMemcpyDefault, copy_stream_);
    check(status, "cannot copy {} x {} bytes on {}", block.height, block.width, name_);
  }
  void wait_for_copies() override {
    const CurrentDevice current(index_);
    order(copy_stream_, copied_, stream_);
  }

  std::unique_ptr<FusedAttention> make_fused(std::string_view library) override {
    if (internal::is_provided_kernel(library)) return make_provided(library, {false, index_, compute_capability_, stream_});
    return make_cudnn(*this, compute_capability_);
  }

  void attend(const AttendArguments& arguments, std::int64_t blocks) override {
    const CurrentDevice current(index_);
    if (arguments.kernel == TileKernel::wgmma) {
      const auto launch = arguments.params.shape.dtype == DType::bfloat16 ? launch_attend_warpgroups<DType::bfloat16>
                                                                          : launch_attend_warpgroups<DType::float16>;
      return launched(launch(arguments, std::min(blocks, residents()), stream_), "attend with wgmma");
    }
    switch (arguments.params.shape.dtype) {
      case DType::float32:
        return launched(launch_attend_typed<DType::float32>(arguments, blocks, stream_), "attend");
      case DType::bfloat16:
        return launched(launch_attend_typed<DType::bfloat16>(arguments, blocks, stream_), "attend");
      case DType::float16:
        return launched(launch_attend_typed<DType::float16>(arguments, blocks, stream_), "attend");
    }
  }
  void gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks) override {
    const CurrentDevice current(index_);
    if (arguments.kernel == TileKernel::wgmma) {
      const auto launch = arguments.params.shape.dtype == DType::bfloat16 ? launch_gradient_warpgroups<DType::bfloat16>
                                                                          : launch_gradient_warpgroups<DType::float16>;
      return launched(launch(gradient, arguments, std::min(blocks, residents()), stream_), "attend_backward with wgmma");
    }
    switch (arguments.params.shape.dtype) {
      case DType::float32:
        return launched(launch_gradient_typed<DType::float32>(gradient, arguments, blocks, stream_), "attend_backward");
      case DType::bfloat16:
        return launched(launch_gradient_typed<DType::bfloat16>(gradient, arguments, blocks, stream_), "attend_backward");
      case DType::float16:
        return launched(launch_gradient_typed<DType::float16>(gradient, arguments, blocks, stream_), "attend_backward");
    }
  }
  void rows(const RowArguments& arguments, std::int64_t blocks) override {
    const CurrentDevice current(index_);
    launched(launch_rows(arguments, blocks, stream_), "rows");
  }
  void sink_gradient(const SinkArguments& arguments) override {
    const CurrentDevice current(index_);
    launched(launch_sink_gradient(arguments, stream_), "sink_gradient");
  }
  void sum_sinks(const SinkArguments& arguments) override {
    const CurrentDevice current(index_);
    launched(launch_sum_sinks(arguments, stream_), "sum_sinks");
  }

  Event record() override {
    const CurrentDevice current(index_);
    check(cudaEventRecord(slot(++recorded_), stream_), "cannot record an event on {}", name_);
    return recorded_;
  }
  bool is_complete(Event event) override {
    if (event == 0) return true;
    const RelaxedCapture relaxed;  // another thread may capture
    // A slot that was recorded again stands for a later point: complete only when that is.
    const cudaError_t status = cudaEventQuery(slot(event));
    if (status == cudaErrorNotReady) {
      forget_error();
      return false;
    }
    check(status, "{} failed", name_);
    return true;
  }
  void wait(Event event, FunctionRef<void()> progress) override {
    using Clock = std::chrono::steady_clock;
    Clock::time_point next = Clock::now() + std::chrono::milliseconds(1);
    while (!is_complete(event)) {
      if (Clock::now() >= next) {
        progress();
        next = Clock::now() + std::chrono::milliseconds(1);
      }
      std::this_thread::yield();
    }
  }

  std::unique_ptr<StreamPoint> make_point() override {
    const CurrentDevice current(index_);
    return std::make_unique<CudaPoint>(name_);
  }
  void record(StreamPoint& point, void* stream) override {
    const CurrentDevice current(index_);
    check(cudaEventRecord(static_cast<CudaPoint&>(point).event(), static_cast<cudaStream_t>(stream)),
          "cannot record an event on {}", name_);
  }
  void follow(const StreamPoint& point, void* stream) override {
    const CurrentDevice current(index_);
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<const CudaPoint&>(point).event(), 0),
          "cannot let a stream wait on {}", name_);
  }

  void finish() noexcept override {
    try {
      const CurrentDevice current(index_);  // a default stream is the current device's
      const RelaxedCapture relaxed;
      ignore(cudaStreamSynchronize(stream_));
      if (copy_stream_ != nullptr) ignore(cudaStreamSynchronize(copy_stream_));
    } catch (const Error&) {
      return;  // the device failed: nothing runs there
    }
  }

 private:
  static constexpr std::uint64_t kEvents = 16;

  void make_copy_stream() {
    if (copy_stream_ != nullptr) return;
    check(cudaStreamCreateWithFlags(&copy_stream_, cudaStreamNonBlocking), "cannot create a stream on {}", name_);
    for (cudaEvent_t* event : {&computed_, &copied_})
      check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cannot create an event on {}", name_);
  }
  // What is enqueued on `later` from now on runs after what is on `earlier` now.
  void order(cudaStream_t earlier, cudaEvent_t event, cudaStream_t later) const {
    check(cudaEventRecord(event, earlier), "cannot record an event on {}", name_);
    check(cudaStreamWaitEvent(later, event, 0), "cannot let a stream wait on {}", name_);
  }

  cudaEvent_t slot(Event event) const { return events_[event % kEvents]; }
  void launched(cudaError_t status, const char* kernel) const { check(status, "cannot launch {} on {}", kernel, name_); }

  int index_;
  cudaStream_t stream_;
  bool owns_stream_;
  std::string name_;
  int shared_bytes_ = 0, multiprocessors_ = 0;
  bool has_warpgroups_ = false;
  int compute_capability_ = 0;
  cudaEvent_t events_[kEvents] = {};
  cudaStream_t at_once_ = nullptr;      // made when it is first used
  cudaStream_t copy_stream_ = nullptr;  // likewise, with its events
  cudaEvent_t computed_ = nullptr, copied_ = nullptr;
  Event recorded_ = 0;
};

}  // namespace

std::unique_ptr<Runtime> make_cuda_runtime(int index, void* stream) { return std::make_unique<CudaRuntime>(index, stream); }

}  // namespace ringspan::cuda
