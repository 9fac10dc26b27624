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
    copy_swizzled<kRows, kDim>(m, tile, from);
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

// For tiles with masked or dropped pairs, before `weights` are multiplied by them, with no product under way. `pairs`: kRows x
// kCols bytes of shared memory; visible_of(thread) has sees(half, column). kDropped: -0 is the weight of a dropped pair, which
// no other one has. Barriers.
template <typename P, bool kDropped, typename M, typename Visible>
RINGSPAN_DEVICE void exclude_non_finite(M& m, unsigned char* tile, const TileRows<typename P::Element>& from,
                                        typename M::template Registers<float, P::kDim / 2>& sums,
                                        typename M::template Registers<std::uint32_t, P::kCols / 4>& weights,
                                        unsigned char* pairs, typename M::template Registers<int, 1>& flags,
                                        Visible&& visible_of) {
  find_non_finite<P, SwizzledTile<P::kCols>>(m, tile, flags);
  if (!m.sync_any(flags)) return m.fence_async();  // what was read may be overwritten by a copy of TMA
  note_pairs<P>(m, pairs, [&](int thread) {
    const auto& words = weights[thread];
    return [&words, visible = visible_of(thread)](int half, int index, int column) {
      const auto bits = static_cast<std::uint16_t>(words[index / 2] >> (index % 2 * 16));
      const bool takes = visible.sees(half, column) && !(kDropped && bits == 0x8000U);
      return takes ? kind_of_weight(P::Storage::load(bits)) : kNoPair;
    };
  });
  clear_non_finite<P, SwizzledTile<P::kCols>>(m, tile);
  m.fence_async();
  m.sync();
  add_non_finite<P>(m, sums, pairs, from);
}

}  // namespace ringspan::cuda
