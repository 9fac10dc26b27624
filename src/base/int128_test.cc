#include "base/int128.h"

#include <gtest/gtest.h>

namespace ringspan {
namespace {

TEST(Int128, PrintsValuesBeyond64Bits) {
  EXPECT_EQ(to_string(Int128{0}), "0");
  EXPECT_EQ(to_string(Int128{-7}), "-7");
  EXPECT_EQ(to_string(Int128{1000000000} * 1000000000 * 1000000000), "1000000000000000000000000000");
}

TEST(Int128, PrintsBothEnds) {
  const Int128 half = Int128{1} << 126;
  EXPECT_EQ(to_string(half - 1 + half), "170141183460469231731687303715884105727");
  EXPECT_EQ(to_string(-half - half), "-170141183460469231731687303715884105728");
}

}  // namespace
}  // namespace ringspan
