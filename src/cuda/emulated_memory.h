// Memory of the emulated device is named by addresses beyond what a process can have, so that the host's touching it is a
// segmentation fault, as it is with a real device. Only the emulated kernels and copies translate them.
#pragma once

#include <cstdint>

namespace ringspan::cuda {

// Added to the address of host memory, it makes that memory of the emulated device.
inline constexpr std::uintptr_t kEmulatedTag = std::uintptr_t{1} << 60;

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

// Takes host memory of the caller for pinned, as cudaHostRegister does, beside what the emulated device allocates so itself.
// The same address may be pinned several times, and is unpinned as often. Any thread.
void pin_on_emulated_device(const void* data, std::int64_t bytes);
void unpin_on_emulated_device(const void* data) noexcept;

}  // namespace ringspan::cuda
