// Which pairs are dropped, written straight from the definition (docs/numerics.md): Philox-4x32-10 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011) on global coordinates. It shares nothing with the kernels. Pure; thread safe.
#pragma once

#include <array>
#include <cstdint>

#include "ringspan/problem.h"

namespace ringspan::oracle {

using Words = std::array<std::uint32_t, 4>;

Words philox(Words counter, std::array<std::uint32_t, 2> key);

// False for every pair where problem.dropout is 0.
bool is_dropped(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j, int state);

}  // namespace ringspan::oracle
