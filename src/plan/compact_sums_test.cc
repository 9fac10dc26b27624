// How much room sums of gradients take. That the plans are right is what check_plan, plan_property_test and the tests of
// devices check.
#include "plan/compact_sums.h"

#include <gtest/gtest.h>

#include <string>

#include "plan_testing/check_plan.h"
#include "plan_testing/random_problem.h"

namespace ringspan {
namespace {

struct Expected {
  const char* pattern;
  Strategy strategy;
  std::int64_t dq_rows, dk_rows;  // x heads, of rank 0, with sums in float32
  int kv_heads = 4;
  DType dtype = DType::bfloat16;
};

std::int64_t bytes_of(const internal::Program& program, const std::string& name) {
  std::int64_t bytes = 0;
  for (const internal::Region& region : program.regions) bytes += region.name == name ? region.bytes : 0;
  return bytes;
}

void expect(const Expected& expected) {
  Problem p;
  p.batch = 1;
  p.tokens_q = p.tokens_k = 2048;
  p.heads = 4, p.kv_heads = expected.kv_heads;
  p.head_dim = p.head_dim_v = 16;
  p.dtype = expected.dtype;
  p.pattern = Pattern::parse(expected.pattern);
  p.ranks = 2;
  PlanOptions options;
  options.device = DeviceKind::cuda;
  options.strategy = expected.strategy;
  SCOPED_TRACE(testing::describe(p, options, 0));
  const std::vector<Plan> plans = testing::plan_all(p, options);
  ASSERT_EQ(testing::check_plans(plans), "");
  const internal::Program& program = plans.front().data().backward;
  const std::int64_t row = p.batch * p.head_dim * std::int64_t{4};
  EXPECT_EQ(bytes_of(program, "dq"), expected.dq_rows * row);
  EXPECT_EQ(bytes_of(program, "dk"), expected.dk_rows * row);
  EXPECT_EQ(bytes_of(program, "dv"), expected.dk_rows * row);
}

// A rank has 1,024 rows; a quarter of each head's are in the branch that reaches across both.
TEST(CompactSums, RowsOfTheBranchThatReachesAcrossRanks) {
  expect({"dilated:512x1,1024x2,2048x4", Strategy::exchange, 256 * 4, 256 * 4});
  expect({"dilated:512x1,1024x2,2048x4", Strategy::pass_q, 256 * 4, 256 * 4});
}

TEST(CompactSums, AllRows) {
  expect({"full", Strategy::exchange, 1024 * 4, 1024 * 4});
  expect({"full", Strategy::exchange, 1024 * 4, 1024 * 2, 2});
}

// Nothing is summed beside the tensors.
TEST(CompactSums, Float32) { expect({"dilated:512x1,1024x2,2048x4", Strategy::exchange, 0, 0, 4, DType::float32}); }

}  // namespace
}  // namespace ringspan
