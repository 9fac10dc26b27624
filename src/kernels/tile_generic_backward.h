// The second half of tile_generic.h: the backward tile and the table.
#include "kernels/tile_generic_few.h"

namespace ringspan::kernels {
namespace {

constexpr int kFirstCache = 32768;  // bytes, of most processors
constexpr int kFetchedRows = 4;     // whose scores are fetched into the first cache before they become gradients

constexpr std::int64_t gradient_stride(const TileDims& dims) { return dims.tile.keys + kScorePad; }
// Of queries and d_out, which are left and right operands: an odd number of cache lines, against cache set conflicts.
constexpr std::int64_t row_stride(int width) { return (width + 15) / 16 / 2 * 32 + 16; }

// Keys of a tile: many, because the queries are packed once for each; few enough for the second cache.
TileSizes backward_sizes(const TileDims& dims) {
  const int width = at_least(dims.head_dim, dims.head_dim_v);
  const int keys = width <= 128 ? 256 : 192;
  return {{width <= 128 ? 126 : 96, keys}, {kRowBlock, 4 * kWidth}, {30, 64}, {kMaxGradQueryTile, kMaxKeyTile}};
}

// What lies where in the three parts of a backward tile. Queries and d_out are multiplied with scale and output_scale.
struct GradientParts {
  std::int64_t k_stride, v_stride;      // of dk and dv: padded
  std::int64_t q_stride, d_out_stride;  // from row to row
  std::int64_t stride;                  // of p and ds, from query to query
  std::int64_t key_elements, value_elements, score_elements;
  float *k_columns, *v_columns, *k_panels, *dk, *dv;
  float *q, *d_out;
  float *p, *ds;

