// The backward tile over pairs of bfloat16, and the table; see tile_pairs.h.
//
// Everything is query-major, with the keys along vectors: p and ds of two neighbouring queries, interleaved, are right operands
// of
//     dv^T += do^T p      dk^T += q^T ds      (depth: queries)
// and ds row by row is the left one of dq += ds k. Gradients of keys gather transposed and are turned once per key tile.
#pragma once

#include "kernels/tile_pairs_few.h"

namespace ringspan::kernels {
namespace {

constexpr int kSubTile = 128;  // keys whose scores stay in the first cache
constexpr std::int64_t kSubStride = kSubTile + kScorePad;
constexpr int kFloat32Type = 0, kFloat16Type = 2;
constexpr int kMaxBlocks = kMaxGradQueryTile / kPairRows;

// Keys of a tile: many, because the queries are packed once for each; few enough for the second cache.
TileSizes backward_sizes_pairs(const TileDims& dims) {
  const int width = at_least(dims.head_dim, dims.head_dim_v);
  const int keys = width <= 64 ? 384 : width <= 128 ? 256 : 128;
  const int own = dims.dtype == kFloat32Type ? (width <= 64 ? 256 : keys * 3 / 4) : keys;
  return {{128, own}, {kPairRows, 32}, {kPairRows, 32}, {kMaxGradQueryTile, kMaxKeyTile}};
}

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
    q_columns_plane = d_rows * column_stride, d_out_columns_plane = dv_rows * column_stride;
    p_panel = rows * kPanelColumns + kPanelPad, p_plane = panels * p_panel;
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

template <typename Type>
BackwardBytes backward_bytes_pairs(const TileDims& dims) {
  return GradientParts<Type>(dims, nullptr, nullptr, nullptr).bytes;
}

template <typename Type>
void begin_keys_pairs(BackwardTile& tile, const RowSource& k, const RowSource& v) {
  const GradientParts<Type> parts(tile);
  const bool k_finite = pack_right_columns<Type>(parts.k, parts.k_panel, parts.k_plane, k);
  const bool v_finite = pack_right_columns<Type>(parts.v, parts.v_panel, parts.v_plane, v);
  pack_right_rows<Type>(parts.k_rows, parts.k_rows_panel, parts.k_rows_plane, k);
  tile.keys_finite = k_finite && v_finite;
  for (std::int64_t i = 0; i < parts.dk_elements; i += kWidth) Isa::store(parts.dk + i, Isa::zero());
  for (std::int64_t i = 0; i < parts.dv_elements; i += kWidth) Isa::store(parts.dv_sum + i, Isa::zero());
}

template <typename Type>
void begin_queries_pairs(BackwardTile& tile, const RowSource& q, const RowSource& d_out) {
  const GradientParts<Type> parts(tile);
  const bool q_finite = pack_left<Type>(parts.q, parts.d, parts.q_plane, q);
  const bool d_out_finite = pack_left<Type>(parts.d_out, parts.dv, parts.d_out_plane, d_out);
  pack_left_columns<Type>(parts.q_columns, parts.column_stride, parts.q_columns_plane, q);
  pack_left_columns<Type>(parts.d_out_columns, parts.column_stride, parts.d_out_columns_plane, d_out);
  tile.queries_finite = q_finite && d_out_finite;
}

// sums[key][e] += scale gradient[e][key].
inline void add_turned(const float* gradient, std::int64_t stride, int keys, int width, float scale, float* sums,
                       std::int64_t sum_stride) {
  const Reg factor = Isa::set1(scale);
  for (int e = 0; e < width; e += kWidth) {
    const int present = at_most(kWidth, width - e);
    for (int key = 0; key < keys; key += kWidth) {
      Reg t[kWidth];
      for (int i = 0; i < kWidth; ++i) t[i] = Isa::load(gradient + (e + i) * stride + key);
      Isa::transpose(t);
      for (int i = 0; i < kWidth && key + i < keys; ++i) {
        float* sum = sums + (key + i) * sum_stride + e;
        Isa::store_partial(sum, Isa::fma(t[i], factor, Isa::load_partial(sum, present)), present);
      }
    }
  }
}

template <typename Type>
void end_keys_pairs(const BackwardTile& tile, float* dk, std::int64_t dk_stride, float* dv, std::int64_t dv_stride) {
  const GradientParts<Type> parts(tile);
  add_turned(parts.dk, parts.gradient_stride, tile.keys, tile.dims.head_dim, tile.scale, dk, dk_stride);
  add_turned(parts.dv_sum, parts.gradient_stride, tile.keys, tile.dims.head_dim_v, tile.output_scale, dv, dv_stride);
}

struct Gradients {
  Reg p, ds;
};

// What a query's scores and dp are combined with, in all lanes: loaded once, as the compiler cannot know that what is stored
// does not change it.
struct QueryFactors {
  Reg scale, output_scale, lse, delta;  // scale, lse: of exponents of 2
  RINGSPAN_INLINE QueryFactors(const BackwardTile& tile, int row)
      : scale(Isa::set1(tile.scale * kLog2e)),
        output_scale(Isa::set1(tile.output_scale)),
        lse(Isa::set1(tile.lse[row] * -kLog2e)),
        delta(Isa::set1(-tile.delta[row])) {}
};

// p (with dropout) and ds of one query and 16 keys from c on.
template <bool kPlain>
RINGSPAN_INLINE Gradients gradients_of(const BackwardTile& tile, const QueryFactors& factors, int row, int c, __mmask16 seen,
                                       Reg score, Reg dp) {
  const Reg zero = Isa::zero(), one = Isa::set1(1.0F);
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
  const Reg p = exp2_of(_mm512_min_ps(zero, exponent));  // NaN stays NaN
  Reg kept = p, factor = factors.output_scale;
  if (!kPlain && tile.factors != nullptr) {
    const Reg drop = _mm512_maskz_loadu_ps(seen, tile.factors + row * tile.factor_stride + c);
    kept = p * drop;
    factor = factor * drop;
  }
  return {kept, p * Isa::fma(dp, factor, factors.delta) * derivative};
}

// Planes of the values of two rows and 16 keys: interleaved words, and if wanted row by row.
template <typename Type>
RINGSPAN_INLINE void store_pair(Reg even, Reg odd, Word* interleaved, std::int64_t plane, Word* rows, std::int64_t stride,
                                std::int64_t rows_plane) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                         4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int n = 0; n < Type::kPlanes; ++n) {
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    const __m256i low = _mm512_castsi512_si256(rounded), high = _mm512_extracti64x4_epi64(rounded, 1);
    _mm512_storeu_si512(interleaved + n * plane, _mm512_permutexvar_epi16(order, rounded));
    if (rows != nullptr) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + n * rows_plane), low);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + n * rows_plane + stride), high);
    }
    if (n + 1 < Type::kPlanes) {
      even = even - widen(low);
      odd = odd - widen(high);
    }
  }
}

