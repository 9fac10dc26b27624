// Rows of an operand into shared memory, by asynchronous copies, for all block programs.
//
// Layout says where a tile's elements lie: 16-byte chunk `chunk` of row `row` at offset(row, chunk), and that of the row
// kPeriod further kPeriod kRowBytes behind it.
#pragma once

#include "cuda/block_parts.h"

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
template <typename Layout, int kRows, int kDim, typename Element, typename M>
RINGSPAN_DEVICE void copy_tile(M& m, unsigned char* tile, RowsView<const Element> rows, std::int64_t first, int valid,
                               int width) {
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  constexpr int kChunks = kDim / kPerChunk;
  static_assert(kRows * kChunks % M::kThreads == 0);
  constexpr int kPassRows = M::kThreads / kChunks;  // a thread has the same chunk of every kPassRows-th row
  constexpr int kPasses = kRows / kPassRows;
  static_assert(Layout::kPeriod % kPassRows == 0 || kPassRows % Layout::kPeriod == 0);
  constexpr int kPatterns = kPassRows < Layout::kPeriod ? Layout::kPeriod / kPassRows : 1;  // of passes
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride % kPerChunk == 0 && width % kPerChunk == 0;
  m.each([&](int number) {
    const int thread = M::hidden(number);
    const int row = thread / kChunks;
    const int chunk = thread % kChunks;
    const int left = width - chunk * kPerChunk;  // elements from this chunk on
    const int count = left < 0 ? 0 : left > kPerChunk ? kPerChunk : left;
    unsigned char* starts[kPatterns];
    RINGSPAN_UNROLL
    for (int pass = 0; pass < kPatterns; ++pass) {
      starts[pass] = tile + Layout::offset(row + pass * kPassRows, chunk) - pass * kPassRows * Layout::kRowBytes;
    }
    const auto to = [&](int pass) { return starts[pass % kPatterns] + pass * kPassRows * Layout::kRowBytes; };
    const Element* from = rows.row(first + row) + chunk * kPerChunk;  // of a row that is not valid it is not looked at
    if (aligned) {
      const int some = count > 0 ? valid : 0;
      RINGSPAN_UNROLL
      for (int pass = 0; pass < kPasses; ++pass, from += rows.stride * kPassRows) {
        m.copy_async(number, to(pass), from, row + pass * kPassRows < some);
      }
    } else {
      RINGSPAN_NO_UNROLL
      for (int pass = 0; pass < kPasses; ++pass, from += rows.stride * kPassRows) {
        Chunk value{};
        RINGSPAN_UNROLL
        for (int e = 0; e < kPerChunk; ++e) {
          constexpr int kPerWord = kPerChunk / 4;
          if (e < count && row + pass * kPassRows < valid) {
            value.words[e / kPerWord] |= bits_of(from[e]) << (e % kPerWord * 16);
          }
        }
        m.store_shared(number, tile + Layout::offset(row + pass * kPassRows, chunk), value);
      }
    }
  });
}

}  // namespace ringspan::cuda