  GradientParts(const TileDims& dims, void* key_side, void* query_side, void* work)
      : k_stride(up(dims.head_dim)),
        v_stride(up(dims.head_dim_v)),
        q_stride(row_stride(dims.head_dim)),
        d_out_stride(row_stride(dims.head_dim_v)),
        stride(gradient_stride(dims)) {
    const std::int64_t keys = (dims.tile.keys + 15) / 16 * 16;
    key_elements = keys * k_stride;
    value_elements = keys * v_stride;
    score_elements = dims.tile.queries * stride;
    k_columns = static_cast<float*>(key_side);
    k_panels = k_columns + key_elements;
    dk = k_panels + key_elements;
    v_columns = dk + key_elements;
    dv = v_columns + value_elements;
    q = static_cast<float*>(query_side);
    d_out = q + dims.tile.queries * q_stride;
    p = static_cast<float*>(work);
    ds = p + score_elements;
  }
  explicit GradientParts(const BackwardTile& tile) : GradientParts(tile.dims, tile.key_side, tile.query_side, tile.work) {}
};

BackwardBytes backward_bytes(const TileDims& dims) {
  alignas(64) char base[64];  // only for the counts
  const GradientParts parts(dims, base, base, base);
  return {float_bytes(3 * parts.key_elements + 2 * parts.value_elements),
          float_bytes(dims.tile.queries * (parts.q_stride + parts.d_out_stride)), float_bytes(2 * parts.score_elements)};
}

void begin_keys(BackwardTile& tile, const RowSource& k, const RowSource& v) {
  const GradientParts parts(tile);
  const int dtype = tile.dims.dtype;
  kPackColumns[dtype](parts.k_columns, k, 1.0F);
  kPackColumns[dtype](parts.v_columns, v, 1.0F);
  tile.keys_finite = kPackPanels[dtype](parts.k_panels, k, tile.scale);
  fill(parts.dk, 0, static_cast<int>(k.rows * parts.k_stride), 0.0F);
  fill(parts.dv, 0, static_cast<int>(v.rows * parts.v_stride), 0.0F);
}

void begin_queries(BackwardTile& tile, const RowSource& q, const RowSource& d_out) {
  const GradientParts parts(tile);
  const int dtype = tile.dims.dtype;
  const bool q_finite = kPackRows[dtype](parts.q, parts.q_stride, q, tile.scale);
  const bool d_out_finite = kPackRows[dtype](parts.d_out, parts.d_out_stride, d_out, tile.output_scale);
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

// One row and the keys [begin, end): p and ds from the scores s (in p) and dp (in ds). kOptions: of score and dropout.
template <bool kOptions>
inline void gradient_vectors(const BackwardTile& tile, float* s, float* ds, int row, int begin, int end) {
  const Reg one = Isa::set1(1.0F), cap = Isa::set1(tile.softcap);
  const Reg inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  const Reg lse = Isa::set1(tile.lse[row]), delta = Isa::set1(tile.delta[row]);
  const std::int64_t distance = tile.key_first - tile.origin[row];
  const std::int64_t next = row + kFetchedRows < tile.rows ? kFetchedRows * gradient_stride(tile.dims) : 0;
  const float* factors = tile.factors == nullptr ? nullptr : tile.factors + row * tile.factor_stride;
  for (int c = down(begin); c < end; c += kWidth) {
    fetch_near(s + next + c), fetch_near(ds + next + c);
    Reg score = Isa::load(s + c), derivative = one;
    if (kOptions && tile.softcap > 0.0F) {
      const Reg t = tanh_of(score * inverse);
      score = cap * t;
      derivative = one - t * t;
    }
    if (kOptions && tile.slope != nullptr) {
      float bias[kWidth];
      for (int lane = 0; lane < kWidth; ++lane) {
        const std::int64_t d = distance + (c + lane) * tile.key_step;
        bias[lane] = *tile.slope * static_cast<float>(d < 0 ? -d : d);
      }
      score -= Isa::load(bias);
    }
    const Reg p = exp_of(-Isa::max(Isa::zero(), lse - score));  // NaN stays NaN
    Reg kept = p, dp = Isa::load(ds + c);
    if (kOptions && factors != nullptr) {
      const Reg factor = Isa::load(factors + c);
      kept = p * factor;
      dp = dp * factor;
    }
    Isa::store(s + c, kept);
    Isa::store(ds + c, kOptions ? p * (dp - delta) * derivative : p * (dp - delta));
  }
}

// All keys of one row; zero where it does not see one.
inline void gradient_row(const BackwardTile& tile, const GradientParts& parts, int row) {
  float* s = parts.p + row * parts.stride;
  float* ds = parts.ds + row * parts.stride;
  const int begin = tile.key_begin[row], end = tile.key_end[row];
  if (tile.softcap > 0.0F || tile.slope != nullptr || tile.factors != nullptr) {
    gradient_vectors<true>(tile, s, ds, row, begin, end);
  } else {
    gradient_vectors<false>(tile, s, ds, row, begin, end);
  }
  if (begin == 0 && end == tile.keys) return;
  fill(s, 0, begin, 0.0F), fill(s, end, tile.keys, 0.0F);
  fill(ds, 0, begin, 0.0F), fill(ds, end, tile.keys, 0.0F);
}

// Gradient of keys: out[key] += sum over the rows that see it of weight[row][key] rows[row].
inline void add_key_gradient(const BackwardTile& tile, const float* weight, const float* rows, std::int64_t row_stride,
                             int width, float* out, std::int64_t out_stride, const Range* ranges) {
  const std::int64_t stride = gradient_stride(tile.dims);
  // Where a gradient of zero may not meet a query, each key over its own rows: 0 inf is NaN.
  const auto seen = [&](int key) {
    return tile.queries_finite ? ranges[key / kRowBlock] : Range{tile.row_begin[key], tile.row_end[key]};
  };
  for (int column = 0; column < width; column += kPanel) {
    const int vectors = up(at_most(width - column, kPanel)) / kWidth;
    for_equal_ranges(tile.keys, tile.queries_finite ? kRowBlock : 1, seen, [&](int key, int count, Range range) {
      multiply(count, vectors, Left{weight + range.begin * stride + key, 1, stride}, rows + range.begin * row_stride + column,
               row_stride, range.end - range.begin, Add{out + key * out_stride + column, out_stride}, Soon{tile.ahead});
    });
  }
}

// dq[row] += sum over the keys it sees of ds[row][key] k[key]. The keys in chunks whose panel stays in the first cache.
inline void add_query_gradient(const BackwardTile& tile, const GradientParts& parts, const Range* ranges) {
  constexpr int kChunk = 128;
  for (int column = 0; column < tile.dims.head_dim; column += kPanel) {
    const int columns = up(at_most(tile.dims.head_dim - column, kPanel));
    const float* panel = parts.k_panels + static_cast<std::int64_t>(column) * tile.keys;
    for (int chunk = 0; chunk < tile.keys; chunk += kChunk) {
      const auto seen = [&](int row) {
        const Range range = tile.keys_finite ? ranges[row / kRowBlock] : Range{tile.key_begin[row], tile.key_end[row]};
        return Range{at_least(range.begin, chunk), at_most(range.end, chunk + kChunk)};
      };
      for_equal_ranges(tile.rows, tile.keys_finite ? kRowBlock : 1, seen, [&](int row, int count, Range range) {
        multiply(count, columns / kWidth, Left{parts.ds + row * parts.stride + range.begin, parts.stride, 1},
                 panel + static_cast<std::int64_t>(range.begin) * columns, columns, range.end - range.begin,
                 AddToRows{tile.dq + row, column, tile.dims.head_dim});
      });
    }
  }
}

void attend_backward_tile(const BackwardTile& tile) {
  const GradientParts parts(tile);
  Range keys_of[kMaxBlocks], rows_of[kMaxBlocks];  // by blocks of rows and of keys
  ranges_of_blocks(tile.key_begin, tile.key_end, tile.rows, keys_of);
  ranges_of_blocks(tile.row_begin, tile.row_end, tile.keys, rows_of);
  const int depths = tile.dims.head_dim + tile.dims.head_dim_v;
  const auto scores = [&](auto beside) {
    multiply_columns(tile.rows, tile.keys, parts.q, parts.q_stride, parts.k_columns, tile.dims.head_dim, parts.p, parts.stride,
                     keys_of, beside);
    multiply_columns(tile.rows, tile.keys, parts.d_out, parts.d_out_stride, parts.v_columns, tile.dims.head_dim_v, parts.ds,
                     parts.stride, keys_of, beside);
  };
  // Panels of keys that the first cache does not hold are read from the second one, which prefetches close to each other hold
  // up.
  if (depths / 2 * kPanel * static_cast<int>(sizeof(float)) > kFirstCache) {
    set_pace(tile.ahead,
             std::int64_t{depths} * ((tile.rows + kRowBlock - 1) / kRowBlock) * ((tile.keys + kPanel - 1) / kPanel));
    scores(Evenly{tile.ahead});
  } else {
    scores(Soon{tile.ahead});
  }
  for (int row = 0; row < tile.rows; ++row) gradient_row(tile, parts, row);
  add_key_gradient(tile, parts.p, parts.d_out, parts.d_out_stride, tile.dims.head_dim_v, parts.dv, parts.v_stride, rows_of);
  add_key_gradient(tile, parts.ds, parts.q, parts.q_stride, tile.dims.head_dim, parts.dk, parts.k_stride, rows_of);
  add_query_gradient(tile, parts, keys_of);
}

constexpr TileOps make_tile_ops() {
  return {kWidth,        forward_sizes,        forward_bytes, pack_keys,      pack_values,    pack_queries,
          attend_tile,   {true, true, true},   attend_few,    backward_sizes, backward_bytes, begin_keys,
          begin_queries, attend_backward_tile, end_keys};
}

}  // namespace
}  // namespace ringspan::kernels
