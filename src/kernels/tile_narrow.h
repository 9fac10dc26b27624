// Part of tile_generic.h and tile_pairs.h: the states of queries that fill a half or a quarter of a vector. A vector of scores
// or probabilities s[key][query] holds those of kKeys keys.
#pragma once

#include "kernels/tile_math.h"

namespace ringspan::kernels {
namespace {

template <int kQueries>
class NarrowStates {
 public:
  static constexpr int kKeys = kWidth / kQueries;

  // The maxima of `size` scores, whole vectors, times `scale`, beside those so far.
  NarrowStates(const ForwardTile& tile, const float* s, int size, float scale) {
    Reg top[2] = {Isa::set1(-kInf), Isa::set1(-kInf)};
    in_turns<2>(size / kWidth, [&](int i, int way) { top[way] = Isa::max(Isa::load(s + i * kWidth), top[way]); });
    Isa::store(parts_, Isa::max(top[0], top[1]));
    Reg tile_m = part(0);
    for (int i = 1; i < kKeys; ++i) tile_m = Isa::max(tile_m, part(i));
    tile_m *= Isa::set1(scale);
    const Reg old_m = Isa::load_partial(tile.m, tile.rows);
    m_ = tile_m > old_m ? tile_m : old_m;
    factor_ = old_m == m_ ? Isa::set1(1.0F) : exp_of(old_m - m_);
  }

  // What is subtracted of a vector of scores: the maxima, but no inf - inf.
  Reg origin() {
    const Reg finite = m_ == Isa::set1(-kInf) ? Isa::zero() : m_;
    for (int i = 0; i < kKeys; ++i) Isa::store_partial(parts_ + i * kQueries, finite, kQueries);
    return Isa::load(parts_);
  }

  // The states of the rows, with the sums of probabilities; shrink: e^(m - m').
  void settle(const ForwardTile& tile, Reg sum, float* shrink) {
    Isa::store(parts_, sum);
    Reg total = part(0);
    for (int i = 1; i < kKeys; ++i) total += part(i);
    Isa::store_partial(shrink, factor_, tile.rows);
    Isa::store_partial(tile.m, m_, tile.rows);
    Isa::store_partial(tile.l, Isa::fma(Isa::load_partial(tile.l, tile.rows), factor_, total), tile.rows);
  }

 private:
  Reg part(int i) const { return Isa::load_partial(parts_ + i * kQueries, kQueries); }

  float parts_[kWidth];  // one per query, of every kKeys-th key
  Reg m_, factor_;
};

}  // namespace
}  // namespace ringspan::kernels
