// One pass of each operation of warpgroup.h that the kernels for warpgroups consist of, on a GPU, for warpgroup_gpu_test.cc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/tile_maps.h"
#include "ringspan/dtype.h"

namespace ringspan::testing {

struct ProbeShape {
  DType dtype;  // 16 bits
  int dim;      // 64 or 128
  int columns;  // rows of the other side: 128 (forward) or 64 (backward)
};

// In memory of the device. rows: 128 x dim, others: columns x dim, weights: 128 x columns, row after row.
struct ProbeData {
  const std::uint16_t *rows, *others, *weights;
  unsigned char *copied, *mapped;  // the tile of `others` as threads copy it, and as TMA does: columns x dim x 2 bytes
  float *scores, *sums;            // rows others^T: 128 x columns; rows' columns + weights others: 128 x dim, begun with 1
};

// By one block, not waited for. others_map: `others`, as one head of one batch item.
cudaError_t launch_probe(const ProbeShape& shape, const ProbeData& data, cuda::TileMaps others_map);

}  // namespace ringspan::testing