// p and ds of queries row, row + 1 and keys [begin, end), both multiples of 16, from scores and dp of the sub-tile at `begin`.
template <typename Type, bool kPlain>
void gradient_rows(const BackwardTile& tile, const GradientParts<Type>& parts, int row, const float* scores, const float* dp,
                   int begin, int end) {
  const bool both = row + 1 < tile.rows, any = row < tile.rows;
  const int begins[2] = {any ? tile.key_begin[row] : 0, both ? tile.key_begin[row + 1] : 0};
  const int ends[2] = {any ? tile.key_end[row] : 0, both ? tile.key_end[row + 1] : 0};
  Word* p = parts.p + begin / kPanelColumns * parts.p_panel + row * kPanelColumns;
  Word* ds = parts.ds + begin / kPanelColumns * parts.p_panel + row * kPanelColumns;
  Word* rows = parts.ds_rows + row * parts.ds_stride + begin;
  const int odd = both ? row + 1 : row;  // an absent row has no key
  const bool whole = begins[0] <= begin && begins[1] <= begin && ends[0] >= end && ends[1] >= end;
  const QueryFactors even_factors(tile, any ? row : 0), odd_factors(tile, any ? odd : 0);
  for (int c = begin; c < end; c += kWidth, p += parts.p_panel, ds += parts.p_panel, rows += kWidth) {
    __mmask16 seen0 = 0xffff, seen1 = 0xffff;
    if (!whole) {
      seen0 = first_of(ends[0] - c) & static_cast<__mmask16>(~first_of(begins[0] - c));
      seen1 = first_of(ends[1] - c) & static_cast<__mmask16>(~first_of(begins[1] - c));
    }
    Gradients a{Isa::zero(), Isa::zero()}, b = a;
    if (whole || (seen0 | seen1) != 0) {
      a = gradients_of<kPlain>(tile, even_factors, row, c, seen0, Isa::load(scores + c - begin), Isa::load(dp + c - begin));
      b = gradients_of<kPlain>(tile, odd_factors, odd, c, seen1, Isa::load(scores + kSubStride + c - begin),
                               Isa::load(dp + kSubStride + c - begin));
      if (!whole) {
        a = {_mm512_maskz_mov_ps(seen0, a.p), _mm512_maskz_mov_ps(seen0, a.ds)};
        b = {_mm512_maskz_mov_ps(seen1, b.p), _mm512_maskz_mov_ps(seen1, b.ds)};
      }
    }
    store_pair<Type>(a.p, b.p, p, parts.p_plane, nullptr, 0, 0);
    store_pair<Type>(a.ds, b.ds, ds, parts.p_plane, rows, parts.ds_stride, parts.ds_plane);
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

// p and ds of a block of queries for keys [range.begin, range.end), multiples of 32.
template <typename Type>
void block_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, int first, Range range) {
  constexpr int kPlanes = Type::kPlanes;
  const int rows = at_most(kPairRows, tile.rows - first);
  const Left q{parts.q + first * parts.d, parts.d, parts.q_plane};
  const Left d_out{parts.d_out + first * parts.dv, parts.dv, parts.d_out_plane};
  const Right k{parts.k, parts.k_panel, parts.k_plane}, v{parts.v, parts.v_panel, parts.v_plane};
  const bool repair = kPlanes > 1 && !(tile.queries_finite && tile.keys_finite);
  const bool plain = tile.softcap <= 0.0F && tile.slope == nullptr && tile.factors == nullptr;
  Ahead* const ahead = ahead_of(tile);
  for (int c = range.begin; c < range.end; c += kSubTile) {
    const int columns = at_most(kSubTile, range.end - c);
    multiply_pairs<AllProducts<kPlanes>>(rows, columns, parts.d, q, k.at(c, 0), parts.scores, kSubStride, false, ahead);
    multiply_pairs<AllProducts<kPlanes>>(rows, columns, parts.dv, d_out, v.at(c, 0), parts.dp, kSubStride, false, ahead);
    if (repair) {
      repair_products<kPlanes>(rows, columns, parts.d, q, k.at(c, 0), parts.scores, kSubStride);
      repair_products<kPlanes>(rows, columns, parts.dv, d_out, v.at(c, 0), parts.dp, kSubStride);
    }
    for (int r = 0; r < kPairRows; r += 2) {
      const float *s = parts.scores + r * kSubStride, *dp = parts.dp + r * kSubStride;
      if (c == range.begin) fetch_query_gradients(tile, first + r);
      if (plain) {
        gradient_rows<Type, true>(tile, parts, first + r, s, dp, c, c + columns);
      } else {
        gradient_rows<Type, false>(tile, parts, first + r, s, dp, c, c + columns);
      }
    }
  }
}

// sums[e][key] += left[e][query] weights[query][key], where some of `left` is not finite and must meet only the weights of keys
// that the query sees: first without it, then it alone. Queries from `first` on, keys from c on.
template <typename Type>
void multiply_visible_keys(const BackwardTile& tile, const GradientParts<Type>& parts, int rows, int columns, int depth,
                           const Left& left, const Right& weights, float* sums, int first, int c) {
  constexpr int kPlanes = Type::kPlanes;
  const std::int64_t copy_stride = tile.dims.tile.queries, copy_plane = kPairRows * copy_stride;
  for (int e = 0; e < rows; e += kPairRows) {
    const int count = at_most(kPairRows, rows - e);
    for (int n = 0; n < kPlanes; ++n) {
      for (int r = 0; r < count; ++r) {
        for (int i = 0; i < depth; i += 32) {
          const Word* source = left.data + n * left.plane + (e + r) * left.stride + i;
          _mm512_storeu_si512(parts.copy + n * copy_plane + r * copy_stride + i, finite_or_zero(_mm512_loadu_si512(source)));
        }
      }
    }
    multiply_pairs<LargeProducts<kPlanes>>(count, columns, depth, Left{parts.copy, copy_stride, copy_plane}, weights,
                                           sums + e * parts.gradient_stride, parts.gradient_stride, true);
  }
  for (int e = 0; e < rows; ++e) {
    for (int i = 0; i < depth; ++i) {
      const Word* element = left.data + e * left.stride + i;
      if (is_finite(*element) || first + i >= tile.rows) continue;
      const int begin = tile.key_begin[first + i], end = tile.key_end[first + i];
      for (int x = 0; x < columns; x += kWidth) {
        const __mmask16 seen = first_of(end - c - x) & static_cast<__mmask16>(~first_of(begin - c - x));
        float* sum = sums + e * parts.gradient_stride + x;
        const Reg weight = columns_of<kPlanes>(weights.at(x, 0), i);
        _mm512_mask_storeu_ps(sum, seen, Isa::fma(element_of<kPlanes>(element, left.plane), weight, Isa::load(sum)));
      }
    }
  }
}

// dk and dv: for each run of 32 keys the blocks of queries that see it, which are neighbours, as ranges only move forward.
template <typename Type>
void add_key_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, const Range* ranges, int blocks) {
  using Products = LargeProducts<Type::kPlanes>;
  const Right p{parts.p, parts.p_panel, parts.p_plane}, ds{parts.ds, parts.p_panel, parts.p_plane};
  const auto blocks_of = [&](int c) {
    Range seen{blocks, 0};
    for (int b = 0; b < blocks; ++b) {
      if (c < ranges[b].begin || c >= ranges[b].end) continue;
      seen = {at_most(seen.begin, b), b + 1};
    }
    return seen;
  };
  for (int c = 0; c < tile.keys;) {
    const Range seen = blocks_of(c);
    int end = c + 32;
    for (; end < tile.keys; end += 32) {
      const Range next = blocks_of(end);
      if (next.begin != seen.begin || next.end != seen.end) break;
    }
    if (!seen.empty()) {
      const int first = seen.begin * kPairRows, depth = (seen.end - seen.begin) * kPairRows;
      const Left d_out{parts.d_out_columns + first, parts.column_stride, parts.d_out_columns_plane};
      const Left q{parts.q_columns + first, parts.column_stride, parts.q_columns_plane};
      const int dv_rows = up16(tile.dims.head_dim_v), dk_rows = up16(tile.dims.head_dim);
      if (tile.queries_finite) {
        multiply_pairs<Products>(dv_rows, end - c, depth, d_out, p.at(c, first), parts.dv_sum + c, parts.gradient_stride, true,
                                 ahead_of(tile));
        multiply_pairs<Products>(dk_rows, end - c, depth, q, ds.at(c, first), parts.dk + c, parts.gradient_stride, true,
                                 ahead_of(tile));
      } else {
        multiply_visible_keys(tile, parts, dv_rows, end - c, depth, d_out, p.at(c, first), parts.dv_sum + c, first, c);
        multiply_visible_keys(tile, parts, dk_rows, end - c, depth, q, ds.at(c, first), parts.dk + c, first, c);
      }
    }
    c = end;
  }
}

