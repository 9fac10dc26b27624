#include "cuda/runtime_stream.h"

#include <fmt/format.h>

#include <atomic>
#include <set>
#include <vector>

#include "comm/nccl_transport.h"
#include "comm/thread_world.h"
#include "cuda/report.h"
#include "cuda/runtime.h"
#include "cuda/select_device.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace cuda {
namespace {

class RuntimeStream final : public DeviceStream {
 public:
  explicit RuntimeStream(std::unique_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  std::string name() const override { return runtime_->name(); }
  bool holds(const void* data) const override { return runtime_->holds(data); }
  void* handle() const override { return runtime_->stream(); }
  void with_device(FunctionRef<void()> action) override { runtime_->with_device(action); }
  void copy(void* to, const void* from, std::int64_t bytes) override { runtime_->copy(to, from, bytes); }
  std::uint64_t record() override { return runtime_->record(); }
  bool is_complete(std::uint64_t event) override { return runtime_->is_complete(event); }
  std::unique_ptr<StreamPoint> make_point() override { return runtime_->make_point(); }
  void record(StreamPoint& point, void* stream) override { runtime_->record(point, stream); }
  void follow(const StreamPoint& point, void* stream) override { runtime_->follow(point, stream); }

 private:
  std::unique_ptr<Runtime> runtime_;
};

std::unique_ptr<Runtime> make_stream_runtime(const std::string& device) {
  static std::atomic<std::uint64_t> seed{1};  // of the emulated device's delays
  std::unique_ptr<Runtime> runtime = make_runtime(device, nullptr, ++seed);
  if (runtime != nullptr) return runtime;
  throw InvalidArgument(fmt::format("device ('{}') has no memory of its own that messages could lie in", device));
}

}  // namespace

DeviceStreamFactory stream_factory(const std::string& device) {
  return [device] { return std::make_unique<RuntimeStream>(make_stream_runtime(device)); };
}

std::string nccl_report() {
  try {
    const NcclLibrary& nccl = NcclLibrary::load();
    return fmt::format("nccl: {} is version {}; ranks with a GPU each can send by it", nccl.loaded,
                       nccl_version_text(nccl.version));
  } catch (const Error& error) {
    return fmt::format("{}; ranks with a GPU each send through the host, or from device to device where they are threads",
                       error.what());
  }
}

}  // namespace cuda

std::vector<std::unique_ptr<Communicator>> make_thread_world(const std::vector<std::string>& devices) {
  std::vector<DeviceStreamFactory> factories;
  factories.reserve(devices.size());
  for (const std::string& device : devices) factories.push_back(cuda::stream_factory(device));
  const std::set<std::string> distinct(devices.begin(), devices.end());
  for (const std::string& device : distinct) {
    if (distinct.size() == 1) break;
    const std::unique_ptr<cuda::Runtime> runtime = cuda::make_stream_runtime(device);
    for (const std::string& other : distinct) {
      if (other != device) runtime->reach(*cuda::make_stream_runtime(other));
    }
  }
  return make_thread_world_of(factories);
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options) {
  return NcclTransport::make(host,
                             {cuda::stream_factory(options.device), options.library, options.unique_id, options.deadline});
}

std::vector<std::byte> make_nccl_unique_id(const std::string& library) {
  const NcclLibrary& nccl = NcclLibrary::load(library);
  NcclUniqueId id{};
  if (const int status = nccl.get_unique_id(&id); status != kNcclSuccess) {
    throw CommError(fmt::format("ncclGetUniqueId failed: {} ({})", nccl.get_error_string(status), status));
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(id.internal);
  return {bytes, bytes + NcclUniqueId::kBytes};
}

}  // namespace ringspan
