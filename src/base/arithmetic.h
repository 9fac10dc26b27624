// Division of integers that rounds one way whatever the sign. Pure, constexpr.
#pragma once

namespace ringspan::internal {

// b > 0.
template <typename Int>
constexpr Int floor_div(Int a, Int b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

template <typename Int>
constexpr Int ceil_div(Int a, Int b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

// The next multiple, a >= 0.
template <typename Int>
constexpr Int round_up(Int a, Int multiple) {
  return ceil_div(a, multiple) * multiple;
}

// In [0, m).
template <typename Int>
constexpr Int floor_mod(Int a, Int m) {
  const Int r = a % m;
  return r < 0 ? r + m : r;
}

}  // namespace ringspan::internal
