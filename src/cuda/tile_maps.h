// Tile maps: operands whose tiles the hardware can copy by itself (TMA), where one thread asks for a whole tile. A map says
// where an operand's rows lie; a tensor map is made from it by the driver (device_tensor_maps.h), or it is followed by the
// emulation. What has no map is copied by all threads (copy_tile), with the same bytes in shared memory.
//
// One map serves all tasks of a call whose operands' rows follow each other: shards, documents and windows of one tensor.
// Others, and views with another row stride (dilated ones), have one of their own, as long as there is room; where there is
// none, views that are alike but for where they begin share one (make_tile_maps.h).
#pragma once

#include <cstdint>

#include "cuda/machine.h"

namespace ringspan::cuda {

// Rows of `width` 16-bit elements; strides in elements.
struct TileMap {
  const void* begin = nullptr;
  std::int64_t row_stride = 0, head_stride = 0, batch_stride = 0;
  std::int64_t rows = 0, heads = 0, batches = 0;
  int width = 0;
  bool dense = true;  // all of its rows, heads and batch items are some operand's: what lies behind an operand may be read
  // How many such views there are, each shift_stride elements behind the one before: a batch item is so many steps of that.
  int shifts = 1;
  std::int64_t shift_stride = 0;
  int item_step = 1;

  // The fourth dimension: batch items, and views of each.
  RINGSPAN_DEVICE std::int64_t items() const { return (batches - 1) * item_step + shifts; }
  RINGSPAN_DEVICE std::int64_t item_stride() const { return shifts > 1 ? shift_stride : batch_stride; }
};

struct TileMaps {
  static constexpr int kMost = 8;
  TileMap maps[kMost];
  int count = 0;
  bool complete = false;  // there is one for every operand, all dense: the hardware copies all tiles
};

// Where an operand of a task is found: found out on the host (make_tile_maps.h).
struct TilePlace {
  int map = -1;        // none
  int row = 0;         // of the operand's first one
  bool dense = false;  // what lies behind the operand may be read
  int item = 0;        // the first batch item of the operand's view, then every item_step-th
};
// Of the operands on the other side of a task: k and v, or q and d_out.
struct alignas(8) TaskPlaces {
  TilePlace first, second;
};

}  // namespace ringspan::cuda
