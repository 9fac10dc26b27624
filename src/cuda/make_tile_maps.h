// Which operands of a call get tile maps, and where in these a task finds its own. Pure, on the host. Cost: O(tasks log tasks).
#pragma once

#include <span>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/schedule.h"

namespace ringspan::cuda {

// Maps of the operands whose tiles blocks of this owner walk over, whose rows the hardware can take (16-byte begins and
// strides), TileMaps::kMost at most. Operands that follow each other share one; where maps would be too many, those do that are
// alike and begin equally far apart, and those with the fewest rows between them, and then the ones that tasks have first are
// kept.
TileMaps tile_maps_of(const kernels::AttendShape& shape, std::span<const kernels::AttendTask> tasks, Owner owner);

// Of an operand, which is given as a map of its own. None where maps lack a row, head or batch item of it: beyond the ends of a
// map the hardware delivers zeros.
TilePlace place_in(const TileMaps& maps, const TileMap& operand);
// Of each task.
std::vector<TaskPlaces> places_in(const TileMaps& maps, const kernels::AttendShape& shape,
                                  std::span<const kernels::AttendTask> tasks, Owner owner);

}  // namespace ringspan::cuda
