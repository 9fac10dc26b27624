// Part of tile_pairs_few.h: few queries for a Dot of vectors, 16 at a time. Keys and values are read where they lie. A vector
// holds four pairs of depths of each of four queries,
//     (q[e], ..., q[e + 7]) of these queries, beside the same depths of a key, repeated
// whose sums are one score per query, of four keys together a vector again. kSets such vectors share what is loaded of a key.
// Probabilities lie in pairs of keys, query by query; values of two keys are laid side by side on their way into the products.
#pragma once

#include "kernels/tile_narrow.h"
#include "kernels/tile_pairs_forward.h"

namespace ringspan::kernels {
namespace {

// Keys of a block of scores: chains that hide the latency, and few blocks.
template <int kSets>
constexpr int narrow_keys() {
  return kSets == 4 ? 4 : 12;
}

// Scores are q . k until they are exponents: maxima are of products, and the scale is in the factor before 2^x.
RINGSPAN_INLINE bool scales_exponents(const ForwardTile& tile) { return tile.scale > 0.0F && tile.softcap <= 0.0F; }

constexpr int kGroupWords = 8;  // of a query or a key

// Nothing of these rows, and of those after them little, is far enough ahead: what is next is fetched as beside other tiles.
inline bool is_short(const RowSource& rows) { return rows.rows <= far_rows(rows, 2, kFarBytes); }
constexpr int kLinesBeside = 64;

// columns[e / 8][query][e % 8]; absent queries are zero.
template <int kSets>
void turn_narrow_pairs(const ForwardTile& tile, std::int64_t q_stride, Word* columns) {
  constexpr int kQueries = 4 * kSets;
  for (int row = 0; row < kQueries; ++row) {
    const Word* const q = static_cast<const Word*>(tile.q) + row * q_stride;
    for (int e = 0; e < tile.dims.head_dim; e += kGroupWords) {
      const __m128i group = row < tile.rows ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + e)) : _mm_setzero_si128();
      _mm_storeu_si128(reinterpret_cast<__m128i*>(columns + e * kQueries + row * kGroupWords), group);
    }
  }
}

// Scores s[key][query] of a block of keys.
template <int kSets>
void narrow_pair_block(const ForwardTile& tile, const Word* keys, std::int64_t stride, FarLines* next, const Word* columns,
                       float* s) {
  constexpr int kKeys = narrow_keys<kSets>(), kQueries = 4 * kSets;
  constexpr int kGroups = kSets == 4 ? 2 : 4, kRows = kKeys / kGroups;
  const int depth = tile.dims.head_dim;
  const Word* k[kGroups];  // few pointers, which stay in registers
  RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] = keys + g * kRows * stride;
  Reg sum[kSets][kKeys];
  RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) { RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) sum[n][i] = Isa::zero(); }
  const auto step = [&](int e) __attribute__((always_inline)) {
    __m512i q[kSets];
    RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) q[n] = _mm512_loadu_si512(columns + e * kQueries + n * kChunk);
    RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) {
      const auto* const words = reinterpret_cast<const __m128i*>(k[i / kRows] + i % kRows * stride);
      const __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128(words));
      RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) sum[n][i] = _mm512_dpbf16_ps(sum[n][i], (__m512bh)x, (__m512bh)q[n]);
    }
    RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] += kGroupWords;
  };
  FarLines far = *next;  // a copy, which stays in registers
  constexpr int kSteps = 4, kLines = kKeys * kSteps * kGroupWords * 2 / 64;
  int e = 0;
  for (; e + kSteps * kGroupWords <= depth; e += kSteps * kGroupWords) {
    if (far.strides()) far.fetch<kLines>();
    RINGSPAN_UNROLL for (int i = 0; i < kSteps; ++i) {
      if (!far.strides()) i % 2 == 0 ? far.fetch<kLines / 4>() : far.fetch<(kLines + 1) / 2 - kLines / 4>();
      step(e + i * kGroupWords);
    }
  }
  for (; e < depth; e += kGroupWords) far.fetch<(kLines + kSteps - 1) / kSteps>(), step(e);
  *next = far;
  const bool scales = !scales_exponents(tile);
  const Reg scale = Isa::set1(tile.scale), cap = Isa::set1(tile.softcap);
  const Reg inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  RINGSPAN_UNROLL for (int i = 0; i < kKeys; i += 4) {
    Reg group[kSets][4], x[kSets];
    RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) { RINGSPAN_UNROLL for (int j = 0; j < 4; ++j) group[n][j] = sum[n][i + j]; }
    Isa::add_groups(group, x);
    RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) {
      if (scales) x[n] = tile.softcap > 0.0F ? cap * tanh_of(x[n] * scale * inverse) : x[n] * scale;
      Isa::store(s + i * kQueries + n * kWidth, x[n]);
    }
  }
}

