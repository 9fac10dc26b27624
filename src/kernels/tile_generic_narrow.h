// Part of tile_generic.h: queries that fill a half or a quarter of a vector. A vector holds kDepths depths of each of four:
//     (q[e], ..., q[e + kDepths - 1]) of these queries, beside the same depths of a key, repeated
// whose sums are one score per query, of kDepths keys together a vector again. kSets such vectors share what is loaded of a
// key.
#include "kernels/tile_generic_rows.h"
#include "kernels/tile_narrow.h"

namespace ringspan::kernels {
namespace {

template <typename Set>
constexpr bool has_groups() {
  return requires(const float* p) { Set::set_group(p); };
}

constexpr int kDepths = kWidth / 4;

// Keys of a block: chains that hide the latency, and of few rows.
template <int kSets>
constexpr int narrow_keys() {
  return kSets == 1 ? 12 : 16 / kSets;
}

// Depths of a step. Of bfloat16 as many as a group of floats has room for: the even ones, then the odd ones.
template <typename Type>
constexpr int step_depths() {
  return has_halves<Type>() ? 2 * kDepths : kDepths;
}

// columns[e / kDepths][query][e % kDepths] of the packed queries, of bfloat16 [e / (2 kDepths)][e % 2][query][e / 2 % kDepths];
// absent ones are zero.
template <int kSets, typename Type>
void turn_narrow(const ForwardTile& tile, float* columns) {
  typedef float Group __attribute__((vector_size(kDepths * sizeof(float)), aligned(4), may_alias));
  typedef std::int32_t Lanes __attribute__((vector_size(kDepths * sizeof(float))));
  constexpr int kQueries = 4 * kSets, kStep = step_depths<Type>();
  Lanes lanes;
  for (int i = 0; i < kDepths; ++i) lanes[i] = 2 * i;
  for (int row = 0; row < kQueries; ++row) {
    const float* const q = static_cast<const float*>(tile.q) + row * query_stride(tile.dims);
    const bool is_there = row < tile.rows;
    float* out = columns + row * kDepths;
    for (int e = 0; e < tile.dims.head_dim; e += kStep, out += kStep * kQueries) {
      const auto group = [&](int i) { return is_there ? *reinterpret_cast<const Group*>(q + e + i * kDepths) : Group{}; };
      if constexpr (has_halves<Type>()) {
        const Group low = group(0), high = group(1);
        *reinterpret_cast<Group*>(out) = __builtin_shuffle(low, high, lanes);
        *reinterpret_cast<Group*>(out + kDepths * kQueries) = __builtin_shuffle(low, high, lanes + 1);
      } else {
        *reinterpret_cast<Group*>(out) = group(0);
      }
    }
  }
}

// Scores s[key][query] of a block of keys. kBytes: of an element of what is fetched, of which keys may be copies.
template <int kSets, typename Type, int kBytes, typename Set>
void narrow_block(const ForwardTile& tile, const RowsOf<Type>& keys, FarLines* next, const float* columns, float* s) {
  constexpr int kKeys = narrow_keys<kSets>(), kQueries = 4 * kSets;
  constexpr int kGroups = kSets == 1 ? 4 : 2, kRows = kKeys / kGroups;  // few pointers, which stay in registers
  constexpr int kWide = step_depths<Type>(), kHalf = kWide / kDepths;
  const int depth = tile.dims.head_dim;
  const std::int64_t stride = keys.stride;
  const typename Type::Type* k[kGroups];
  RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] = keys.data + g * kRows * stride;
  Reg sum[kSets][kKeys];
  RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) { RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) sum[n][i] = Isa::zero(); }
  const auto step = [&](int e) __attribute__((always_inline)) {
    Reg q[kHalf][kSets];
    RINGSPAN_UNROLL for (int h = 0; h < kHalf; ++h) {
      RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) q[h][n] = Isa::load(columns + (e + h * kDepths) * kQueries + n * kWidth);
    }
    RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) {
      const Reg x = Set::set_group(reinterpret_cast<const float*>(k[i / kRows] + i % kRows * stride));
      if constexpr (has_halves<Type>()) {
        const Halves both = halves_of(x);
        RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) sum[n][i] = Isa::fma(both.even, q[0][n], sum[n][i]);
        RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) sum[n][i] = Isa::fma(both.odd, q[1][n], sum[n][i]);
      } else {
        RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) sum[n][i] = Isa::fma(x, q[0][n], sum[n][i]);
      }
    }
    RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) k[g] += kWide;
  };
  FarLines far = *next;  // a copy, which stays in registers
  constexpr int kSteps = 4 / kHalf, kLines = kKeys * kSteps * kWide * kBytes / 64;
  int e = 0;
  for (; e + kSteps * kWide <= depth; e += kSteps * kWide) {
    if (far.strides()) far.fetch<kLines>();
    RINGSPAN_UNROLL for (int i = 0; i < kSteps; ++i) {
      RINGSPAN_UNROLL for (int line = i * kLines / kSteps; line < (i + 1) * kLines / kSteps; ++line) {
        if (!far.strides()) far.fetch<1>();
      }
      step(e + i * kWide);
    }
  }
  for (; e < depth; e += kWide) far.fetch<(kLines + kSteps - 1) / kSteps>(), step(e);
  *next = far;
  const Reg cap = Isa::set1(tile.softcap), inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  RINGSPAN_UNROLL for (int i = 0; i < kKeys; i += kDepths) {
    Reg group[kSets][kDepths], x[kSets];
    RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n) {
      RINGSPAN_UNROLL for (int j = 0; j < kDepths; ++j) group[n][j] = sum[n][i + j];
    }
    Set::add_groups(group, x);
    RINGSPAN_UNROLL for (int n = 0; n < kSets; ++n)
        Isa::store(s + i * kQueries + n * kWidth, tile.softcap > 0.0F ? cap * tanh_of(x[n] * inverse) : x[n]);
  }
}

