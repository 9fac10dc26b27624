// Plans of ranks whose tensors lie on their hosts: what must hold of any plan, by brute force, copies included.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "plan_testing/check_plan.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Problem make_problem(int ranks, const char* sharding, const char* pattern, std::int64_t tokens = 45) {
  Problem p;
  p.batch = 2;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 4;
  p.head_dim_v = 3;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  p.sharding_q = p.sharding_k = Sharding::parse(sharding);
  return p;
}

PlanOptions make_options(std::int64_t rows) {
  PlanOptions options;
  options.device = DeviceKind::cuda;
  options.host_tensors = true;
  options.keep_o_float32 = false;
  options.bucket_rows = rows;
  return options;
}

TEST(FromHost, PlansHold) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& [sharding, pattern] :
         std::vector<std::pair<const char*, const char*>>{{"contiguous", "full"},
                                                          {"zigzag", "causal"},
                                                          {"striped", "causal"},
                                                          {"contiguous", "window:4,2"},
                                                          {"block_striped:4", "prefix:10"},
                                                          {"zigzag", "dilated:8x1,16x2,45x4"},
                                                          {"contiguous", "dilated:16x1,32x4@head_groups & causal"}}) {
      for (const std::int64_t rows : {3, 7, 100}) {
        Problem p = make_problem(ranks, sharding, pattern);
        p.sinks = rows == 7;
        if (p.sinks) p.lengths_q = p.lengths_k = {45, 13};
        EXPECT_EQ(testing::check_plans(testing::plan_all(p, make_options(rows))), "")
            << ranks << " ranks, " << sharding << " " << pattern << ", pieces of " << rows;
      }
    }
  }
  for (const auto& [queries, keys] : {std::pair{0, 9}, std::pair{9, 0}, std::pair{2, 40}, std::pair{40, 2}}) {
    Problem p = make_problem(4, "contiguous", "full");
    p.tokens_q = queries;
    p.tokens_k = keys;
    EXPECT_EQ(testing::check_plans(testing::plan_all(p, make_options(3))), "") << queries << " x " << keys;
  }
}

// A piece that is copied a stage too late is noticed by these checks, and one that is copied too early into a slot in use.
TEST(FromHost, CopiesInTheWrongStageAreNoticed) {
  for (const int ranks : {1, 3}) {
    const std::vector<Plan> plans = testing::plan_all(make_problem(ranks, "contiguous", "full"), make_options(4));
    int noticed = 0, moved = 0;
    for (std::size_t stage = 8; stage < 40; ++stage) {
      for (const int shift : {1, -1}) {
        internal::PlanData data = plans.front().data();
        std::vector<internal::Stage>& stages = data.backward.stages;
        std::vector<internal::Launch>& from = stages.at(stage).copies;
        std::vector<internal::Launch>& to = stages.at(stage + static_cast<std::size_t>(shift)).copies;
        if (from.empty()) continue;
        to.insert(to.end(), from.begin(), from.end());
        from.clear();
        ++moved;
        noticed += testing::Hazards(data).check().empty() ? 0 : 1;
      }
    }
    EXPECT_GT(moved, 20);
    EXPECT_GE(noticed, moved * 3 / 4) << ranks << " ranks";  // the rest were free slots
  }
}

// With p ranks each copies its share, once for every piece that stays on any of them, and sends what others read.
TEST(FromHost, BytesHaveClosedForms) {
  const int ranks = 4;
  const std::int64_t n = 480, rows = 30, pieces = n / ranks / rows;
  Problem p = make_problem(ranks, "contiguous", "full", n);
  p.batch = 1;
  const Plan plan = make_plan(p, make_options(rows), 1);
  const std::int64_t q_row = 4 * 4 * 4, o_row = 4 * 3 * 4, kv_row = 2 * (4 + 3) * 4, share = n / ranks, statistic = 4 * 4;
  EXPECT_EQ(plan.host_bytes(Pass::forward).to_device, share * q_row + pieces * share * kv_row);
  EXPECT_EQ(plan.host_bytes(Pass::forward).to_host, share * (o_row + statistic));
  EXPECT_EQ(plan.host_bytes(Pass::backward).to_host, share * (q_row + kv_row));
  std::int64_t forward = 0, backward = 0;
  for (const PeerBytes& peer : plan.traffic(Pass::forward)) forward += peer.received_bytes;
  for (const PeerBytes& peer : plan.traffic(Pass::backward)) backward += peer.received_bytes;
  EXPECT_EQ(forward, pieces * (n - share) * kv_row);
  EXPECT_EQ(backward, forward + pieces * (n - share) * (q_row + o_row + 2 * statistic));
  EXPECT_EQ(plan.excess_rows(), 0);
  EXPECT_GT(make_plan(make_problem(ranks, "contiguous", "window:4,2", n), make_options(rows), 1).excess_rows(), 0);
}

