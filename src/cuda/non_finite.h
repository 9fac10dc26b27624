// NaN and infinities in a tile whose rows some of the block's rows do not see, or drop: their weight is 0, but 0 x NaN must not
// reach a sum. Such elements become 0 in shared memory and reach the rows that see them one by one. Seldom more than a look.
#pragma once

#include "cuda/copy_tile.h"

namespace ringspan::cuda {

// Chunks of a tile of kCols rows, by a loop over all threads: body(number of the thread, pointer).
template <typename P, typename Layout, typename M, typename Body>
RINGSPAN_DEVICE void each_chunk(M& m, unsigned char* tile, Body&& body) {
  constexpr int kChunks = P::kDim * static_cast<int>(sizeof(typename P::Element)) / 16;
  m.each([&](int number) {
    RINGSPAN_NO_UNROLL
    for (int index = M::hidden(number); index < P::kCols * kChunks; index += M::kThreads) {
      body(number, tile + Layout::offset(index / kChunks, index % kChunks));
    }
  });
}

// Raises a thread's flag where the tile holds NaN or infinities. No barrier.
template <typename P, typename Layout, typename M>
RINGSPAN_DEVICE void find_non_finite(M& m, unsigned char* tile, typename M::template Registers<int, 1>& flags) {
  constexpr int kChunks = P::kDim * static_cast<int>(sizeof(typename P::Element)) / 16;
  constexpr int kPassRows = M::kThreads / kChunks;  // as in copy_tile.h
  static_assert(P::kCols % kPassRows == 0 && kPassRows % Layout::kPeriod == 0);
  m.each([&](int number) {
    const int thread = M::hidden(number);
    const unsigned char* at = tile + Layout::offset(thread / kChunks, thread % kChunks);
    std::uint32_t found = 0;
    RINGSPAN_UNROLL_4  // several reads under way, in few instructions: they are fetched anew for every look
        for (int pass = 0; pass < P::kCols / kPassRows; ++pass, at += kPassRows * Layout::kRowBytes) {
      const Chunk chunk = m.load_shared(number, at);
      RINGSPAN_UNROLL
      for (int word = 0; word < 4; ++word) found |= overflow_of_exponents<P::kType>(chunk.words[word]);
    }
    flags[number][0] = found != 0 ? 1 : 0;
  });
}

// Sets elements that are not finite to 0. A thread writes what it read itself. No barrier, no fence.
template <typename P, typename Layout, typename M>
RINGSPAN_DEVICE void clear_non_finite(M& m, unsigned char* tile) {
  each_chunk<P, Layout>(m, tile, [&](int number, unsigned char* at) {
    Chunk chunk = m.load_shared(number, at);
    RINGSPAN_UNROLL
    for (int word = 0; word < 4; ++word) chunk.words[word] = without_non_finite<P::kType>(chunk.words[word]);
    m.store_shared(number, at, chunk);
  });
}

// What a pair's weight makes of a value that is not finite.
enum PairKind : std::uint8_t {
  kNoPair = 0,    // nothing: not visible, or dropped
  kPositive = 1,  // the value
  kNegative = 2,  // the value with the other sign
  kNaN = 3,       // NaN: a weight of 0, or NaN
};
RINGSPAN_DEVICE PairKind kind_of_weight(float weight) { return weight > 0.0F ? kPositive : weight < 0.0F ? kNegative : kNaN; }

// For each pair of kRows x kCols bytes what kind_of(thread, half, index, column) says, `index` being its place in the thread's
// accumulators.
template <typename P, typename M, typename KindOf>
RINGSPAN_DEVICE void note_pairs(M& m, unsigned char* pairs, KindOf&& kind_of) {
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    const auto kind = kind_of(thread);
    RINGSPAN_UNROLL
    for (int index = 0; index < P::kCols / 2; ++index) {
      const int half = index % 4 / 2;
      const int column = M::hidden(index / 4 * 8 + lane.column + index % 2);
      pairs[(lane.row + half * 8) * P::kCols + column] = kind(half, index, column);
    }
  });
}

template <typename P, typename M>
RINGSPAN_DEVICE void add_non_finite(M& m, typename M::template Registers<float, P::kDim / 2>& sums, const unsigned char* pairs,
                                    const TileRows<typename P::Element>& from) {
  m.each([&](int thread) {
    const Lane lane = lane_of(M::hidden(thread));
    RINGSPAN_NO_UNROLL
    for (int column = 0; column < from.valid; ++column) {
      const typename P::Element* row = from.rows.row(from.first + column);
      const int kinds[2] = {pairs[lane.row * P::kCols + column], pairs[(lane.row + 8) * P::kCols + column]};
      if (kinds[0] + kinds[1] == kNoPair) continue;
      RINGSPAN_UNROLL
      for (int pair = 0; pair < P::kDim / 4; ++pair) {
        const int e = M::hidden(pair / 2 * 8 + lane.column + pair % 2);
        const float value = e < from.width ? P::Storage::load(row[e]) : 0.0F;
        const float nan = value - value;
        if (nan == 0.0F) continue;
        RINGSPAN_UNROLL
        for (int half = 0; half < 2; ++half) {
          if (kinds[half] == kNoPair) continue;
          sums[thread][pair / 2 * 4 + half * 2 + pair % 2] += kinds[half] == kPositive   ? value
                                                              : kinds[half] == kNegative ? -value
                                                                                         : nan;
        }
      }
    }
  });
}

}  // namespace ringspan::cuda
