// Part of tile_pairs_backward.h: p and ds of a tile, stored as the operands of its other products. Where a Dot is of vectors,
// all queries meet 32 keys after the other: their scores and dp stay in registers, and what waits for gradients of queries is
// only ds. Where it is not, all blocks of 32 queries meet 128 keys, and then the gradients of these keys are added to.
#pragma once

#include "kernels/tile_pairs_few.h"

namespace ringspan::kernels {
namespace {

// Keys whose scores and dp lie in scratch; where sums are not vectors, their p and ds as operands, too.
constexpr int kSubTile = Dot::kInRegisters ? 32 : 128;
constexpr std::int64_t kSubStride = kSubTile + kScorePad;

// Where everything of a backward tile lies.
template <typename Type>
struct GradientParts {
  static constexpr int kPlanes = Type::kPlanes;
  int d, dv;  // depths, padded
  std::int64_t k_panel, k_plane, v_panel, v_plane, k_rows_panel, k_rows_plane;
  std::int64_t gradient_stride, dk_elements, dv_elements;
  std::int64_t q_plane, d_out_plane, column_stride, q_columns_plane, d_out_columns_plane;
  std::int64_t p_panel, p_plane, ds_stride, ds_plane, dq_stride;
  Word *k, *v, *k_rows;
  float *dk, *dv_sum;
  Word *q, *d_out, *q_columns, *d_out_columns;
  float *scores, *dp, *dq;
  Word *p, *ds, *ds_rows, *copy;
  BackwardBytes bytes;

