// Which pairs the oracle drops: published numbers, a rate, and the decisions that docs/numerics.md defines.
#include "oracle/dropout.h"

#include <gtest/gtest.h>

#include <cmath>

namespace ringspan::oracle {
namespace {

TEST(OracleDropout, PhiloxGivesThePublishedNumbers) {  // Random123, kat_vectors, philox4x32 10
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(OracleDropout, DropsAsOftenAsAsked) {
  for (const float rate : {0.0F, 0.1F, 0.5F, 0.9F}) {
    Problem p;
    p.dropout = rate;
    p.seed = 3;
    int dropped = 0;
    const int n = 300;
    for (int pair = 0; pair < n * n; ++pair) dropped += is_dropped(p, 0, 1, pair / n, pair % n, 0) ? 1 : 0;
    EXPECT_NEAR(dropped, n * n * rate, 5 * std::sqrt(n * n * rate * (1 - rate))) << rate;
  }
}

TEST(OracleDropout, EveryCoordinateMatters) {
  Problem p;
  p.dropout = 0.5F;
  p.seed = 1;
  const auto decisions = [&p](std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t first, int state) {
    std::uint64_t bits = 0;
    for (int j = 0; j < 64; ++j) bits |= std::uint64_t{is_dropped(p, batch, head, i, first + j, state)} << j;
    return bits;
  };
  const std::uint64_t base = decisions(2, 3, 4, 0, 0);
  EXPECT_NE(base, decisions(3, 3, 4, 0, 0));
  EXPECT_NE(base, decisions(2, 4, 4, 0, 0));
  EXPECT_NE(base, decisions(2, 3, 4 + (std::int64_t{1} << 35), 0, 0));
  EXPECT_NE(base, decisions(2, 3, 4, std::int64_t{1} << 36, 0));
  EXPECT_NE(base, decisions(2, 3, 4, 0, 1));
  p.seed |= std::uint64_t{1} << 40;
  EXPECT_NE(base, decisions(2, 3, 4, 0, 0));
}

}  // namespace
}  // namespace ringspan::oracle
