// The tiled algorithm over dot products of pairs of bfloat16: operands and packing. tile_pairs_product.h,
// tile_pairs_forward.h and tile_pairs_backward.h have the rest; an ISA file includes them after its `struct Dot`.
//
// A float16 is the sum of two bfloat16, its planes (11 = 8 + 3 bits), and a product of sums is a sum of products, so that
// float16 takes the same path: products of all planes where a score is made (as exact as float32), without the smallest where
// probabilities are rounded anyway (2^-16 where rounding to float16 has 2^-11). A float32 is the sum of three (24 = 8 + 8 + 8
// bits): six products, without those of at most 2^-23 (2^-26 in the root mean square).
//
// Packed forms (u16 words; a plane of one after the other):
//   left    rows x depth: [rows][stride]; depth padded with zeros to a multiple of 32
//   right   depth x columns: panels of 16 columns, each [depth / 2][16][2]: two neighbouring depths side by side
// 16 columns x 32 depths of a right operand are 1 KiB in one piece, 16 x 32 of a left one 16 lines: tiles of AMX, and rows of
// words to broadcast against vectors for AVX512-BF16.
//
// Dot: kSplits (whether it is fast enough for several planes), kFetchesQueries (whether backward gains where queries and their
// gradients are fetched ahead), kNarrow (whether few queries take tile_pairs_narrow.h), turns(dims) (of which forward tiles
// queries are packed as right operands), kInRegisters (whether its sums are vectors, so that a block can be used before it is
// stored), Session (what must be alive while products are computed), and products: c[rows][columns] (+)= sum over depth, in
// blocks of rows, lines of `ahead` fetched after each. They may read and write rows up to the next multiple of 16.
//   kInRegisters: column<Products>(rows, panels, left, right, depth, c, c_stride, add, ahead, tops): columns are 16 panels, up
//     to kPanels; what is stored raises tops[row][16], unless nullptr.
//     add_products<Products>(left, right, depth, sum): sum[r][v] += row r of left x panel v of right.
//   Otherwise: multiply<Products>(rows, columns, depth, left, right, c, c_stride, add, ahead).
// Each element of c is a chain over chunks of 32 depths (AMX) or of 2, in order; chunks of zeros add nothing.
// Denormal results count as zero.
#pragma once

#include "kernels/tile_fetch.h"