  GradientParts(const TileDims& dims, void* key_side, void* query_side, void* work)
      : d(up32(dims.head_dim)), dv(up32(dims.head_dim_v)) {
    const int rows = dims.tile.queries, keys = dims.tile.keys;
    const int panels = keys / kPanelColumns, d_rows = up16(dims.head_dim), dv_rows = up16(dims.head_dim_v);
    k_panel = d * kPanelColumns, k_plane = panels * k_panel;
    v_panel = dv * kPanelColumns, v_plane = panels * v_panel;
    k_rows_panel = keys * kPanelColumns + kPanelPad, k_rows_plane = d_rows / kPanelColumns * k_rows_panel;
    gradient_stride = keys + kScorePad;
    dk_elements = d_rows * gradient_stride, dv_elements = dv_rows * gradient_stride;
    q_plane = rows * d, d_out_plane = rows * dv;
    column_stride = rows + kRowPad;
    q_columns_plane = d * column_stride, d_out_columns_plane = dv * column_stride;
    p_panel = rows * kPanelColumns + kPanelPad,
    p_plane = (Dot::kInRegisters ? panels : at_most(keys, kSubTile) / kPanelColumns) * p_panel;
    ds_stride = keys + kRowPad, ds_plane = rows * ds_stride;
    dq_stride = d_rows + kScorePad;

    std::int64_t at = 0;
    const auto words = [&](void* base, std::int64_t count) {
      Word* result = base == nullptr ? nullptr : reinterpret_cast<Word*>(static_cast<char*>(base) + at);
      at += to_line(2 * kPlanes * count);
      return result;
    };
    const auto floats = [&](void* base, std::int64_t count) {
      float* result = base == nullptr ? nullptr : reinterpret_cast<float*>(static_cast<char*>(base) + at);
      at += to_line(4 * count);
      return result;
    };
    k = words(key_side, k_plane), v = words(key_side, v_plane), k_rows = words(key_side, k_rows_plane);
    dk = floats(key_side, dk_elements), dv_sum = floats(key_side, dv_elements);
    bytes.key_side = at, at = 0;
    q = words(query_side, q_plane), d_out = words(query_side, d_out_plane);
    q_columns = words(query_side, q_columns_plane), d_out_columns = words(query_side, d_out_columns_plane);
    bytes.query_side = at, at = 0;
    scores = floats(work, kPairRows * kSubStride), dp = floats(work, kPairRows * kSubStride);
    dq = floats(work, kPairRows * dq_stride);
    p = words(work, p_plane), ds = words(work, p_plane), ds_rows = words(work, ds_plane);
    copy = words(work, at_least(keys * kPanelColumns, kPairRows * rows));
    bytes.work = at;
  }
  explicit GradientParts(const BackwardTile& tile) : GradientParts(tile.dims, tile.key_side, tile.query_side, tile.work) {}
};

struct Gradients {
  Reg p, ds;
};

// A probability that will be rounded to planes: of one, to 8 bits. NaN stays NaN.
template <typename Type>
RINGSPAN_INLINE Reg probability_of(Reg exponent) {
  return exp2_of < Isa, Type::kPlanes == 1 ? 3 : 5 > (_mm512_min_ps(Isa::zero(), exponent));
}

// What a query's scores and dp are combined with, in all lanes: loaded once, as the compiler cannot know that what is stored
// does not change it.
struct QueryFactors {
  Reg scale, output_scale, lse, delta;  // scale, lse: of exponents of 2
  RINGSPAN_INLINE QueryFactors(const BackwardTile& tile, int row)
      : scale(Isa::set1(tile.scale * kLog2e)),
        output_scale(Isa::set1(tile.output_scale)),
        lse(Isa::set1(plain_nan(tile.lse[row]) * -kLog2e)),
        delta(Isa::set1(-plain_nan(tile.delta[row]))) {}
  // Not of ones only, which rounding would turn into zeros.
  static float plain_nan(float x) { return x == x ? x : __builtin_nanf(""); }
};

// p (with dropout) and ds of one query and 16 keys from c on.
template <typename Type, bool kPlain>
RINGSPAN_INLINE Gradients gradients_of(const BackwardTile& tile, const QueryFactors& factors, int row, int c, __mmask16 seen,
                                       Reg score, Reg dp) {
  const Reg one = Isa::set1(1.0F);
  Reg exponent, derivative = one;
  if constexpr (kPlain) {
    exponent = Isa::fma(score, factors.scale, factors.lse);
  } else {
    score = score * Isa::set1(tile.scale);
    if (tile.softcap > 0.0F) {
      const Reg t = tanh_of(score * Isa::set1(1.0F / tile.softcap));
      score = Isa::set1(tile.softcap) * t;
      derivative = one - t * t;
    }
    if (tile.slope != nullptr) {
      float bias[kWidth];
      const std::int64_t distance = tile.key_first - tile.origin[row];
      for (int lane = 0; lane < kWidth; ++lane) {
        const std::int64_t x = distance + (c + lane) * tile.key_step;
        bias[lane] = *tile.slope * static_cast<float>(x < 0 ? -x : x);
      }
      score -= Isa::load(bias);
    }
    exponent = Isa::fma(score, Isa::set1(kLog2e), factors.lse);
  }
  const Reg p = probability_of<Type>(exponent);
  Reg kept = p, factor = factors.output_scale;
  if (!kPlain && tile.factors != nullptr) {
    const Reg drop = _mm512_maskz_loadu_ps(seen, tile.factors + row * tile.factor_stride + c);
    kept = p * drop;
    factor = factor * drop;
  }
  return {kept, p * Isa::fma(dp, factor, factors.delta) * derivative};
}

// The words of two rows and 16 keys where sums are vectors: interleaved, and if wanted row by row.
RINGSPAN_INLINE void store_pair(Reg even, Reg odd, Word* interleaved, Word* rows, std::int64_t stride) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                         4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  _mm512_storeu_si512(interleaved, _mm512_permutexvar_epi16(order, rounded));
  if (rows == nullptr) return;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows), _mm512_castsi512_si256(rounded));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + stride), _mm512_extracti64x4_epi64(rounded, 1));
}