// Of `count` keys from `first` on, which are `keys`, and -inf up to a whole vector.
template <int kSets, typename Type, int kBytes, typename Set>
void narrow_scores(const ForwardTile& tile, const RowsOf<Type>& keys, const RowSource& source, const float* columns, float* s,
                   int first, int count) {
  constexpr int kKeys = narrow_keys<kSets>(), kQueries = 4 * kSets;
  FarLines far(source, first, kBytes, kFarBytes);
  int key = 0;
  for (; key + kKeys <= count; key += kKeys)
    narrow_block<kSets, Type, kBytes, Set>(tile, {keys.data + key * keys.stride, keys.stride}, &far, columns,
                                           s + key * kQueries);
  if (key == count) return;
  const int depth = tile.dims.head_dim, rest = count - key;
  typename Type::Type copy[kKeys * kMaxHeadDim];
  float scores[kKeys * kQueries];
  for (int i = 0; i < kKeys; ++i) {
    const auto* const row = keys.data + (key + at_most(i, rest - 1)) * keys.stride;
    for (int e = 0; e < depth; ++e) copy[i * depth + e] = row[e];
  }
  narrow_block<kSets, Type, kBytes, Set>(tile, {copy, depth}, &far, columns, scores);
  for (int i = 0; i < up(rest * kQueries); ++i) s[key * kQueries + i] = i < rest * kQueries ? scores[i] : -kInf;
}

// Scores s[key][query] become probabilities; shrink: e^(m - m').
template <int kSets>
void softmax_narrow(const ForwardTile& tile, float* s, float* shrink) {
  const int size = up(tile.keys * 4 * kSets);
  NarrowStates<4 * kSets> states(tile, s, size, 1.0F);
  const Reg origin = states.origin();
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  in_turns<2>(size / kWidth, [&](int i, int way) {
    const Reg p = exp_of(Isa::load(s + i * kWidth) - origin);
    Isa::store(s + i * kWidth, p);
    sum[way] += p;
  });
  states.settle(tile, sum[0] + sum[1], shrink);
}

// Keys of bfloat16 are read where they lie, those of float16 in float32 copies.
template <int kSets, typename Set>
void attend_narrow(const ForwardTile& tile, const FloatRows& keys, const FloatRows& values) {
  constexpr int kQueries = 4 * kSets;
  auto* const columns = static_cast<float*>(tile.work);
  float* const scores = columns + tile.dims.head_dim * kQueries;
  if (tile.dims.dtype == 1 && tile.dims.head_dim % step_depths<BFloat16>() == 0) {
    const RowSource& source = keys.source();
    turn_narrow<kSets, BFloat16>(tile, columns);
    narrow_scores<kSets, BFloat16, 2, Set>(tile, {static_cast<const std::uint16_t*>(source.data), source.stride}, source,
                                           columns, scores, 0, source.rows);
  } else {
    turn_narrow<kSets, Float32>(tile, columns);
    keys.in_parts(narrow_keys<kSets>(), false, [&](const FewRows& here, int first, int count) {
      float* const to = scores + first * kQueries;
      tile.dims.dtype == 0 ? narrow_scores<kSets, Float32, 4, Set>(tile, here, keys.source(), columns, to, first, count)
                           : narrow_scores<kSets, Float32, 2, Set>(tile, here, keys.source(), columns, to, first, count);
    });
  }
  float shrink[kQueries];
  softmax_narrow<kSets>(tile, scores, shrink);
  few_values(tile, values, Left{scores, 1, kQueries}, shrink);
}

}  // namespace
}  // namespace ringspan::kernels
