// Which operands of a call get tile maps. Pure, on the host. Cost: O(tasks).
#pragma once

#include <span>

#include "cuda/arguments.h"
#include "cuda/schedule.h"

namespace ringspan::cuda {

// Maps of the operands whose tiles blocks of this owner walk over, whose rows the hardware can take (16-byte begins and
// strides), in the order in which tasks have them, TileMaps::kMost at most.
TileMaps tile_maps_of(const kernels::AttendShape& shape, std::span<const kernels::AttendTask> tasks, Owner owner);

}  // namespace ringspan::cuda
