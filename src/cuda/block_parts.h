// What the block programs share: which work a block has, tiles from memory to shared memory, visible columns, scores.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/arguments.h"
#include "cuda/finish_row.h"
#include "cuda/machine.h"
#include "kernels/dropout.h"
#include "kernels/task_view.h"

namespace ringspan::cuda {

struct BlockWork {
  std::int64_t group = 0, tile = 0, head = 0, batch = 0;  // batch: index of the tasks' batch items
};

RINGSPAN_DEVICE BlockWork find_work(const AttendArguments& arguments, std::int64_t block) {
  std::int64_t low = 0;
  std::int64_t high = arguments.group_count - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    (arguments.groups[middle].first_block <= block ? low : high) =
        arguments.groups[middle].first_block <= block ? middle : middle - 1;
  }
  const Group& group = arguments.groups[low];
  block -= group.first_block;
  return {low, block % group.tiles, block / group.tiles % group.heads, block / group.tiles / group.heads};
}

// Rows of one (batch item, head) of an operand.
template <typename T>
struct RowsView {
  T* data = nullptr;
  std::int64_t stride = 0;  // elements
  RINGSPAN_DEVICE T* row(std::int64_t index) const { return data + index * stride; }
};

template <typename T, typename Operand>
RINGSPAN_DEVICE RowsView<T> view_of(const Operand& rows, std::int64_t batch, std::int64_t head) {
  return {static_cast<T*>(rows.data) + batch * rows.batch_stride + head * rows.head_stride, rows.row_stride};
}

struct alignas(16) Chunk {
  std::uint32_t words[4];
};

template <DType kType>
RINGSPAN_DEVICE bool is_finite_word(std::uint32_t word) {  // one float32 or a pair of 16-bit elements
  if constexpr (kType == DType::float32) return (word & 0x7f800000U) != 0x7f800000U;
  constexpr std::uint32_t kExponent = kType == DType::bfloat16 ? 0x7f80U : 0x7c00U;
  return (word & kExponent) != kExponent && (word >> 16 & kExponent) != kExponent;
}
template <DType kType>
RINGSPAN_DEVICE std::uint32_t without_non_finite(std::uint32_t word) {
  if constexpr (kType == DType::float32) return is_finite_word<kType>(word) ? word : 0U;
  constexpr std::uint32_t kExponent = kType == DType::bfloat16 ? 0x7f80U : 0x7c00U;
  const std::uint32_t low = (word & kExponent) == kExponent ? 0U : word & 0xffffU;
  const std::uint32_t high = (word >> 16 & kExponent) == kExponent ? 0U : word & 0xffff0000U;
  return low | high;
}

RINGSPAN_DEVICE std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
RINGSPAN_DEVICE std::uint32_t bits_of(std::uint16_t value) { return value; }

// kRows rows from `first` on into shared memory, `valid` of them with `width` elements, zeros elsewhere. With kDetect elements
// that are not finite raise the thread's flag. No barrier.
template <typename P, int kRows, bool kDetect, typename M>
RINGSPAN_DEVICE void load_tile(M& m, typename P::Element* tile, RowsView<const typename P::Element> rows, std::int64_t first,
                               int valid, int width, typename M::template Registers<int, 1>& flags) {
  using Element = typename P::Element;
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  constexpr int kChunks = P::kDim / kPerChunk;
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride % kPerChunk == 0 && width % kPerChunk == 0;
  m.each([&](int thread) {
    for (int index = thread; index < kRows * kChunks; index += M::kThreads) {
      const int row = index / kChunks;
      const int column = index % kChunks * kPerChunk;
      Chunk chunk{};
      if (row < valid && column < width) {
        const Element* source = rows.row(first + row) + column;
        if (aligned) {
          chunk = *reinterpret_cast<const Chunk*>(source);
        } else {
          RINGSPAN_UNROLL
          for (int e = 0; e < kPerChunk; ++e) {
            if (column + e >= width) continue;
            constexpr int kPerWord = kPerChunk / 4;
            chunk.words[e / kPerWord] |= bits_of(source[e]) << (e % kPerWord * 16);
          }
        }
      }
      if constexpr (kDetect) {
        RINGSPAN_UNROLL
        for (int word = 0; word < 4; ++word) {
          if (!is_finite_word<P::kType>(chunk.words[word])) flags[thread][0] = 1;
        }
      }
      *reinterpret_cast<Chunk*>(tile + row * P::kLead + column) = chunk;
    }
  });
}

// And back: `valid` rows of `width` elements, kLead elements apart in shared memory, to rows from `first` on; 16 bytes at a
// time where these begin at multiples of that. No barrier.
template <int kRows, int kDim, int kLead, typename Element, typename M>
RINGSPAN_DEVICE void store_tile(M& m, const Element* tile, RowsView<Element> rows, std::int64_t first, int valid, int width) {
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  constexpr int kChunks = kDim / kPerChunk;
  const bool aligned = reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride % kPerChunk == 0;
  m.each([&](int thread) {
    for (int index = M::hidden(thread); index < kRows * kChunks; index += M::kThreads) {
      const int row = index / kChunks;
      const int column = index % kChunks * kPerChunk;
      if (row >= valid || column >= width) continue;
      const Element* from = tile + row * kLead + column;
      Element* to = rows.row(first + row) + column;
      if (aligned && column + kPerChunk <= width) {
        *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(from);
      } else {
        RINGSPAN_NO_UNROLL
        for (int e = 0; e < kPerChunk && column + e < width; ++e) to[e] = from[e];
      }
    }
  });
}

