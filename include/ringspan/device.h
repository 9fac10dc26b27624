// Devices: where attention runs besides the CPU, and memory there for programs that have no other way to get it.
//
// A device is named by a string: "cpu", "cuda" (the first), "cuda:1", or "cuda-emulated", which runs the kernels of CUDA
// devices on the CPU, thread by thread: slow, for tests of programs and of ringspan itself. ExecuteOptions::device says where
// an Attention runs; its tensors, arena, slopes and sinks must be memory of that device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan {

// Driver, devices and libraries, and what will be used of them and why: one fact per line. Throws nothing of its own.
std::vector<std::string> device_report();

// Memory of a device (not "cpu"), and synchronous copies. Throws DeviceError, Unsupported, or InvalidArgument for an unknown
// name. One thread at a time. One that was moved from may only be assigned to or destroyed.
class DeviceBuffer {
 public:
  enum class Place : std::uint8_t {
    device,
    pinned_host  // page-locked host memory, for PlanOptions::host_tensors: here data() is the host's to follow
  };
  DeviceBuffer(std::string_view device, std::int64_t bytes, Place place = Place::device);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&&) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) noexcept;

  // An address on the device, unless pinned: the host must not follow it.
  std::byte* data() const;
  std::int64_t bytes() const;
  // The copies see what ran on the device before; work of an Attention on another stream must have ended (Attention::wait()).
  void copy_from_host(const void* source, std::int64_t bytes, std::int64_t offset = 0);
  void copy_from_device(const void* source, std::int64_t bytes, std::int64_t offset = 0);
  void copy_to_host(void* target, std::int64_t bytes, std::int64_t offset = 0) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringspan
