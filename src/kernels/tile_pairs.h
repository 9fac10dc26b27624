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
// Where the depth is elements that are split, the halves of each 32 lie side by side on both sides.
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
//     add_products(left, right, depth, sum): of each of several products, sum[r][v] += row r of left x panel v of right.
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

RINGSPAN_INLINE __m512i upper_words() { return _mm512_set1_epi32(static_cast<int>(0xffff0000U)); }
RINGSPAN_INLINE __m512 low_half(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
RINGSPAN_INLINE __m512 high_half(__m512i words) { return _mm512_castsi512_ps(_mm512_and_si512(words, upper_words())); }
// The upper words of two vectors side by side, and the lower ones.
RINGSPAN_INLINE __m512i upper_of(__m512i even, __m512i odd, __m512i upper = upper_words()) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd, upper, 0xf8);  // a | (b & c)
}
RINGSPAN_INLINE __m512i lower_of(__m512i even, __m512i odd) {
  return _mm512_ternarylogic_epi32(_mm512_slli_epi32(odd, 16), even, upper_words(), 0xf4);  // a | (b & ~c)
}

// Words of two vectors of floats side by side, those of `even` first, rounded with ties away from zero: two instructions where
// the conversion takes four, and an order in which they would have to be put. No number may be near the largest, nor a NaN have
// ones only. `rounded`: the floats of those words, and whatever lies below them.
RINGSPAN_INLINE __m512i words_side_by_side(__m512 even, __m512 odd, __m512i (&rounded)[2]) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  rounded[0] = _mm512_add_epi32(_mm512_castps_si512(even), half);
  rounded[1] = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return upper_of(rounded[0], rounded[1]);
}

// kLimit: exponents from which on a sum of products of planes may not be what the product of the sums is.
struct BFloat16 {
  using Element = Word;
  static constexpr int kPlanes = 1;
  static constexpr short kLimit = 0x7f80;
};
struct Float16 {
  using Element = Word;
  static constexpr int kPlanes = 2;
  static constexpr short kLimit = 0x7f80;
  RINGSPAN_INLINE static __m512 load(const Word* p, __mmask16 present) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, p));
  }
};
struct Float32 {
  using Element = float;
  static constexpr int kPlanes = 3;
  static constexpr short kLimit = (127 + 58) << 7;  // products of 2^58 or more may overflow
  RINGSPAN_INLINE static __m512 load(const float* p, __mmask16 present) { return _mm512_maskz_loadu_ps(present, p); }
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
template <int kPlanes>
RINGSPAN_INLINE void split(__m512 even, __m512 odd, __m512i* planes) {
  for (int n = 0; n < kPlanes; ++n) {
    __m512i rounded[2];
    planes[n] = words_side_by_side(even, odd, rounded);
    even = even - high_half(rounded[0]);
    odd = odd - high_half(rounded[1]);
  }
}
template <typename Type>
RINGSPAN_INLINE void store_side_by_side(__m512 even, __m512 odd, Word* to, std::int64_t plane) {
  __m512i planes[Type::kPlanes];
  split<Type::kPlanes>(even, odd, planes);
  for (int n = 0; n < Type::kPlanes; ++n) _mm512_storeu_si512(to + n * plane, planes[n]);
}

// What rounding might carry into the exponent of infinities, or beyond: numbers near the largest, infinities and NaN. Their
// first plane is cut off instead, and infinities and NaN have no other.
RINGSPAN_INLINE bool any_large(__m512 even, __m512 odd) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i larger = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(even), magnitude),
                                          _mm512_and_si512(_mm512_castps_si512(odd), magnitude));
  return _mm512_cmpge_epu32_mask(larger, _mm512_set1_epi32(0x7f7f8000)) != 0;
}
template <int kPlanes>
__attribute__((noinline)) void split_large(__m512 even, __m512 odd, __m512i* planes) {
  const __m512i infinite = _mm512_set1_epi32(0x7f800000);
  const auto cut = [&](__m512& x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, infinite), infinite);
    const __m512i quiet = _mm512_castps_si512(_mm512_add_ps(x, x));  // a NaN of which the upper word is one, too
    const __m512i upper = _mm512_and_si512(_mm512_mask_mov_epi32(quiet, finite, bits), upper_words());
    x = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(upper));
    return upper;
  };
  const __m512i first = cut(even), second = cut(odd);
  planes[0] = upper_of(first, second);
  split<kPlanes - 1>(even, odd, planes + 1);
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

// 16 words of 16 rows become 16 rows of words.
RINGSPAN_INLINE void transpose_words(__m512i (&words)[16]) {
  Reg t[16];
  for (int i = 0; i < 16; ++i) t[i] = _mm512_castsi512_ps(words[i]);
  Isa::transpose(t);
  for (int i = 0; i < 16; ++i) words[i] = _mm512_castps_si512(t[i]);
}

// Whether rows are equally far apart and 32 elements at a time: no masks, and no indices to look up.
inline bool is_plain(const RowSource& source) { return source.index == nullptr && source.width % 32 == 0; }

