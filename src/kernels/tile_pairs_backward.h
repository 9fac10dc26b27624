// The backward tile over pairs of bfloat16, and the table; see tile_pairs.h.
//
// Everything is query-major, with the keys along vectors: p and ds of two neighbouring queries, interleaved, are right operands
// of
//     dv^T += do^T p      dk^T += q^T ds      (depth: queries)
// and ds row by row is the left one of dq += ds k. Gradients of keys gather transposed and are turned once per key tile.
#pragma once

#include "kernels/tile_pairs_gradients.h"

namespace ringspan::kernels {
namespace {

constexpr int kMaxBlocks = kMaxGradQueryTile / kPairRows;

// Keys of a tile: many, because the queries are packed once for each; few enough for the second cache.
TileSizes backward_sizes_pairs(const TileDims& dims) {
  const int width = at_least(dims.head_dim, dims.head_dim_v);
  TileSize own{Dot::kInRegisters ? 192 : width <= 128 ? 256 : 128, width <= 128 ? 512 : 256};
  if (dims.dtype == kFloat16Type) own = {128, width <= 64 ? 384 : width <= 128 ? 256 : 128};
  if (dims.dtype == kFloat32Type) own = width <= 128 ? TileSize{128, 256} : TileSize{64, 128};
  return {own, {kPairRows, 32}, {kPairRows, 32}, {kMaxGradQueryTile, kMaxKeyTile}};
}

template <typename Type>
BackwardBytes backward_bytes_pairs(const TileDims& dims) {
  return GradientParts<Type>(dims, nullptr, nullptr, nullptr).bytes;
}

template <typename Type>
void begin_keys_pairs(BackwardTile& tile, const RowSource& k, const RowSource& v) {
  const GradientParts<Type> parts(tile);
  const bool k_finite = pack_right_columns<Type>(parts.k, parts.k_panel, parts.k_plane, k);
  const bool v_finite = pack_right_columns<Type>(parts.v, parts.v_panel, parts.v_plane, v);
  pack_right_rows<Type, !Dot::kInRegisters>(parts.k_rows, parts.k_rows_panel, parts.k_rows_plane, k);
  tile.keys_finite = k_finite && v_finite;
  for (std::int64_t i = 0; i < parts.dk_elements; i += kWidth) Isa::store(parts.dk + i, Isa::zero());
  for (std::int64_t i = 0; i < parts.dv_elements; i += kWidth) Isa::store(parts.dv_sum + i, Isa::zero());
}

template <typename Type>
void begin_queries_pairs(BackwardTile& tile, const RowSource& q, const RowSource& d_out) {
  const GradientParts<Type> parts(tile);
  const bool q_finite = pack_left<Type>(parts.q, parts.d, parts.q_plane, q);
  const bool d_out_finite = pack_left<Type>(parts.d_out, parts.dv, parts.d_out_plane, d_out);
  constexpr bool kSplit = Type::kPlanes > 1;
  for (int n = 0; n < Type::kPlanes; ++n) {
    pack_left_columns<kSplit>(parts.q_columns + n * parts.q_columns_plane, parts.column_stride,
                              {parts.q + n * parts.q_plane, parts.d, nullptr, q.rows, parts.d});
    pack_left_columns<kSplit>(parts.d_out_columns + n * parts.d_out_columns_plane, parts.column_stride,
                              {parts.d_out + n * parts.d_out_plane, parts.dv, nullptr, d_out.rows, parts.dv});
  }
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

// dk and dv of keys [keys.begin, keys.end), of which p and ds are there: for each run of 32 keys the blocks of queries that see
// it, which are neighbours, as ranges only move forward.
template <typename Type>
void add_key_gradients(const BackwardTile& tile, const GradientParts<Type>& parts, const Range* ranges, int blocks,
                       Range keys) {
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
  for (int c = keys.begin; c < keys.end;) {
    const Range seen = blocks_of(c);
    int end = c + 32;
    for (; end < keys.end; end += 32) {
      const Range next = blocks_of(end);
      if (next.begin != seen.begin || next.end != seen.end) break;
    }
    if (!seen.empty()) {
      const int first = seen.begin * kPairRows, depth = (seen.end - seen.begin) * kPairRows;
      const Left d_out{parts.d_out_columns + first, parts.column_stride, parts.d_out_columns_plane};
      const Left q{parts.q_columns + first, parts.column_stride, parts.q_columns_plane};
      const int dv_rows = up16(tile.dims.head_dim_v), dk_rows = up16(tile.dims.head_dim);
      const Right p_here = p.at(c - keys.begin, first), ds_here = ds.at(c - keys.begin, first);
      if (tile.queries_finite) {
        multiply_pairs<Products>(dv_rows, end - c, depth, d_out, p_here, parts.dv_sum + c, parts.gradient_stride, true,
                                 ahead_of(tile));
        multiply_pairs<Products>(dk_rows, end - c, depth, q, ds_here, parts.dk + c, parts.gradient_stride, true,
                                 ahead_of(tile));
      } else {
        multiply_visible_keys(tile, parts, dv_rows, end - c, depth, d_out, p_here, parts.dv_sum + c, first, c);
        multiply_visible_keys(tile, parts, dk_rows, end - c, depth, q, ds_here, parts.dk + c, first, c);
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
    multiply_visible<Type::kPlanes, !Dot::kInRegisters>(rows, up16(width), depth, ds, k.at(0, range.begin), parts.dq,
                                                        parts.dq_stride, tile.key_begin + first, tile.key_end + first,
                                                        range.begin, parts.copy);
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
  }
  if constexpr (Dot::kInRegisters) {
    tile_gradients<Type>(tile, parts, ranges, blocks);
    add_key_gradients<Type>(tile, parts, ranges, blocks, {0, tile.keys});
  } else {
    for (int c = 0; c < tile.keys; c += kSubTile) {
      const Range keys{c, at_most(c + kSubTile, tile.keys)};
      for (int b = 0; b < blocks; ++b) {
        const Range part{at_least(ranges[b].begin, c), at_most(ranges[b].end, c + kSubTile)};
        if (!part.empty()) block_gradients<Type>(tile, parts, b * kPairRows, part, c);
      }
      add_key_gradients<Type>(tile, parts, ranges, blocks, keys);
    }
  }
  for (int b = 0; b < blocks; ++b) add_query_gradients<Type>(tile, parts, b * kPairRows, ranges[b]);
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
