// The forward tile of bfloat16 in AMX, after tile_amx.cc's tiles; see tile_pairs.h for the others. Everything is turned, so
// that 16 queries lie along vectors:
//     s^T = k q^T        o^T += v^T p^T
// Keys are left operands as rows, values as columns, queries right ones; two rows of probabilities, side by side, are a row of
// the right operand of o^T. No sum or maximum goes across lanes, and up to 64 columns of o^T stay in tiles.
//
// 64 keys at a time. Beside the exponentials of a part run the products of o^T of the part before and of s^T of the next one.
// While products run, vectors of 512 bits have one port of two: what counts is how few instructions an exponential takes.
#pragma once

#include "kernels/tile_pairs_few.h"

namespace ringspan::kernels {
namespace {

constexpr int kLanes = 16, kPartKeys = 64, kTileWords = 512, kTileFloats = 256;

// A maximum is raised where a score is above it by more than this: probabilities may be up to 8, and sums shrink seldom.
constexpr float kSlack = 2.0794415F;

// Where everything of a tile lies. Values: chunks of 32 keys, [columns][32] each.
struct TurnedParts {
  int depth, columns;  // of queries and keys, of values; padded
  std::int64_t chunk;
  explicit TurnedParts(const TileDims& dims)
      : depth(up32(dims.head_dim)), columns(up16(dims.head_dim_v)), chunk(columns * std::int64_t{kChunk}) {}

  ForwardBytes bytes(const TileDims& dims) const {
    const std::int64_t keys = (dims.tile.keys + kPartKeys - 1) / kPartKeys * kPartKeys;
    return {to_line(2 * keys * depth), to_line(2 * keys * columns), to_line(2 * dims.tile.queries * depth),
            to_line(2 * kPartKeys * kLanes * (4 + 2) + 4 * columns * kLanes + 2 * chunk)};
  }
};

// What 16 queries have of the tile so far. Tiles 0 to 3 are rows of o^T where they are held, 4 and 5 queries, 6 and 7 whatever
// is multiplied.
class TurnedBlock {
 public:
  TurnedBlock(const ForwardTile& tile, const TurnedParts& parts, int first)
      : tile_(tile),
        parts_(parts),
        first_(first),
        rows_(at_most(kLanes, tile.rows - first)),
        queries_(static_cast<const Word*>(tile.q) + first * std::int64_t{parts.depth}),
        keys_(static_cast<const Word*>(tile.k)),
        values_(static_cast<const Word*>(tile.v)),
        scores_{static_cast<float*>(tile.work), static_cast<float*>(tile.work) + kPartKeys * kLanes},
        weights_{reinterpret_cast<Word*>(scores_[1] + kPartKeys * kLanes), nullptr},
        sums_(reinterpret_cast<float*>(weights_[0] + 2 * kPartKeys * kLanes)),
        copy_(reinterpret_cast<Word*>(sums_ + parts.columns * kLanes)),
        plain_(is_plain(tile)) {
    weights_[1] = weights_[0] + kPartKeys * kLanes;
    const __mmask16 present = first_of(rows_);
    // Absent rows are as the first one.
    begin_ = _mm512_mask_loadu_epi32(_mm512_set1_epi32(tile.begin[first]), present, tile.begin + first);
    end_ = _mm512_mask_loadu_epi32(_mm512_set1_epi32(tile.end[first]), present, tile.end + first);
    old_m_ = _mm512_mask_loadu_ps(Isa::set1(-kInf), present, tile.m + first);
  }

  void run(Range range) {
    if (tile_.factors != nullptr) {
      tile_.v_finite ? run<true, true>(range) : run<false, true>(range);
    } else {
      tile_.v_finite ? run<true, false>(range) : run<false, false>(range);
    }
  }

 private:
  // Per query: its maximum so far, the sum of its weights, and that of what they were rounded to.
  struct State {
    Reg m, l, rounded;
  };