// p and ds of queries row, row + 1 and keys [begin, end), both multiples of 32, from scores and dp of the sub-tile at `begin`.
template <typename Type, bool kPlain>
void gradient_rows(const BackwardTile& tile, const GradientParts<Type>& parts, int row, const float* scores, const float* dp,
                   int begin, int end, int origin) {
  const bool both = row + 1 < tile.rows, any = row < tile.rows;
  const int begins[2] = {any ? tile.key_begin[row] : 0, both ? tile.key_begin[row + 1] : 0};
  const int ends[2] = {any ? tile.key_end[row] : 0, both ? tile.key_end[row + 1] : 0};
  Word* p = parts.p + (begin - origin) / kPanelColumns * parts.p_panel + row * kPanelColumns;
  Word* ds = parts.ds + (begin - origin) / kPanelColumns * parts.p_panel + row * kPanelColumns;
  Word* rows = parts.ds_rows + row * parts.ds_stride + begin;
  const int odd_row = both ? row + 1 : row;  // an absent row has no key
  const bool whole = begins[0] <= begin && begins[1] <= begin && ends[0] >= end && ends[1] >= end;
  const QueryFactors even_factors(tile, any ? row : 0), odd_factors(tile, any ? odd_row : 0);
  for (int c = begin; c < end; c += 2 * kWidth, p += 2 * parts.p_panel, ds += 2 * parts.p_panel, rows += 2 * kWidth) {
    Gradients even[2], odd[2];
    RINGSPAN_UNROLL for (int v = 0; v < 2; ++v) {
      const int at = c + v * kWidth;
      __mmask16 seen0 = 0xffff, seen1 = 0xffff;
      if (!whole) {
        seen0 = first_of(ends[0] - at) & static_cast<__mmask16>(~first_of(begins[0] - at));
        seen1 = first_of(ends[1] - at) & static_cast<__mmask16>(~first_of(begins[1] - at));
      }
      even[v] = odd[v] = {Isa::zero(), Isa::zero()};
      if (!whole && (seen0 | seen1) == 0) continue;
      const float *const s = scores + at - begin, *const d = dp + at - begin;
      even[v] = gradients_of<Type, kPlain>(tile, even_factors, row, at, seen0, Isa::load(s), Isa::load(d));
      odd[v] = gradients_of<Type, kPlain>(tile, odd_factors, odd_row, at, seen1, Isa::load(s + kSubStride),
                                          Isa::load(d + kSubStride));
      if (whole) continue;
      even[v] = {_mm512_maskz_mov_ps(seen0, even[v].p), _mm512_maskz_mov_ps(seen0, even[v].ds)};
      odd[v] = {_mm512_maskz_mov_ps(seen1, odd[v].p), _mm512_maskz_mov_ps(seen1, odd[v].ds)};
    }
    if constexpr (Dot::kInRegisters) {
      RINGSPAN_UNROLL for (int v = 0; v < 2; ++v) {
        store_pair(even[v].p, odd[v].p, p + v * parts.p_panel, nullptr, 0);
        store_pair(even[v].ds, odd[v].ds, ds + v * parts.p_panel, rows + v * kWidth, parts.ds_stride);
      }
    } else {
      RINGSPAN_UNROLL for (int v = 0; v < 2; ++v) {
        store_side_by_side<Type>(even[v].p, odd[v].p, p + v * parts.p_panel, parts.p_plane);
        store_side_by_side<Type>(even[v].ds, odd[v].ds, ds + v * parts.p_panel, parts.p_plane);
      }
      store_side_by_side<Type>(even[0].ds, even[1].ds, rows, parts.ds_plane);
      store_side_by_side<Type>(odd[0].ds, odd[1].ds, rows + parts.ds_stride, parts.ds_plane);
    }
  }
}

inline Ahead* ahead_of(const BackwardTile& tile) { return Dot::kFetchesQueries ? tile.ahead : nullptr; }

