// Memory of the emulated device is named by addresses beyond what a process can have, so that the host's touching it is a
// segmentation fault, as it is with a real device. Only the emulated kernels and copies translate them.
#pragma once

#include <cstdint>

namespace ringspan::cuda {

// Added to the address of host memory, it makes that memory of the emulated device.
inline constexpr std::uintptr_t kEmulatedTag = std::uintptr_t{1} << 60;

}  // namespace ringspan::cuda
