// What the algorithms of tile_generic.h and tile_pairs.h share: elementary functions over the vectors of an ISA file's
// `struct Isa`, ranges of rows, sources. Included after it; everything is in an anonymous namespace, as there.
#pragma once

namespace ringspan::kernels {
namespace {

#define RINGSPAN_INLINE inline __attribute__((always_inline))
#define RINGSPAN_UNROLL _Pragma("GCC unroll 16")

using Reg = Isa::Reg;
constexpr int kWidth = Isa::kWidth;
constexpr int kVectors = Isa::kVectors;
constexpr int kPanel = kWidth * kVectors;
constexpr float kInf = __builtin_inff(), kLog2e = 1.44269504F;

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a < b ? b : a; }
constexpr int down(int x) { return x / kWidth * kWidth; }
constexpr int up(int x) { return (x + kWidth - 1) / kWidth * kWidth; }

// function(i, i % kWays) for i in [0, count): sums that take turns stay in registers.
template <int kWays, typename Function>
RINGSPAN_INLINE void in_turns(int count, const Function& function) {
  int i = 0;
  for (; i + kWays <= count; i += kWays) {
    RINGSPAN_UNROLL for (int way = 0; way < kWays; ++way) function(i + way, way);
  }
  RINGSPAN_UNROLL for (int way = 0; way < kWays - 1; ++way) {
    if (i + way < count) function(i + way, way);
  }
}

// ---- elementary functions ----------------------------------------------------------------------------------------------

// 2^f for a fraction f() of x, on [0, 1): a polynomial of the least relative error: 9e-5 or 1e-7 of degree 3 or 5. Exactly 1 at
// 0.
template <typename Set = Isa, int kDegree = 5>
RINGSPAN_INLINE Reg exp2_of_fraction(Reg f) {
  constexpr float kThird[] = {7.7067041997E-2F, 2.2764499120E-1F, 6.9511678642E-1F};
  constexpr float kFifth[] = {1.8671301659E-3F, 9.0170297764E-3F, 5.5799912661E-2F, 2.4016444385E-1F, 6.9315129519E-1F};
  const auto of = [&](const auto& coefficients) {
    Reg p = Set::set1(coefficients[0]);
    RINGSPAN_UNROLL for (int i = 1; i < kDegree; ++i) p = Set::fma(p, f, Set::set1(coefficients[i]));
    return Set::fma(p, f, Set::set1(1.0F));
  };
  if constexpr (kDegree == 3) {
    return of(kThird);
  } else {
    return of(kFifth);
  }
}

// 2^x for x <= 127; ldexp() takes the integer part. Exactly 1 at 0, exactly 0 below -126 (and at -inf), NaN at NaN. Were the
// probabilities below that denormal numbers, every product with one of them would take a hundred times as long.
template <typename Set = Isa, int kDegree = 5>
RINGSPAN_INLINE Reg exp2_of(Reg x) {
  return Set::ldexp(exp2_of_fraction<Set, kDegree>(Set::fraction(x)), x);
}

// e^x for x <= 88; relative error 1e-7; exactly 1 at 0, exactly 0 below -87.7 (and at -inf), NaN at NaN.
template <typename Set = Isa>
RINGSPAN_INLINE Reg exp_of(Reg x) {
  const Reg log2e = Set::set1(kLog2e);
  if constexpr (requires { Set::fraction(x); }) {
    return exp2_of<Set>(x * log2e);
  } else {
    x = Set::max(Set::set1(-88.0F), x);
    // Rounds to a whole number, and leaves it in the last bits, as an exponent.
    const Reg shift = Set::set1(0x1.8p23F + 127.0F);
    const Reg whole = Set::fma(x, log2e, shift), f = Set::fma(x, log2e, shift - whole);
    Reg p = Set::set1(1.327646719e-3F);  // 2^f, |f| <= 1/2: minimax of degree 5
    p = Set::fma(p, f, Set::set1(9.675541682e-3F));
    p = Set::fma(p, f, Set::set1(5.550713292e-2F));
    p = Set::fma(p, f, Set::set1(2.402211972e-1F));
    p = Set::fma(p, f, Set::set1(6.931469671e-1F));
    p = Set::fma(p, f, Set::set1(1.0F));
    return p * Set::last_bits_as_exponent(whole);
  }
}

// Near 0 the odd polynomial of Cephes; elsewhere from e^(2|x|). Relative error 2e-7; NaN at NaN.
RINGSPAN_INLINE Reg tanh_of(Reg x) {
  const Reg zero = Isa::zero();
  const Reg magnitude = x < zero ? -x : x;
  const Reg z = x * x;
  Reg p = Isa::set1(-5.70498872745e-3F);
  p = Isa::fma(p, z, Isa::set1(2.06390887954e-2F));
  p = Isa::fma(p, z, Isa::set1(-5.37397155531e-2F));
  p = Isa::fma(p, z, Isa::set1(1.33314422036e-1F));
  p = Isa::fma(p, z, Isa::set1(-3.33332819422e-1F));
  const Reg small = Isa::fma(p * z, x, x);
  const Reg limit = Isa::set1(10.0F);  // tanh is 1 in float32
  const Reg bounded = magnitude > limit ? limit : magnitude;
  const Reg large = Isa::set1(1.0F) - Isa::set1(2.0F) / (exp_of(bounded + bounded) + Isa::set1(1.0F));
  return magnitude < Isa::set1(0.625F) ? small : (x < zero ? -large : large);
}

// s -= slope |distance + c step| for c in [begin, end).
inline void subtract_alibi(float* s, int begin, int end, float slope, std::int64_t distance, std::int64_t step) {
  for (int c = begin; c < end; ++c) {
    const std::int64_t d = distance + c * step;
    s[c] -= slope * static_cast<float>(d < 0 ? -d : d);
  }
}

inline void fill(float* s, int begin, int end, float value) {
  for (int c = begin; c < end; ++c) s[c] = value;
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

template <typename Type>
RINGSPAN_INLINE const typename Type::Type* row_at(const RowSource& source, int row) {
  const std::int64_t index = source.index == nullptr ? row : source.index[row];
  return static_cast<const typename Type::Type*>(source.data) + index * source.stride;
}

// The union of the ranges of rows [first, last), empty ones left out.
struct Range {
  int begin, end;
  bool empty() const { return begin >= end; }
};
inline Range union_of(const std::int32_t* begin, const std::int32_t* end, int first, int last) {
  Range range{1 << 30, 0};
  for (int r = first; r < last; ++r) {
    if (begin[r] >= end[r]) continue;
    range = {at_most(range.begin, begin[r]), at_least(range.end, end[r])};
  }
  return range;
}

}  // namespace
}  // namespace ringspan::kernels
