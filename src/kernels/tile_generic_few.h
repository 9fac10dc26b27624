// Part of tile_generic.h: few queries that all see every key of a tile. Queries lie along vectors, so that keys are the left
// operand of
//     s^T = k q^T        acc += p v        (p^T: [key][query])
// and maxima, exponentials and sums of all queries are taken together. Of few enough queries most of a vector would be empty:
// there it holds several depths of each (tile_generic_narrow.h), or scores are dot products along the head dimension.
#include "kernels/tile_generic_narrow.h"

namespace ringspan::kernels {
namespace {

constexpr int kDotRows = has_groups<Isa>() ? 2 : 4;

// Scores [row][key] of at most kDotRows queries, of keys [first, first + count).
inline void dot_scores(const ForwardTile& tile, const RowSource& source, const FewRows& keys, int first, int count) {
  const int depth = tile.dims.head_dim, bytes = tile.dims.dtype == 0 ? 4 : 2, lines = (depth * bytes + 63) / 64;
  FarLines far(source, first, bytes, kFarBytes);
  for (int key = 0; key < count; key += kWidth) {
    const int present = at_most(kWidth, count - key);
    for (int row = 0; row < tile.rows; ++row) {
      const float* const q = static_cast<const float*>(tile.q) + row * query_stride(tile.dims);
      Reg t[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        t[i] = Isa::zero();
        if (i >= present) continue;
        for (int line = 0; line < lines && row == 0; ++line) far.fetch<1>();
        const float* const k = keys.data + (key + i) * keys.stride;
        int e = 0;
        for (; e + kWidth <= depth; e += kWidth) t[i] = Isa::fma(Isa::load(k + e), Isa::load(q + e), t[i]);
        if (e < depth) t[i] = Isa::fma(Isa::load_partial(k + e, depth - e), Isa::load_partial(q + e, depth - e), t[i]);
      }
      Isa::transpose(t);
      for (int width = kWidth / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) t[i] += t[i + width];
      }
      Isa::store(static_cast<float*>(tile.work) + row * score_stride(tile.dims) + first + key, t[0]);  // there is room
    }
  }
}

inline void attend_dots(const ForwardTile& tile, const FloatRows& keys, const FloatRows& values) {
  keys.in_parts(kFewKeys, false,
                [&](const FewRows& here, int first, int count) { dot_scores(tile, keys.source(), here, first, count); });
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
  if (tile.task_rows <= kDotRows) return attend_dots(tile, keys, values);
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
