#include "plan/choose_together.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "plan/plan_data.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

Problem make_problem(int ranks = 8) {
  Problem p;
  p.tokens_q = p.tokens_k = 4096;
  p.heads = p.kv_heads = 8;
  p.pattern = Pattern::parse("causal");
  p.sharding_q = p.sharding_k = Sharding::parse("zigzag");
  p.ranks = ranks;
  return p;
}

TEST(ChooseTogether, OneChoiceForAllThatHoldIt) {
  const auto first = internal::choose_together(make_problem(), {});
  EXPECT_EQ(internal::choose_together(make_problem(), {}), first);
  EXPECT_EQ(internal::choose_together(make_problem(), {})->plans, internal::choose(make_problem(), {}).plans);
}

TEST(ChooseTogether, APlanHoldsItsChoice) {
  const Plan plan = make_plan(make_problem(), {}, 0);
  const auto choice = internal::choose_together(make_problem(), {});
  EXPECT_EQ(plan.data().choice, choice);
  EXPECT_EQ(make_plan(make_problem(), {}, 1).data().choice, choice);
}

TEST(ChooseTogether, NotForWhoAsksForAnother) {
  const auto first = internal::choose_together(make_problem(), {});
  PlanOptions options;
  options.strategy = Strategy::ring;
  const auto ring = internal::choose_together(make_problem(), options);
  EXPECT_EQ(ring->setting.options.strategy, Strategy::ring);
  EXPECT_NE(internal::choose_together(make_problem(4), options), ring);
  EXPECT_EQ(internal::choose_together(make_problem(4), options)->setting.ranks(), 4);
}

TEST(ChooseTogether, ThreadsPlanWhatOneWould) {
  constexpr int kRanks = 8;
  std::vector<std::string> alone, together(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) alone.push_back(make_plan(make_problem(), {}, rank).to_json());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { together[rank] = make_plan(make_problem(), {}, static_cast<int>(rank)).to_json(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(together, alone);
}

TEST(ChooseTogether, EveryThreadThrows) {
  PlanOptions options;
  options.memory_budget = 1000;
  std::atomic<int> thrown = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        make_plan(make_problem(), options, rank);
      } catch (const OutOfBudget& error) {
        if (std::string(error.what()).find("smallest possible is") != std::string::npos) ++thrown;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(thrown, 4);
}

}  // namespace
}  // namespace ringspan
