// Part of tile_generic.h: queries that fill a half or a quarter of a vector. A vector holds kDepths depths of each:
//     (q[e], ..., q[e + kDepths - 1]) of all queries, beside the same depths of a key, repeated
// whose sums are one score per query, of kDepths keys together a vector again.
#include "kernels/tile_generic_rows.h"
#include "kernels/tile_narrow.h"

namespace ringspan::kernels {
namespace {

template <typename Set>
constexpr bool has_groups() {
  return requires(const float* p) { Set::template set_group<2>(p); };
}

// columns[e / kDepths][query][e % kDepths] of the packed queries; absent ones are zero.
template <int kDepths>
void turn_narrow(const ForwardTile& tile, float* columns) {
  constexpr int kQueries = kWidth / kDepths;
  for (int row = 0; row < kQueries; ++row) {
    const float* const q = static_cast<const float*>(tile.q) + row * query_stride(tile.dims);
    for (int e = 0; e < tile.dims.head_dim; e += kDepths) {
      for (int i = 0; i < kDepths; ++i) columns[e * kQueries + row * kDepths + i] = row < tile.rows ? q[e + i] : 0.0F;
    }
  }
}

// Scores s[key][query] of kFewKeys keys. kBytes: of an element, where it is fetched from.
template <int kDepths, int kBytes, typename Set>
void narrow_block(const ForwardTile& tile, const FewRows& keys, FarLines far, const float* columns, float* s) {
  constexpr int kQueries = kWidth / kDepths, kRows = 3, kGroups = kFewKeys / kRows;  // few pointers, which stay in registers
  const int depth = tile.dims.head_dim;
  const std::int64_t stride = keys.stride;
  const float* k[kGroups];
  RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] = keys.data + g * kRows * stride;
  Reg sum[kFewKeys];
  RINGSPAN_UNROLL for (int i = 0; i < kFewKeys; ++i) sum[i] = Isa::zero();
  const auto step = [&](int e) __attribute__((always_inline)) {
    const Reg q = Isa::load(columns + e * kQueries);
    RINGSPAN_UNROLL for (int i = 0; i < kFewKeys; ++i) {
      sum[i] = Isa::fma(Set::template set_group<kDepths>(k[i / kRows] + i % kRows * stride), q, sum[i]);
    }
    RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] += kDepths;
  };
  constexpr int kSteps = 4, kLines = kFewKeys * kSteps * kDepths * kBytes / 64;
  int e = 0;
  for (; e + kSteps * kDepths <= depth; e += kSteps * kDepths) {
    if (far.strides()) far.fetch<kLines>();
    RINGSPAN_UNROLL for (int i = 0; i < kSteps; ++i) {
      if (!far.strides()) i % 2 == 0 ? far.fetch<kLines / 4>() : far.fetch<(kLines + 1) / 2 - kLines / 4>();
      step(e + i * kDepths);
    }
  }
  for (; e < depth; e += kDepths) far.fetch<(kLines + kSteps - 1) / kSteps>(), step(e);
  const Reg cap = Isa::set1(tile.softcap), inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  RINGSPAN_UNROLL for (int i = 0; i < kFewKeys; i += kDepths) {
    Reg group[kDepths];
    RINGSPAN_UNROLL for (int j = 0; j < kDepths; ++j) group[j] = sum[i + j];
    const Reg x = Set::add_groups(group);
    Isa::store(s + i * kQueries, tile.softcap > 0.0F ? cap * tanh_of(x * inverse) : x);
  }
}

// Of `count` keys from `first` on, which are `keys`, and -inf up to a whole vector.
template <int kDepths, int kBytes, typename Set>
void narrow_scores(const ForwardTile& tile, const FewRows& keys, const RowSource& source, const float* columns, float* s,
                   int first, int count) {
  constexpr int kQueries = kWidth / kDepths;
  int key = 0;
  for (; key + kFewKeys <= count; key += kFewKeys) {
    narrow_block<kDepths, kBytes, Set>(tile, {keys.data + key * keys.stride, keys.stride},
                                       FarLines(source, first + key, kBytes), columns, s + key * kQueries);
  }
  if (key == count) return;
  const int depth = tile.dims.head_dim, rest = count - key;
  float copy[kFewKeys * kMaxHeadDim], scores[kFewKeys * kQueries];
  for (int i = 0; i < kFewKeys; ++i) {
    const float* const row = keys.data + (key + at_most(i, rest - 1)) * keys.stride;
    for (int e = 0; e < depth; ++e) copy[i * depth + e] = row[e];
  }
  narrow_block<kDepths, kBytes, Set>(tile, {copy, depth}, FarLines(source, first + key, kBytes), columns, scores);
  for (int i = 0; i < up(rest * kQueries); ++i) s[key * kQueries + i] = i < rest * kQueries ? scores[i] : -kInf;
}

// Scores s[key][query] become probabilities; shrink: e^(m - m').
template <int kDepths>
void softmax_narrow(const ForwardTile& tile, float* s, float* shrink) {
  const int size = up(tile.keys * (kWidth / kDepths));
  NarrowStates<kDepths> states(tile, s, size);
  const Reg origin = states.origin();
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  in_turns<2>(size / kWidth, [&](int i, int way) {
    const Reg p = exp_of(Isa::load(s + i * kWidth) - origin);
    Isa::store(s + i * kWidth, p);
    sum[way] += p;
  });
  states.settle(tile, sum[0] + sum[1], shrink);
}

template <int kDepths, typename Set>
void attend_narrow(const ForwardTile& tile, const FloatRows& keys, const FloatRows& values) {
  constexpr int kQueries = kWidth / kDepths;
  auto* const columns = static_cast<float*>(tile.work);
  float* const scores = columns + tile.dims.head_dim * kQueries;
  turn_narrow<kDepths>(tile, columns);
  keys.in_parts(false, [&](const FewRows& here, int first, int count) {
    float* const to = scores + first * kQueries;
    tile.dims.dtype == 0 ? narrow_scores<kDepths, 4, Set>(tile, here, keys.source(), columns, to, first, count)
                         : narrow_scores<kDepths, 2, Set>(tile, here, keys.source(), columns, to, first, count);
  });
  float shrink[kQueries];
  softmax_narrow<kDepths>(tile, scores, shrink);
  few_values(tile, values, Left{scores, 1, kQueries}, shrink);
}

}  // namespace
}  // namespace ringspan::kernels
