// cuDNN as a fused attention (fused.h): on a device, or planned for one that is elsewhere.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cuda/fused.h"
#include "cuda/runtime.h"

namespace ringspan::cuda {

// On the runtime's device and stream; where cuDNN cannot be used, one that refuses every shape and says why.
// `compute_capability` is 90 for 9.0.
std::unique_ptr<FusedAttention> make_cudnn(Runtime& runtime, int compute_capability);

// Answers for a device that need not be here, described by what cuDNN writes of one as JSON; it runs nothing. Throws
// DeviceError where cuDNN cannot be used.
std::unique_ptr<FusedAttention> make_cudnn_elsewhere(std::string_view properties, int compute_capability);

// For people: whether it was found, which, and what it is used for. One line, never throws but for memory.
std::string cudnn_report();

}  // namespace ringspan::cuda
