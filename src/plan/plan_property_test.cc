// Random problems x every strategy x several world sizes: what the ranks plan, each alone, fits together.
// RINGSPAN_SEED and RINGSPAN_CASES in the environment choose the first seed and the number of cases.
#include <gtest/gtest.h>

#include <cstdlib>

#include "plan/strategy.h"
#include "plan_testing/check_plan.h"
#include "plan_testing/random_problem.h"

namespace ringspan {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kCases = 10;  // the same programs ten times slower
#else
constexpr std::uint64_t kCases = 60;
#endif

class Worlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Worlds, ::testing::Values(1, 2, 3, 4, 7), ::testing::PrintToStringParamName());

TEST_P(Worlds, PlansFitTogether) {
  const std::uint64_t first = from_environment("RINGSPAN_SEED", 1);
  const std::uint64_t cases = from_environment("RINGSPAN_CASES", kCases);
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    testing::RandomProblem random(seed * 1000 + static_cast<std::uint64_t>(GetParam()));
    const Problem problem = random.problem(GetParam());
    for (const internal::StrategyRow& row : internal::strategies()) {
      PlanOptions options = random.options(problem, row.strategy);
      if (seed % 2 == 0) options.device = DeviceKind::cuda;
      ASSERT_EQ(testing::check_plans(testing::plan_all(problem, options)), "") << testing::describe(problem, options, seed);
    }
  }
}

}  // namespace
}  // namespace ringspan
