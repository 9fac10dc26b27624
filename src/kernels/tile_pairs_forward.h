// The forward tile over pairs of bfloat16; see tile_pairs.h. In blocks of 32 queries: scores, softmax, probabilities rounded to
// planes, values.
#pragma once

#include "kernels/tile_pairs_product.h"

namespace ringspan::kernels {
namespace {

// With more keys to a tile a row's maximum, sum and state are settled less often, but scores leave the first cache: measured,
// twice as many pay in bfloat16 from a depth of 64 on.
TileSizes forward_sizes_pairs(const TileDims& dims) {
  const int depth = up32(dims.head_dim);
  const int keys = dims.dtype == kBFloat16Type && depth >= 64 ? 1024 : 512;
  return {{192, keys}, {kPairRows, 32}, {kFewRows, 64}, {kMaxQueryTile, kMaxKeyTile}};
}

constexpr std::int64_t score_stride(const TileDims& dims) { return dims.tile.keys + kScorePad; }
constexpr std::int64_t probability_stride(const TileDims& dims) { return dims.tile.keys + kRowPad; }

// Where everything of a forward tile lies.
template <typename Type>
struct ForwardParts {
  static constexpr int kPlanes = Type::kPlanes;
  std::int64_t keys, q_stride, q_plane, k_panel, k_plane, v_panel, v_plane, s_stride, p_stride, p_plane, sum_stride;
  explicit ForwardParts(const TileDims& dims)
      : keys(dims.tile.keys),
        q_stride(up32(dims.head_dim)),
        q_plane(dims.tile.queries * q_stride),
        k_panel(q_stride * kPanelColumns),
        k_plane(keys / kPanelColumns * k_panel),
        v_panel(keys * kPanelColumns + kPanelPad),
        v_plane(up16(dims.head_dim_v) / kPanelColumns * v_panel),
        s_stride(score_stride(dims)),
        p_stride(probability_stride(dims)),
        p_plane(kPairRows * p_stride),
        sum_stride(up16(dims.head_dim_v) + kScorePad) {}

