#include "oracle/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/float16.h"

namespace ringspan::oracle {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor tensor(std::vector<double> values, double floor, std::int64_t width = 2) {
  Tensor t;
  t.width = width;
  t.values = std::move(values);
  t.floors.assign(static_cast<std::size_t>(t.rows()), floor);
  return t;
}

TEST(Compare, ToleranceIsTwiceTheNaiveErrorOfTheRowPlusTheFloor) {
  const Tensor exact = tensor({0, 0, 0, 0}, 0.001);
  const Tensor naive = tensor({0.01, 0, 0, 0}, 0);
  EXPECT_TRUE(compare("o", exact, naive, std::vector<double>{0, 0.0209, 0, 0.0009}, DType::float32).passed);
  const Comparison other_row = compare("o", exact, naive, std::vector<double>{0, 0, 0, 0.0011}, DType::float32);
  EXPECT_FALSE(other_row.passed);  // the naive error of the first row does not excuse the second
  EXPECT_EQ(other_row.worst, 3);
  EXPECT_EQ(other_row.failures, 1);
  EXPECT_EQ(to_string(other_row),
            "o: failed, 1 of 4 elements; worst at 3: 0.0011 instead of 0 (error 1.1e-03, tolerance 1.0e-03)");
}

TEST(Compare, OneRoundingToTheDtypeIsForgiven) {
  const Tensor exact = tensor({1.0 + 0x1p-9, 1.0}, 0.0);
  EXPECT_TRUE(compare("o", exact, exact, std::vector<double>{1.0, 1.0}, DType::bfloat16).passed);
  EXPECT_FALSE(compare("o", exact, exact, std::vector<double>{1.0, 1.0}, DType::float32).passed);
}

TEST(Compare, NaNPassesWhereTheExactValueIsNaN) {
  const Tensor exact = tensor({1, 1}, 1e300);
  EXPECT_FALSE(compare("o", exact, exact, std::vector<double>{1, kNaN}, DType::float32).passed);
  for (const double floor : {0.0, kInfinity, kNaN}) {
    const Tensor bad = tensor({1, kNaN}, floor);
    const Comparison same = compare("o", bad, bad, std::vector<double>{1, kNaN}, DType::float32);
    EXPECT_TRUE(same.passed) << floor;
    EXPECT_EQ(same.both_nan, 1);
    const Comparison other = compare("o", bad, bad, std::vector<double>{1, 1}, DType::float32);
    EXPECT_FALSE(other.passed) << floor;
    EXPECT_EQ(other.both_nan, 0);
    EXPECT_FALSE(compare("o", bad, bad, std::vector<double>{kNaN, kNaN}, DType::float32).passed) << floor;
  }
  EXPECT_FALSE(compare("o", tensor({1, kNaN}, kNaN), exact, std::vector<double>{1.1, kNaN}, DType::float32).passed);
  const Tensor naive = tensor({1, kNaN}, 0);
  EXPECT_FALSE(compare("o", exact, naive, std::vector<double>{kNaN, 1}, DType::float32).passed);
  EXPECT_TRUE(compare("o", tensor({1, 1}, 0.1), naive, std::vector<double>{1, 1.05}, DType::float32).passed);
}

TEST(Compare, TheWorstElementIsOneThatFails) {
  const Tensor exact = tensor({0, 0, 1, 1}, 0.5);
  const Comparison found = compare("o", exact, exact, std::vector<double>{0.25, kNaN, 1, 1.25}, DType::float32);
  EXPECT_EQ(found.failures, 1);
  EXPECT_EQ(found.worst, 1);
  const Tensor sharp = tensor({0, 0, 1, 1}, kInfinity);
  EXPECT_EQ(compare("o", sharp, sharp, std::vector<double>{0, kInfinity, 1, 2}, DType::float32).worst, 1);
  EXPECT_EQ(compare("o", tensor({0, 0}, 0), tensor({0, 0}, 0), std::vector<double>{0, 0.5}, DType::float32).worst, 1);
}

TEST(Compare, InfinitiesMustBeTheSame) {
  const Tensor exact = tensor({-kInfinity, 0}, 1e300);
  EXPECT_TRUE(compare("lse", exact, exact, std::vector<double>{-kInfinity, 0}, DType::float32).passed);
  EXPECT_FALSE(compare("lse", exact, exact, std::vector<double>{-1e30, 0}, DType::float32).passed);
  EXPECT_FALSE(compare("lse", exact, exact, std::vector<double>{kInfinity, 0}, DType::float32).passed);
  EXPECT_FALSE(compare("lse", exact, exact, std::vector<double>{-kInfinity, -kInfinity}, DType::float32).passed);
}

TEST(Compare, WhatFloat16CannotHoldMayBeInfinite) {
  const Tensor exact = tensor({70000, -70000}, 0);
  EXPECT_TRUE(compare("dq", exact, exact, std::vector<double>{kInfinity, -kInfinity}, DType::float16).passed);
  EXPECT_FALSE(compare("dq", exact, exact, std::vector<double>{kInfinity, kInfinity}, DType::float16).passed);
  EXPECT_FALSE(compare("dq", exact, exact, std::vector<double>{kInfinity, -kInfinity}, DType::bfloat16).passed);
}

TEST(Compare, ViewsAreReadByTheirStrides) {
  // (batch 1, heads 2, tokens 3, width 1) seen as (1, 3, 2, 1)
  const float data[] = {0, 1, 2, 10, 11, 12};
  const View view{data, DType::float32, 6, 1, 3};
  EXPECT_EQ(to_doubles(view, 1, 3, 2, 1), (std::vector<double>{0, 10, 1, 11, 2, 12}));
  const Row rows[] = {{0, 1, 2}, {0, 0, 1}};
  EXPECT_EQ(to_doubles(view, rows, 1), (std::vector<double>{12, 1}));
  const std::uint16_t half[] = {float_to_float16(1.5F), float_to_bfloat16(1.5F)};
  EXPECT_EQ(to_doubles({half, DType::float16, 1, 1, 1}, 1, 1, 1, 1)[0], 1.5);
  EXPECT_EQ(to_doubles({half + 1, DType::bfloat16, 1, 1, 1}, 1, 1, 1, 1)[0], 1.5);
}

}  // namespace
}  // namespace ringspan::oracle
