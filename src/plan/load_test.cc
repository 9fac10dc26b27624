// What is counted of each rank without planning it, against plans.
#include "plan/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "plan/choose.h"
#include "plan_testing/random_problem.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

// The choice stops planning a candidate by these numbers, so that they must be exact.
TEST(Loads, AreThePairsOfPlans) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    testing::RandomProblem random(seed);
    const Problem problem = random.problem(static_cast<int>(random.draw(1, 7)), 80);
    for (const StrategyRow& row : strategies()) {
      PlanOptions options;
      options.strategy = row.strategy;
      options.backward = false;
      const Setting setting = choose(problem, options).setting;
      const Loads loads(setting);
      for (int rank = 0; rank < problem.ranks; ++rank) {
        ASSERT_EQ(loads.pairs(row.assign(setting, rank)), build_plan(setting, rank).forward.pairs)
            << row.name << " rank " << rank << " of " << testing::describe(problem, options, seed);
      }
    }
  }
}

// A plan that no memory holds ends with an error, where it would end the process.
TEST(Loads, HaveAMost) {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 64;
  problem.ranks = 2;
  problem.pattern = Pattern::parse("causal");
  problem.sharding_q = problem.sharding_k = Sharding::parse("block_striped:4");
  for (const Strategy strategy : {Strategy::all_gather, Strategy::ring}) {
    PlanOptions options;
    options.strategy = strategy;
    Setting setting = choose(problem, options).setting;
    const PlanData data = build_plan(setting, 1);
    setting.most_tasks = std::max(std::ssize(data.forward.attend_items), std::ssize(data.backward.attend_items));
    EXPECT_NO_THROW(build_plan(setting, 1));
    const std::string words = "rank 1 would have more than " + std::to_string(--setting.most_tasks) + " tasks in a pass";
    try {
      build_plan(setting, 1);
      FAIL() << to_string(strategy);
    } catch (const OutOfBudget& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(words)) << to_string(strategy);
    }
  }
}

TEST(Loads, KnowTheExtremes) {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 1000;
  problem.ranks = 10;
  problem.pattern = Pattern::parse("causal");
  PlanOptions options;
  options.strategy = Strategy::ring;
  EXPECT_EQ(Loads(choose(problem, options).setting).extremes(), (std::vector<int>{0, 9}));
  problem.pattern = Pattern::parse("block:300-400,0-1000;0-300,700-800");  // queries of rank 3, keys of rank 7
  EXPECT_EQ(Loads(choose(problem, options).setting).extremes(), (std::vector<int>{0, 3, 7}));
}

// Of a pattern with more slices than may be looked at, all ranks count as those that were.
TEST(Loads, AreEstimatedFromSomeRanks) {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 1 << 20;
  problem.ranks = 512;
  problem.heads = problem.kv_heads = 8;
  problem.pattern = Pattern::parse("dilated:2048x1,4096x2");
  PlanOptions options;
  for (const Strategy strategy : {Strategy::ring, Strategy::local, Strategy::ulysses}) {
    options.strategy = strategy;
    if (strategy == Strategy::ulysses) problem.ranks = 8;
    const Setting setting = choose(problem, options).setting;
    const Loads all(setting), some(setting, 100);
    EXPECT_EQ(all.ranks_looked_at(), problem.ranks);
    EXPECT_LT(some.ranks_looked_at(), problem.ranks);
    for (const int rank : {0, problem.ranks - 1}) {
      const Assignment assignment = strategy_row(strategy).assign(setting, rank);
      EXPECT_EQ(some.pairs(assignment), all.pairs(assignment)) << to_string(strategy) << " rank " << rank;
    }
  }
}

}  // namespace
}  // namespace ringspan::internal