// Where a weight is 0 because a pair is masked, 0 x NaN must not reach the sum: before a product takes such a tile, its
// elements that are not finite become 0, and add_non_finite() brings them to the rows that see them. Barriers before and after.
template <typename P, int kRows, typename M>
RINGSPAN_DEVICE void clean_tile(M& m, typename P::Element* tile) {
  constexpr int kWords = P::kDim * static_cast<int>(sizeof(typename P::Element)) / 4;
  m.sync();
  m.each([&](int thread) {
    for (int index = thread; index < kRows * kWords; index += M::kThreads) {
      auto& word = reinterpret_cast<std::uint32_t*>(tile + index / kWords * P::kLead)[index % kWords];
      word = without_non_finite<P::kType>(word);
    }
  });
  m.sync();
}

// Columns [begin, end) of the tile that a thread's two rows see.
struct VisibleColumns {
  int begin[2];
  int end[2];
  RINGSPAN_DEVICE bool sees(int half, int column) const { return column >= begin[half] && column < end[half]; }
};

RINGSPAN_DEVICE void clip(kernels::IndexRange range, std::int64_t first, int columns, int half, VisibleColumns& out) {
  const std::int64_t begin = range.begin - first;
  const std::int64_t end = range.end - first;
  out.begin[half] = begin < 0 ? 0 : begin > columns ? columns : static_cast<int>(begin);
  out.end[half] = end < 0 ? 0 : end > columns ? columns : static_cast<int>(end);
}

// The contribution of the elements that clean_tile() took out: for visible pairs only. `stage` holds the weights; a pair that
// `takes(column, weight)` refuses (dropped, of a score of -inf) does not take part. For tiles that hold NaN or infinities, so
// seldom.
template <typename P, typename M, typename Takes>
RINGSPAN_DEVICE void add_non_finite(M& m, typename M::template Registers<float, P::kDim / 2>& c, const float* stage,
                                    RowsView<const typename P::Element> rows, std::int64_t first, int valid, int width,
                                    typename M::template Registers<VisibleColumns, 1>& visible, Takes&& takes) {
  m.each([&](int thread) {
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int index = 0; index < P::kDim / 2; ++index) {
      const int e = index / 4 * 8 + lane.column + index % 2;
      const int half = index % 4 / 2;
      for (int column = 0; column < valid && e < width; ++column) {
        const float value = P::Storage::load(rows.row(first + column)[e]);
        const bool finite = value - value == 0.0F;
        const float weight = stage[(lane.row + half * 8) * P::kStageLead + column];
        if (!finite && visible[thread][0].sees(half, column) && takes(column, weight)) c[thread][index] += weight * value;
      }
    }
  });
}

struct Score {
  float value = 0.0F;
  float derivative = 1.0F;  // with respect to scale q . k
};

RINGSPAN_DEVICE_CALL Score score_with_options(const kernels::AttendParams& params, float dot, float slope,
                                              std::int64_t distance) {
  Score score{params.scale * dot, 1.0F};
  if (params.shape.softcap) {
    const float t = tanhf(score.value / params.softcap);
    score = {params.softcap * t, 1.0F - t * t};
  }
  if (params.shape.alibi) score.value -= slope * static_cast<float>(distance < 0 ? -distance : distance);
  return score;
}

// As kernels/score.h has it, with the functions of the device; `distance()` is j - i - diagonal.
template <typename Distance>
RINGSPAN_DEVICE Score pair_score(const kernels::AttendParams& params, float dot, float slope, Distance&& distance) {
  if (params.shape.softcap || params.shape.alibi) return score_with_options(params, dot, slope, distance());
  return {params.scale * dot, 1.0F};
}

RINGSPAN_DEVICE float alibi_slope(const kernels::AttendParams& params, std::int64_t batch, std::int64_t head) {
  return params.shape.alibi ? params.alibi_slopes[batch * params.alibi_batch_stride + head] : 0.0F;
}

RINGSPAN_DEVICE_CALL bool is_dropped(kernels::PhiloxKey key, std::uint32_t threshold, std::int64_t i, std::int64_t j) {
  const kernels::PhiloxBlock block = kernels::dropout_block(i, j, key);
  const auto word = j & 3;
  return (word == 0 ? block[0] : word == 1 ? block[1] : word == 2 ? block[2] : block[3]) < threshold;
}

RINGSPAN_DEVICE float keep_factor(const kernels::AttendParams& params) {
  return params.shape.dropout ? 1.0F / (1.0F - params.dropout) : 1.0F;
}

}  // namespace ringspan::cuda
