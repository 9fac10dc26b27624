// Which pairs are dropped: a rate, and a function of every coordinate.
#include "kernels/attend.h"

#include <gtest/gtest.h>

#include <cmath>

namespace ringspan::kernels {
namespace {

TEST(Dropout, RateAndIndependence) {
  const double rate = 0.3;
  int dropped = 0, both = 0;
  const int n = 400;
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      const bool a = is_dropped(1, 0.3F, 0, 0, i, j, 0);
      dropped += a ? 1 : 0;
      both += a && is_dropped(1, 0.3F, 0, 0, i, j + 1, 0) ? 1 : 0;
    }
  }
  const double count = static_cast<double>(n) * n;
  EXPECT_NEAR(dropped / count, rate, 5 * std::sqrt(rate * (1 - rate) / count));
  EXPECT_NEAR(both / count, rate * rate, 5 * std::sqrt(rate * rate / count));
}

TEST(Dropout, EveryCoordinateMatters) {
  const auto pattern = [](std::uint64_t seed, std::int64_t batch, std::int64_t head, std::int64_t i, int state) {
    std::uint64_t bits = 0;
    for (int j = 0; j < 64; ++j) bits |= static_cast<std::uint64_t>(is_dropped(seed, 0.5F, batch, head, i, j, state)) << j;
    return bits;
  };
  const std::uint64_t base = pattern(1, 2, 3, 4, 0);
  EXPECT_NE(base, pattern(2, 2, 3, 4, 0));
  EXPECT_NE(base, pattern(1 | std::uint64_t{1} << 40, 2, 3, 4, 0));
  EXPECT_NE(base, pattern(1, 3, 3, 4, 0));
  EXPECT_NE(base, pattern(1, 2, 4, 4, 0));
  EXPECT_NE(base, pattern(1, 2, 3, 5, 0));
  EXPECT_NE(base, pattern(1, 2, 3, 4 + (std::int64_t{1} << 35), 0));
  EXPECT_NE(base, pattern(1, 2, 3, 4, 1));
  EXPECT_FALSE(is_dropped(1, 0.0F, 0, 0, 0, 0, 0));
}

}  // namespace
}  // namespace ringspan::kernels
