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

// Not known to the compiler, which would make constants again and again, in instructions that take the ports of what they
// are for.
template <typename Vector>
RINGSPAN_INLINE Vector kept(Vector x) {
  __asm__("" : "+v"(x));
  return x;
}

// 2^x, as 2^(i / 32) by a polynomial of degree 2: relative error 1e-7, none at multiples of 1/32. Six of its instructions go
// only where products of tiles leave one port to vectors; with a polynomial alone they would be eight.
struct Powers {
  Powers() {
    for (int n = 0; n < 2; ++n) power[n] = Isa::load(kPowers + 16 * n);
  }
  // For x <= 127. Numbers below the normal ones are zero if the thread has them so (FlushToZero).
  RINGSPAN_INLINE Reg exp2_of(Reg x) const {
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const __m512i at = _mm512_castps_si512(_mm512_add_round_ps(x, to_index, kDown));
    const Reg f = _mm512_reduce_ps(x, 5 << 4 | kDown);  // x less a multiple of 1/32
    const Reg p = Isa::fma(Isa::fma(second, f, first), f, one);
    return _mm512_scalef_ps(p * _mm512_permutex2var_ps(power[0], at, power[1]), x);
  }

 private:
  alignas(64) static constexpr float kPowers[32] = {
      1.00000000F, 1.02189715F, 1.04427378F, 1.06714040F, 1.09050773F, 1.11438674F, 1.13878863F, 1.16372486F,
      1.18920712F, 1.21524736F, 1.24185781F, 1.26905096F, 1.29683955F, 1.32523664F, 1.35425555F, 1.38390988F,
      1.41421356F, 1.44518081F, 1.47682615F, 1.50916443F, 1.54221083F, 1.57598085F, 1.61049033F, 1.64575548F,
      1.68179283F, 1.71861930F, 1.75625216F, 1.79470908F, 1.83400809F, 1.87416763F, 1.91520656F, 1.95714412F,
  };
  Reg power[2], one = kept(Isa::set1(1.0F)), first = kept(Isa::set1(0.693123732F)), second = kept(Isa::set1(0.242652692F));
  Reg to_index = kept(Isa::set1(0x1.8p18F));  // leaves multiples of 1/32 in the last bits
};

