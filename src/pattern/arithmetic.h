// Integer helpers of the pattern layer: division that rounds one way whatever the sign. Pure, constexpr.
#pragma once

#include <cstdint>

#include "base/int128.h"

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

// In [0, m).
template <typename Int>
constexpr Int floor_mod(Int a, Int m) {
  const Int r = a % m;
  return r < 0 ? r + m : r;
}

}  // namespace ringspan::internal
