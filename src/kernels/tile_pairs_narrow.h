// Part of tile_pairs_few.h: queries that fill a half or a quarter of a vector, for a Dot of vectors. Keys and values are read
// where they lie. A vector holds kDepths pairs of depths of each query,
//     (q[e], ..., q[e + 2 kDepths - 1]) of all queries, beside the same depths of a key, repeated
// whose sums are one score per query, of kDepths keys together a vector again. Probabilities lie in pairs of keys, query by
// query; values of two keys are laid side by side on their way into the products.
#pragma once

#include "kernels/tile_narrow.h"
#include "kernels/tile_pairs_forward.h"

namespace ringspan::kernels {
namespace {

constexpr int kNarrowKeys = 12;  // of a block of scores: chains that hide the latency

// The same words of a key, as often as there are queries.
template <int kDepths>
RINGSPAN_INLINE __m512i repeat(const Word* k) {
  if constexpr (kDepths == 4) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k)));
  long long both;
  __builtin_memcpy(&both, k, sizeof both);
  return _mm512_set1_epi64(both);
}

// columns[e / (2 kDepths)][query][e % (2 kDepths)]; absent queries are zero.
template <int kDepths>
void turn_narrow_pairs(const ForwardTile& tile, std::int64_t q_stride, Word* columns) {
  constexpr int kQueries = kWidth / kDepths, kWords = 2 * kDepths;
  for (int row = 0; row < kQueries; ++row) {
    const Word* const q = static_cast<const Word*>(tile.q) + row * q_stride;
    for (int e = 0; e < tile.dims.head_dim; e += kWords) {
      for (int i = 0; i < kWords; ++i) {
        columns[e / kWords * kChunk + row * kWords + i] = row < tile.rows ? q[e + i] : Word{0};
      }
    }
  }
}

// Scores s[key][query] of kNarrowKeys keys.
template <int kDepths>
void narrow_pair_block(const ForwardTile& tile, const Word* keys, std::int64_t stride, FarLines far, const Word* columns,
                       float* s) {
  constexpr int kQueries = kWidth / kDepths, kWords = 2 * kDepths, kRows = 3, kGroups = kNarrowKeys / kRows;
  const int depth = tile.dims.head_dim;
  const Word* k[kGroups];  // few pointers, which stay in registers
  RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] = keys + g * kRows * stride;
  Reg sum[kNarrowKeys];
  RINGSPAN_UNROLL for (int i = 0; i < kNarrowKeys; ++i) sum[i] = Isa::zero();
  const auto step = [&](int e) __attribute__((always_inline)) {
    const __m512i q = _mm512_loadu_si512(columns + e / kWords * kChunk);
    RINGSPAN_UNROLL for (int i = 0; i < kNarrowKeys; ++i) {
      sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)repeat<kDepths>(k[i / kRows] + i % kRows * stride), (__m512bh)q);
    }
    RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] += kWords;
  };
  constexpr int kSteps = 4, kLines = kNarrowKeys * kSteps * kWords * 2 / 64;
  int e = 0;
  for (; e + kSteps * kWords <= depth; e += kSteps * kWords) {
    if (far.strides()) far.fetch<kLines>();
    RINGSPAN_UNROLL for (int i = 0; i < kSteps; ++i) {
      if (!far.strides()) i % 2 == 0 ? far.fetch<kLines / 4>() : far.fetch<(kLines + 1) / 2 - kLines / 4>();
      step(e + i * kWords);
    }
  }
  for (; e < depth; e += kWords) far.fetch<(kLines + kSteps - 1) / kSteps>(), step(e);
  const Reg scale = Isa::set1(tile.scale), cap = Isa::set1(tile.softcap);
  const Reg inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  RINGSPAN_UNROLL for (int i = 0; i < kNarrowKeys; i += kDepths) {
    Reg group[kDepths];
    RINGSPAN_UNROLL for (int j = 0; j < kDepths; ++j) group[j] = sum[i + j];
    const Reg x = Isa::add_groups(group) * scale;
    Isa::store(s + i * kQueries, tile.softcap > 0.0F ? cap * tanh_of(x * inverse) : x);
  }
}

