#include "cuda/select_device.h"

#include <fmt/format.h>

#include <charconv>

#include "cuda/cudnn.h"
#include "cuda/gpu_device.h"
#include "cuda/provided_fused.h"
#include "cuda/report.h"
#include "ringspan/device.h"
#include "ringspan/error.h"

namespace ringspan {
namespace cuda {

std::unique_ptr<Runtime> make_runtime(std::string_view device, void* stream, std::uint64_t seed) {
  if (device.empty() || device == "cpu") {
    if (stream != nullptr) throw InvalidArgument("stream is given, but device is cpu, which has none");
    return nullptr;
  }
  if (device == "cuda-emulated") {
    if (stream != nullptr) throw InvalidArgument("stream is given, but device is cuda-emulated, which has only its own");
    return make_emulated_runtime(seed);
  }
  if (device == "cuda") return make_cuda_runtime(0, stream);
  constexpr std::string_view kPrefix = "cuda:";
  if (device.starts_with(kPrefix)) {
    int index = -1;
    const char* const end = device.data() + device.size();
    const auto [rest, error] = std::from_chars(device.data() + kPrefix.size(), end, index);
    if (error == std::errc{} && rest == end && index >= 0) return make_cuda_runtime(index, stream);
  }
  throw InvalidArgument(fmt::format("unknown device '{}': expected cpu, cuda, cuda:INDEX or cuda-emulated", device));
}

std::unique_ptr<internal::Device> make_device(std::string_view device, void* stream, std::uint64_t seed) {
  std::unique_ptr<Runtime> runtime = make_runtime(device, stream, seed);
  if (runtime == nullptr) return nullptr;
  return std::make_unique<GpuDevice>(std::move(runtime));
}

}  // namespace cuda

std::vector<std::string> device_report() {
  std::vector<std::string> lines = cuda::cuda_report();
  lines.push_back(cuda::cudnn_report());
  lines.push_back(cuda::provided_report());
  lines.push_back(cuda::nccl_report());
  return lines;
}

struct DeviceBuffer::Impl {
  std::unique_ptr<cuda::Runtime> runtime;
  std::int64_t bytes = 0;
  Place place = Place::device;
  std::byte* data = nullptr;

  ~Impl() {
    if (data == nullptr) return;
    place == Place::device ? runtime->release(data) : runtime->release_host(data);
  }
  std::byte* at(std::int64_t offset, std::int64_t count) const {
    if (offset < 0 || count < 0 || offset > bytes || count > bytes - offset) {
      throw InvalidArgument(fmt::format("{} bytes from byte {} are outside of a buffer of {} bytes", count, offset, bytes));
    }
    return data + offset;
  }
  void copy(void* to, const void* from, std::int64_t count) const {
    runtime->copy(to, from, count);
    runtime->wait(runtime->record(), [] {});
  }
};

DeviceBuffer::DeviceBuffer(std::string_view device, std::int64_t bytes, Place place) : impl_(std::make_unique<Impl>()) {
  if (bytes < 0) throw InvalidArgument(fmt::format("bytes ({}) must not be negative", bytes));
  impl_->runtime = cuda::make_runtime(device, nullptr, 1);
  if (impl_->runtime == nullptr) throw InvalidArgument("a device buffer is for devices other than the cpu");
  impl_->bytes = bytes;
  impl_->place = place;
  if (bytes == 0) return;
  impl_->data = place == Place::device ? impl_->runtime->allocate(bytes) : impl_->runtime->allocate_host(bytes);
}
DeviceBuffer::~DeviceBuffer() = default;
DeviceBuffer::DeviceBuffer(DeviceBuffer&&) noexcept = default;
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&&) noexcept = default;

std::byte* DeviceBuffer::data() const { return impl_->data; }
std::int64_t DeviceBuffer::bytes() const { return impl_->bytes; }
void DeviceBuffer::copy_from_host(const void* source, std::int64_t bytes, std::int64_t offset) {
  impl_->copy(impl_->at(offset, bytes), source, bytes);
}
void DeviceBuffer::copy_from_device(const void* source, std::int64_t bytes, std::int64_t offset) {
  impl_->copy(impl_->at(offset, bytes), source, bytes);
}
void DeviceBuffer::copy_to_host(void* target, std::int64_t bytes, std::int64_t offset) const {
  impl_->copy(target, impl_->at(offset, bytes), bytes);
}

}  // namespace ringspan
