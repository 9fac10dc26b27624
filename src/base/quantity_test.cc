#include "base/quantity.h"

#include <gtest/gtest.h>

namespace ringspan::internal {
namespace {

TEST(Quantity, Bytes) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(1024), "1 KiB");
  EXPECT_EQ(bytes_text(1.5 * (1 << 30)), "1.5 GiB");
  EXPECT_EQ(bytes_text((1 << 20) - 1.0), "1 MiB");  // not 1024 KiB
}

TEST(Quantity, Flops) {
  EXPECT_EQ(flops_text(999), "999 FLOP");
  EXPECT_EQ(flops_text(18.01e15), "18.01 PFLOP");
  EXPECT_EQ(flops_text(999'999'999), "1 GFLOP");
  EXPECT_EQ(flops_text(12e21), "1.2e+04 EFLOP");
}

TEST(Quantity, Durations) {
  EXPECT_EQ(duration_text(0), "0 ns");
  EXPECT_EQ(duration_text(20'000), "20 us");
  EXPECT_EQ(duration_text(250'900'000'000), "250.9 s");
  EXPECT_EQ(duration_text(Int128{180'144} * 1'000'000'000), "2.085 days");
  EXPECT_EQ(duration_text(Int128{1} << 100), "4.017e+13 years");
}

}  // namespace
}  // namespace ringspan::internal
