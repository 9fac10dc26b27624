// The second half of tile_generic.h: the backward tile and the table.
#include "kernels/tile_generic_few.h"

namespace ringspan::kernels {
namespace {

constexpr int kFetchedKeys = 4;  // whose scores are fetched into the first cache before they become gradients

constexpr std::int64_t gradient_stride(const TileDims& dims) { return dims.tile.queries + kScorePad; }

// Keys of a tile: many, because the queries are packed once for each; few enough for the second cache.
TileSizes backward_sizes(const TileDims& dims) {
  const int width = at_least(dims.head_dim, dims.head_dim_v);
  return {{128, width <= 64 ? 384 : width <= 128 ? 240 : 120}, {32, 4 * kRowBlock}, {32, 48}, {kMaxGradQueryTile, 1008}};
}

// What lies where in the three parts of a backward tile. Queries and d_out are multiplied with scale and output_scale.
struct GradientParts {
  std::int64_t k_stride, v_stride;  // padded
  std::int64_t stride;              // of p and ds, from key to key
  std::int64_t k_elements, v_elements, q_elements, d_out_elements, score_elements;
  float *k_rows, *v_rows, *k_panels, *dk, *dv;
  float *q_columns, *q_panels, *d_out_columns, *d_out_panels;
  float *p, *ds;