  // Not inlined: four of them in one function take more registers than there are.
  template <bool kFinite, bool kDropout>
  __attribute__((noinline)) void run(Range range) {
    begin_tiles();
    const int first = range.begin / kPartKeys * kPartKeys;
    for (int i = 0; i < kPartKeys / kLanes; ++i) {
      multiply_keys(first, i);
      store_tile<6>(scores_[0] + i * kTileFloats, 64);
    }
    Reg m = old_m_, l = Isa::zero(), rounded = Isa::zero();
    const Reg factor = Isa::set1((plain_ ? tile_.scale : 1.0F) * kLog2e);
    int before = -1, turn = 0;  // the part whose weights wait for values
    for (int part = first; part < range.end; part += kPartKeys, turn ^= 1) {
      finish_scores(part, scores_[turn]);
      const Reg tops = largest_of(scores_[turn]) * Isa::set1(plain_ ? tile_.scale : 1.0F);
      const __mmask16 above = _mm512_cmp_ps_mask(tops, m + Isa::set1(kDropout ? 0.0F : kSlack), _CMP_GT_OQ);
      if (__builtin_expect(above != 0, 0)) {
        if (before >= 0) multiply_values(before, weights_[turn ^ 1]);
        before = -1;
        const State state = raised({m, l, rounded}, tops, above, part > first);
        m = state.m, l = state.l, rounded = state.rounded;
      }
      const int next = part + kPartKeys < range.end ? part + kPartKeys : -1;
      to_tiles();
      const Reg origin = origin_of(m, [&](Reg x) { return subtracted(turn, m, x); });
      for (int slot = 0; slot < 8; ++slot) {
        if (slot < 4) {
          if (before >= 0) multiply_values(before, weights_[turn ^ 1], slot);
        } else if (next >= 0) {
          multiply_keys(next, slot - 4);
        }
        exponentiate<kDropout>(part, slot * 8, scores_[turn], weights_[turn], factor, origin, l, rounded);
        if (slot >= 4 && next >= 0) {
          store_tile<6>(scores_[turn ^ 1] + (slot - 4) * kTileFloats, 64);
          drop_tile<6>();
        }
      }
      if (tile_.ahead != nullptr) fetch_lines(tile_.ahead, tile_.ahead->step);
      if constexpr (kFinite) {
        before = part;
      } else {
        multiply_visible_values(part, weights_[turn]);
      }
    }
    if (before >= 0) multiply_values(before, weights_[turn ^ 1]);
    if (kFinite) store_held();
    store<kDropout>({m, l, rounded});
  }

  void begin_tiles() {
    to_tiles();
    load_queries();
    if (tile_.v_finite) {
      begin_sums<0>(nullptr, 0, false);
      begin_sums<1>(nullptr, 0, false);
      begin_sums<2>(nullptr, 0, false);
      begin_sums<3>(nullptr, 0, false);
    } else {
      for (std::int64_t i = 0; i < parts_.columns * kLanes; i += kWidth) Isa::store(sums_ + i, Isa::zero());
    }
  }
  void load_queries() const {
    load_tile<4>(queries_, 64);
    if (parts_.depth > kChunk) load_tile<5>(queries_ + kTileWords, 64);
  }

  // Products with rows of keys or values, which are in one piece.
  template <int kSums, int kRight>
  RINGSPAN_INLINE static void add_rows(const Word* rows) {
    load_tile<7>(rows, 64);
    add_product<kSums, 7, kRight>();
    drop_tile<7>();
  }

  // Tile 6: scores of 16 keys.
  RINGSPAN_INLINE void multiply_keys(int part, int i) const {
    const Word* const k = keys_ + (part + i * std::int64_t{kLanes}) * parts_.depth;
    begin_sums<6>(nullptr, 0, false);
    add_rows<6, 4>(k);
    if (parts_.depth > kChunk) add_rows<6, 5>(k + kTileWords);
  }

