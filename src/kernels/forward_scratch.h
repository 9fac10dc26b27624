// ForwardScratch: what one thread of the tiled forward kernels keeps in its part of the scratch. Laid out by the shape alone;
// no allocation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/arithmetic.h"
#include "kernels/attend_tiled.h"
#include "kernels/carver.h"
#include "kernels/key_split.h"

namespace ringspan::kernels {

// About as many bytes of keys and values are packed at a time, a run of key tiles: the longer it is, the less often states are
// stored and loaded. More than a second cache holds: tiles come from the third one, fetched while the one before is computed.
inline constexpr std::int64_t kPackedBytes = std::int64_t{2} << 20;
inline constexpr int kMaxRunTiles = 16;

struct ForwardScratch {
  int run_tiles;  // key tiles packed at a time
  TileDims dims;
  ForwardBytes bytes_of;
  std::int64_t acc_stride, factor_stride;
  std::byte *k, *v, *q, *work;
  float *acc, *factors, *m, *l;
  std::int64_t* distance;
  std::int32_t *index, *head, *offset, *begin, *end, *tile_begin, *tile_end;
  std::byte* partial;

  ForwardScratch(const TileOps& ops, const AttendShape& shape, std::byte* base, std::int64_t* bytes) {
    Carver carver(base);
    dims = tile_dims(shape, ops.forward_sizes);
    bytes_of = ops.forward_bytes(dims);
    acc_stride = internal::round_up<std::int64_t>(shape.head_dim_v, ops.width);
    factor_stride = dims.tile.keys + kScorePad;
    const std::int64_t rows = dims.tile.queries;
    const std::int64_t tile_bytes = bytes_of.keys + bytes_of.values;
    run_tiles = static_cast<int>(std::clamp<std::int64_t>((kPackedBytes + tile_bytes / 2) / tile_bytes, 1, kMaxRunTiles));
    partial = carver.take<std::byte>(KeySplit::state_bytes(shape));  // first: not every call uses it
    k = carver.take<std::byte>(run_tiles * bytes_of.keys);
    v = carver.take<std::byte>(run_tiles * bytes_of.values);
    q = carver.take<std::byte>(bytes_of.queries);
    work = carver.take<std::byte>(bytes_of.work);
    acc = carver.take<float>(rows * acc_stride);
    factors = shape.dropout ? carver.take<float>(rows * factor_stride) : nullptr;
    m = carver.take<float>(rows);
    l = carver.take<float>(rows);
    distance = carver.take<std::int64_t>(rows);
    for (std::int32_t** list : {&index, &head, &offset, &begin, &end, &tile_begin, &tile_end})
      *list = carver.take<std::int32_t>(rows);
    if (bytes != nullptr) *bytes = carver.bytes();
  }
};

}  // namespace ringspan::kernels
