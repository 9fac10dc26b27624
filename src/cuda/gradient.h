// The passes of attend_backward: which gradients the blocks of a launch make; see gradient_block.h.
#pragma once

#include <cstdint>

namespace ringspan::cuda {

enum class Gradient : std::uint8_t { dq, dk_dv, dk, dv };

}  // namespace ringspan::cuda
