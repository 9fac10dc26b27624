// Rows of accumulator fragments to memory: of a state, of results, of gradients. A thread has two neighbouring columns of each
// run of eight; a warp has sixteen rows.
#pragma once

#include "cuda/block_parts.h"

namespace ringspan::cuda {

// Rows first .. first + rows - 1, or (kSeen) those of them that were seen; a quad writes 32 bytes side by side.
template <typename P, bool kSeen = true, typename M>
RINGSPAN_DEVICE void store_floats(M& m, typename M::template Registers<float, P::kDim / 2>& values,
                                  typename M::template Registers<int, 2>& seen, RowsView<float> to, std::int64_t first,
                                  int rows, int width) {
  const bool whole = are_pairs(to) && width == P::kDim;
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      if (row >= rows || (kSeen && seen[thread][half] == 0)) continue;
      float* const out = to.row(first + row) + lane.column;
      const auto pair_of = [&](int j) {
        return FloatPair{values[thread][j * 4 + half * 2], values[thread][j * 4 + half * 2 + 1]};
      };
      if (whole) {  // without a question per pair
        RINGSPAN_UNROLL
        for (int j = 0; j < P::kDim / 8; ++j) *reinterpret_cast<FloatPair*>(out + j * 8) = pair_of(j);
      } else {
        RINGSPAN_UNROLL
        for (int j = 0; j < P::kDim / 8; ++j) store_pair(out + j * 8, width - j * 8 - lane.column, pair_of(j));
      }
    }
  });
}

// Each warp's rows from shared memory, kLead elements apart, to memory from row `first` on, `rows` of all with `width` elements
// each; 16 bytes at a time where rows begin and end at multiples of that.
template <int kDim, int kLead, typename Element, typename M>
RINGSPAN_DEVICE void store_rows_of_warps(M& m, const Element* tile, RowsView<Element> to, std::int64_t first, int rows,
                                         int width) {
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  constexpr int kChunks = kDim / kPerChunk;  // of a row
  constexpr int kPassRows = 32 / kChunks;
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(to.data) % 16 == 0 && to.stride % kPerChunk == 0 && width % kPerChunk == 0;
  m.each([&](int number) {
    const int thread = M::hidden(number);
    const int row = thread / 32 * 16 + thread % 32 / kChunks;
    const int column = thread % kChunks * kPerChunk;
    const Element* const from = tile + row * kLead + column;
    Element* out = to.row(first + row) + column;
    if (aligned) {
      const int some = column < width ? rows : 0;
      RINGSPAN_UNROLL
      for (int pass = 0; pass < 16; pass += kPassRows, out += to.stride * kPassRows) {
        if (row + pass < some) *reinterpret_cast<Chunk*>(out) = *reinterpret_cast<const Chunk*>(from + pass * kLead);
      }
    } else {
      RINGSPAN_NO_UNROLL
      for (int pass = 0; pass < 16 && row + pass < rows; pass += kPassRows, out += to.stride * kPassRows) {
        RINGSPAN_NO_UNROLL
        for (int e = 0; e < kPerChunk && column + e < width; ++e) out[e] = from[pass * kLead + e];
      }
    }
  });
}

// All rows in 16 bits, through shared memory (`tile`, kRows x (kDim + 8) elements that nobody else uses), so that whole runs of
// 16 bytes are written.
template <typename P, typename M>
RINGSPAN_DEVICE void store_rounded(M& m, typename M::template Registers<float, P::kDim / 2>& values,
                                   RowsView<typename P::Element> to, std::int64_t first, int rows, int width,
                                   typename P::Element* tile) {
  constexpr int kLead = P::kDim + 8;  // spreads eight rows over all banks
  m.sync_warps();
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_UNROLL
    for (int index = 0; index < P::kDim / 4; ++index) {
      const int row = lane.row + index % 2 * 8;
      const int column = index / 2 * 8 + lane.column;
      *reinterpret_cast<std::uint32_t*>(tile + row * kLead + column) =
          M::template pack<P::kType>(values[thread][2 * index], values[thread][2 * index + 1]);
    }
  });
  m.sync_warps();
  store_rows_of_warps<P::kDim, kLead>(m, tile, to, first, rows, width);
}

}  // namespace ringspan::cuda
