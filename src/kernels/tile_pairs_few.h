// Few queries that all see every key of a tile, in bfloat16; see tile_pairs.h. Keys and values are used once, so what packing
// costs counts: keys are the left operand of
//     s^T = k q^T
// which is rows as they lie in memory, the turned queries the small right one. Maxima, exponentials and sums of 16 queries are
// taken side by side; probabilities are turned where they are rounded.
#pragma once

#include "kernels/tile_pairs_narrow.h"

namespace ringspan::kernels {
namespace {

constexpr int kLinesPerGroup = 64;  // fetched beside 32 keys

// Probabilities p[query][key] of 16 queries and 32 keys, of which the first `keys` are there (kWhole: all).
template <bool kWhole>
RINGSPAN_INLINE void exponentiate_columns(const float* s, std::int64_t s_stride, int keys, Reg factor, Reg origin, Word* p,
                                          std::int64_t p_stride, Reg (&sum)[2]) {
  alignas(64) constexpr Word kSideBySide[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i t[kWidth];  // words of two keys side by side, for each query
  for (int i = 0; i < kWidth; ++i) {
    Reg pair[2];
    for (int n = 0; n < 2; ++n) {
      const int key = 2 * i + n;
      pair[n] = kWhole || key < keys ? exp2_of(Isa::fma(Isa::load(s + key * s_stride), factor, origin)) : Isa::zero();
      sum[n] += pair[n];
    }
    t[i] = _mm512_permutexvar_epi16(_mm512_load_si512(kSideBySide), (__m512i)_mm512_cvtne2ps_pbh(pair[1], pair[0]));
  }
  transpose_words(t);
  for (int query = 0; query < kWidth; ++query) _mm512_storeu_si512(p + query * p_stride, t[query]);
}

// Scores s[key][query] of at most 16 queries from `row` on become probabilities p[query][key] relative to their new maxima,
// zero from the last key to the next multiple of 32. shrink: e^(m - m').
inline void softmax_columns(const ForwardTile& tile, int row, float* s, std::int64_t s_stride, Word* p, std::int64_t p_stride,
                            float* shrink) {
  const int present = at_most(kWidth, tile.rows - row);
  const bool plain = scales_exponents(tile);
  const float scale = plain ? tile.scale : 1.0F;
  if (!plain) {
    const Reg factor = Isa::set1(tile.scale), cap = Isa::set1(tile.softcap);
    const Reg inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
    for (int key = 0; key < tile.keys; ++key) {
      const Reg x = Isa::load(s + key * s_stride) * factor;
      Isa::store(s + key * s_stride, tile.softcap > 0.0F ? cap * tanh_of(x * inverse) : x);
    }
  }
  Reg top[4];
  for (Reg& t : top) t = Isa::set1(-kInf);
  in_turns<4>(tile.keys, [&](int key, int way) { top[way] = Isa::max(Isa::load(s + key * s_stride), top[way]); });
  const Reg tile_m = Isa::max(Isa::max(top[0], top[1]), Isa::max(top[2], top[3])) * Isa::set1(scale);
  const Reg old_m = Isa::load_partial(tile.m + row, present);
  const Reg new_m = tile_m > old_m ? tile_m : old_m;
  const Reg origin = origin_of(s, tile.keys, s_stride, scale, new_m);
  const Reg factor = old_m == new_m ? Isa::set1(1.0F) : exp_of(old_m - new_m);
  const Reg exponent = Isa::set1(scale * kLog2e);
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  for (int first = 0; first < tile.keys; first += 2 * kWidth) {
    if (first + 2 * kWidth <= tile.keys) {
      exponentiate_columns<true>(s + first * s_stride, s_stride, 2 * kWidth, exponent, origin, p + first, p_stride, sum);
    } else {
      exponentiate_columns<false>(s + first * s_stride, s_stride, tile.keys - first, exponent, origin, p + first, p_stride,
                                  sum);
    }
    if (tile.ahead != nullptr) fetch_lines(tile.ahead, kLinesPerGroup);
  }
  Isa::store(shrink, factor);
  Isa::store_partial(tile.m + row, new_m, present);
  Isa::store_partial(tile.l + row, Isa::fma(Isa::load_partial(tile.l + row, present), factor, sum[0] + sum[1]), present);
}

// s[key][query] of the queries of a block. Rows that end a tile are copied, since a product may read 16 of them at a time, and
// those that are no multiple of 32 elements or not equally far apart.
inline void turned_scores(const ForwardTile& tile, const RowSource& k, Word* space, const Right& queries, int columns,
                          float* s) {
  const int depth = up32(tile.dims.head_dim);
  const bool in_place = k.index == nullptr && k.width == depth;
  const int whole = in_place ? k.rows / 16 * 16 : 0;
  const auto product = [&](int first, int rows, const Left& keys) {
    multiply_pairs<AllProducts<1>>(rows, columns, depth, keys, queries, s + static_cast<std::int64_t>(first) * columns, columns,
                                   false, tile.ahead);
  };
  if (whole > 0) product(0, whole, Left{static_cast<const Word*>(k.data), k.stride, 0});
  if (whole == k.rows) return;
  RowSource rest = k;
  rest.rows -= whole;
  if (in_place) rest.data = static_cast<const Word*>(k.data) + whole * k.stride;
  pack_left<BFloat16>(space, depth, 0, rest);
  product(whole, rest.rows, Left{space, depth, 0});
}

constexpr int kFewKeys = 512;  // taken in at a time, so that their scores, probabilities and values stay near

inline RowSource rows_from(const RowSource& source, int first, int rows) {
  RowSource part = source;
  part.data = static_cast<const Word*>(source.data) + first * source.stride;
  part.rows = rows;
  if (first + rows < source.rows) {
    part.next = static_cast<const Word*>(source.data) + (first + rows) * source.stride;
    part.next_stride = source.stride;
  }
  return part;
}

void attend_few_pairs(const ForwardTile& tile, const RowSource& k, const RowSource& v, void* k_space, void* v_space) {
  const Dot::Session session;
  const ForwardParts<BFloat16> parts(tile.dims);
  auto* const values = static_cast<Word*>(v_space);
  float* const scores = parts.scores(tile);
  Word* const probabilities = parts.probabilities(tile);
  float* const sums = parts.sums(tile);
  const int width = up16(tile.dims.head_dim_v);
  ForwardTile part = tile;
  for (int key = 0; key < tile.keys; key += kFewKeys) {
    part.keys = at_most(kFewKeys, tile.keys - key);
    if (Dot::kNarrow && tile.dims.head_dim % kGroupWords == 0) {
      narrow_pairs(part, rows_from(k, key, part.keys), rows_from(v, key, part.keys));
      continue;
    }
    pack_right_rows<BFloat16>(values, parts.v_panel, 0, rows_from(v, key, part.keys));
    for (int first = 0; first < tile.rows; first += kPairRows) {
      const int rows = at_most(kPairRows, tile.rows - first), columns = up16(rows);
      const Word* const q = static_cast<const Word*>(tile.q) + first * parts.q_stride;
      const bool are_turned = Dot::turns(tile.dims);
      if (!are_turned)
        pack_right_columns<BFloat16>(parts.turned(tile), parts.k_panel, 0,
                                     RowSource{q, parts.q_stride, nullptr, rows, up32(tile.dims.head_dim)});
      const Right queries{are_turned ? q : parts.turned(tile), parts.k_panel, 0};
      turned_scores(part, rows_from(k, key, part.keys), static_cast<Word*>(k_space), queries, columns, scores);
      float shrink[kPairRows];
      for (int r = 0; r < rows; r += kWidth)
        softmax_columns(part, first + r, scores + r, columns, probabilities + r * parts.p_stride, parts.p_stride, shrink + r);
      multiply_pairs<LargeProducts<1>>(rows, width, up32(part.keys), Left{probabilities, parts.p_stride, 0},
                                       Right{values, parts.v_panel, 0}, sums, parts.sum_stride, false, tile.ahead);
      for (int r = 0; r < rows; ++r)
        shrink_and_add(tile.acc + (first + r) * tile.acc_stride, shrink[r], sums + r * parts.sum_stride, width);
    }
  }
}

}  // namespace
}  // namespace ringspan::kernels
