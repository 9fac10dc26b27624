// What the hardware copies tiles by: one tensor map per tile map (tile_maps.h), a parameter of the kernels for warpgroups.
#pragma once

#include <cstdint>

#include "cuda/tile_maps.h"

namespace ringspan::cuda {

struct alignas(128) TensorMap {  // a CUtensorMap
  std::uint64_t words[16];
};
struct TensorMaps {
  TensorMap maps[TileMaps::kMost];
};

// Whether the driver can make them; without, all tiles are copied by threads.
bool has_tensor_maps();

// Boxes of `rows` rows and 64 columns in the 128-byte swizzle. Where the driver refuses any there are none, `maps` included:
// all tiles are copied by threads.
TensorMaps encode_tensor_maps(TileMaps& maps, int rows);

}  // namespace ringspan::cuda