// Of all keys of `k`, and -inf up to two whole vectors.
template <int kSets>
void narrow_pair_scores(const ForwardTile& tile, const RowSource& k, bool again, const Word* columns, float* s) {
  constexpr int kKeys = narrow_keys<kSets>(), kQueries = 4 * kSets;
  const auto* const data = static_cast<const Word*>(k.data);
  FarLines far(k, 0, 2, kFarBytes);
  if (again || is_short(k)) far.stay(data);
  int key = 0;
  for (; key + kKeys <= k.rows; key += kKeys)
    narrow_pair_block<kSets>(tile, data + key * k.stride, k.stride, &far, columns, s + key * kQueries);
  if (key < k.rows) {
    const int depth = tile.dims.head_dim, rest = k.rows - key;
    Word copy[kKeys * kMaxHeadDim];
    float scores[kKeys * kQueries];
    for (int i = 0; i < kKeys; ++i) {
      const Word* const row = data + (key + at_most(i, rest - 1)) * k.stride;
      for (int e = 0; e < depth; ++e) copy[i * depth + e] = row[e];
    }
    narrow_pair_block<kSets>(tile, copy, depth, &far, columns, scores);
    for (int i = 0; i < rest * kQueries; ++i) s[key * kQueries + i] = scores[i];
  }
  constexpr int kTogether = 2 * kWidth / kQueries;
  const int end = (k.rows + kTogether - 1) / kTogether * kTogether;
  for (int i = k.rows * kQueries; i < end * kQueries; ++i) s[i] = -kInf;
}

// Scores s[key][query] become probabilities pairs[key / 2][query][key % 2] relative to their new maxima. shrink: e^(m - m').
template <int kSets>
void softmax_narrow_pairs(const ForwardTile& tile, float* s, Word* pairs, float* shrink) {
  constexpr int kQueries = 4 * kSets;
  alignas(64) constexpr Word kInPairs[3][32] = {
      {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31},
      {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 16, 24, 17, 25, 18, 26, 19, 27, 20, 28, 21, 29, 22, 30, 23, 31},
      {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31}};
  const __m512i in_pairs = _mm512_load_si512(kInPairs[kSets == 4 ? 0 : kSets == 2 ? 1 : 2]);
  const int size = (tile.keys * kQueries + 2 * kWidth - 1) / (2 * kWidth) * (2 * kWidth);
  const float scale = scales_exponents(tile) ? tile.scale : 1.0F;
  NarrowStates<kQueries> states(tile, s, size, scale);
  const Reg factor = Isa::set1(scale * kLog2e), origin = origin_of(s, size / kWidth, kWidth, scale, states.origin());
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  for (int i = 0; i < size; i += 2 * kWidth) {
    Reg p[2];
    RINGSPAN_UNROLL for (int n = 0; n < 2; ++n) {
      p[n] = exp2_of(Isa::fma(Isa::load(s + i + n * kWidth), factor, origin));
      sum[n] += p[n];
    }
    _mm512_storeu_si512(pairs + i, _mm512_permutexvar_epi16(in_pairs, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0])));
  }
  states.settle(tile, sum[0] + sum[1], shrink);
}

// acc = acc shrink + p v of kRows queries and 32 columns, of which the first `width` are there, over `count` values. pairs: of
// the first query and value.
template <int kRows>
void narrow_pair_values(const ForwardTile& tile, const Word* data, std::int64_t stride, int count, FarLines* next,
                        const Word* pairs, std::int64_t pair_stride, int row, int column, int width, const float* shrink) {
  const auto present = static_cast<__mmask32>(width >= 32 ? ~0U : (1U << width) - 1U);
  data += column;
  Reg sum[kRows][2];
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = Isa::zero();
  const auto add = [&](__m512i first, __m512i second, const Word* p) {
    const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(first, second);  // columns 0 to 3 of each 8 with both keys
    const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(first, second);
    RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
      int both;
      __builtin_memcpy(&both, p + 2 * r, sizeof both);
      const __m512bh weights = (__m512bh)_mm512_set1_epi32(both);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], low, weights);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], high, weights);
    }
  };
  FarLines far = *next;  // a copy, which stays in registers
  int key = 0;
  for (; key + 2 <= count; key += 2, data += 2 * stride, pairs += pair_stride) {
    far.fetch<2>();
    add(_mm512_maskz_loadu_epi16(present, data), _mm512_maskz_loadu_epi16(present, data + stride), pairs);
  }
  if (key < count) add(_mm512_maskz_loadu_epi16(present, data), _mm512_setzero_si512(), pairs);
  *next = far;
  const __m512i halves[2] = {_mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                             _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
    float* const acc = tile.acc + (row + r) * tile.acc_stride + column;
    const Reg factor = Isa::set1(shrink[row + r]);
    RINGSPAN_UNROLL for (int n = 0; n < 2; ++n) {
      if (n * kWidth >= width) continue;
      const Reg x = _mm512_permutex2var_ps(sum[r][0], halves[n], sum[r][1]);
      Isa::store(acc + n * kWidth, Isa::fma(Isa::load(acc + n * kWidth), factor, x));
    }
  }
}

