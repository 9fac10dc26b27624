// Part of tile_generic.h: few queries that all see every key of a tile. Queries lie along vectors, so that keys are the left
// operand of
//     s^T = k q^T        acc += p v        (p^T: [key][query])
// and maxima, exponentials and sums of all queries are taken together. Of few enough queries most of a vector would be empty:
// there it holds several depths of each (tile_generic_narrow.h), or scores are dot products along the head dimension.
#include "kernels/tile_generic_narrow.h"

namespace ringspan::kernels {
namespace {

constexpr int kDotRows = has_groups<Isa>() ? 2 : 4;

// Query `row` as its dot products with rows of the type take it: of bfloat16 even elements before odd ones, vector by vector.
template <typename Type>
inline void query_of_dots(const ForwardTile& tile, int row, float* out) {
  const float* const q = static_cast<const float*>(tile.q) + row * query_stride(tile.dims);
  const int depth = tile.dims.head_dim;
  int e = 0;
  if constexpr (has_halves<Type>()) {
    for (; e + 2 * kWidth <= depth; e += 2 * kWidth) {
      for (int i = 0; i < 2 * kWidth; ++i) out[e + i % 2 * kWidth + i / 2] = q[e + i];
    }
  }
  for (; e < depth; ++e) out[e] = q[e];
}

// Dot products of a query and kKeys rows, vector by vector.
template <typename Type, int kKeys>
RINGSPAN_INLINE void dot_block(const typename Type::Type* k, std::int64_t stride, const float* q, int depth, Reg* sums) {
  Reg sum[kKeys];
  RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) sum[i] = Isa::zero();
  int e = 0;
  if constexpr (has_halves<Type>()) {
    for (; e + 2 * kWidth <= depth; e += 2 * kWidth) {
      const Reg even = Isa::load(q + e), odd = Isa::load(q + e + kWidth);
      RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) {
        const Halves x = load_halves(k + i * stride + e);
        sum[i] = Isa::fma(x.odd, odd, Isa::fma(x.even, even, sum[i]));
      }
    }
  }
  for (; e + kWidth <= depth; e += kWidth) {
    const Reg y = Isa::load(q + e);
    RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) sum[i] = Isa::fma(Type::load(k + i * stride + e), y, sum[i]);
  }
  if (e < depth) {
    const Reg y = Isa::load_partial(q + e, depth - e);
    RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) sum[i] =
        Isa::fma(Type::load_partial(k + i * stride + e, depth - e), y, sum[i]);
  }
  RINGSPAN_UNROLL for (int i = 0; i < kKeys; ++i) sums[i] = sum[i];
}

// Scores [row][key] of at most kDotRows queries.
template <typename Type>
void dot_scores(const ForwardTile& tile, const RowSource& keys) {
  constexpr int kBytes = sizeof(typename Type::Type), kKeys = 4;
  const int depth = tile.dims.head_dim, lines = (depth * kBytes * kKeys + 63) / 64;
  float queries[kDotRows][kMaxHeadDim];
  for (int row = 0; row < tile.rows; ++row) query_of_dots<Type>(tile, row, queries[row]);
  FarLines far(keys, 0, kBytes, kFarBytes);
  const auto* k = static_cast<const typename Type::Type*>(keys.data);
  for (int key = 0; key < tile.keys; key += kWidth, k += kWidth * keys.stride) {
    const int present = at_most(kWidth, tile.keys - key);
    for (int row = 0; row < tile.rows; ++row) {
      Reg t[kWidth];
      int i = 0;
      for (; i + kKeys <= present; i += kKeys) {
        for (int line = 0; line < lines && row == 0; ++line) far.fetch<1>();
        dot_block<Type, kKeys>(k + i * keys.stride, keys.stride, queries[row], depth, t + i);
      }
      for (; i < present; ++i) dot_block<Type, 1>(k + i * keys.stride, keys.stride, queries[row], depth, t + i);
      for (; i < kWidth; ++i) t[i] = Isa::zero();
      Isa::transpose(t);
      for (int width = kWidth / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) t[j] += t[j + width];
      }
      Isa::store(static_cast<float*>(tile.work) + row * score_stride(tile.dims) + key, t[0]);  // there is room
    }
  }
}

inline void attend_dots(const ForwardTile& tile, const RowSource& keys, const FloatRows& values) {
  tile.dims.dtype == 0   ? dot_scores<Float32>(tile, keys)
  : tile.dims.dtype == 1 ? dot_scores<BFloat16>(tile, keys)
                         : dot_scores<Float16>(tile, keys);
  float shrink[kDotRows];
  const Range all{0, tile.keys};
  softmax_rows(tile, 0, tile.rows, &all, shrink);
  few_values(tile, values, Left{static_cast<const float*>(tile.work), score_stride(tile.dims), 1}, shrink);
}

// columns[e][query]: the packed queries, turned; absent ones are zero.
inline void turn_queries(const ForwardTile& tile, int vectors, float* columns) {
  const auto* q = static_cast<const float*>(tile.q);
  const std::int64_t stride = query_stride(tile.dims);
  for (int v = 0; v < vectors; ++v) {
    for (int e = 0; e < tile.dims.head_dim; e += kWidth) {
      const int elements = at_most(kWidth, tile.dims.head_dim - e);
      Reg t[kWidth];
      for (int r = 0; r < kWidth; ++r) {
        const int row = v * kWidth + r;
        t[r] = row < tile.rows ? Isa::load_partial(q + row * stride + e, elements) : Isa::zero();
      }
      Isa::transpose(t);
      for (int c = 0; c < elements; ++c) Isa::store(columns + (e + c) * vectors * kWidth + v * kWidth, t[c]);
    }
  }
}

