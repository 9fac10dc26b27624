// Which operands of a call get tile maps. Pure, on the host. Cost: O(tasks log tasks).
#pragma once

#include <span>

#include "cuda/arguments.h"
#include "cuda/schedule.h"

namespace ringspan::cuda {

// Maps of the operands whose tiles blocks of this owner walk over, whose rows the hardware can take (16-byte begins and
// strides), TileMaps::kMost at most. Operands that follow each other share one; where maps would be too many, those do that are
// alike and begin equally far apart, and those with the fewest rows between them, and then the ones that tasks have first are
// kept.
TileMaps tile_maps_of(const kernels::AttendShape& shape, std::span<const kernels::AttendTask> tasks, Owner owner);

}  // namespace ringspan::cuda
