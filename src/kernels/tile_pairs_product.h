// Products of packed operands over an ISA file's `struct Dot`; see tile_pairs.h.
#pragma once

#include "kernels/tile_pairs.h"

namespace ringspan::kernels {
namespace {

// c[rows][columns] (+)= left x right; columns a multiple of 16, depth of 32. tops (Dot::kInRegisters): 16 maxima of each row,
// which those of c raise.
template <typename Products, typename Block = Dot>
void multiply_pairs(int rows, int columns, int depth, const Left& left, const Right& right, float* c, std::int64_t c_stride,
                    bool add, Ahead* ahead = nullptr, float* tops = nullptr) {
  if constexpr (Block::kInRegisters) {
    constexpr int kColumns = Block::kPanels * kPanelColumns;
    for (int column = 0; column < columns; column += kColumns) {
      const int panels = at_most(columns - column, kColumns) / kPanelColumns;
      Block::template column<Products>(rows, panels, left, right.at(column, 0), depth, c + column, c_stride, add, ahead, tops);
    }
  } else {
    Block::template multiply<Products>(rows, columns, depth, left, right, c, c_stride, add, ahead);
  }
}

RINGSPAN_INLINE __mmask16 not_finite(Reg x) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(x), exponent), exponent);
}
// 32 words, zeros instead of those that are not finite.
RINGSPAN_INLINE __m512i finite_or_zero(__m512i words) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(words, exponent), exponent), words);
}
// An element of a left operand, 16 columns of depth k of a panel: the sums of their planes.
template <int kPlanes>
RINGSPAN_INLINE Reg element_of(const Word* data, std::int64_t plane) {
  Reg x = Isa::zero();
  for (int n = 0; n < kPlanes; ++n) x += low_half(_mm512_set1_epi32(data[n * plane]));
  return x;
}
template <int kPlanes>
RINGSPAN_INLINE Reg columns_of(const Right& panel, int k) {
  Reg x = Isa::zero();
  for (int n = 0; n < kPlanes; ++n) {
    const __m512i words = _mm512_loadu_si512(panel.data + n * panel.plane + k / 2 * kChunk);
    x += k % 2 == 0 ? low_half(words) : high_half(words);
  }
  return x;
}
RINGSPAN_INLINE bool is_finite(Word word) { return (word & 0x7f80U) != 0x7f80U; }

// An infinite number is packed as itself and zeros, so that products of planes contain 0 inf, and products that overflow may
// have either sign: makes elements of c that are not finite again from the sums of the planes.
template <int kPlanes>
void repair_products(int rows, int columns, int depth, const Left& left, const Right& right, float* c, std::int64_t c_stride) {
  for (int column = 0; column < columns; column += kPanelColumns) {
    const Right panel = right.at(column, 0);
    for (int row = 0; row < rows; ++row) {
      float* out = c + row * c_stride + column;
      const __mmask16 bad = not_finite(Isa::load(out));
      if (bad == 0) continue;
      Reg sum = Isa::zero();
      for (int k = 0; k < depth; ++k)
        sum = Isa::fma(element_of<kPlanes>(left.data + row * left.stride + k, left.plane), columns_of<kPlanes>(panel, k), sum);
      _mm512_mask_storeu_ps(out, bad, sum);
    }
  }
}

// c = weights x right, where some of `right` is not finite and must meet only the weights of depths that a row sees,
// [begin[row], end[row]) - origin: first without it, so that other rows keep their bits, then it alone. `copy`: a panel.
template <int kPlanes, bool kHalves = false>
void multiply_visible(int rows, int columns, int depth, const Left& weights, const Right& right, float* c,
                      std::int64_t c_stride, const std::int32_t* begin, const std::int32_t* end, int origin, Word* copy) {
  const std::int64_t copy_plane = static_cast<std::int64_t>(depth) * kPanelColumns;
  for (int column = 0; column < columns; column += kPanelColumns) {
    const Right panel = right.at(column, 0);
    for (int n = 0; n < kPlanes; ++n) {
      for (std::int64_t i = 0; i < copy_plane; i += 32)
        _mm512_storeu_si512(copy + n * copy_plane + i, finite_or_zero(_mm512_loadu_si512(panel.data + n * panel.plane + i)));
    }
    multiply_pairs<LargeProducts<kPlanes>>(rows, kPanelColumns, depth, weights, Right{copy, 0, copy_plane}, c + column,
                                           c_stride, false);
    for (int k = 0; k < depth; ++k) {
      const Reg values = columns_of<kPlanes>(panel, k);
      const __mmask16 bad = not_finite(values);
      if (bad == 0) continue;
      const int key = row_of_depth<kHalves>(k) + origin;
      for (int row = 0; row < rows; ++row) {
        if (key < begin[row] || key >= end[row]) continue;
        float* sum = c + row * c_stride + column;
        const Reg weight = element_of<kPlanes>(weights.data + row * weights.stride + k, weights.plane);
        _mm512_mask_storeu_ps(sum, bad, Isa::fma(weight, values, Isa::load(sum)));
      }
    }
  }
}

}  // namespace
}  // namespace ringspan::kernels
