#include "cuda/device_tensor_maps.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace ringspan::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
constexpr unsigned kSince = 12000;  // the version of CUDA with this entry point

Encode find_encode() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSince, cudaEnableDefault, &found);
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());  // the next launch would report it
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
}
Encode encoder() {
  static const Encode found = find_encode();
  return found;
}

// Both 16-bit types are copied as they are.
bool encode(Encode encode_tiled, const TileMap& map, int rows, TensorMap& out) {
  constexpr cuuint64_t kElementBytes = 2;
  const auto bytes = [&](std::int64_t stride, std::int64_t count) {  // of a dimension with one element any stride will do
    return static_cast<cuuint64_t>(count == 1 ? map.row_stride : stride) * kElementBytes;
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(map.width), static_cast<cuuint64_t>(map.rows),
                               static_cast<cuuint64_t>(map.heads), static_cast<cuuint64_t>(map.items())};
  const cuuint64_t strides[3] = {bytes(map.row_stride, map.rows), bytes(map.head_stride, map.heads),
                                 bytes(map.item_stride(), map.items())};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
  return encode_tiled(reinterpret_cast<CUtensorMap*>(&out), CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(map.begin),
                      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool has_tensor_maps() { return encoder() != nullptr; }

TensorMaps encode_tensor_maps(TileMaps& maps, int rows) {
  const Encode encode_tiled = encoder();
  TensorMaps encoded{};
  for (int index = 0; index < maps.count; ++index) {
    if (encode_tiled != nullptr && encode(encode_tiled, maps.maps[index], rows, encoded.maps[index])) continue;
    maps = {};
  }
  return encoded;
}

}  // namespace ringspan::cuda
