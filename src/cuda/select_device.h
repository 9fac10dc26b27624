// From the name of a device to a runtime; see ringspan/device.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "cuda/runtime.h"
#include "exec/device.h"

namespace ringspan::cuda {

// Null for "cpu" and "". Throws InvalidArgument for an unknown name.
std::unique_ptr<Runtime> make_runtime(std::string_view device, void* stream, std::uint64_t seed);
std::unique_ptr<internal::Device> make_device(std::string_view device, void* stream, std::uint64_t seed);

}  // namespace ringspan::cuda