// Computing that takes no time hides nothing; where it takes long, only what no computing stands beside is left.
TEST(FromHost, TheModelKnowsTheBus) {
  PlanOptions options = make_options(30);
  options.cost.host_bytes_per_second = 1'000'000;
  options.cost.flops_per_second = std::int64_t{1} << 60;
  const Problem p = make_problem(1, "contiguous", "full", 480);
  const Plan slow = make_plan(p, options, 0);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Plan::HostBytes bytes = slow.host_bytes(pass);
    const Plan::HostTime time = slow.host_nanoseconds(pass);
    EXPECT_NEAR(static_cast<double>(time.copies), static_cast<double>(bytes.to_device + bytes.to_host) * 1e3, 1e3);
    EXPECT_NEAR(static_cast<double>(time.exposed), static_cast<double>(time.copies), 1e3);
  }
  const auto exposed = [](const Plan& plan) {
    return plan.host_nanoseconds(Pass::forward).exposed + plan.host_nanoseconds(Pass::backward).exposed;
  };
  EXPECT_NEAR(static_cast<double>(slow.modelled_nanoseconds()), static_cast<double>(exposed(slow)), 1e3);
  options.cost.flops_per_second = 1'000'000;
  const Plan hidden = make_plan(p, options, 0);
  // The first pieces of both sides and the last results.
  const std::int64_t q = 2 * 30 * 4 * 4 * 4, kv = 2 * 30 * 2 * (4 + 3) * 4, o = 2 * 30 * 4 * (3 * 4 + 4);
  EXPECT_EQ(hidden.host_nanoseconds(Pass::forward).exposed, (q + kv + o) * 1000);
  EXPECT_EQ(hidden.host_nanoseconds(Pass::forward).copies, slow.host_nanoseconds(Pass::forward).copies);
  const double flops = hidden.flops(Pass::forward) + hidden.flops(Pass::backward);
  EXPECT_NEAR(static_cast<double>(hidden.modelled_nanoseconds()), flops * 1e3 + static_cast<double>(exposed(hidden)), 1e3);
  options.cost.host_bytes_per_second = 0;
  EXPECT_THAT([&] { make_plan(p, options, 0); },
              ThrowsMessage<InvalidArgument>(HasSubstr("cost.host_bytes_per_second (0) must be at least 1")));
}

TEST(FromHost, MemoryDoesNotGrowWithTheTokens) {
  std::vector<std::int64_t> bytes;
  for (const std::int64_t n : {480, 960}) {
    bytes.push_back(make_plan(make_problem(4, "zigzag", "causal", n), make_options(30), 0).arena_bytes());
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

// However many ranks and tokens: the pieces that are chosen make few enough stages.
TEST(FromHost, ThereIsAPieceForAnySize) {
  for (const auto& [ranks, tokens] : {std::pair{1, 1 << 26}, std::pair{4, 1 << 24}, std::pair{64, 1 << 28}}) {
    Problem p = make_problem(ranks, "contiguous", "window:1023,0", tokens);
    const Plan plan = make_plan(p, make_options(PlanOptions::kBucketAuto), ranks / 2);
    EXPECT_GE(plan.bucket_rows(), 16'384) << ranks << " ranks";
    EXPECT_LT(plan.data().backward.stages.size(), 1 << 16);
  }
}

// 2^32 pieces of queries times as many of keys: more stages than int64 can count.
TEST(FromHost, MoreStagesThanCanBeCountedAreRefused) {
  for (const int ranks : {1, 2}) {
    EXPECT_THAT([&] { make_plan(make_problem(ranks, "contiguous", "causal", std::int64_t{1} << 32), make_options(1), 0); },
                ThrowsMessage<Unsupported>(HasSubstr("use larger buckets")))
        << ranks << " ranks";
  }
}

TEST(FromHost, OtherStrategiesAreRefused) {
  for (const Strategy strategy : {Strategy::local, Strategy::all_gather, Strategy::ring, Strategy::pass_q, Strategy::ulysses}) {
    PlanOptions options = make_options(7);
    options.strategy = strategy;
    if (strategy == Strategy::local) options.computing_ranks = 2;
    EXPECT_THAT([&] { make_plan(make_problem(2, "zigzag", "causal"), options, 0); },
                ThrowsMessage<Unsupported>(HasSubstr("host_tensors stream by strategy exchange on several ranks")));
  }
  PlanOptions exchange = make_options(7);
  exchange.strategy = Strategy::exchange;
  EXPECT_EQ(make_plan(make_problem(2, "zigzag", "causal"), exchange, 0).strategy(), Strategy::exchange);
  EXPECT_EQ(make_plan(make_problem(2, "zigzag", "causal"), make_options(7), 0).strategy(), Strategy::exchange);
  EXPECT_THAT([&] { make_plan(make_problem(1, "zigzag", "causal"), exchange, 0); },
              ThrowsMessage<Unsupported>(HasSubstr("host_tensors stream by strategy local on one rank")));
}

}  // namespace
}  // namespace ringspan
