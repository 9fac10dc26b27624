// What the block programs share: which work a block has, rows of operands, visible columns.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/arguments.h"
#include "cuda/finish_row.h"
#include "cuda/machine.h"
#include "kernels/task_view.h"

namespace ringspan::cuda {

struct BlockWork {
  // head: index of the tasks' query heads, or the kv head itself; batch: index of their batch items; tile 0: the most work
  std::int64_t group = 0, tile = 0, head = 0, batch = 0;
};

// `number`: of the group.
RINGSPAN_DEVICE BlockWork work_in(const Group& group, std::int64_t number, std::int64_t block) {
  const auto index = static_cast<std::uint32_t>(block - group.first_block);  // a launch has fewer than 2^31
  const auto together = static_cast<std::uint32_t>(group.together);
  const auto columns = static_cast<std::uint32_t>(group.columns);
  const std::uint32_t share = together * static_cast<std::uint32_t>(group.tiles);
  const std::uint32_t first = index / share * together;
  const std::uint32_t width = columns - first < together ? columns - first : together;
  const std::uint32_t column = first + index % share % width;
  const auto heads = static_cast<std::uint32_t>(group.heads);
  return {number, index % share / width, group.head_first + column % heads * group.head_step, column / heads};
}
// Cost: the logarithm of the groups.
RINGSPAN_DEVICE BlockWork find_work(const AttendArguments& arguments, std::int64_t block) {
  std::int64_t low = 0, high = arguments.group_count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (arguments.groups[middle].first_block <= block ? low : high) = middle;
  }
  return work_in(arguments.groups[low], low, block);
}

// Rows first .. first + count - 1 of (batch item, head) of a task.
struct RowsOfBlock {
  int batch, head, first, count;
};

// Rows of one (batch item, head) of an operand.
template <typename T>
struct RowsView {
  T* data = nullptr;
  std::int64_t stride = 0;  // elements
  RINGSPAN_DEVICE T* row(std::int64_t index) const { return data + index * stride; }
};

template <typename T, typename Operand>
RINGSPAN_DEVICE RowsView<T> view_of(const Operand& rows, std::int64_t batch, std::int64_t head) {
  T* const data = static_cast<T*>(rows.data) + batch * rows.batch_stride + head * rows.head_stride;
  RINGSPAN_ASSUME_GLOBAL(data);
  return {data, rows.row_stride};
}

// Two floats side by side, of which `left` are there; at once where their address is a multiple of 8.
struct alignas(8) FloatPair {
  float low, high;
};
RINGSPAN_DEVICE bool are_pairs(const RowsView<float>& rows) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % 8 == 0 && rows.stride % 2 == 0;
}
RINGSPAN_DEVICE FloatPair load_pair(const float* from, int left) {
  return {left > 0 ? from[0] : 0.0F, left > 1 ? from[1] : 0.0F};
}
RINGSPAN_DEVICE void store_pair(float* to, int left, FloatPair pair) {
  if (left > 0) to[0] = pair.low;
  if (left > 1) to[1] = pair.high;
}

struct alignas(16) Chunk {
  std::uint32_t words[4];
};

// Not 0 where an exponent of the word, one float32 or a pair of 16-bit elements, has all bits set: one more in its last place
// carries into the sign.
template <DType kType>
RINGSPAN_DEVICE std::uint32_t overflow_of_exponents(std::uint32_t word) {
  constexpr std::uint32_t kSigns = kType == DType::float32 ? 0x80000000U : 0x80008000U;
  constexpr std::uint32_t kExponents = kType == DType::float32    ? 0x7f800000U
                                       : kType == DType::bfloat16 ? 0x7f807f80U
                                                                  : 0x7c007c00U;
  constexpr std::uint32_t kOnes = kType == DType::float32 ? 0x00800000U : kType == DType::bfloat16 ? 0x00800080U : 0x04000400U;
  return ((word & kExponents) + kOnes) & kSigns;
}
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

RINGSPAN_DEVICE float alibi_slope(const kernels::AttendParams& params, std::int64_t batch, std::int64_t head) {
  return params.shape.alibi ? params.alibi_slopes[batch * params.alibi_batch_stride + head] : 0.0F;
}

}  // namespace ringspan::cuda
