#include "plan/rank_costs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pattern/lower.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

using internal::RankCost;
using internal::RankCosts;
using ::testing::HasSubstr;
using ::testing::Not;

Problem make_problem(int ranks = 5) {
  Problem p;
  p.tokens_q = p.tokens_k = 997;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 16;
  p.pattern = Pattern::parse("causal");
  p.ranks = ranks;
  return p;
}

RankCosts costs_of(const Problem& problem, const PlanOptions& options) {
  return RankCosts(problem, options, [](int) {});
}

TEST(RankCosts, AreThoseOfThePlans) {
  for (const Strategy strategy : {Strategy::ring, Strategy::exchange, Strategy::all_gather, Strategy::pass_q}) {
    PlanOptions options;
    options.strategy = strategy;
    const RankCosts costs = costs_of(make_problem(), options);
    ASSERT_EQ(costs.ranks().size(), 5U);
    Int128 pairs = 0;
    std::int64_t sent = 0, received = 0, queries = 0;
    for (int rank = 0; rank < 5; ++rank) {
      const Plan plan = make_plan(make_problem(), options, rank);
      const RankCost& cost = costs.ranks()[static_cast<std::size_t>(rank)];
      EXPECT_EQ(cost.nanoseconds, plan.modelled_nanoseconds());
      queries += cost.queries;
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const internal::PassCost& of_pass = cost.passes[static_cast<std::size_t>(pass)];
        EXPECT_EQ(of_pass.memory_bytes, plan.memory_bytes(pass));
        EXPECT_EQ(of_pass.flops, plan.flops(pass));
        std::int64_t to_peers = 0, from_peers = 0;
        for (const PeerBytes& peer : plan.traffic(pass)) {
          to_peers += peer.sent_bytes;
          from_peers += peer.received_bytes;
        }
        EXPECT_EQ(of_pass.sent_bytes, to_peers);
        EXPECT_EQ(of_pass.received_bytes, from_peers);
        pairs += of_pass.pairs;
        sent += of_pass.sent_bytes;
        received += of_pass.received_bytes;
      }
    }
    EXPECT_EQ(queries, 997);
    EXPECT_EQ(pairs, 2 * pair_count(make_problem())) << to_string(strategy);
    EXPECT_EQ(sent, received);
  }
}

TEST(RankCosts, ForPeople) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  const std::string text = costs_of(make_problem(), options).to_string();
  for (const char* words : {"plans of 5 ranks", "997 queries x 997 keys", "on the slowest rank (4)", "both passes", "least",
                            "mean", "most", "all"}) {
    EXPECT_THAT(text, HasSubstr(words));
  }
  EXPECT_THAT(text, Not(HasSubstr("pinned")));  // nothing is
  options.backward = false;
  EXPECT_THAT(costs_of(make_problem(), options).to_string(), Not(HasSubstr("both passes")));
  EXPECT_THAT(costs_of(make_problem(1), {}).to_string(), Not(HasSubstr("mean")));
}

TEST(RankCosts, ManyRanksAreSummedUp) {
  PlanOptions options;
  options.strategy = Strategy::all_gather;
  const std::string text = costs_of(make_problem(100), options).to_string();
  EXPECT_THAT(text, HasSubstr("most"));
  EXPECT_THAT(text, Not(HasSubstr("\n  99  ")));
}

TEST(RankCosts, ForPrograms) {
  PlanOptions options;
  options.backward = false;
  const RankCosts costs = costs_of(make_problem(), options);
  const auto json = nlohmann::json::parse(costs.to_json());
  EXPECT_EQ(json["schema"], 1);
  EXPECT_EQ(json["problem"]["tokens_q"], 997);
  ASSERT_EQ(json["ranks"].size(), 5U);
  EXPECT_EQ(json["ranks"][3]["rank"], 3);
  EXPECT_EQ(json["ranks"][3]["forward"]["sent_bytes"], costs.ranks()[3].passes[0].sent_bytes);
  EXPECT_TRUE(json["ranks"][3]["backward"].is_null());
  EXPECT_FALSE(json["rejected"].empty());
}

TEST(RankCosts, SayHowFarTheyAre) {
  std::vector<int> planned;
  RankCosts(make_problem(), {}, [&](int count) { planned.push_back(count); });
  EXPECT_EQ(planned, (std::vector<int>{1, 2, 3, 4, 5}));
  PlanOptions options;
  options.memory_budget = 1;
  EXPECT_THROW(costs_of(make_problem(), options), OutOfBudget);
}

}  // namespace
}  // namespace ringspan