// Of kRows queries from `row` on, as often as they are there, over values [first, first + count).
template <int kRows>
int narrow_pair_rows(const ForwardTile& tile, const RowSource& v, bool again, int first, int count, const Word* pairs,
                     std::int64_t pair_stride, const float* shrink, int row) {
  const Word* const data = static_cast<const Word*>(v.data) + first * v.stride;
  for (; row + kRows <= tile.rows; row += kRows) {
    FarLines far(v, first, 2, value_bytes(tile));
    if (again || row > 0 || is_short(v)) far.stay(data);  // they are already
    for (int column = 0; column < tile.dims.head_dim_v; column += 32) {
      const int width = at_most(32, tile.dims.head_dim_v - column);
      narrow_pair_values<kRows>(tile, data, v.stride, count, &far, pairs + first / 2 * pair_stride + 2 * row, pair_stride, row,
                                column, width, shrink);
    }
  }
  return row;
}

template <int kSets>
void narrow_pair_values(const ForwardTile& tile, const RowSource& v, bool again, const Word* pairs, float* shrink) {
  constexpr int kQueries = 4 * kSets;
  const int part =
      up16(far_rows(v, 2, value_bytes(tile)));  // all columns of some values, then of those that were fetched meanwhile
  for (int first = 0; first < v.rows; first += part) {
    const int count = at_most(part, v.rows - first);
    int row = 0;
    if constexpr (kQueries >= 8) row = narrow_pair_rows<8>(tile, v, again, first, count, pairs, 2 * kQueries, shrink, row);
    row = narrow_pair_rows<4>(tile, v, again, first, count, pairs, 2 * kQueries, shrink, row);
    row = narrow_pair_rows<2>(tile, v, again, first, count, pairs, 2 * kQueries, shrink, row);
    narrow_pair_rows<1>(tile, v, again, first, count, pairs, 2 * kQueries, shrink, row);
    if (first == 0) fill(shrink, 0, tile.rows, 1.0F);
  }
}

template <int kSets>
void attend_narrow_pairs(const ForwardTile& tile, const RowSource& k, const RowSource& v, bool again) {
  const ForwardParts<BFloat16> parts(tile.dims);
  float* const scores = parts.scores(tile);
  Word* const pairs = parts.probabilities(tile);
  turn_narrow_pairs<kSets>(tile, parts.q_stride, parts.turned(tile));
  narrow_pair_scores<kSets>(tile, k, again, parts.turned(tile), scores);
  if (is_short(k) && tile.ahead != nullptr) fetch_lines(tile.ahead, kLinesBeside);
  float shrink[kWidth];
  softmax_narrow_pairs<kSets>(tile, scores, pairs, shrink);
  if (is_short(v) && tile.ahead != nullptr) fetch_lines(tile.ahead, kLinesBeside);
  narrow_pair_values<kSets>(tile, v, again, pairs, shrink);
}

// Some keys of a tile. How, the task decides, not the rows of this call: sums of probabilities have another order.
inline void narrow_pairs(const ForwardTile& tile, const RowSource& k, const RowSource& v) {
  if (tile.task_rows <= 4) return attend_narrow_pairs<1>(tile, k, v, false);
  if (tile.task_rows <= 8) return attend_narrow_pairs<2>(tile, k, v, false);
  ForwardTile part = tile;
  for (int row = 0; row < tile.rows; row += kWidth) {
    part.q = static_cast<const Word*>(tile.q) + row * ForwardParts<BFloat16>(tile.dims).q_stride;
    part.m = tile.m + row, part.l = tile.l + row, part.acc = tile.acc + row * tile.acc_stride;
    part.rows = at_most(kWidth, tile.rows - row);
    attend_narrow_pairs<4>(part, k, v, row > 0);
  }
}

}  // namespace
}  // namespace ringspan::kernels
