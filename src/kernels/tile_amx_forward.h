// The forward tile of bfloat16 in AMX, after tile_amx.cc's tiles; see tile_pairs.h for the others. 16 queries lie along vectors
// (tile_amx_products.h), so that no sum or maximum goes across lanes.
//
// In steps of some queries and some keys, one after the other through all of the tile: beside the exponentials of a step run
// the products of o^T of the step before and of s^T of the next one. Meanwhile vectors have one port of two for all arithmetic
// but additions: what counts is how little of it an exponential takes.
#pragma once

#include "kernels/tile_amx_products.h"
#include "kernels/tile_pairs_few.h"

namespace ringspan::kernels {
namespace {

// A maximum is raised where a score is above it by more than ln 8.5: probabilities may be up to that, and sums shrink seldom.
// They are computed as quarters, so that a bit of their exponents tells which are 8 or more.
constexpr float kSlack = 2.140066F, kQuarter = -2.0F;

template <int kGroups>
class TurnedTile {
 public:
  TurnedTile(const ForwardTile& tile, const TurnedParts& parts)
      : tile_(tile),
        products_(tile, parts),
        scores_{static_cast<float*>(tile.work), static_cast<float*>(tile.work) + parts.scores},
        plain_(is_plain(tile)),
        scale_(plain_ ? tile.scale : 1.0F) {}

  void run() {
    if (tile_.factors != nullptr) {
      tile_.v_finite ? run<true, true>() : run<false, true>();
    } else {
      tile_.v_finite ? run<true, false>() : run<false, false>();
    }
  }

 private:
  using Products = TurnedProducts<kGroups>;
  using Step = TurnedStep<kGroups>;
  static constexpr bool kHeld = Products::kHeld;
  static constexpr int kKeysAtOnce = 4 / kGroups;  // of exponentials
  static constexpr std::int64_t kScores = Products::kScores;

  // Of each query: its maximum so far; a quarter of the sum of its weights, and of that of what they were rounded to; what is
  // added to exponents.
  struct State {
    Reg m[kGroups], l[kGroups], rounded[kGroups], origin[kGroups];
    Reg factor;     // of scores in exponents
    __m512i words;  // bits of the weights of a step
  };

  // Not inlined: four of them in one function take more registers than there are.
  template <bool kFinite, bool kDropout>
  __attribute__((noinline)) void run() {
    State state, done;
    state.factor = Isa::set1(scale_ * kLog2e);
    Step before{}, next = Step::first_of_rows(tile_, 0);
    if (next.keys == 0) return;
    products_.multiply_keys(next, scores_[0], [] {});
    int turn = 0;
    for (; next.keys > 0; turn ^= 1) {
      const Step now = next;
      float *const s = scores_[turn], *const other = scores_[turn ^ 1];
      next = now.next();
      if (now.is_first) begin_rows(now, state);
      finish_scores(now, s);
      const bool looks = kDropout || now.key - now.seen.begin < Step::kMostKeys || has_large(state);
      if (looks) raise<kFinite, kDropout>(now, s, &before, other, state);
      Reg l[kGroups], rounded[kGroups];  // before this step
      for (int g = 0; g < kGroups; ++g) l[g] = state.l[g], rounded[g] = state.rounded[g];
      state.words = _mm512_setzero_si512();
      int ended = 0, allowed = 0;  // keys, and 256ths of keys
      const int slots = (before.keys > 0 ? products_.value_slots(before) : 0) + (next.keys > 0 ? products_.key_slots(next) : 0);
      const int pace = slots > 0 ? (now.keys * 256 + slots - 1) / slots : 0;
      const auto exponentiate_some = [&]() __attribute__((always_inline)) {
        allowed += pace;
        for (; ended * 256 < allowed && ended < now.keys; ended += kKeysAtOnce) exponentiate<kDropout>(now, ended, s, state);
      };
      if (before.keys > 0) {
        products_.multiply_values(before, other, exponentiate_some);
        if (before.is_last()) store<kFinite, kDropout>(before, done);
      }
      if (next.keys > 0) products_.multiply_keys(next, other, exponentiate_some);
      for (; ended < now.keys; ended += kKeysAtOnce) exponentiate<kDropout>(now, ended, s, state);
      const __m512i large = _mm512_set1_epi32(0x40004000);
      if (__builtin_expect(!looks && _mm512_test_epi32_mask(state.words, large) != 0, 0)) {
        for (int g = 0; g < kGroups; ++g) state.l[g] = l[g], state.rounded[g] = rounded[g];
        repeat<kFinite>(now, s, state);
      }
      Products::keep_awake();
      if (tile_.ahead != nullptr) fetch_lines(tile_.ahead, tile_.ahead->step);
      if (now.is_last()) done = state;
      if constexpr (kFinite) {
        before = now;
      } else {
        products_.multiply_visible_values(now, s);
        if (now.is_last()) store<kFinite, kDropout>(now, done);
      }
    }
    if constexpr (kFinite) {
      products_.multiply_values(before, scores_[turn ^ 1], [] {});
      store<kFinite, kDropout>(before, done);
    }
  }
  // A step of which a weight was too large, after its neighbours' products.
  template <bool kFinite>
  __attribute__((noinline)) void repeat(const Step& step, float* s, State& state) {
    products_.multiply_keys(step, s, [] {});
    finish_scores(step, s);
    raise<kFinite, false>(step, s, nullptr, nullptr, state);
    for (int i = 0; i < step.keys; i += kKeysAtOnce) exponentiate<false>(step, i, s, state);
  }