  // A quarter of the products with the values of a part.
  RINGSPAN_INLINE void multiply_values(int part, const Word* weights, int quarter) {
    const Word* const v = values_ + part / kChunk * parts_.chunk;
    const int chunk = quarter / 2;
    if (part + chunk * kChunk >= tile_.keys) return;
    const Word* const rows = v + chunk * parts_.chunk;
    if (quarter % 2 == 0) {
      load_tile<6>(weights + chunk * kTileWords, 64);
      add_rows<0, 6>(rows);
      if (parts_.columns > 16) add_rows<1, 6>(rows + kTileWords);
    } else if (parts_.columns > 32) {
      add_rows<2, 6>(rows + 2 * kTileWords);
      if (parts_.columns > 48) add_rows<3, 6>(rows + 3 * kTileWords);
      drop_tile<6>();
    }
  }
  void multiply_values(int part, const Word* weights) {
    to_tiles();
    for (int quarter = 0; quarter < 4; ++quarter) multiply_values(part, weights, quarter);
  }

  // Where values are not all finite: first without those, so that other queries keep their bits, then they alone.
  void multiply_visible_values(int part, const Word* weights) {
    for (int chunk = 0; chunk < 2 && part + chunk * kChunk < tile_.keys; ++chunk) {
      const Word* const values = values_ + (part / kChunk + chunk) * parts_.chunk;
      const Right p{weights + chunk * kTileWords, 0, 0};
      for (std::int64_t i = 0; i < parts_.chunk; i += 32)
        _mm512_storeu_si512(copy_ + i, finite_or_zero(_mm512_loadu_si512(values + i)));
      Dot::multiply<AllProducts<1>>(parts_.columns, kLanes, kChunk, Left{copy_, kChunk, 0}, p, sums_, kLanes, true, nullptr);
      for (int e = 0; e < parts_.columns; ++e) {
        for (int i = 0; i < kChunk; ++i) {
          const Word value = values[e * kChunk + i];
          if (is_finite(value)) continue;
          const Reg product = Isa::fma(low_half(_mm512_set1_epi32(value)), columns_of<1>(p, i), Isa::load(sums_ + e * kLanes));
          _mm512_mask_storeu_ps(sums_ + e * kLanes, seeing(part + chunk * kChunk + i), product);
        }
      }
    }
    load_queries();
  }

  __mmask16 seeing(int key) const {
    const __m512i at = _mm512_set1_epi32(key);
    return _mm512_cmple_epi32_mask(begin_, at) & _mm512_cmplt_epi32_mask(at, end_);
  }