// The rows of dq that a block of queries adds to, before the others of the tile; few at a time, as more may be dropped.
inline void fetch_query_gradients(const BackwardTile& tile, int row) {
  if (!Dot::kFetchesQueries) return;
  for (const int end = at_most(row + 2, tile.rows); row < end; ++row) {
    for (int e = 0; e < tile.dims.head_dim; e += kWidth) __builtin_prefetch(tile.dq[row] + e, 1, 2);
  }
}

// p and ds of a block of queries for keys [part.begin, part.end), multiples of 32, of the sub-tile from `origin` on.
template <typename Type>
void block_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, int first, Range part, int origin) {
  constexpr int kPlanes = Type::kPlanes;
  const int rows = at_most(kPairRows, tile.rows - first), columns = part.end - part.begin;
  const Left q{parts.q + first * parts.d, parts.d, parts.q_plane};
  const Left d_out{parts.d_out + first * parts.dv, parts.dv, parts.d_out_plane};
  const Right k = Right{parts.k, parts.k_panel, parts.k_plane}.at(part.begin, 0);
  const Right v = Right{parts.v, parts.v_panel, parts.v_plane}.at(part.begin, 0);
  const bool plain = tile.softcap <= 0.0F && tile.slope == nullptr && tile.factors == nullptr;
  multiply_pairs<AllProducts<kPlanes>>(rows, columns, parts.d, q, k, parts.scores, kSubStride, false);
  multiply_pairs<AllProducts<kPlanes>>(rows, columns, parts.dv, d_out, v, parts.dp, kSubStride, false);
  if (kPlanes > 1 && !(tile.queries_finite && tile.keys_finite)) {
    repair_products<kPlanes>(rows, columns, parts.d, q, k, parts.scores, kSubStride);
    repair_products<kPlanes>(rows, columns, parts.dv, d_out, v, parts.dp, kSubStride);
  }
  for (int r = 0; r < kPairRows; r += 2) {
    const float *s = parts.scores + r * kSubStride, *dp = parts.dp + r * kSubStride;
    if (plain) {
      gradient_rows<Type, true>(tile, parts, first + r, s, dp, part.begin, part.end, origin);
    } else {
      gradient_rows<Type, false>(tile, parts, first + r, s, dp, part.begin, part.end, origin);
    }
  }
}

// What a query's scores and dp are combined with, without options; of exponents of 2.
struct PlainFactors {
  alignas(64) float lse[kMaxGradQueryTile + kWidth], delta[kMaxGradQueryTile + kWidth];
};

// p and ds of queries [row, row + kRows) for keys [c, c + 32), all visible and without options, from scores and dp that stay in
// registers.
template <typename Type, int kRows>
RINGSPAN_INLINE void held_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, const PlainFactors& factors,
                                    int row, int c, Reg (&scores)[kRows][2], Reg (&dp)[kRows][2]) {
  const Reg scale = Isa::set1(tile.scale * kLog2e), output_scale = Isa::set1(tile.output_scale);
  RINGSPAN_UNROLL for (int r = 0; r < kRows; r += 2) {
    RINGSPAN_UNROLL for (int v = 0; v < 2; ++v) {
      Reg p[2], ds[2];
      RINGSPAN_UNROLL for (int i = 0; i < 2; ++i) {
        const Reg exponent = Isa::fma(scores[r + i][v], scale, Isa::set1(factors.lse[row + r + i]));
        p[i] = probability_of<Type>(exponent);
        ds[i] = p[i] * Isa::fma(dp[r + i][v], output_scale, Isa::set1(factors.delta[row + r + i]));
      }
      const std::int64_t at = (c / kPanelColumns + v) * parts.p_panel + (row + r) * kPanelColumns;
      store_pair(p[0], p[1], parts.p + at, nullptr, 0);
      store_pair(ds[0], ds[1], parts.ds + at, parts.ds_rows + (row + r) * parts.ds_stride + c + v * kWidth, parts.ds_stride);
    }
  }
}

