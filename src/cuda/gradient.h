// The passes of attend_backward: which gradients the blocks of a launch make; see gradient_block.h.
#pragma once

#include <cstdint>

#include "cuda/arguments.h"

namespace ringspan::cuda {

enum class Gradient : std::uint8_t { dq, dk_dv, dk, dv };
constexpr Owner owner_of(Gradient gradient) { return gradient == Gradient::dq ? Owner::query_gradients : Owner::key_gradients; }

}  // namespace ringspan::cuda
