// The second half of tile_generic.h: the backward tile and the table.
namespace ringspan::kernels {
namespace {

// One key: p and ds of all rows from the scores s (in tile.p) and dp (in tile.ds); zero where a row does not see the key.
inline void gradient_row(const BackwardTile& tile, int key) {
  float* s = tile.p + key * tile.score_stride;
  float* ds = tile.ds + key * tile.score_stride;
  const int begin = tile.row_begin[key], end = tile.row_end[key];
  if (begin >= end) {
    fill(s, 0, tile.rows, 0.0F);
    fill(ds, 0, tile.rows, 0.0F);
    return;
  }
  const Reg one = Isa::set1(1.0F), cap = Isa::set1(tile.softcap);
  const Reg inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  const std::int64_t position = tile.key_first + key * tile.key_step;
  const float* factors = tile.factors == nullptr ? nullptr : tile.factors + key * tile.score_stride;
  for (int r = down(begin); r < end; r += kWidth) {
    Reg score = Isa::load(s + r), derivative = one;
    if (tile.softcap > 0.0F) {
      const Reg t = tanh_of(score * inverse);
      score = cap * t;
      derivative = one - t * t;
    }
    if (tile.slope != nullptr) {
      float bias[kWidth] = {};
      for (int lane = 0; lane < kWidth && r + lane < tile.rows; ++lane) {
        const std::int64_t d = position - tile.origin[r + lane];
        bias[lane] = *tile.slope * static_cast<float>(d < 0 ? -d : d);
      }
      score -= Isa::load(bias);
    }
    const Reg exponent = score - Isa::load(tile.lse + r);
    const Reg p = exp_of(exponent > Isa::zero() ? Isa::zero() : exponent);  // NaN stays NaN
    Reg kept = p, dp = Isa::load(ds + r);
    if (factors != nullptr) {
      const Reg factor = Isa::load(factors + r);
      kept = p * factor;
      dp = dp * factor;
    }
    Isa::store(s + r, kept);
    Isa::store(ds + r, p * (dp - Isa::load(tile.delta + r)) * derivative);
  }
  fill(s, 0, begin, 0.0F), fill(s, end, tile.rows, 0.0F);
  fill(ds, 0, begin, 0.0F), fill(ds, end, tile.rows, 0.0F);
}

// Gradient of keys: out[key] += sum over the rows that see it of weight[key][row] rows[row], `rows` in panels.
template <typename Ranges>
void add_key_gradient(const BackwardTile& tile, const float* weight, const float* packed, int width, float* out,
                      std::int64_t out_stride, const Ranges& range_of) {
  const int step = tile.queries_finite ? kRowBlock : 1;  // one by one over its own rows: 0 inf is NaN
  for (int column = 0; column < width; column += kPanel) {
    const int columns = up(at_most(width - column, kPanel));
    const float* panel = packed + static_cast<std::int64_t>(column) * tile.rows;
    for (int key = 0; key < tile.keys; key += step) {
      const Range range = step == 1 ? Range{tile.row_begin[key], tile.row_end[key]} : range_of(key);
      if (range.empty()) continue;
      multiply(at_most(step, tile.keys - key), columns / kWidth,
               Left{weight + key * tile.score_stride + range.begin, tile.score_stride, 1},
               panel + static_cast<std::int64_t>(range.begin) * columns, columns, range.end - range.begin,
               Add{out + key * out_stride + column, out_stride});
    }
  }
}

// dq[row] += sum over the keys it sees of ds[key][row] k[key]. The keys in chunks whose panel stays in the first cache.
void add_query_gradient(const BackwardTile& tile) {
  constexpr int kChunk = 128;
  const int step = tile.keys_finite ? kRowBlock : 1;
  for (int column = 0; column < tile.head_dim; column += kPanel) {
    const int columns = up(at_most(tile.head_dim - column, kPanel));
    const float* panel = tile.k_panels + static_cast<std::int64_t>(column) * tile.keys;
    for (int chunk = 0; chunk < tile.keys; chunk += kChunk) {
      for (int row = 0; row < tile.rows; row += step) {
        const int last = at_most(row + step, tile.rows);
        const Range seen = union_of(tile.key_begin, tile.key_end, row, last);
        const int begin = at_least(seen.begin, chunk), end = at_most(seen.end, chunk + kChunk);
        if (begin >= end) continue;
        multiply(last - row, columns / kWidth, Left{tile.ds + begin * tile.score_stride + row, 1, tile.score_stride},
                 panel + static_cast<std::int64_t>(begin) * columns, columns, end - begin,
                 AddToRows{tile.dq + row, column, tile.head_dim});
      }
    }
  }
}

void attend_backward_tile(const BackwardTile& tile) {
  const auto range_of = [&](int key) {
    return union_of(tile.row_begin, tile.row_end, key, at_most(key + kRowBlock, tile.keys));
  };
  multiply_columns(tile.keys, tile.rows, tile.k_rows, tile.k_stride, tile.q_columns, tile.head_dim, tile.p, tile.score_stride,
                   range_of);
  multiply_columns(tile.keys, tile.rows, tile.v_rows, tile.v_stride, tile.d_out_columns, tile.head_dim_v, tile.ds,
                   tile.score_stride, range_of);
  for (int key = 0; key < tile.keys; ++key) gradient_row(tile, key);
  add_key_gradient(tile, tile.p, tile.d_out_panels, tile.head_dim_v, tile.dv, tile.dv_stride, range_of);
  add_key_gradient(tile, tile.ds, tile.q_panels, tile.head_dim, tile.dk, tile.dk_stride, range_of);
  add_query_gradient(tile);
}

using BFloat16 = Sixteen<Isa::load_bf16>;
using Float16 = Sixteen<Isa::load_f16>;

constexpr TileOps make_tile_ops() {
  return {kWidth,
          kPanel,
          {pack_columns<Float32>, pack_columns<BFloat16>, pack_columns<Float16>},
          {pack_panels<Float32>, pack_panels<BFloat16>, pack_panels<Float16>},
          {pack_rows<Float32>, pack_rows<BFloat16>, pack_rows<Float16>},
          attend_tile,
          attend_backward_tile};
}

}  // namespace
}  // namespace ringspan::kernels