// The same for any keys [c, c + 32); those that not all of the queries see, and options, go by scratch.
template <typename Type, int kRows, typename Block = Dot>
void column_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, const PlainFactors& factors, bool plain,
                      int row, int c) {
  static_assert(Type::kPlanes == 1);
  Reg sums[2][kRows][2];
  auto &scores = sums[0], &dp = sums[1];
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) scores[r][0] = scores[r][1] = dp[r][0] = dp[r][1] = Isa::zero();
  Block::add_products({Left{parts.q + row * parts.d, parts.d, 0}, Left{parts.d_out + row * parts.dv, parts.dv, 0}},
                      {Right{parts.k, parts.k_panel, 0}.at(c, 0), Right{parts.v, parts.v_panel, 0}.at(c, 0)},
                      {parts.d, parts.dv}, sums);
  const int last = at_most(row + kRows, tile.rows) - 1;
  if (plain && last == row + kRows - 1 && tile.key_begin[last] <= c && tile.key_end[row] >= c + 32)
    return held_gradients<Type>(tile, parts, factors, row, c, scores, dp);
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
    RINGSPAN_UNROLL for (int v = 0; v < 2; ++v) {
      Isa::store(parts.scores + r * kSubStride + v * kWidth, scores[r][v]);
      Isa::store(parts.dp + r * kSubStride + v * kWidth, dp[r][v]);
    }
  }
  for (int r = 0; r < kRows; r += 2) {
    const float *s = parts.scores + r * kSubStride, *d = parts.dp + r * kSubStride;
    if (plain) {
      gradient_rows<Type, true>(tile, parts, row + r, s, d, c, c + 32, 0);
    } else {
      gradient_rows<Type, false>(tile, parts, row + r, s, d, c, c + 32, 0);
    }
  }
}

// p and ds of all queries, 32 keys at a time, which stay in the first cache meanwhile.
template <typename Type>
void tile_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, const Range* ranges, int blocks) {
  const bool plain = tile.softcap <= 0.0F && tile.slope == nullptr && tile.factors == nullptr;
  PlainFactors factors;
  for (int r = 0; r < tile.rows; r += kWidth) {
    const int present = at_most(kWidth, tile.rows - r);
    Isa::store(factors.lse + r, Isa::load_partial(tile.lse + r, present) * Isa::set1(-kLog2e));
    Isa::store(factors.delta + r, Isa::zero() - Isa::load_partial(tile.delta + r, present));
  }
  Ahead* const ahead = ahead_of(tile);
  int fetched = 0;  // rows of dq
  for (int c = 0; c < tile.keys; c += 32) {
    int first = 0, last = blocks;
    while (first < blocks && c >= ranges[first].end) ++first;
    while (last > first && c < ranges[last - 1].begin) --last;
    int row = first * kPairRows;
    for (int left = at_most(last * kPairRows, tile.rows + tile.rows % 2) - row; left > 0;) {
      const int rows = left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : 2;
      for (const int end = row + rows; fetched < end; fetched += 2) fetch_query_gradients(tile, fetched);
      if (rows == 6) {
        column_gradients<Type, 6>(tile, parts, factors, plain, row, c);
      } else if (rows == 4) {
        column_gradients<Type, 4>(tile, parts, factors, plain, row, c);
      } else {
        column_gradients<Type, 2>(tile, parts, factors, plain, row, c);
      }
      if (ahead != nullptr) fetch_lines(ahead, ahead->step);
      row += rows, left -= rows;
    }
    for (; row < last * kPairRows; row += 2) {  // of absent queries
      for (int v = 0; v < 2; ++v) {
        const std::int64_t at = (c / kPanelColumns + v) * parts.p_panel + row * kPanelColumns;
        _mm512_storeu_si512(parts.p + at, _mm512_setzero_si512());
        _mm512_storeu_si512(parts.ds + at, _mm512_setzero_si512());
      }
    }
  }
}

}  // namespace
}  // namespace ringspan::kernels