namespace ringspan::kernels {
namespace {

using Word = std::uint16_t;

constexpr int kFloat32Type = 0, kBFloat16Type = 1, kFloat16Type = 2;  // of TileDims::dtype

constexpr int kChunk = 32;  // depth of a tile
constexpr int kPanelColumns = 16;
constexpr std::int64_t kPanelPad = 32;  // words between panels, against cache set conflicts
constexpr std::int64_t kRowPad = 32;
constexpr int kPairRows = 32;  // rows of a block of queries

constexpr int up32(int x) { return (x + 31) / 32 * 32; }
constexpr int down32(int x) { return x / 32 * 32; }
constexpr int up16(int x) { return (x + 15) / 16 * 16; }
constexpr std::int64_t to_line(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// ---- planes ------------------------------------------------------------------------------------------------------------

RINGSPAN_INLINE __m512 low_half(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
RINGSPAN_INLINE __m512 high_half(__m512i words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
}
RINGSPAN_INLINE __m512 widen(__m256i x) { return low_half(_mm512_cvtepu16_epi32(x)); }
RINGSPAN_INLINE __mmask16 not_finite(__m256i x) {
  const __m256i exponent = _mm256_set1_epi16(0x7f80);
  return _mm256_cmpeq_epi16_mask(_mm256_and_si256(x, exponent), exponent);
}
RINGSPAN_INLINE __m256i round_to_words(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// Words of two vectors of floats side by side, those of `even` first, rounded with ties away from zero: two instructions where
// the conversion takes four, and an order in which they would have to be put. No number may be near the largest, nor a NaN have
// ones only. `rounded`: the floats of those words, and whatever lies below them.
RINGSPAN_INLINE __m512i words_side_by_side(__m512 even, __m512 odd, __m512i (&rounded)[2]) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  rounded[0] = _mm512_add_epi32(_mm512_castps_si512(even), half);
  rounded[1] = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(rounded[0], 16), rounded[1], upper, 0xf8);  // a | (b & c)
}

// kLimit: exponents from which on a sum of products of planes may not be what the product of the sums is.
struct BFloat16 {
  using Element = Word;
  static constexpr int kPlanes = 1;
  static constexpr short kLimit = 0x7f80;
  RINGSPAN_INLINE static void load(const Word* p, __mmask16 present, __m256i (&planes)[kPlanes]) {
    planes[0] = _mm256_maskz_loadu_epi16(present, p);
  }
};

struct Float16 {
  using Element = Word;
  static constexpr int kPlanes = 2;
  static constexpr short kLimit = 0x7f80;
  RINGSPAN_INLINE static void load(const Word* p, __mmask16 present, __m256i (&planes)[kPlanes]) {
    const __m512 x = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, p));
    planes[0] = round_to_words(x);
    planes[1] = _mm256_maskz_mov_epi16(static_cast<__mmask16>(~not_finite(planes[0])), round_to_words(x - widen(planes[0])));
  }
};

struct Float32 {
  using Element = float;
  static constexpr int kPlanes = 3;
  static constexpr short kLimit = (127 + 58) << 7;  // products of 2^58 or more may overflow
  RINGSPAN_INLINE static void load(const float* p, __mmask16 present, __m256i (&planes)[kPlanes]) {
    const __m512 x = _mm512_maskz_loadu_ps(present, p);
    const __m512i bits = _mm512_castps_si512(x), exponent = _mm512_set1_epi32(0x7f800000);
    const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
    planes[0] = round_to_words(x);  // unless that overflows
    planes[0] =
        _mm256_mask_mov_epi16(planes[0], finite & not_finite(planes[0]), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    const __m512 rest = _mm512_maskz_sub_ps(finite, x, widen(planes[0]));
    planes[1] = round_to_words(rest);
    planes[2] = round_to_words(rest - widen(planes[1]));
  }
};

// Which planes of left and right are multiplied; neighbours share one, which need not be loaded again.
template <int kPlanes>
struct AllProducts;
template <>
struct AllProducts<1> {
  static constexpr int kCount = 1, kLeft[] = {0}, kRight[] = {0};
};
template <>
struct AllProducts<2> {
  static constexpr int kCount = 4, kLeft[] = {1, 0, 0, 1}, kRight[] = {1, 1, 0, 0};
};
template <>
struct AllProducts<3> {  // the others: see above
  static constexpr int kCount = 6, kLeft[] = {0, 0, 0, 1, 1, 2}, kRight[] = {2, 1, 0, 0, 1, 0};
};
template <int kPlanes>
struct LargeProducts : AllProducts<kPlanes> {};
template <>
struct LargeProducts<2> {
  static constexpr int kCount = 3, kLeft[] = {0, 0, 1}, kRight[] = {1, 0, 0};
};

// Planes of two vectors side by side; see words_side_by_side.
template <typename Type>
RINGSPAN_INLINE void store_side_by_side(__m512 even, __m512 odd, Word* to, std::int64_t plane) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  for (int n = 0; n < Type::kPlanes; ++n) {
    __m512i rounded[2];
    _mm512_storeu_si512(to + n * plane, words_side_by_side(even, odd, rounded));
    if (n + 1 == Type::kPlanes) return;
    even = even - _mm512_castsi512_ps(_mm512_and_si512(rounded[0], upper));
    odd = odd - _mm512_castsi512_ps(_mm512_and_si512(rounded[1], upper));
  }
}

// ---- packing -----------------------------------------------------------------------------------------------------------

struct Left {
  const Word* data;
  std::int64_t stride, plane;
};
struct Right {
  const Word* data;
  std::int64_t panel, plane;
  Right at(int column, int depth) const {
    return {data + column / kPanelColumns * panel + static_cast<std::int64_t>(depth) * kPanelColumns, panel, plane};
  }
};

RINGSPAN_INLINE __mmask16 first_of(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1U << n) - 1U); }

// Where a row lies; of absent ones, the first: a load that is masked out takes hundreds of cycles where its page was never
// written.
RINGSPAN_INLINE std::int64_t index_of(const RowSource& source, int row) {
  if (row >= source.rows) return 0;
  return source.index == nullptr ? row : source.index[row];
}

template <typename Type>
RINGSPAN_INLINE void load_planes(const RowSource& source, int row, int e, __m256i (&planes)[Type::kPlanes]) {
  const std::int64_t index = index_of(source, row);
  const __mmask16 present = row < source.rows ? first_of(source.width - e) : 0;
  Type::load(static_cast<const typename Type::Element*>(source.data) + index * source.stride + e, present, planes);
}