template <typename Type>
void add_query_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, int first, Range range) {
  const int rows = at_most(kPairRows, tile.rows - first), width = tile.dims.head_dim;
  const Right k{parts.k_rows, parts.k_rows_panel, parts.k_rows_plane};
  const Left ds{parts.ds_rows + first * parts.ds_stride + range.begin, parts.ds_stride, parts.ds_plane};
  const int depth = range.end - range.begin;
  if (tile.keys_finite) {
    multiply_pairs<LargeProducts<Type::kPlanes>>(rows, up16(width), depth, ds, k.at(0, range.begin), parts.dq, parts.dq_stride,
                                                 false);
  } else {
    multiply_visible<Type::kPlanes>(rows, up16(width), depth, ds, k.at(0, range.begin), parts.dq, parts.dq_stride,
                                    tile.key_begin + first, tile.key_end + first, range.begin, parts.copy);
  }
  const Reg scale = Isa::set1(tile.scale);
  for (int r = 0; r < rows; ++r) {
    const float* gradient = parts.dq + r * parts.dq_stride;
    float* sum = tile.dq[first + r];
    for (int e = 0; e < width; e += kWidth) {
      const int present = at_most(kWidth, width - e);
      Isa::store_partial(sum + e, Isa::fma(Isa::load(gradient + e), scale, Isa::load_partial(sum + e, present)), present);
    }
  }
}