  GradientParts(const TileDims& dims, void* key_side, void* query_side, void* work)
      : k_stride(up(dims.head_dim)), v_stride(up(dims.head_dim_v)), stride(gradient_stride(dims)) {
    k_elements = (dims.tile.keys * k_stride + 15) / 16 * 16;
    v_elements = (dims.tile.keys * v_stride + 15) / 16 * 16;
    q_elements = dims.tile.queries * k_stride;
    d_out_elements = dims.tile.queries * v_stride;
    score_elements = dims.tile.keys * stride;
    k_rows = static_cast<float*>(key_side);
    k_panels = k_rows + k_elements;
    dk = k_panels + k_elements;
    v_rows = dk + k_elements;
    dv = v_rows + v_elements;
    q_columns = static_cast<float*>(query_side);
    q_panels = q_columns + q_elements;
    d_out_columns = q_panels + q_elements;
    d_out_panels = d_out_columns + d_out_elements;
    p = static_cast<float*>(work);
    ds = p + score_elements;
  }
  explicit GradientParts(const BackwardTile& tile) : GradientParts(tile.dims, tile.key_side, tile.query_side, tile.work) {}
};

BackwardBytes backward_bytes(const TileDims& dims) {
  alignas(64) char base[64];  // only for the counts
  const GradientParts parts(dims, base, base, base);
  return {float_bytes(3 * parts.k_elements + 2 * parts.v_elements), float_bytes(2 * (parts.q_elements + parts.d_out_elements)),
          float_bytes(2 * parts.score_elements)};
}

void begin_keys(BackwardTile& tile, const RowSource& k, const RowSource& v) {
  const GradientParts parts(tile);
  const int dtype = tile.dims.dtype;
  kPackRows[dtype](parts.k_rows, parts.k_stride, k, 1.0F);
  kPackRows[dtype](parts.v_rows, parts.v_stride, v, 1.0F);
  tile.keys_finite = kPackPanels[dtype](parts.k_panels, k, tile.scale);
  fill(parts.dk, 0, static_cast<int>(k.rows * parts.k_stride), 0.0F);
  fill(parts.dv, 0, static_cast<int>(v.rows * parts.v_stride), 0.0F);
}

void begin_queries(BackwardTile& tile, const RowSource& q, const RowSource& d_out) {
  const GradientParts parts(tile);
  const int dtype = tile.dims.dtype;
  const bool q_finite = kPackBoth[dtype](parts.q_columns, parts.q_panels, q, tile.scale);
  const bool d_out_finite = kPackBoth[dtype](parts.d_out_columns, parts.d_out_panels, d_out, tile.output_scale);
  tile.queries_finite = q_finite && d_out_finite;
}

inline void add_rows(const float* gradient, std::int64_t stride, int rows, int width, float* sum, std::int64_t sum_stride) {
  for (int r = 0; r < rows; ++r, gradient += stride, sum += sum_stride) {
    for (int e = 0; e < width; ++e) sum[e] += gradient[e];
  }
}

void end_keys(const BackwardTile& tile, float* dk, std::int64_t dk_stride, float* dv, std::int64_t dv_stride) {
  const GradientParts parts(tile);
  add_rows(parts.dk, parts.k_stride, tile.keys, tile.dims.head_dim, dk, dk_stride);
  add_rows(parts.dv, parts.v_stride, tile.keys, tile.dims.head_dim_v, dv, dv_stride);
}

// One key and the rows from `begin` on: p and ds from the scores s (in p) and dp (in ds). kOptions: of score and dropout.
template <bool kOptions>
inline void gradient_vectors(const BackwardTile& tile, float* s, float* ds, int key, int begin, int end) {
  const Reg one = Isa::set1(1.0F), cap = Isa::set1(tile.softcap);
  const Reg inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  const std::int64_t position = tile.key_first + key * tile.key_step, next = kFetchedKeys * gradient_stride(tile.dims);
  const float* factors = tile.factors == nullptr ? nullptr : tile.factors + key * tile.factor_key;
  for (int r = down(begin); r < end; r += kWidth) {
    fetch_near(s + next + r), fetch_near(ds + next + r);
    Reg score = Isa::load(s + r), derivative = one;
    if (kOptions && tile.softcap > 0.0F) {
      const Reg t = tanh_of(score * inverse);
      score = cap * t;
      derivative = one - t * t;
    }
    if (kOptions && tile.slope != nullptr) {
      float bias[kWidth] = {};
      for (int lane = 0; lane < kWidth && r + lane < tile.rows; ++lane) {
        const std::int64_t d = position - tile.origin[r + lane];
        bias[lane] = *tile.slope * static_cast<float>(d < 0 ? -d : d);
      }
      score -= Isa::load(bias);
    }
    const Reg p = exp_of(-Isa::max(Isa::zero(), Isa::load(tile.lse + r) - score));  // NaN stays NaN
    Reg kept = p, dp = Isa::load(ds + r);
    if (kOptions && factors != nullptr) {
      const Reg factor = Isa::load(factors + r);
      kept = p * factor;
      dp = dp * factor;
    }
    Isa::store(s + r, kept);
    Isa::store(ds + r, kOptions ? p * (dp - Isa::load(tile.delta + r)) * derivative : p * (dp - Isa::load(tile.delta + r)));
  }
}

// All rows of one key; zero where a row does not see it.
inline void gradient_row(const BackwardTile& tile, const GradientParts& parts, int key) {
  float* s = parts.p + key * parts.stride;
  float* ds = parts.ds + key * parts.stride;
  const int begin = tile.row_begin[key], end = tile.row_end[key];
  if (begin >= end) {
    fill(s, 0, tile.rows, 0.0F);
    fill(ds, 0, tile.rows, 0.0F);
    return;
  }
  if (tile.softcap > 0.0F || tile.slope != nullptr || tile.factors != nullptr) {
    gradient_vectors<true>(tile, s, ds, key, begin, end);
  } else {
    gradient_vectors<false>(tile, s, ds, key, begin, end);
  }
  if (begin == 0 && end == tile.rows) return;
  fill(s, 0, begin, 0.0F), fill(s, end, tile.rows, 0.0F);
  fill(ds, 0, begin, 0.0F), fill(ds, end, tile.rows, 0.0F);
}

// Gradient of keys: out[key] += sum over the rows that see it of weight[key][row] rows[row], `rows` in panels.
template <typename Ranges>
void add_key_gradient(const BackwardTile& tile, const float* weight, const float* packed, int width, float* out,
                      std::int64_t out_stride, const Ranges& range_of) {
  const std::int64_t stride = gradient_stride(tile.dims);
  const int step = tile.queries_finite ? kRowBlock : 1;  // one by one over its own rows: 0 inf is NaN
  for (int column = 0; column < width; column += kPanel) {
    const int columns = up(at_most(width - column, kPanel));
    const float* panel = packed + static_cast<std::int64_t>(column) * tile.rows;
    for (int key = 0; key < tile.keys; key += step) {
      const Range range = step == 1 ? Range{tile.row_begin[key], tile.row_end[key]} : range_of(key);
      if (range.empty()) continue;
      multiply(at_most(step, tile.keys - key), columns / kWidth, Left{weight + key * stride + range.begin, stride, 1},
               panel + static_cast<std::int64_t>(range.begin) * columns, columns, range.end - range.begin,
               Add{out + key * out_stride + column, out_stride});
    }
  }
}

// dq[row] += sum over the keys it sees of ds[key][row] k[key]. The keys in chunks whose panel stays in the first cache.
void add_query_gradient(const BackwardTile& tile, const GradientParts& parts) {
  constexpr int kChunk = 128;
  const int step = tile.keys_finite ? kRowBlock : 1;
  for (int column = 0; column < tile.dims.head_dim; column += kPanel) {
    const int columns = up(at_most(tile.dims.head_dim - column, kPanel));
    const float* panel = parts.k_panels + static_cast<std::int64_t>(column) * tile.keys;
    for (int chunk = 0; chunk < tile.keys; chunk += kChunk) {
      for (int row = 0; row < tile.rows; row += step) {
        const int last = at_most(row + step, tile.rows);
        const Range seen = union_of(tile.key_begin, tile.key_end, row, last);
        const int begin = at_least(seen.begin, chunk), end = at_most(seen.end, chunk + kChunk);
        if (begin >= end) continue;
        multiply(last - row, columns / kWidth, Left{parts.ds + begin * parts.stride + row, 1, parts.stride},
                 panel + static_cast<std::int64_t>(begin) * columns, columns, end - begin,
                 AddToRows{tile.dq + row, column, tile.dims.head_dim});
      }
    }
  }
}

void attend_backward_tile(const BackwardTile& tile) {
  const GradientParts parts(tile);
  const auto range_of = [&](int key) {
    return union_of(tile.row_begin, tile.row_end, key, at_most(key + kRowBlock, tile.keys));
  };
  multiply_columns(tile.keys, tile.rows, parts.k_rows, parts.k_stride, parts.q_columns, tile.dims.head_dim, parts.p,
                   parts.stride, range_of);
  multiply_columns(tile.keys, tile.rows, parts.v_rows, parts.v_stride, parts.d_out_columns, tile.dims.head_dim_v, parts.ds,
                   parts.stride, range_of);
  for (int key = 0; key < tile.keys; ++key) gradient_row(tile, parts, key);
  add_key_gradient(tile, parts.p, parts.d_out_panels, tile.dims.head_dim_v, parts.dv, parts.v_stride, range_of);
  add_key_gradient(tile, parts.ds, parts.q_panels, tile.dims.head_dim, parts.dk, parts.k_stride, range_of);
  add_query_gradient(tile, parts);
}

constexpr TileOps make_tile_ops() {
  return {kWidth,       false,         forward_sizes,        forward_bytes, pack_keys,      pack_values,
          pack_queries, attend_tile,   {true, true, true},   attend_few,    backward_sizes, backward_bytes,
          begin_keys,   begin_queries, attend_backward_tile, end_keys};
}

}  // namespace
}  // namespace ringspan::kernels