  // Scores of a part become what the formula says, but for scale where it goes into the exponent; -inf where a query does not
  // see the key.
  void finish_scores(int part, float* s) const {
    const __mmask16 whole = _mm512_cmple_epi32_mask(begin_, _mm512_set1_epi32(part)) &
                            _mm512_cmple_epi32_mask(_mm512_set1_epi32(part + kPartKeys), end_);
    if (whole == 0xffff && plain_) return;
    const Reg scale = Isa::set1(tile_.scale), cap = Isa::set1(tile_.softcap), inverse = Isa::set1(1.0F / tile_.softcap);
    for (int i = 0; i < kPartKeys; ++i) {
      Reg x = Isa::load(s + i * kLanes);
      if (!plain_) {
        x = x * scale;
        if (tile_.softcap > 0.0F) x = cap * tanh_of(x * inverse);
        if (tile_.slope != nullptr) x = x - Isa::set1(*tile_.slope) * distance_of(part + i);
      }
      Isa::store(s + i * kLanes, _mm512_mask_mov_ps(Isa::set1(-kInf), seeing(part + i), x));
    }
  }
  // |distance| of each query to a key.
  Reg distance_of(int key) const {
    const __m512i step = _mm512_set1_epi64(key * tile_.distance_step);
    const __mmask16 present = first_of(rows_);
    const std::int64_t* const distance = tile_.distance + first_;
    const __m512i low = _mm512_abs_epi64(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(present), distance) + step);
    const __m512i high = _mm512_abs_epi64(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(present >> 8), distance + 8) + step);
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtepi64_ps(low)), _mm512_cvtepi64_ps(high), 1);
  }

  // Per query; never NaN.
  static RINGSPAN_INLINE Reg largest_of(const float* s) {
    Reg top[4];
    for (Reg& t : top) t = Isa::set1(-kInf);
    in_turns<4>(kPartKeys, [&](int i, int way) { top[way] = Isa::max(Isa::load(s + i * kLanes), top[way]); });
    return Isa::max(Isa::max(top[0], top[1]), Isa::max(top[2], top[3]));
  }

  // Maxima become `tops` where those are above them, and sums shrink.
  __attribute__((noinline)) State raised(const State& state, Reg tops, __mmask16 above, bool has_sums) const {
    const Reg m = _mm512_mask_mov_ps(state.m, above, tops);
    const Reg shrink = _mm512_mask_mov_ps(Isa::set1(1.0F), above, exp_of(state.m - m));
    if (has_sums && tile_.v_finite) store_held();
    for (int e = 0; has_sums && e < parts_.columns; ++e) {
      const Reg x = Isa::load(sums_ + e * kLanes) * shrink;
      // Without numbers below the normal ones, which products take for zero where they add something, be it for other lanes.
      const __mmask16 normal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), Isa::set1(0x1p-126F), _CMP_NLT_UQ);
      Isa::store(sums_ + e * kLanes, _mm512_maskz_mov_ps(normal, x));
    }
    if (has_sums && tile_.v_finite) load_held();
    return {m, state.l * shrink, state.rounded * shrink};
  }

  // Apart from run(), whose loop has other addresses otherwise.
  __attribute__((noinline)) Reg subtracted(int turn, Reg m, Reg origin) const {
    return subtract_large(scores_[turn], kPartKeys, kLanes, plain_ ? tile_.scale : 1.0F, m, origin);
  }

  // Weights of 8 keys of a part, from its i-th on.
  template <bool kDropout>
  RINGSPAN_INLINE void exponentiate(int part, int i, const float* s, Word* weights, Reg factor, Reg origin, Reg& l,
                                    Reg& rounded) const {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
    RINGSPAN_UNROLL for (int pair = i; pair < i + 8; pair += 2) {
      const Reg p = exp2_of(Isa::fma(Isa::load(s + pair * kLanes), factor, origin));
      const Reg q = exp2_of(Isa::fma(Isa::load(s + (pair + 1) * kLanes), factor, origin));
      l = l + (p + q);
      Reg kept_p = p, kept_q = q;
      if constexpr (kDropout) kept_p = p * kept(part + pair), kept_q = q * kept(part + pair + 1);
      __m512i words[2];
      _mm512_storeu_si512(weights + pair * kLanes, words_side_by_side(kept_p, kept_q, words));
      if constexpr (!kDropout)
        rounded = rounded + (_mm512_castsi512_ps(_mm512_and_si512(words[0], upper)) +
                             _mm512_castsi512_ps(_mm512_and_si512(words[1], upper)));
    }
  }
  // Factors of dropout of each query for a key; where it is not seen there are none.
  Reg kept(int key) const {
    const __m512i rows = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(rows, _mm512_set1_epi32(static_cast<int>(tile_.factor_stride)));
    const float* const factors = tile_.factors + first_ * tile_.factor_stride + key;
    return _mm512_mask_i32gather_ps(Isa::zero(), seeing(key) & first_of(rows_), offsets, factors, 4);
  }

  void store_held() const {
    store_tile<0>(sums_, 64);
    if (parts_.columns > 16) store_tile<1>(sums_ + kTileFloats, 64);
    if (parts_.columns > 32) store_tile<2>(sums_ + 2 * kTileFloats, 64);
    if (parts_.columns > 48) store_tile<3>(sums_ + 3 * kTileFloats, 64);
  }
  void load_held() const {
    to_tiles();
    load_tile<0>(sums_, 64);
    if (parts_.columns > 16) load_tile<1>(sums_ + kTileFloats, 64);
    if (parts_.columns > 32) load_tile<2>(sums_ + 2 * kTileFloats, 64);
    if (parts_.columns > 48) load_tile<3>(sums_ + 3 * kTileFloats, 64);
  }

  // Everything meets the state of the rows that see a key. Sums of values are related to the sum of the rounded weights, so
  // that equal ones, all rounded the same way, do not change a value; the sum of a state is the exact one.
  template <bool kDropout>
  void store(const State& state) const {
    const __mmask16 active = _mm512_cmplt_epi32_mask(begin_, end_) & first_of(rows_);
    const Reg shrink = old_m_ == state.m ? Isa::set1(1.0F) : exp_of(old_m_ - state.m);
    float* const l = tile_.l + first_;
    _mm512_mask_storeu_ps(l, active, Isa::fma(_mm512_maskz_loadu_ps(active, l), shrink, state.l));
    _mm512_mask_storeu_ps(tile_.m + first_, active, state.m);
    const Reg ratio = state.l / state.rounded;
    const __mmask16 is_ratio =
        _mm512_cmp_ps_mask(state.rounded, Isa::zero(), _CMP_GT_OQ) & _mm512_cmp_ps_mask(ratio, Isa::set1(2.0F), _CMP_LT_OQ);
    const Reg exact = kDropout ? Isa::set1(1.0F) : _mm512_mask_mov_ps(Isa::set1(1.0F), is_ratio, ratio);
    float shrinks[kLanes];
    Isa::store(shrinks, shrink);
    for (int e = 0; e < parts_.columns; e += kWidth) {
      Reg t[kWidth];
      for (int i = 0; i < kWidth; ++i) t[i] = Isa::load(sums_ + (e + i) * kLanes) * exact;
      Isa::transpose(t);
      for (int r = 0; r < rows_; ++r) {
        if ((active >> r & 1) == 0) continue;
        float* const acc = tile_.acc + (first_ + r) * tile_.acc_stride + e;
        // The added zero turns -0 into +0.
        Isa::store(acc, Isa::fma(Isa::load(acc), Isa::set1(shrinks[r]), t[r]) + Isa::zero());
      }
    }
  }

  const ForwardTile& tile_;
  const TurnedParts& parts_;
  int first_, rows_;
  const Word *queries_, *keys_, *values_;
  float* scores_[2];
  Word* weights_[2];
  float* sums_;  // [columns][16], where they are not held
  Word* copy_;
  bool plain_;
  __m512i begin_, end_;
  Reg old_m_;
};