template <typename Type>
void attend_backward_pairs(const BackwardTile& tile) {
  const Dot::Session session;
  const GradientParts<Type> parts(tile);
  Range ranges[kMaxBlocks];
  int blocks = 0;
  for (int first = 0; first < tile.rows; first += kPairRows, ++blocks) {
    const Range range = union_of(tile.key_begin, tile.key_end, first, at_most(first + kPairRows, tile.rows));
    ranges[blocks] = {down32(range.begin), up32(range.end)};
    block_gradients<Type>(tile, parts, first, ranges[blocks]);
    add_query_gradients<Type>(tile, parts, first, ranges[blocks]);
  }
  add_key_gradients<Type>(tile, parts, ranges, blocks);
}

// ---- the table ---------------------------------------------------------------------------------------------------------

// What is one function per storage type becomes one that looks at the type.
#define RINGSPAN_BY_TYPE(call)     \
  do {                             \
    if constexpr (Dot::kSplits) {  \
      if (dtype == kFloat16Type) { \
        using Type = Float16;      \
        return call;               \
      }                            \
      if (dtype == kFloat32Type) { \
        using Type = Float32;      \
        return call;               \
      }                            \
    }                              \
    using Type = BFloat16;         \
    return call;                   \
  } while (false)

inline ForwardBytes forward_bytes_by_type(const TileDims& dims) {
  const int dtype = dims.dtype;
  RINGSPAN_BY_TYPE(forward_bytes_pairs<Type>(dims));
}
inline bool pack_keys_by_type(const TileDims& dims, void* out, const RowSource& k) {
  const int dtype = dims.dtype;
  RINGSPAN_BY_TYPE(pack_keys_pairs<Type>(dims, out, k));
}
inline bool pack_values_by_type(const TileDims& dims, void* out, const RowSource& v) {
  const int dtype = dims.dtype;
  RINGSPAN_BY_TYPE(pack_values_pairs<Type>(dims, out, v));
}
inline bool pack_queries_by_type(const TileDims& dims, void* out, const RowSource& q, float scale) {
  const int dtype = dims.dtype;
  RINGSPAN_BY_TYPE(pack_queries_pairs<Type>(dims, out, q, scale));
}
inline void attend_by_type(const ForwardTile& tile) {
  const int dtype = tile.dims.dtype;
  RINGSPAN_BY_TYPE(attend_pairs<Type>(tile));
}
inline BackwardBytes backward_bytes_by_type(const TileDims& dims) {
  const int dtype = dims.dtype;
  RINGSPAN_BY_TYPE(backward_bytes_pairs<Type>(dims));
}
inline void begin_keys_by_type(BackwardTile& tile, const RowSource& k, const RowSource& v) {
  const int dtype = tile.dims.dtype;
  RINGSPAN_BY_TYPE(begin_keys_pairs<Type>(tile, k, v));
}
inline void begin_queries_by_type(BackwardTile& tile, const RowSource& q, const RowSource& d_out) {
  const int dtype = tile.dims.dtype;
  RINGSPAN_BY_TYPE(begin_queries_pairs<Type>(tile, q, d_out));
}
inline void attend_backward_by_type(const BackwardTile& tile) {
  const int dtype = tile.dims.dtype;
  RINGSPAN_BY_TYPE(attend_backward_pairs<Type>(tile));
}
inline void end_keys_by_type(const BackwardTile& tile, float* dk, std::int64_t dk_stride, float* dv, std::int64_t dv_stride) {
  const int dtype = tile.dims.dtype;
  RINGSPAN_BY_TYPE(end_keys_pairs<Type>(tile, dk, dk_stride, dv, dv_stride));
}

constexpr TileOps make_pair_tile_ops() {
  return {kWidth,
          forward_sizes_pairs,
          forward_bytes_by_type,
          pack_keys_by_type,
          pack_values_by_type,
          pack_queries_by_type,
          attend_by_type,
          {false, true, false},
          attend_few_pairs,
          backward_sizes_pairs,
          backward_bytes_by_type,
          begin_keys_by_type,
          begin_queries_by_type,
          attend_backward_by_type,
          end_keys_by_type};
}

}  // namespace
}  // namespace ringspan::kernels