// 16 words of 16 rows become 16 rows of words.
RINGSPAN_INLINE void transpose_words(__m512i (&words)[16]) {
  Reg t[16];
  for (int i = 0; i < 16; ++i) t[i] = _mm512_castsi512_ps(words[i]);
  Isa::transpose(t);
  for (int i = 0; i < 16; ++i) words[i] = _mm512_castps_si512(t[i]);
}

// Whether rows are words as they lie in memory, 32 at a time and equally far apart: no masks, and no indices to look up.
template <typename Type>
RINGSPAN_INLINE bool is_plain(const RowSource& source) {
  return Type::kPlanes == 1 && source.index == nullptr && source.width % 32 == 0;
}

// Rows further on that packing asks for: rows that are far apart lie on pages of their own, which processors do not fetch
// ahead. Not beyond the last: that may be memory that was never written, and asking for it means walking the page tables each
// time.
constexpr int kRowsAhead = 16;

// 32 elements of a row from e on, as words of each plane; zeros where there are none. `top`: the largest magnitudes of words.
// Plain: of rows that are, and are there.
template <typename Type, bool kPlain>
RINGSPAN_INLINE void load_wide(const RowSource& source, int row, int e, __m512i (&words)[Type::kPlanes], __m512i& top) {
  if constexpr (kPlain) {
    const Word* const data = static_cast<const Word*>(source.data) + row * source.stride + e;
    __builtin_prefetch(data + (at_most(row + kRowsAhead, source.rows - 1) - row) * source.stride, 0, 3);
    words[0] = _mm512_loadu_si512(data);
  } else if constexpr (Type::kPlanes == 1) {
    const std::int64_t index = index_of(source, row);
    const int count = row < source.rows ? source.width - e : 0;
    const __mmask32 present = count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
    words[0] = _mm512_maskz_loadu_epi16(present, static_cast<const Word*>(source.data) + index * source.stride + e);
  } else {
    __m256i low[Type::kPlanes], high[Type::kPlanes];
    load_planes<Type>(source, row, e, low);
    load_planes<Type>(source, row, e + 16, high);
    for (int p = 0; p < Type::kPlanes; ++p) words[p] = _mm512_inserti64x4(_mm512_castsi256_si512(low[p]), high[p], 1);
  }
  top = _mm512_max_epu16(top, _mm512_and_si512(words[0], _mm512_set1_epi16(0x7fff)));
}
template <typename Type>
RINGSPAN_INLINE bool within_limit(__m512i top) {
  return _mm512_cmpge_epu16_mask(top, _mm512_set1_epi16(Type::kLimit)) == 0;
}

// Rows as rows of a left operand.
template <typename Type, bool kPlain>
void pack_left_rows(Word* out, std::int64_t stride, std::int64_t plane, const RowSource& source, __m512i& top) {
  for (int row = 0; row < source.rows; ++row) {
    for (int e = 0; e < up32(source.width); e += 32) {
      __m512i planes[Type::kPlanes];
      load_wide<Type, kPlain>(source, row, e, planes, top);
      for (int p = 0; p < Type::kPlanes; ++p) _mm512_storeu_si512(out + p * plane + row * stride + e, planes[p]);
    }
  }
}
template <typename Type>
bool pack_left(Word* out, std::int64_t stride, std::int64_t plane, const RowSource& source) {
  __m512i top = _mm512_setzero_si512();
  if (is_plain<Type>(source)) {
    pack_left_rows<Type, Type::kPlanes == 1>(out, stride, plane, source, top);
  } else {
    pack_left_rows<Type, false>(out, stride, plane, source, top);
  }
  return within_limit<Type>(top);
}

// Rows as columns of a right operand: depth is their width. Here a panel.
template <typename Type, bool kPlain>
RINGSPAN_INLINE void pack_right_panel(Word* out, std::int64_t plane, const RowSource& source, int first, __m512i& top) {
  for (int e = 0; e < up32(source.width); e += 32) {
    __m512i words[Type::kPlanes][16];
    for (int r = 0; r < 16; ++r) {
      __m512i row[Type::kPlanes];
      load_wide<Type, kPlain>(source, first + r, e, row, top);
      for (int p = 0; p < Type::kPlanes; ++p) words[p][r] = row[p];
    }
    for (int p = 0; p < Type::kPlanes; ++p) {
      transpose_words(words[p]);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + p * plane + (e + 2 * i) * kPanelColumns, words[p][i]);
    }
    if (source.ahead != nullptr) fetch_lines(source.ahead, source.ahead->burst);
  }
}
template <typename Type>
bool pack_right_columns(Word* out, std::int64_t panel, std::int64_t plane, const RowSource& source) {
  const bool plain = is_plain<Type>(source);
  __m512i top = _mm512_setzero_si512();
  for (int first = 0; first < up32(source.rows); first += kPanelColumns, out += panel) {
    if (plain && first + kPanelColumns <= source.rows) {
      pack_right_panel<Type, Type::kPlanes == 1>(out, plane, source, first, top);
    } else {
      pack_right_panel<Type, false>(out, plane, source, first, top);
    }
  }
  return within_limit<Type>(top);
}

