// Tiles of 16-bit elements in the 128-byte swizzle of warpgroup.h: how they come into shared memory, and the two products that
// attention consists of.
//     product_rows      C  = A B^T     A: the block's rows, B: rows of the other side; inner dimension dense in both
//     product_weights   C += W B       W: weights packed to 16 bits in registers, B: rows of the other side
#pragma once

#include "cuda/block_parts.h"
#include "cuda/warpgroup.h"

namespace ringspan::cuda {

// Rows of a tile in memory: `valid` of them from `first` on, with `width` elements each.
template <typename Element>
struct TileRows {
  RowsView<const Element> rows;
  std::int64_t first;
  int valid, width;
};

// kRows rows from `first` on, `valid` of them with `width` elements, zeros elsewhere: by asynchronous copies of 16 bytes where
// rows begin and end at multiples of 16 bytes, element by element elsewhere. No barrier.
template <int kRows, int kDim, typename Element, typename M>
RINGSPAN_DEVICE void copy_tile(M& m, unsigned char* tile, RowsView<const Element> rows, std::int64_t first, int valid,
                               int width) {
  constexpr int kChunks = kDim / 8;
  static_assert(kRows * kChunks % M::kThreads == 0);
  constexpr int kPassRows = M::kThreads / kChunks;  // a thread has the same chunk of every kPassRows-th row
  constexpr int kPasses = kRows / kPassRows;
  static_assert(kPassRows % 8 == 0, "so that a thread's chunks lie at the same place of the swizzle");
  const bool aligned = reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride % 8 == 0 && width % 8 == 0;
  m.each([&](int number) {
    const int thread = M::hidden(number);
    const int row = thread / kChunks;
    const int chunk = thread % kChunks;
    const int left = width - chunk * 8;  // elements from this chunk on
    const int count = left < 0 ? 0 : left > 8 ? 8 : left;
    unsigned char* to = tile + chunk_offset<kRows>(row, chunk);
    const Element* from = rows.row(first + row) + chunk * 8;  // of a row that is not valid it is not looked at
    if (aligned) {
      const int some = count > 0 ? valid : 0;
      RINGSPAN_UNROLL
      for (int pass = 0; pass < kPasses; ++pass, from += rows.stride * kPassRows) {
        m.copy_async(number, to + pass * kPassRows * kPanelRowBytes, from, row + pass * kPassRows < some);
      }
    } else {
      RINGSPAN_NO_UNROLL
      for (int pass = 0; pass < kPasses; ++pass, from += rows.stride * kPassRows) {
        Chunk value{};
        RINGSPAN_UNROLL
        for (int e = 0; e < 8; ++e) {
          if (e < count && row + pass * kPassRows < valid) value.words[e / 2] |= bits_of(from[e]) << (e % 2 * 16);
        }
        m.store_shared(number, to + pass * kPassRows * kPanelRowBytes, value);
      }
    }
  });
}

// The same of kRows rows that are all there, from a map (boxes have 64 columns): by one thread, counted at `barrier`.
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

// By the hardware where the tile is whole and has a place in a map, else by all threads. (head, batch): of the map.
template <int kRows, int kDim, typename Element, typename M>
RINGSPAN_DEVICE void copy_tile_from(M& m, unsigned char* tile, const TileRows<Element>& from, const TileMaps& maps,
                                    const TilePlace& place, int head, int batch, std::uint32_t barrier) {
  if (place.map >= 0 && from.valid == kRows) {
    const BoxCorner corner{0, place.row + static_cast<int>(from.first), head, batch};
    copy_mapped_tile<kRows, kDim>(m, tile, maps, place.map, corner, barrier);
  } else {
    copy_tile<kRows, kDim, Element>(m, tile, from.rows, from.first, from.valid, from.width);
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
