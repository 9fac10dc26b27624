// Tiles of 16-bit elements in the 128-byte swizzle of warpgroup.h: how they come into shared memory, and the two products that
// attention consists of.
//     product_rows      C  = A B^T     A: the block's rows, B: rows of the other side; inner dimension dense in both
//     product_weights   C += W B       W: weights packed to 16 bits in registers, B: rows of the other side
#pragma once

#include "cuda/copy_tile.h"
#include "cuda/non_finite.h"
#include "cuda/warpgroup.h"

namespace ringspan::cuda {

// The place of a tile's elements, for copy_tile.h.
template <int kRows>
struct SwizzledTile {
  static constexpr int kPeriod = 8;
  static constexpr int kRowBytes = kPanelRowBytes;
  static RINGSPAN_DEVICE int offset(int row, int chunk) { return chunk_offset<kRows>(row, chunk); }
};

// kRows rows of an operand, by the threads of the role.
template <int kRows, int kDim, typename Element, typename M>
RINGSPAN_DEVICE void copy_swizzled(M& m, unsigned char* tile, const TileRows<Element>& from) {
  copy_tile<SwizzledTile<kRows>, kRows, kDim, Element>(m, tile, from.rows, from.first, from.valid, from.width);
}

// The same from a map (boxes have 64 columns): by one thread, counted at `barrier`. Where fewer rows are valid, what follows
// them in memory, which is some other operand's, or zeros beyond the end of the map.
template <int kRows, int kDim, typename M>
RINGSPAN_DEVICE void copy_mapped_tile(M& m, unsigned char* tile, const TileMaps& maps, int map, BoxCorner corner,
                                      std::uint32_t barrier) {
  m.each([&](int thread) {
    if (thread != 0) return;
    m.expect_bytes(barrier, kRows * kDim * 2);
    RINGSPAN_UNROLL
    for (corner.column = 0; corner.column < kDim; corner.column += kPanelColumns) {
      const int panel = corner.column / kPanelColumns * kRows * kPanelRowBytes;
      m.template copy_box<kRows>(maps, map, m.shared_address(tile) + static_cast<std::uint32_t>(panel), corner, barrier);
    }
  });
}

// `valid` rows of an operand from `first` on: by the hardware where the tile has a place in a map and is whole or may be filled
// up, else by all threads. head: of the map; rows_of(): the operand's TileRows, for threads.
template <int kRows, int kDim, typename Element, typename M, typename RowsOf>
RINGSPAN_DEVICE void copy_tile_from(M& m, unsigned char* tile, int first, int valid, const TileMaps& maps,
                                    const TilePlace& place, int head, std::uint32_t barrier, RowsOf&& rows_of) {
  if (place.map >= 0 && (valid == kRows || place.dense)) {
    copy_mapped_tile<kRows, kDim>(m, tile, maps, place.map, {0, place.row + first, head, place.item}, barrier);
  } else {
    copy_swizzled<kRows, kDim, Element>(m, tile, rows_of());
  }
}

template <typename P, typename M>
RINGSPAN_DEVICE void product_rows(M& m, typename M::template Registers<float, P::kCols / 2>& c, std::uint32_t a,
                                  std::uint32_t b) {
  const std::uint64_t a0 = descriptor_k(a);
  const std::uint64_t b0 = descriptor_k(b);
  RINGSPAN_UNROLL
  for (int k = 0; k < P::kDim; k += 16) {
    m.template multiply<P::kType, P::kCols, Major::k>(
        c, [&](int warpgroup) { return advance(a0, offset_k<P::kRows>(warpgroup * kWarpgroupRows, k)); },
        advance(b0, offset_k<P::kCols>(0, k)), k != 0);
  }
}

template <typename P, typename M>
RINGSPAN_DEVICE void product_weights(M& m, typename M::template Registers<float, P::kDim / 2>& c,
                                     typename M::template Registers<std::uint32_t, P::kCols / 4>& weights, std::uint32_t b) {
  const std::uint64_t b0 = descriptor_mn<P::kCols>(b);
  RINGSPAN_UNROLL
  for (int k = 0; k < P::kCols; k += 16) {
    m.template multiply_from_registers<P::kType, P::kDim>(c, weights, k / 4, advance(b0, k * kPanelRowBytes), 1);
  }
}

}  // namespace ringspan::cuda