void attend_turned(const ForwardTile& tile) {
  const Dot::Session session;
  const TurnedParts parts(tile.dims);
  for (int first = 0; first < tile.rows; first += kLanes) {
    const Range range = union_of(tile.begin, tile.end, first, at_most(first + kLanes, tile.rows));
    if (!range.empty()) TurnedBlock(tile, parts, first).run(range);
  }
}

// Chunks of 16 keys in one piece each.
bool pack_keys_turned(void* out, const RowSource& k) {
  __m512i top = _mm512_setzero_si512();
  Word* to = static_cast<Word*>(out);
  for (int first = 0; first < k.rows; first += kLanes) {
    for (int e = 0; e < up32(k.width); e += kChunk, to += kTileWords) {
      for (int r = 0; r < at_most(kLanes, k.rows - first); ++r) {
        __m512i words[1];
        load_wide<BFloat16, false>(k, first + r, e, words, top);
        _mm512_storeu_si512(to + r * kChunk, words[0]);
      }
    }
  }
  return within_limit<BFloat16>(top);
}
bool pack_values_turned(const TileDims& dims, void* out, const RowSource& v) {
  const TurnedParts parts(dims);
  bool finite = true;
  for (int row = 0; row < v.rows; row += kChunk) {
    if (v.ahead != nullptr) fetch_lines(v.ahead, 4 * v.ahead->burst);
    RowSource chunk = v;
    chunk.rows = at_most(kChunk, v.rows - row);
    chunk.data = static_cast<const Word*>(v.data) + row * v.stride;
    finite &= pack_left_columns<false>(static_cast<Word*>(out) + row / kChunk * parts.chunk, kChunk, chunk);
  }
  return finite;
}
bool pack_queries_turned(const TileDims& dims, void* out, const RowSource& q) {
  return pack_right_columns<BFloat16>(static_cast<Word*>(out), TurnedParts(dims).depth * std::int64_t{kLanes}, 0, q);
}

}  // namespace
}  // namespace ringspan::kernels