// Room for the sums of kFewKeys keys at a time, beside so many vectors of queries; else kRowBlock.
constexpr bool has_room(int vectors) { return vectors <= kVectors / 2; }

// Scores s[key][query] of keys [first, first + count).
inline void few_scores(const ForwardTile& tile, const FewRows& keys, const float* columns, int vectors, float* s, int count) {
  const int depth = tile.dims.head_dim;
  const std::int64_t stride = vectors * kWidth;
  const Evenly ahead{tile.ahead};
  for (int first = 0; first < vectors; first += kVectors) {  // of queries
    const int here = at_most(kVectors, vectors - first);
    const auto left = [&](int key) { return Left{keys.data + key * keys.stride, keys.stride, 1}; };
    const auto store = [&](int key) { return Assign{s + key * stride + first * kWidth, stride}; };
    int key = 0;
    if (has_room(here)) {
      for (; key + kFewKeys <= count; key += kFewKeys) {
        here == 1
            ? multiply_block<kFewKeys, 1>(left(key), columns + first * kWidth, stride, depth, store(key), ahead)
            : multiply_block<kFewKeys, kVectors / 2>(left(key), columns + first * kWidth, stride, depth, store(key), ahead);
      }
    }
    multiply(count - key, here, left(key), columns + first * kWidth, stride, depth, store(key), ahead);
  }
}

// Scores s[key][query] become probabilities; shrink: e^(m - m').
inline void softmax_columns(const ForwardTile& tile, int vectors, float* s, float* shrink) {
  const std::int64_t stride = vectors * kWidth;
  const Reg cap = Isa::set1(tile.softcap), inverse = Isa::set1(tile.softcap > 0.0F ? 1.0F / tile.softcap : 0.0F);
  for (int v = 0; v < vectors; ++v) {
    float* const scores = s + v * kWidth;
    const int present = at_most(kWidth, tile.rows - v * kWidth);
    Reg top[2] = {Isa::set1(-kInf), Isa::set1(-kInf)};
    in_turns<2>(tile.keys, [&](int key, int way) {
      Reg x = Isa::load(scores + key * stride);
      if (tile.softcap > 0.0F) Isa::store(scores + key * stride, x = cap * tanh_of(x * inverse));
      top[way] = Isa::max(x, top[way]);
    });
    const Reg tile_m = Isa::max(top[0], top[1]);
    const Reg old_m = Isa::load_partial(tile.m + v * kWidth, present);
    const Reg new_m = tile_m > old_m ? tile_m : old_m;
    const Reg origin = new_m == Isa::set1(-kInf) ? Isa::zero() : new_m;  // no inf - inf
    const Reg factor = old_m == new_m ? Isa::set1(1.0F) : exp_of(old_m - new_m);
    Reg sum[2] = {Isa::zero(), Isa::zero()};
    in_turns<2>(tile.keys, [&](int key, int way) {
      const Reg p = exp_of(Isa::load(scores + key * stride) - origin);
      Isa::store(scores + key * stride, p);
      sum[way] += p;
    });
    Isa::store(shrink + v * kWidth, factor);
    Isa::store_partial(tile.m + v * kWidth, new_m, present);
    Isa::store_partial(tile.l + v * kWidth, Isa::fma(Isa::load_partial(tile.l + v * kWidth, present), factor, sum[0] + sum[1]),
                       present);
  }
}

// Depths of the register tiles of few_scores, and of few_values where it does not fetch values itself.
inline std::int64_t depths_of_few(const ForwardTile& tile, int vectors) {
  int of_scores = 0;
  for (int first = 0; first < vectors; first += kVectors)
    of_scores += tile.keys * tile.dims.head_dim / (has_room(at_most(kVectors, vectors - first)) ? kFewKeys : kRowBlock);
  const int blocks = (tile.rows + kRowBlock - 1) / kRowBlock, panels = (tile.dims.head_dim_v + kPanel - 1) / kPanel;
  return of_scores + (values_are_in_place(tile) ? 0 : blocks * panels * tile.keys);
}

inline void attend_vectors(const ForwardTile& tile, const FloatRows& keys, const FloatRows& values) {
  const int vectors = (tile.rows + kWidth - 1) / kWidth;
  const std::int64_t stride = vectors * kWidth;
  auto* const columns = static_cast<float*>(tile.work);
  float* const scores = columns + tile.dims.head_dim * stride;
  turn_queries(tile, vectors, columns);
  if (tile.ahead != nullptr && values_are_in_place(tile)) tile.ahead->rows[Ahead::kValues].rows = 0;
  set_pace(tile.ahead, depths_of_few(tile, vectors));
  keys.in_parts(kFewKeys, false, [&](const FewRows& here, int first, int count) {
    few_scores(tile, here, columns, vectors, scores + first * stride, count);
  });
  float shrink[(kFewRows + kWidth - 1) / kWidth * kWidth];
  softmax_columns(tile, vectors, scores, shrink);
  few_values(tile, values, Left{scores, 1, stride}, shrink);
}

// How, the task decides, not the rows of this call: bits differ.
void attend_few(const ForwardTile& tile, const RowSource& k, const RowSource& v, void* k_space, void* v_space) {
  const FloatRows keys(tile.dims, k, k_space, false), values(tile.dims, v, v_space, true);
  if (tile.task_rows <= kDotRows) return attend_dots(tile, k, values);
  if constexpr (has_groups<Isa>()) {
    if (tile.dims.head_dim % kDepths == 0) {
      if (tile.task_rows <= 4) return attend_narrow<1, Isa>(tile, keys, values);
      if constexpr (kVectors >= 4) {  // registers for sums of eight
        if (tile.task_rows <= 8) return attend_narrow<2, Isa>(tile, keys, values);
      }
    }
  }
  attend_vectors(tile, keys, values);
}

}  // namespace
}  // namespace ringspan::kernels
