// The forward tile over pairs of bfloat16; see tile_pairs.h. 32 queries at a time: scores, softmax, probabilities rounded to
// planes, values.
#pragma once

#include "kernels/tile_pairs_product.h"

namespace ringspan::kernels {
namespace {

constexpr std::int64_t kScoreStride = kKeyTile + kScorePad;
constexpr std::int64_t kProbabilityStride = kKeyTile + kRowPad;

// Where everything of a forward tile lies.
template <typename Type>
struct ForwardParts {
  static constexpr int kPlanes = Type::kPlanes;
  std::int64_t q_stride, q_plane, k_panel, k_plane, v_panel, v_plane, p_plane, sum_stride;
  explicit ForwardParts(const TileDims& dims)
      : q_stride(up32(dims.head_dim)),
        q_plane(kQueryTile * q_stride),
        k_panel(q_stride * kPanelColumns),
        k_plane(kKeyTile / kPanelColumns * k_panel),
        v_panel(kKeyTile * kPanelColumns + kPanelPad),
        v_plane(up16(dims.head_dim_v) / kPanelColumns * v_panel),
        p_plane(kPairRows * kProbabilityStride),
        sum_stride(up16(dims.head_dim_v) + kScorePad) {}

  ForwardBytes bytes() const {
    return {to_line(2 * kPlanes * k_plane), to_line(2 * kPlanes * v_plane), to_line(2 * kPlanes * q_plane),
            to_line(4 * kPairRows * kScoreStride + 2 * kPlanes * p_plane + 4 * kPairRows * sum_stride +
                    2 * kPlanes * kKeyTile * kPanelColumns)};
  }
  static float* scores(const ForwardTile& tile) { return static_cast<float*>(tile.work); }
  static Word* probabilities(const ForwardTile& tile) {
    return reinterpret_cast<Word*>(scores(tile) + kPairRows * kScoreStride);
  }
  float* sums(const ForwardTile& tile) const { return reinterpret_cast<float*>(probabilities(tile) + kPlanes * p_plane); }
  Word* copy(const ForwardTile& tile) const { return reinterpret_cast<Word*>(sums(tile) + kPairRows * sum_stride); }
};

// Scores become what the formula says, in place: scale, softcap, ALiBi.
inline void finish_scores(const ForwardTile& tile, int row, float* s, int first, int last) {
  const Reg scale = Isa::set1(tile.scale);
  for (int c = first; c < last; c += kWidth) Isa::store(s + c, Isa::load(s + c) * scale);
  if (tile.softcap > 0.0F) {
    const Reg cap = Isa::set1(tile.softcap), inverse = Isa::set1(1.0F / tile.softcap);
    for (int c = first; c < last; c += kWidth) Isa::store(s + c, cap * tanh_of(Isa::load(s + c) * inverse));
  }
  if (tile.slope != nullptr)
    subtract_alibi(s, tile.begin[row], tile.end[row], *tile.slope, tile.distance[row], tile.distance_step);
}

inline float largest_of(const float* s, int first, int last) {
  Reg top[2] = {Isa::set1(-kInf), Isa::set1(-kInf)};
  for (int c = first; c < last; c += 2 * kWidth) {  // max(x, top) is top where x is NaN
    top[0] = Isa::max(Isa::load(s + c), top[0]);
    top[1] = Isa::max(Isa::load(s + c + kWidth), top[1]);
  }
  return Isa::reduce_max(Isa::max(top[0], top[1]));
}

// 32 probabilities, rounded to planes.
template <typename Type>
RINGSPAN_INLINE void store_probabilities(Word* p, std::int64_t plane, Reg low, Reg high) {
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_storeu_si512(p, rounded);
  if constexpr (Type::kPlanes == 2) {
    const Reg low_rest = low - widen(_mm512_castsi512_si256(rounded));
    const Reg high_rest = high - widen(_mm512_extracti64x4_epi64(rounded, 1));
    _mm512_storeu_si512(p + plane, (__m512i)_mm512_cvtne2ps_pbh(high_rest, low_rest));
  }
}

// p = 2^(s factor - shift), their sum; factors of dropout come after the sum.
template <typename Type, bool kDropout>
RINGSPAN_INLINE float exponentiate(const float* s, int first, int last, float factor, float shift, Word* p, std::int64_t plane,
                                   const float* factors, int begin, int end) {
  const Reg scale = Isa::set1(factor), origin = Isa::set1(-shift);
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  for (int c = first; c < last; c += 2 * kWidth) {
    Reg low = exp2_of(Isa::fma(Isa::load(s + c), scale, origin));
    Reg high = exp2_of(Isa::fma(Isa::load(s + c + kWidth), scale, origin));
    sum[0] += low;
    sum[1] += high;
    if constexpr (kDropout) {
      const __mmask16 low_seen = first_of(end - c) & static_cast<__mmask16>(~first_of(begin - c));
      const __mmask16 high_seen = first_of(end - c - kWidth) & static_cast<__mmask16>(~first_of(begin - c - kWidth));
      low = low * _mm512_maskz_loadu_ps(low_seen, factors + c);
      high = high * _mm512_maskz_loadu_ps(high_seen, factors + c + kWidth);
    }
    store_probabilities<Type>(p + c, plane, low, high);
  }
  return Isa::reduce_add(sum[0] + sum[1]);
}

template <typename Type>
void clear_probabilities(Word* p, std::int64_t plane, int begin, int end) {
  for (int n = 0; n < Type::kPlanes; ++n) {
    for (int c = begin; c < end; c += 32) _mm512_storeu_si512(p + n * plane + c, _mm512_setzero_si512());
  }
}

// Scores of one row (s) become planes of probabilities relative to the new maximum (p); zero in the rest of `range`, whose
// ends are multiples of 32. Returns e^(m - m').
template <typename Type>
float softmax_pairs(const ForwardTile& tile, int row, Range range, float* s, Word* p, std::int64_t plane) {
  const int begin = tile.begin[row], end = tile.end[row];
  if (begin >= end) {
    clear_probabilities<Type>(p, plane, range.begin, range.end);
    return 1.0F;
  }
  const int first = down32(begin), last = up32(end);
  // Scale goes into the exponent, unless something comes between them or it turns -inf over.
  const bool plain = tile.scale > 0.0F && tile.softcap <= 0.0F && tile.slope == nullptr;
  if (!plain) finish_scores(tile, row, s, first, last);
  fill(s, first, begin, -kInf);
  fill(s, end, last, -kInf);
  clear_probabilities<Type>(p, plane, range.begin, first);
  clear_probabilities<Type>(p, plane, last, range.end);

  const float scale = plain ? tile.scale : 1.0F;
  const float old_m = tile.m[row];
  const float tile_m = largest_of(s, first, last) * scale;
  const float new_m = tile_m > old_m ? tile_m : old_m;
  const float origin = new_m == -kInf ? 0.0F : new_m;  // no inf - inf while the row has only scores of -inf
  float sum;
  if (tile.factors != nullptr) {
    sum = exponentiate<Type, true>(s, first, last, scale * kLog2e, origin * kLog2e, p, plane,
                                   tile.factors + row * tile.factor_stride, begin, end);
  } else {
    sum = exponentiate<Type, false>(s, first, last, scale * kLog2e, origin * kLog2e, p, plane, nullptr, begin, end);
  }
  float shrink = 1.0F;
  if (old_m != new_m) {
    float lanes[kWidth];
    Isa::store(lanes, exp_of(Isa::set1(old_m - new_m)));
    shrink = lanes[0];
  }
  tile.m[row] = new_m;
  tile.l[row] = tile.l[row] * shrink + sum;
  return shrink;
}

// acc = acc shrink + sum; the added zero turns -0 into +0, so that a row is the same whatever shares its tile.
inline void shrink_and_add(float* acc, float shrink, const float* sum, int width) {
  for (int e = 0; e < width; e += kWidth)
    Isa::store(acc + e, Isa::fma(Isa::load(acc + e), Isa::set1(shrink), Isa::load(sum + e)) + Isa::zero());
}

template <typename Type>
void attend_pairs(const ForwardTile& tile) {
  constexpr int kPlanes = Type::kPlanes;
  const Dot::Session session;
  const ForwardParts<Type> parts(tile.dims);
  const Right k{static_cast<const Word*>(tile.k), parts.k_panel, parts.k_plane};
  const Right v{static_cast<const Word*>(tile.v), parts.v_panel, parts.v_plane};
  float* const scores = parts.scores(tile);
  Word* const probabilities = parts.probabilities(tile);
  float* const sums = parts.sums(tile);
  const int depth = up32(tile.dims.head_dim), width = up16(tile.dims.head_dim_v);
  const bool repair = kPlanes > 1 && !(tile.q_finite && tile.k_finite);
  for (int first = 0; first < tile.rows; first += kPairRows) {
    const int rows = at_most(kPairRows, tile.rows - first);
    Range range = union_of(tile.begin, tile.end, first, first + rows);
    if (range.empty()) continue;
    range = {down32(range.begin), up32(range.end)};
    const int columns = range.end - range.begin;
    const Left q{static_cast<const Word*>(tile.q) + first * parts.q_stride, parts.q_stride, parts.q_plane};
    multiply_pairs<AllProducts<kPlanes>>(rows, columns, depth, q, k.at(range.begin, 0), scores + range.begin, kScoreStride,
                                         false);
    if (repair) repair_products<kPlanes>(rows, columns, depth, q, k.at(range.begin, 0), scores + range.begin, kScoreStride);
    float shrink[kPairRows];
    for (int r = 0; r < rows; ++r) {
      shrink[r] = softmax_pairs<Type>(tile, first + r, range, scores + r * kScoreStride, probabilities + r * kProbabilityStride,
                                      parts.p_plane);
    }
    const Left p{probabilities + range.begin, kProbabilityStride, parts.p_plane};
    if (tile.v_finite) {
      multiply_pairs<LargeProducts<kPlanes>>(rows, width, columns, p, v.at(0, range.begin), sums, parts.sum_stride, false);
    } else {
      multiply_visible<kPlanes>(rows, width, columns, p, v.at(0, range.begin), sums, parts.sum_stride, tile.begin + first,
                                tile.end + first, range.begin, parts.copy(tile));
    }
    for (int r = 0; r < rows; ++r) {
      if (tile.begin[first + r] >= tile.end[first + r]) continue;
      shrink_and_add(tile.acc + (first + r) * tile.acc_stride, shrink[r], sums + r * parts.sum_stride, width);
    }
  }
}

template <typename Type>
bool pack_keys_pairs(const TileDims& dims, void* out, const RowSource& k) {
  const ForwardParts<Type> parts(dims);
  return pack_right_columns<Type>(static_cast<Word*>(out), parts.k_panel, parts.k_plane, k);
}
template <typename Type>
bool pack_values_pairs(const TileDims& dims, void* out, const RowSource& v) {
  const ForwardParts<Type> parts(dims);
  return pack_right_rows<Type>(static_cast<Word*>(out), parts.v_panel, parts.v_plane, v);
}
// Scale would be rounded here; it goes into the scores.
template <typename Type>
bool pack_queries_pairs(const TileDims& dims, void* out, const RowSource& q, float) {
  const ForwardParts<Type> parts(dims);
  return pack_left<Type>(static_cast<Word*>(out), parts.q_stride, parts.q_plane, q);
}
template <typename Type>
ForwardBytes forward_bytes_pairs(const TileDims& dims) {
  return ForwardParts<Type>(dims).bytes();
}

}  // namespace
}  // namespace ringspan::kernels