// Of all keys of `k`, and -inf up to a multiple of 2 kDepths.
template <int kDepths>
void narrow_pair_scores(const ForwardTile& tile, const RowSource& k, const Word* columns, float* s) {
  constexpr int kQueries = kWidth / kDepths;
  const auto* const data = static_cast<const Word*>(k.data);
  int key = 0;
  for (; key + kNarrowKeys <= k.rows; key += kNarrowKeys) {
    narrow_pair_block<kDepths>(tile, data + key * k.stride, k.stride, FarLines(k, key, 2), columns, s + key * kQueries);
  }
  if (key < k.rows) {
    const int depth = tile.dims.head_dim, rest = k.rows - key;
    Word copy[kNarrowKeys * kMaxHeadDim];
    float scores[kNarrowKeys * kQueries];
    for (int i = 0; i < kNarrowKeys; ++i) {
      const Word* const row = data + (key + at_most(i, rest - 1)) * k.stride;
      for (int e = 0; e < depth; ++e) copy[i * depth + e] = row[e];
    }
    narrow_pair_block<kDepths>(tile, copy, depth, FarLines(k, key, 2), columns, scores);
    for (int i = 0; i < rest * kQueries; ++i) s[key * kQueries + i] = scores[i];
  }
  constexpr int kTogether = 2 * kDepths;
  const int end = (k.rows + kTogether - 1) / kTogether * kTogether;
  for (int i = k.rows * kQueries; i < end * kQueries; ++i) s[i] = -kInf;
}

// Scores s[key][query] become probabilities pairs[key / 2][query][key % 2] relative to their new maxima. shrink: e^(m - m').
template <int kDepths>
void softmax_narrow_pairs(const ForwardTile& tile, const float* s, Word* pairs, float* shrink) {
  constexpr int kQueries = kWidth / kDepths;
  alignas(64) constexpr Word kInPairs[2][32] = {
      {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 16, 24, 17, 25, 18, 26, 19, 27, 20, 28, 21, 29, 22, 30, 23, 31},
      {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31}};
  const __m512i in_pairs = _mm512_load_si512(kInPairs[kDepths == 4 ? 1 : 0]);
  const int size = (tile.keys * kQueries + 2 * kWidth - 1) / (2 * kWidth) * (2 * kWidth);
  NarrowStates<kDepths> states(tile, s, size);
  const Reg origin = states.origin();
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  for (int i = 0; i < size; i += 2 * kWidth) {
    Reg p[2];
    RINGSPAN_UNROLL for (int n = 0; n < 2; ++n) {
      p[n] = exp_of(Isa::load(s + i + n * kWidth) - origin);
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
int narrow_pair_rows(const ForwardTile& tile, const RowSource& v, int first, int count, const Word* pairs,
                     std::int64_t pair_stride, const float* shrink, int row) {
  const Word* const data = static_cast<const Word*>(v.data) + first * v.stride;
  for (; row + kRows <= tile.rows; row += kRows) {
    FarLines far(v, first, 2);
    if (row > 0) far.stay(data);  // they are already
    for (int column = 0; column < tile.dims.head_dim_v; column += 32) {
      const int width = at_most(32, tile.dims.head_dim_v - column);
      narrow_pair_values<kRows>(tile, data, v.stride, count, &far, pairs + first / 2 * pair_stride + 2 * row, pair_stride, row,
                                column, width, shrink);
    }
  }
  return row;
}

template <int kDepths>
void narrow_pair_values(const ForwardTile& tile, const RowSource& v, const Word* pairs, float* shrink) {
  constexpr int kQueries = kWidth / kDepths;
  const int part = up16(far_rows(v, 2));  // all columns of some values, then of those that were fetched meanwhile
  for (int first = 0; first < v.rows; first += part) {
    const int count = at_most(part, v.rows - first);
    int row = 0;
    if constexpr (kQueries == 8) row = narrow_pair_rows<8>(tile, v, first, count, pairs, 2 * kQueries, shrink, row);
    row = narrow_pair_rows<4>(tile, v, first, count, pairs, 2 * kQueries, shrink, row);
    row = narrow_pair_rows<2>(tile, v, first, count, pairs, 2 * kQueries, shrink, row);
    narrow_pair_rows<1>(tile, v, first, count, pairs, 2 * kQueries, shrink, row);
    if (first == 0) fill(shrink, 0, tile.rows, 1.0F);
  }
}

// One part of a tile's keys.
template <int kDepths>
void attend_narrow_pairs(const ForwardTile& part, const RowSource& k, const RowSource& v) {
  const ForwardParts<BFloat16> parts(part.dims);
  float* const scores = parts.scores(part);
  Word* const pairs = parts.probabilities(part);
  turn_narrow_pairs<kDepths>(part, parts.q_stride, parts.turned(part));
  narrow_pair_scores<kDepths>(part, k, parts.turned(part), scores);
  float shrink[kWidth];
  softmax_narrow_pairs<kDepths>(part, scores, pairs, shrink);
  narrow_pair_values<kDepths>(part, v, pairs, shrink);
}

}  // namespace
}  // namespace ringspan::kernels