// For a thread's vectors, while it lives: results below the normal numbers become zero, as those of products of tiles do.
class FlushToZero {
 public:
  FlushToZero() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushToZero() { _mm_setcsr(before_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

template <Sums kSums>
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
  using Products = TurnedProducts<kSums>;
  using Step = TurnedStep<kSums>;
  static constexpr bool kHeld = Products::kHeld;
  static constexpr int kGroups = Products::kGroups;
  static constexpr int kKeysAtOnce = 4 / kGroups;  // of exponentials
  static constexpr std::int64_t kScores = Products::kScores;

  // Of each query: its maximum so far; a quarter of the sum of its weights, and of that of what they were rounded to; what is
  // added to exponents.
  struct State {
    Reg m[kGroups], l[kGroups], rounded[kGroups], origin[kGroups];
    bool large;  // a maximum is so large that each step has to subtract it from scores, or there is none yet
  };
  // What weights are computed with, and their sums: a copy that only registers have. What lies in memory, a tile that is stored
  // might change.
  struct Weighing {
    Weighing(const State& state, Reg factor_of_scores) : factor(factor_of_scores) {
      for (int g = 0; g < kGroups; ++g) l[g] = state.l[g], rounded[g] = state.rounded[g], origin[g] = state.origin[g];
    }
    void sums_to(State& state) const {
      for (int g = 0; g < kGroups; ++g) state.l[g] = l[g], state.rounded[g] = rounded[g];
    }
    Reg l[kGroups], rounded[kGroups], origin[kGroups];
    Reg factor;  // of scores in exponents
    Powers powers;
    __m512i half = kept(_mm512_set1_epi32(0x8000)), upper = kept(upper_words()), ones = kept(_mm512_set1_epi32(0x3f803f80));
    __m512i words = _mm512_setzero_si512();  // bits of the weights
  };

  // Not inlined: four of them in one function take more registers than there are.
  template <bool kFinite, bool kDropout>
  __attribute__((noinline)) void run() {
    State state, done;
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
      const bool looks = kDropout || now.key - now.seen.begin < Step::kMostKeys || state.large;
      if (looks) raise<kFinite, kDropout>(now, s, &before, other, state);
      Weighing weighing(state, Isa::set1(scale_ * kLog2e));
      int ended = 0, allowed = 0;  // keys, and 256ths of keys
      const int slots = (before.keys > 0 ? products_.value_slots(before) : 0) + (next.keys > 0 ? products_.key_slots(next) : 0);
      const int pace = slots > 0 ? now.keys * 256 / slots : 0;
      const auto exponentiate_some = [&]() __attribute__((always_inline)) {
        allowed += pace;
        if (ended * 256 >= allowed) return;
        exponentiate<kDropout>(now, ended, s, weighing);
        ended += kKeysAtOnce;
      };
      if (before.keys > 0) {
        products_.multiply_values(before, other, exponentiate_some);
        if (before.is_last()) store<kFinite, kDropout>(before, done);
      }
      if (next.keys > 0) products_.multiply_keys(next, other, exponentiate_some);
      for (; ended < now.keys; ended += kKeysAtOnce) exponentiate<kDropout>(now, ended, s, weighing);
      const __m512i large = _mm512_set1_epi32(0x40004000);
      if (__builtin_expect(!looks && _mm512_test_epi32_mask(weighing.words, large) != 0, 0)) {
        repeat<kFinite>(now, s, state);
      } else {
        weighing.sums_to(state);
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
    Weighing weighing(state, Isa::set1(scale_ * kLog2e));
    for (int i = 0; i < step.keys; i += kKeysAtOnce) exponentiate<false>(step, i, s, weighing);
    weighing.sums_to(state);
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
    state.large = has_large(state);
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
  RINGSPAN_INLINE void exponentiate(const Step& step, int i, float* s, Weighing& weighing) const {
    RINGSPAN_UNROLL for (const int end = i + kKeysAtOnce; i < end; i += 2) {
      RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) {
        float* const x = s + g * kScores + i * kLanes;
        Reg p = weighing.powers.exp2_of(Isa::fma(Isa::load(x), weighing.factor, weighing.origin[g]));
        Reg q = weighing.powers.exp2_of(Isa::fma(Isa::load(x + kLanes), weighing.factor, weighing.origin[g]));
        weighing.l[g] = weighing.l[g] + (p + q);
        if constexpr (kDropout) p = p * factors_of(step, g, step.key + i), q = q * factors_of(step, g, step.key + i + 1);
        // As words_side_by_side() does it.
        const __m512i even = _mm512_add_epi32(_mm512_castps_si512(p), weighing.half);
        const __m512i words = upper_of(even, _mm512_add_epi32(_mm512_castps_si512(q), weighing.half), weighing.upper);
        _mm512_storeu_si512(s + g * kScores + i * kLanes / 2, words);
        if constexpr (!kDropout)
          weighing.words = _mm512_or_si512(weighing.words, words),
          weighing.rounded[g] = _mm512_dpbf16_ps(weighing.rounded[g], (__m512bh)words, (__m512bh)weighing.ones);
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
  const FlushToZero flush;
  const TurnedParts parts(tile.dims);
  switch (parts.sums) {
    case Sums::kInTiles:
      return TurnedTile<Sums::kInTiles>(tile, parts).run();
    case Sums::kNear:
      return TurnedTile<Sums::kNear>(tile, parts).run();
    case Sums::kFar:
      return TurnedTile<Sums::kFar>(tile, parts).run();
  }
}

}  // namespace
}  // namespace ringspan::kernels