// Rows 2 i and 2 i + 1 side by side, 16 elements from e on.
template <typename Type>
RINGSPAN_INLINE void load_pair(const RowSource& source, int row, int e, __m512i (&words)[Type::kPlanes]) {
  __m256i even[Type::kPlanes], odd[Type::kPlanes];
  load_planes<Type>(source, row, e, even);
  load_planes<Type>(source, row + 1, e, odd);
  for (int p = 0; p < Type::kPlanes; ++p)
    words[p] = _mm512_or_si512(_mm512_cvtepu16_epi32(even[p]), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd[p]), 16));
}

// Rows as depths of a right operand; here two of them, the `pair`-th. Words are interleaved inside quarters of a register,
// which are then put in order.
template <typename Type, bool kPlain>
RINGSPAN_INLINE void pack_right_pair(Word* out, std::int64_t panel, std::int64_t plane, const RowSource& source, int even_row,
                                     int odd_row, int pair, __m512i& top) {
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int e = 0; e < source.width; e += 32) {
    __m512i even[Type::kPlanes], odd[Type::kPlanes];
    load_wide<Type, kPlain>(source, even_row, e, even, top);
    load_wide<Type, kPlain>(source, odd_row, e, odd, top);
    for (int p = 0; p < Type::kPlanes; ++p) {
      const __m512i low = _mm512_unpacklo_epi16(even[p], odd[p]), high = _mm512_unpackhi_epi16(even[p], odd[p]);
      Word* const to = out + p * plane + e / kPanelColumns * panel + 2 * pair * kPanelColumns;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, first, high));
      if (kPlain || e + kPanelColumns < source.width)
        _mm512_storeu_si512(to + panel, _mm512_permutex2var_epi64(low, second, high));
    }
  }
}
// The row at a depth. kHalves: of 32 rows, the halves lie side by side, not neighbours.
template <bool kHalves>
constexpr int row_of_depth(int depth) {
  return kHalves ? depth / 32 * 32 + depth % 32 / 2 + depth % 2 * 16 : depth;
}
template <typename Type, bool kHalves = false>
bool pack_right_rows(Word* out, std::int64_t panel, std::int64_t plane, const RowSource& source) {
  const bool plain = is_plain<Type>(source);
  __m512i top = _mm512_setzero_si512();
  for (int pair = 0; pair < up32(source.rows) / 2; ++pair) {
    if (source.ahead != nullptr && pair % 4 == 0) fetch_lines(source.ahead, source.ahead->burst);
    const int even = row_of_depth<kHalves>(2 * pair), odd = row_of_depth<kHalves>(2 * pair + 1);
    if (plain && odd < source.rows) {
      pack_right_pair<Type, Type::kPlanes == 1>(out, panel, plane, source, even, odd, pair, top);
    } else {
      pack_right_pair<Type, false>(out, panel, plane, source, even, odd, pair, top);
    }
  }
  return within_limit<Type>(top);
}

// Rows as depths of a left operand: [width][rows].
template <typename Type>
bool pack_left_columns(Word* out, std::int64_t stride, std::int64_t plane, const RowSource& source) {
  __m512i top = _mm512_setzero_si512();
  for (int row = 0; row < up32(source.rows); row += 32) {
    for (int e = 0; e < source.width; e += 16) {
      __m512i words[Type::kPlanes][16];
      for (int i = 0; i < 16; ++i) {
        __m512i pair[Type::kPlanes];
        load_pair<Type>(source, row + 2 * i, e, pair);
        top = _mm512_max_epu16(top, _mm512_and_si512(pair[0], _mm512_set1_epi16(0x7fff)));
        for (int p = 0; p < Type::kPlanes; ++p) words[p][i] = pair[p];
      }
      for (int p = 0; p < Type::kPlanes; ++p) {
        transpose_words(words[p]);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + p * plane + (e + i) * stride + row, words[p][i]);
      }
    }
  }
  return within_limit<Type>(top);
}

}  // namespace
}  // namespace ringspan::kernels
