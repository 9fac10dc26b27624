// Which kernel a pass runs, and with which tile. Depends on this machine's instruction set and this rank's options only. Pure.
#pragma once

#include <cstdint>

#include "ringspan/plan.h"

namespace ringspan::internal {

// The kernel that the options name, or the best for the shape, with the tile that they give, or the tuned one, or its own.
// Throws what select_attend() throws: an unknown name, a shape or a tile that the kernel does not take. On a device there is no
// choice: its kernels have one name per pass and tiles of their own.
KernelChoice choose_kernel(const Problem& problem, const PlanOptions& options, Pass pass);

// What that kernel needs with that tile; nothing on a device.
std::int64_t kernel_scratch_bytes(const Problem& problem, const PlanOptions& options, Pass pass);

}  // namespace ringspan::internal
