// Rows of the mission at sizes that take minutes under a sanitizer.
#include <gtest/gtest.h>

#include "api_testing/world.h"

namespace ringspan::testing {
namespace {

// The prototypes refused lengths that the largest segment does not divide.
TEST(Mission, NoDivisibilityConstraintAtTheSizesOfThePaper) {
  for (const std::int64_t tokens : {2048, 4096}) {
    for (const int ranks : {1, 2}) {
      Case test;
      Problem& p = test.problem;
      p.tokens_q = p.tokens_k = tokens;
      p.heads = p.kv_heads = 1;
      p.head_dim = p.head_dim_v = 4;
      p.pattern = Pattern::parse("dilated:2048x1,4096x2,8192x4");
      p.ranks = ranks;
      test.options.strategy = Strategy::ring;
      EXPECT_EQ(judge(test), "");
    }
  }
}

}  // namespace
}  // namespace ringspan::testing