  Reg old_m(const Step& step, int group) const {
    return _mm512_mask_loadu_ps(Isa::set1(-kInf), step.present(group), tile_.m + step.row + group * kLanes);
  }
  void begin_rows(const Step& step, State& state) const {
    for (int g = 0; g < kGroups; ++g) {
      state.m[g] = old_m(step, g);
      state.l[g] = state.rounded[g] = Isa::zero();
      state.origin[g] = quartered(origin_of(state.m[g], [](Reg origin) { return origin; }));
    }
  }

  // Scores become what the formula says, but for scale where it goes into the exponent; -inf where a query does not see the
  // key.
  RINGSPAN_INLINE void finish_scores(const Step& step, float* s) const {
    if (plain_ && step.is_whole()) return;
    for (int g = 0; g < kGroups; ++g) {
      if (!plain_) apply_options(step, g, s + g * kScores);
      const int end = step.key + step.keys;
      hide(step, g, s + g * kScores, step.key, at_most(step.common.begin, end));
      hide(step, g, s + g * kScores, at_least(at_least(step.common.begin, step.common.end), step.key), end);
    }
  }
  // Of keys of which not all queries see each.
  __attribute__((noinline)) void hide(const Step& step, int group, float* s, int first, int last) const {
    const __m512i begin = step.begins(group), end = step.ends(group);
    for (int key = first; key < last; ++key) {
      const __m512i at = _mm512_set1_epi32(key);
      const __mmask16 seen = _mm512_cmple_epi32_mask(begin, at) & _mm512_cmplt_epi32_mask(at, end);
      float* const x = s + (key - step.key) * kLanes;
      Isa::store(x, _mm512_mask_mov_ps(Isa::set1(-kInf), seen, Isa::load(x)));
    }
  }
  __attribute__((noinline)) void apply_options(const Step& step, int group, float* s) const {
    const Reg scale = Isa::set1(tile_.scale), cap = Isa::set1(tile_.softcap), inverse = Isa::set1(1.0F / tile_.softcap);
    for (int i = 0; i < step.keys; ++i) {
      Reg x = Isa::load(s + i * kLanes) * scale;
      if (tile_.softcap > 0.0F) x = cap * tanh_of(x * inverse);
      if (tile_.slope != nullptr) x = x - Isa::set1(*tile_.slope) * distance_of(step, group, step.key + i);
      Isa::store(s + i * kLanes, x);
    }
  }
  // |distance| of each query to a key.
  Reg distance_of(const Step& step, int group, int key) const {
    const __m512i along = _mm512_set1_epi64(key * tile_.distance_step);
    const __mmask16 rows = step.present(group);
    const std::int64_t* const distance = tile_.distance + step.row + group * kLanes;
    const __m512i low = _mm512_abs_epi64(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(rows), distance) + along);
    const __m512i high = _mm512_abs_epi64(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(rows >> 8), distance + 8) + along);
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtepi64_ps(low)), _mm512_cvtepi64_ps(high), 1);
  }

  // Whether a maximum is so large that each step has to subtract it from scores, or there is none yet.
  static bool has_large(const State& state) {
    __mmask16 small = 0xffff;
    for (int g = 0; g < kGroups; ++g)
      small &= _mm512_cmp_ps_mask(_mm512_abs_ps(state.m[g]), Isa::set1(kLargeMaximum), _CMP_LE_OQ);
    return small != 0xffff;
  }
  // Rounded by itself, not with the product before it: the same bits wherever it is asked for.
  static RINGSPAN_INLINE Reg quartered(Reg origin) {
    return _mm512_add_round_ps(origin, Isa::set1(kQuarter), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // Maxima become what the scores of a step ask for; `before`: whose values are not in the sums yet.
  template <bool kFinite, bool kDropout>
  RINGSPAN_INLINE void raise(const Step& step, float* s, Step* before, const float* weights, State& state) {
    for (int g = 0; g < kGroups; ++g) {
      const Reg tops = largest_of(s + g * kScores, step.keys) * Isa::set1(scale_);
      const __mmask16 above = _mm512_cmp_ps_mask(tops, state.m[g] + Isa::set1(kDropout ? 0.0F : kSlack), _CMP_GT_OQ);
      if (above != 0) {
        if (!step.is_first && before != nullptr && before->keys > 0) add_values(*before, weights);
        raise_maxima<kFinite>(step, g, tops, above, state);
      }
      state.origin[g] = quartered(origin_of(s + g * kScores, step.keys, kLanes, scale_, state.m[g]));
    }
  }
  __attribute__((noinline)) void add_values(Step& step, const float* weights) {
    products_.multiply_values(step, weights, [] {});
    step.keys = 0;
  }
  template <bool kFinite>
  __attribute__((noinline)) void raise_maxima(const Step& step, int group, Reg tops, __mmask16 above, State& state) const {
    const Reg m = _mm512_mask_mov_ps(state.m[group], above, tops);
    const Reg shrink = _mm512_mask_mov_ps(Isa::set1(1.0F), above, exp_of(state.m[group] - m));
    state.m[group] = m, state.l[group] = state.l[group] * shrink, state.rounded[group] = state.rounded[group] * shrink;
    if (step.is_first) return;
    if (kHeld && kFinite) products_.store_held();
    float* const sums = products_.sums(group);
    for (int e = 0; e < products_.columns(); ++e) {
      const Reg x = Isa::load(sums + e * kLanes) * shrink;
      // Without numbers below the normal ones, which products take for zero where they add something, be it for other lanes.
      const __mmask16 normal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), Isa::set1(0x1p-126F), _CMP_NLT_UQ);
      Isa::store(sums + e * kLanes, _mm512_maskz_mov_ps(normal, x));
    }
    if (kHeld && kFinite) products_.load_held();
  }
  // Per query; never NaN.
  static RINGSPAN_INLINE Reg largest_of(const float* s, int keys) {
    Reg top[4];
    for (Reg& t : top) t = Isa::set1(-kInf);
    for (int i = 0; i < keys; i += 4) {
      RINGSPAN_UNROLL for (int way = 0; way < 4; ++way) top[way] = Isa::max(Isa::load(s + (i + way) * kLanes), top[way]);
    }
    return Isa::max(Isa::max(top[0], top[1]), Isa::max(top[2], top[3]));
  }

  // Weights of some keys, from the i-th of a step on, in place: words of two keys side by side.
  template <bool kDropout>
  RINGSPAN_INLINE void exponentiate(const Step& step, int i, float* s, State& state) const {
    RINGSPAN_UNROLL for (const int end = i + kKeysAtOnce; i < end; i += 2) {
      RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) {
        float* const x = s + g * kScores + i * kLanes;
        Reg p = exp2_of(Isa::fma(Isa::load(x), state.factor, state.origin[g]));
        Reg q = exp2_of(Isa::fma(Isa::load(x + kLanes), state.factor, state.origin[g]));
        state.l[g] = state.l[g] + (p + q);
        if constexpr (kDropout) p = p * factors_of(step, g, step.key + i), q = q * factors_of(step, g, step.key + i + 1);
        __m512i rounded[2];
        const __m512i words = words_side_by_side(p, q, rounded);
        _mm512_storeu_si512(s + g * kScores + i * kLanes / 2, words);
        if constexpr (!kDropout)
          state.words = _mm512_or_si512(state.words, words),
          state.rounded[g] =
              state.rounded[g] + (_mm512_castsi512_ps(_mm512_and_si512(rounded[0], upper_words())) + high_half(words));
      }
    }
  }
  // Of dropout, of each query for a key; where it is not seen there are none.
  Reg factors_of(const Step& step, int group, int key) const {
    const __m512i rows = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(rows, _mm512_set1_epi32(static_cast<int>(tile_.factor_stride)));
    const float* const factors = tile_.factors + (step.row + group * kLanes) * tile_.factor_stride + key;
    return _mm512_mask_i32gather_ps(Isa::zero(), step.seeing(group, key) & step.present(group), offsets, factors, 4);
  }

  // Everything meets the state of the rows that see a key. Sums of values are related to the sum of the weights as they were
  // rounded, so that equal ones do not change a value; the sum of a state is the exact one.
  template <bool kFinite, bool kDropout>
  __attribute__((noinline)) void store(const Step& step, const State& state) const {
    if (kHeld && kFinite) products_.store_held();
    for (int g = 0; g < kGroups; ++g) {
      const int first = step.row + g * kLanes;
      const __mmask16 active = _mm512_cmplt_epi32_mask(step.begins(g), step.ends(g)) & step.present(g);
      const Reg old = old_m(step, g);
      const Reg shrink = old == state.m[g] ? Isa::set1(1.0F) : exp_of(old - state.m[g]);
      float* const l = tile_.l + first;
      _mm512_mask_storeu_ps(l, active, Isa::fma(_mm512_maskz_loadu_ps(active, l), shrink, state.l[g] * Isa::set1(4.0F)));
      _mm512_mask_storeu_ps(tile_.m + first, active, state.m[g]);
      const Reg ratio = state.l[g] / state.rounded[g];
      const __mmask16 is_ratio = _mm512_cmp_ps_mask(state.rounded[g], Isa::zero(), _CMP_GT_OQ) &
                                 _mm512_cmp_ps_mask(ratio, Isa::set1(2.0F), _CMP_LT_OQ);
      const Reg exact = Isa::set1(4.0F) * (kDropout ? Isa::set1(1.0F) : _mm512_mask_mov_ps(Isa::set1(1.0F), is_ratio, ratio));
      float shrinks[kLanes];
      Isa::store(shrinks, shrink);
      const float* const sums = products_.sums(g);
      for (int e = 0; e < products_.columns(); e += kWidth) {
        Reg t[kWidth];
        for (int i = 0; i < kWidth; ++i) t[i] = Isa::load(sums + (e + i) * kLanes) * exact;
        Isa::transpose(t);
        for (int r = 0; r < kLanes; ++r) {
          if ((active >> r & 1) == 0) continue;
          float* const acc = tile_.acc + (first + r) * tile_.acc_stride + e;
          // The added zero turns -0 into +0.
          Isa::store(acc, Isa::fma(Isa::load(acc), Isa::set1(shrinks[r]), t[r]) + Isa::zero());
        }
      }
      Products::keep_awake();
    }
  }

  const ForwardTile& tile_;
  Products products_;
  float* scores_[2];  // [groups][keys of a step][16] each, then weights
  bool plain_;
  float scale_;
};

void attend_turned(const ForwardTile& tile) {
  const Dot::Session session;
  const TurnedParts parts(tile.dims);
  if (parts.groups == 1) {
    TurnedTile<1>(tile, parts).run();
  } else {
    TurnedTile<2>(tile, parts).run();
  }
}

}  // namespace
}  // namespace ringspan::kernels
