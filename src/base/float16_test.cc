#include "base/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace ringspan {
namespace {

// The value of 16 bits with `exponent_bits` of exponent, from the definition.
double decode(std::uint32_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>((bits & 0x7fffU) >> mantissa_bits);
  const auto mantissa = static_cast<double>(bits & ((1U << mantissa_bits) - 1U));
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + std::ldexp(1.0, mantissa_bits), exponent - bias - mantissa_bits);
}

struct Format {
  const char* name;
  int exponent_bits;
  float (*load)(std::uint16_t);
  std::uint16_t (*store)(float);
};

class Float16Test : public testing::TestWithParam<Format> {};

TEST_P(Float16Test, EveryPatternDecodesAndComesBack) {
  const Format& format = GetParam();
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const double expected = decode(bits, format.exponent_bits);
    const float value = format.load(pattern);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(format.load(format.store(value)))) << bits;
    } else {
      ASSERT_EQ(value, expected) << bits;
      ASSERT_EQ(format.store(value), pattern) << bits;
    }
  }
}

// Between two neighbours the nearer one is chosen, and the even one half-way.
TEST_P(Float16Test, RoundsToNearestEven) {
  const Format& format = GetParam();
  const std::uint32_t infinity = ((1U << format.exponent_bits) - 1U) << (15 - format.exponent_bits);
  for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const double low = decode(bits, format.exponent_bits);
    const double high = decode(bits + 1, format.exponent_bits);
    const auto middle = static_cast<float>((low + high) / 2);
    if (middle != (low + high) / 2) continue;  // half a denormal of bfloat16 does not exist in float32
    const std::uint32_t even = bits + (bits & 1U);
    ASSERT_EQ(format.store(middle), even) << bits;
    ASSERT_EQ(format.store(-middle), even | 0x8000U) << bits;
    ASSERT_EQ(format.store(std::nextafterf(middle, 0.0F)), bits) << bits;
    ASSERT_EQ(format.store(std::nextafterf(middle, INFINITY)), bits + 1) << bits;
  }
}

TEST_P(Float16Test, OverflowBecomesInfinity) {
  const Format& format = GetParam();
  const std::uint32_t infinity = ((1U << format.exponent_bits) - 1U) << (15 - format.exponent_bits);
  const double largest = decode(infinity - 1, format.exponent_bits);
  const double step = largest - decode(infinity - 2, format.exponent_bits);
  EXPECT_EQ(format.store(static_cast<float>(largest + step / 2)), infinity);
  EXPECT_EQ(format.store(std::nextafterf(static_cast<float>(largest + step / 2), 0.0F)), infinity - 1);
  EXPECT_EQ(format.store(INFINITY), infinity);
  EXPECT_EQ(format.store(-INFINITY), infinity | 0x8000U);
  EXPECT_TRUE(std::isnan(format.load(format.store(std::numeric_limits<float>::quiet_NaN()))));
}

INSTANTIATE_TEST_SUITE_P(Formats, Float16Test,
                         testing::Values(Format{"float16", 5, float16_to_float, float_to_float16},
                                         Format{"bfloat16", 8, bfloat16_to_float, float_to_bfloat16}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace ringspan