// 32 elements of a row from e on, as words of each plane; zeros where there are none. Where elements are split, the halves of
// the 32 lie side by side. `top`: the largest magnitudes of words. Plain: of rows that are, and are there.
template <typename Type, bool kPlain>
RINGSPAN_INLINE void load_wide(const RowSource& source, int row, int e, __m512i (&words)[Type::kPlanes], __m512i& top) {
  using Element = typename Type::Element;
  const std::int64_t index = kPlain ? row : index_of(source, row);
  const Element* const data = static_cast<const Element*>(source.data) + index * source.stride + e;
  const int count = kPlain ? 32 : row < source.rows ? source.width - e : 0;
  if (kPlain) fetch_row_ahead(data, source, row);
  if constexpr (Type::kPlanes == 1) {
    const __mmask32 present = count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
    words[0] = kPlain ? _mm512_loadu_si512(data) : _mm512_maskz_loadu_epi16(present, data);
  } else {
    const __m512 even = Type::load(data, first_of(count)), odd = Type::load(data + 16, first_of(count - 16));
    if (__builtin_expect(any_large(even, odd), 0)) {
      split_large<Type::kPlanes>(even, odd, words);
    } else {
      split<Type::kPlanes>(even, odd, words);
    }
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
  if (is_plain(source)) {
    pack_left_rows<Type, true>(out, stride, plane, source, top);
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
  const bool plain = is_plain(source);
  __m512i top = _mm512_setzero_si512();
  for (int first = 0; first < up32(source.rows); first += kPanelColumns, out += panel) {
    if (plain && first + kPanelColumns <= source.rows) {
      pack_right_panel<Type, true>(out, plane, source, first, top);
    } else {
      pack_right_panel<Type, false>(out, plane, source, first, top);
    }
  }
  return within_limit<Type>(top);
}

// Words of two rows side by side, row by row as load_wide has them: the first 16 of 32 elements, and the others. Of words that
// lie in order, quarters have to be put in order afterwards.
template <bool kHalves>
RINGSPAN_INLINE void interleave(__m512i even, __m512i odd, __m512i (&halves)[2]) {
  if (kHalves) {
    halves[0] = lower_of(even, odd), halves[1] = upper_of(even, odd);
    return;
  }
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
  halves[0] = _mm512_permutex2var_epi64(low, first, high), halves[1] = _mm512_permutex2var_epi64(low, second, high);
}

// Rows as depths of a right operand; here two of them, the `pair`-th.
template <typename Type, bool kPlain>
RINGSPAN_INLINE void pack_right_pair(Word* out, std::int64_t panel, std::int64_t plane, const RowSource& source, int even_row,
                                     int odd_row, int pair, __m512i& top) {
  for (int e = 0; e < source.width; e += 32) {
    __m512i even[Type::kPlanes], odd[Type::kPlanes];
    load_wide<Type, kPlain>(source, even_row, e, even, top);
    load_wide<Type, kPlain>(source, odd_row, e, odd, top);
    for (int p = 0; p < Type::kPlanes; ++p) {
      __m512i halves[2];
      interleave<(Type::kPlanes > 1)>(even[p], odd[p], halves);
      Word* const to = out + p * plane + e / kPanelColumns * panel + 2 * pair * kPanelColumns;
      _mm512_storeu_si512(to, halves[0]);
      if (kPlain || e + kPanelColumns < source.width) _mm512_storeu_si512(to + panel, halves[1]);
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
  const bool plain = is_plain(source);
  __m512i top = _mm512_setzero_si512();
  for (int pair = 0; pair < up32(source.rows) / 2; ++pair) {
    if (source.ahead != nullptr && pair % 4 == 0) fetch_lines(source.ahead, source.ahead->burst);
    const int even = row_of_depth<kHalves>(2 * pair), odd = row_of_depth<kHalves>(2 * pair + 1);
    if (plain && odd < source.rows) {
      pack_right_pair<Type, true>(out, panel, plane, source, even, odd, pair, top);
    } else {
      pack_right_pair<Type, false>(out, panel, plane, source, even, odd, pair, top);
    }
  }
  return within_limit<Type>(top);
}

// Rows of words as depths of a left operand, [width][rows]. kHalves: words as load_wide leaves those of split elements.
template <bool kHalves, bool kPlain>
RINGSPAN_INLINE void pack_left_square(Word* out, std::int64_t stride, const RowSource& source, int row, int e, __m512i& top) {
  __m512i words[2][16];
  for (int i = 0; i < 16; ++i) {
    __m512i even[1], odd[1], halves[2];
    load_wide<BFloat16, kPlain>(source, row + 2 * i, e, even, top);
    load_wide<BFloat16, kPlain>(source, row + 2 * i + 1, e, odd, top);
    interleave<kHalves>(even[0], odd[0], halves);
    words[0][i] = halves[0], words[1][i] = halves[1];
  }
  for (int half = 0; half < 2 && (kPlain || e + half * 16 < source.width); ++half) {
    transpose_words(words[half]);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (e + half * 16 + i) * stride + row, words[half][i]);
  }
}
template <bool kHalves>
bool pack_left_columns(Word* out, std::int64_t stride, const RowSource& source) {
  const bool plain = is_plain(source);
  __m512i top = _mm512_setzero_si512();
  for (int row = 0; row < up32(source.rows); row += 32) {
    for (int e = 0; e < source.width; e += 32) {
      if (plain && row + 32 <= source.rows) {
        pack_left_square<kHalves, true>(out, stride, source, row, e, top);
      } else {
        pack_left_square<kHalves, false>(out, stride, source, row, e, top);
      }
    }
  }
  return within_limit<BFloat16>(top);
}

}  // namespace
}  // namespace ringspan::kernels