  ForwardBytes bytes() const {
    return {to_line(2 * kPlanes * k_plane), to_line(2 * kPlanes * v_plane), to_line(2 * kPlanes * q_plane),
            to_line(4 * kPairRows * s_stride + 2 * kPlanes * p_plane + 4 * kPairRows * sum_stride +
                    2 * kPlanes * keys * kPanelColumns + 2 * kPairRows * q_stride)};
  }
  static float* scores(const ForwardTile& tile) { return static_cast<float*>(tile.work); }
  Word* probabilities(const ForwardTile& tile) const { return reinterpret_cast<Word*>(scores(tile) + kPairRows * s_stride); }
  float* sums(const ForwardTile& tile) const { return reinterpret_cast<float*>(probabilities(tile) + kPlanes * p_plane); }
  Word* copy(const ForwardTile& tile) const { return reinterpret_cast<Word*>(sums(tile) + kPairRows * sum_stride); }
  Word* turned(const ForwardTile& tile) const {
    return copy(tile) + kPlanes * keys * kPanelColumns;
  }  // of attend_few_pairs: queries
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

// Scores [begin, end), fewer than 32 of a run of 32 that begins or ends there, become -inf.
RINGSPAN_INLINE void hide(float* s, int begin, int end) {
  for (int c = begin & -kWidth; c < end; c += kWidth) {
    const __mmask16 hidden = first_of(end - c) & static_cast<__mmask16>(~first_of(begin - c));
    Isa::store(s + c, _mm512_mask_mov_ps(Isa::load(s + c), hidden, Isa::set1(-kInf)));
  }
}

// Per lane of a row of scores; max(x, top) is top where x is NaN.
RINGSPAN_INLINE Reg largest_of(const float* s, int first, int last) {
  Reg top[2] = {Isa::set1(-kInf), Isa::set1(-kInf)};
  for (int c = first; c < last; c += 2 * kWidth) {
    top[0] = Isa::max(Isa::load(s + c), top[0]);
    top[1] = Isa::max(Isa::load(s + c + kWidth), top[1]);
  }
  return Isa::max(top[0], top[1]);
}

// 32 probabilities, rounded to planes: in their order where sums are vectors, otherwise halves side by side.
template <typename Type>
RINGSPAN_INLINE void store_probabilities(Word* p, std::int64_t plane, Reg low, Reg high) {
  if constexpr (Dot::kInRegisters) {
    static_assert(Type::kPlanes == 1);
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  } else {
    store_side_by_side<Type>(low, high, p, plane);
  }
}

// The exponents s scale log2e - m log2e are differences of products that are rounded apart: of a score of 1e9 by more than 2^x
// has room for, even at the maximum itself. From here on, where they differ by some hundredths, products are subtracted first.
constexpr float kLargeMaximum = 1e5F;

// `count` vectors of scores, `stride` apart, become (s scale - m) / scale where m is large, 0 exactly at the maximum, so that
// their exponents have no origin; others stay. s scale is rounded by itself, as in m; a multiply-add would not.
__attribute__((noinline)) Reg subtract_large(float* s, int count, std::int64_t stride, float scale, Reg m, Reg origin) {
  const Reg size = _mm512_abs_ps(m), factor = Isa::set1(scale);
  const __mmask16 large =
      _mm512_cmp_ps_mask(size, Isa::set1(kLargeMaximum), _CMP_GT_OQ) & _mm512_cmp_ps_mask(size, Isa::set1(kInf), _CMP_LT_OQ);
  for (int i = 0; large != 0 && i < count; ++i, s += stride) {
    const Reg product = _mm512_mul_round_ps(Isa::load(s), factor, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm512_mask_storeu_ps(s, large, (product - m) / factor);
  }
  return _mm512_mask_mov_ps(origin, large, Isa::zero());
}

// What is added to the exponents s scale log2e of rows whose maxima are m; subtract(origin) where any of these is large.
template <typename Subtract>
RINGSPAN_INLINE Reg origin_of(Reg m, const Subtract& subtract) {
  // No inf - inf while a row has only scores of -inf.
  const Reg finite = m == Isa::set1(-kInf) ? Isa::zero() : m;
  const Reg origin = finite * Isa::set1(-kLog2e);
  const __mmask16 above = _mm512_cmp_ps_mask(_mm512_abs_ps(finite), Isa::set1(kLargeMaximum), _CMP_GT_OQ);
  return __builtin_expect(above != 0, 0) ? subtract(origin) : origin;
}
// Of `count` vectors of scores, each of as many rows as m.
RINGSPAN_INLINE Reg origin_of(float* s, int count, std::int64_t stride, float scale, Reg m) {
  return origin_of(m, [&](Reg origin) { return subtract_large(s, count, stride, scale, m, origin); });
}

// use(c, p) of p = 2^exponent(c), kRun vectors, for c = first, first + kRun, ... of [first, last) in vectors; fewer than two
// runs are left out. Returns where it ended. Step by step beside the runs before and after: each step waits for the one before,
// and of runs that follow each other a processor looks ahead to few.
constexpr int kRun = 4;
template <typename Exponent, typename Use>
RINGSPAN_INLINE int exp2_in_runs(int first, int last, const Exponent& exponent, const Use& use) {
  if (last - first < 2 * kRun) return first;
  Reg x[kRun], fraction[kRun], p[kRun], x_of_p[kRun];
  const auto begin = [&](int c) __attribute__((always_inline)) {
    RINGSPAN_UNROLL for (int i = 0; i < kRun; ++i) x[i] = exponent(c + i);
    RINGSPAN_UNROLL for (int i = 0; i < kRun; ++i) fraction[i] = Isa::fraction(x[i]);
  };
  const auto raise = [&]() __attribute__((always_inline)) {
    RINGSPAN_UNROLL for (int i = 0; i < kRun; ++i) p[i] = exp2_of_fraction(fraction[i]), x_of_p[i] = x[i];
  };
  const auto end = [&](int c) __attribute__((always_inline)) {
    RINGSPAN_UNROLL for (int i = 0; i < kRun; ++i) p[i] = Isa::ldexp(p[i], x_of_p[i]);
    use(c, p);
  };
  int c = first;
  begin(c);
  raise();
  begin(c + kRun);
  for (; c + 3 * kRun <= last; c += kRun) {
    end(c);
    raise();
    begin(c + 2 * kRun);
  }
  end(c);
  raise();
  end(c + kRun);
  return c + 2 * kRun;
}

// p = 2^(s factor + origin), their sum per lane; factors of dropout come after the sum.
template <typename Type, bool kDropout>
RINGSPAN_INLINE Reg exponentiate(const float* s, int first, int last, float factor, Reg origin, Word* p, std::int64_t plane,
                                 const float* factors, int begin, int end) {
  const Reg scale = Isa::set1(factor);
  Reg sum[2] = {Isa::zero(), Isa::zero()};
  if constexpr (Dot::kInRegisters && !kDropout) {
    const auto exponent = [&](int c) __attribute__((always_inline)) {
      return Isa::fma(Isa::load(s + c * kWidth), scale, origin);
    };
    const auto use = [&](int c, const Reg(&run)[kRun]) __attribute__((always_inline)) {
      RINGSPAN_UNROLL for (int i = 0; i < kRun; i += 2) {
        sum[0] += run[i];
        sum[1] += run[i + 1];
        store_probabilities<Type>(p + (c + i) * kWidth, plane, run[i], run[i + 1]);
      }
    };
    first = exp2_in_runs(first / kWidth, last / kWidth, exponent, use) * kWidth;
  }
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
  return sum[0] + sum[1];
}

template <typename Type>
void clear_probabilities(Word* p, std::int64_t plane, int begin, int end) {
  for (int n = 0; n < Type::kPlanes; ++n) {
    for (int c = begin; c < end; c += 32) _mm512_storeu_si512(p + n * plane + c, _mm512_setzero_si512());
  }
}

// Lane r of the result: the maximum, or the sum, of the lanes of t[r]; always the same tree.
template <typename Combine>
RINGSPAN_INLINE Reg across(Reg (&t)[16], const Combine& combine) {
  Isa::transpose(t);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) t[i] = combine(t[i], t[i + width]);
  }
  return t[0];
}

// Whether scale goes into the exponent, as nothing comes between them and it does not turn -inf over.
inline bool is_plain(const ForwardTile& tile) { return tile.scale > 0.0F && tile.softcap <= 0.0F && tile.slope == nullptr; }

// Scores of 16 rows from `row` on (s) become planes of probabilities relative to their new maxima (p); zero in the rest of
// `range`, whose ends are multiples of 32. tops: nullptr, or maxima of whole rows per lane. shrink: e^(m - m').
template <typename Type>
void softmax_rows(const ForwardTile& tile, int row, int rows, Range range, float* s, const float* tops, Word* p,
                  std::int64_t plane, float* shrink) {
  const bool plain = is_plain(tile);
  const float scale = plain ? tile.scale : 1.0F;
  const std::int32_t *begin = tile.begin + row, *end = tile.end + row;
  const std::int64_t s_stride = score_stride(tile.dims), p_stride = probability_stride(tile.dims);
  Reg t[16];
  __mmask16 active = 0;
  for (int r = 0; r < 16; ++r) {
    t[r] = Isa::set1(-kInf);
    if (r >= rows || begin[r] >= end[r]) continue;
    active = static_cast<__mmask16>(active | 1U << r);
    float* scores = s + r * s_stride;
    const int first = down32(begin[r]), last = up32(end[r]);
    if (!plain) finish_scores(tile, row + r, scores, first, last);
    if (first < begin[r]) hide(scores, first, begin[r]);
    if (end[r] < last) hide(scores, end[r], last);
    const bool known = tops != nullptr && begin[r] <= range.begin && end[r] >= range.end;
    t[r] = known ? Isa::load(tops + r * kWidth) : largest_of(scores, first, last);
  }
  const Reg tile_m = across(t, [](Reg a, Reg b) { return Isa::max(a, b); }) * Isa::set1(scale);
  const Reg old_m = Isa::load(tile.m + row);
  const Reg new_m = tile_m > old_m ? tile_m : old_m;
  const Reg factor = old_m == new_m ? Isa::set1(1.0F) : exp_of(old_m - new_m);
  float maxima[16];
  Isa::store(maxima, new_m);
  Isa::store(shrink, factor);
  for (int r = 0; r < rows; ++r) {
    Word* probabilities = p + r * p_stride;
    if (begin[r] >= end[r]) {
      clear_probabilities<Type>(probabilities, plane, range.begin, range.end);
      t[r] = Isa::zero();
      continue;
    }
    float* const scores = s + r * s_stride;
    const int first = down32(begin[r]), last = up32(end[r]);
    if (tile.ahead != nullptr) fetch_lines(tile.ahead, tile.ahead->step);
    clear_probabilities<Type>(probabilities, plane, range.begin, first);
    clear_probabilities<Type>(probabilities, plane, last, range.end);
    const Reg origin = origin_of(scores + first, (last - first) / kWidth, kWidth, scale, Isa::set1(maxima[r]));
    if (tile.factors != nullptr) {
      t[r] = exponentiate<Type, true>(scores, first, last, scale * kLog2e, origin, probabilities, plane,
                                      tile.factors + (row + r) * tile.factor_stride, begin[r], end[r]);
    } else {
      t[r] = exponentiate<Type, false>(scores, first, last, scale * kLog2e, origin, probabilities, plane, nullptr, 0, 0);
    }
  }
  const Reg sum = across(t, [](Reg a, Reg b) { return a + b; });
  _mm512_mask_storeu_ps(tile.m + row, active, new_m);
  _mm512_mask_storeu_ps(tile.l + row, active, Isa::fma(Isa::load(tile.l + row), factor, sum));
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
  alignas(64) float maxima[kPairRows * kWidth];
  float* const tops = Dot::kInRegisters && is_plain(tile) ? maxima : nullptr;
  for (int first = 0; first < tile.rows; first += kPairRows) {
    const int rows = at_most(kPairRows, tile.rows - first);
    Range range = union_of(tile.begin, tile.end, first, first + rows);
    if (range.empty()) continue;
    range = {down32(range.begin), up32(range.end)};
    const int columns = range.end - range.begin;
    const Left q{static_cast<const Word*>(tile.q) + first * parts.q_stride, parts.q_stride, parts.q_plane};
    if (tops != nullptr) fill(tops, 0, kPairRows * kWidth, -kInf);
    multiply_pairs<AllProducts<kPlanes>>(rows, columns, depth, q, k.at(range.begin, 0), scores + range.begin, parts.s_stride,
                                         false, tile.ahead, tops);
    if (repair) repair_products<kPlanes>(rows, columns, depth, q, k.at(range.begin, 0), scores + range.begin, parts.s_stride);
    float shrink[kPairRows];
    for (int r = 0; r < rows; r += 16) {
      softmax_rows<Type>(tile, first + r, at_most(16, rows - r), range, scores + r * parts.s_stride,
                         tops == nullptr ? nullptr : tops + r * kWidth, probabilities + r * parts.p_stride, parts.p_plane,
                         shrink + r);
    }
    const Left p{probabilities + range.begin, parts.p_stride, parts.p_plane};
    if (tile.v_finite) {
      multiply_pairs<LargeProducts<kPlanes>>(rows, width, columns, p, v.at(0, range.begin), sums, parts.sum_stride, false,
                                             tile.ahead);
    } else {
      multiply_visible<kPlanes, !Dot::kInRegisters>(rows, width, columns, p, v.at(0, range.begin), sums, parts.sum_stride,
                                                    tile.begin + first, tile.end + first, range.begin, parts.copy(tile));
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
  return pack_right_rows<Type, !Dot::kInRegisters>(static_cast<Word*>(out), parts.v_panel, parts.v_plane, v);
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
