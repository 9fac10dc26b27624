// Which tasks leave results. That results are written once, of every row, and that no state is used after it, is what
// plan_property_test checks of random plans; here: that it happens where it should.
#include "plan/settle.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "plan_testing/check_plan.h"

namespace ringspan {
namespace {

using internal::AttendItem;
using internal::LaunchKind;

struct Counts {
  std::size_t tasks = 0, settled = 0;
  std::size_t with_state = 0;                        // tasks
  std::int64_t finalized_rows = 0, zeroed_rows = 0;  // (batch, head, row)
};

Counts counts_of(const Plan& plan) {
  const internal::Program& program = plan.data().forward;
  Counts counts;
  counts.tasks = program.attend_items.size();
  for (const AttendItem& item : program.attend_items) {
    counts.settled += item.operands[internal::kResult].view >= 0 ? 1 : 0;
    counts.with_state += item.operands[internal::kM].view >= 0 ? 1 : 0;
  }
  for (const internal::Stage& stage : program.stages) {
    for (const internal::Launch& launch : stage.compute) {
      for (std::int64_t i = launch.first; i < launch.first + launch.count; ++i) {
        if (launch.kind != LaunchKind::finalize && launch.kind != LaunchKind::fill) break;
        const internal::RowItem& item = program.row_items[static_cast<std::size_t>(i)];
        const std::int64_t rows = item.batch_count * item.heads.count * item.rows;
        const internal::View& view = program.views[static_cast<std::size_t>(item.operands[0].view)];
        if (launch.kind == LaunchKind::finalize) counts.finalized_rows += rows;
        if (launch.kind == LaunchKind::fill && view.kind == internal::TensorKind::lse) counts.zeroed_rows += rows;
      }
    }
  }
  return counts;
}

Problem problem(const char* pattern, int ranks = 1) {
  Problem p;
  p.batch = 2;
  p.tokens_q = p.tokens_k = 64;
  p.heads = 4, p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 4;
  p.dtype = DType::bfloat16;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  return p;
}

Counts counts_of(const Problem& p, const PlanOptions& options = {}) {
  const std::vector<Plan> plans = testing::plan_all(p, options);
  EXPECT_EQ(testing::check_plans(plans), "");
  return counts_of(plans.front());
}

TEST(Settle, OneTaskPerRow) {
  for (const char* pattern : {"full", "causal", "causal & window:7,0"}) {
    const Counts counts = counts_of(problem(pattern));
    EXPECT_EQ(counts.finalized_rows, 0) << pattern;
    EXPECT_GE(counts.settled, 1U) << pattern;
    EXPECT_EQ(counts.with_state, 0U) << pattern;
    EXPECT_EQ(counts.zeroed_rows, 0) << pattern;
  }
}

TEST(Settle, ManyKeysTakeAStateOnACpu) {
  PlanOptions options;
  options.attend_kernel = "portable";
  for (const int tokens : {4000, 5000}) {
    Problem p = problem("full");
    p.tokens_k = tokens;
    const Plan plan = make_plan(p, options, 0);
    EXPECT_EQ(counts_of(plan).with_state, tokens < 4096 ? 0U : counts_of(plan).tasks) << tokens;
    EXPECT_EQ(counts_of(plan).finalized_rows, 0) << tokens;
    const auto is_state = [](const internal::Region& region) { return region.component == internal::Component::state; };
    EXPECT_EQ(std::ranges::count_if(plan.data().forward.regions, is_state), tokens < 4096 ? 0 : 1)
        << tokens;  // m and l; acc is saved as o
  }
  options = {};
  options.device = DeviceKind::cuda;
  Problem p = problem("full");
  p.tokens_k = 5000;
  EXPECT_EQ(counts_of(make_plan(p, options, 0)).with_state, 0U);
}

TEST(Settle, DocumentsOfEachBatchItem) {
  Problem p = problem("documents & causal");
  p.batch = 1;
  p.cu_seqlens_q = p.cu_seqlens_k = {0, 3, 3, 10, 64};
  const Counts counts = counts_of(p);
  EXPECT_EQ(counts.settled, counts.tasks);
  EXPECT_EQ(counts.finalized_rows, 0);
}

TEST(Settle, RowsOfTwoTasks) {
  const Counts counts = counts_of(problem("prefix:9"));  // the prefix's own rows see keys before and after them
  EXPECT_EQ(counts.settled, 1U);
  EXPECT_EQ(counts.finalized_rows, 2 * 4 * 9);
}

TEST(Settle, PaddingHasNoSink) {
  for (const bool sinks : {false, true}) {
    Problem p = problem("causal");
    p.sinks = sinks;
    p.lengths_q = p.lengths_k = {64, 20};
    const Counts counts = counts_of(p);
    EXPECT_EQ(counts.settled, counts.tasks) << sinks;
    EXPECT_EQ(counts.zeroed_rows, 44 * p.heads) << sinks;
  }
}

TEST(Settle, RowsBetweenThoseOfADilatedPattern) {
  const Counts counts = counts_of(problem("dilated:64x4"));
  EXPECT_EQ(counts.settled, counts.tasks);
  EXPECT_EQ(counts.zeroed_rows, 2 * 4 * 48);
}

// A row of a sink without a key ends as the sink, which is the launch's.
TEST(Settle, SinksOfRowsWithoutKeys) {
  Problem p = problem("dilated:64x4");
  p.sinks = true;
  const Counts counts = counts_of(p);
  EXPECT_EQ(counts.settled, counts.tasks);
  EXPECT_EQ(counts.with_state, counts.tasks);
  EXPECT_EQ(counts.finalized_rows, 2 * 4 * 48);
}

TEST(Settle, TheLastBucketOfARing) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.bucket_rows = 8;
  Problem p = problem("causal", 4);
  p.sharding_q = p.sharding_k = Sharding::parse("zigzag");
  const Counts counts = counts_of(p, options);
  EXPECT_EQ(counts.finalized_rows, 0);
  EXPECT_LT(counts.settled, counts.tasks);
}

// Branches over other rows and heads, results that come back from other ranks, states that are joined: nobody is seen to be
// last.
TEST(Settle, LeavesTheRest) {
  PlanOptions pass_q;
  pass_q.strategy = Strategy::pass_q;
  for (const auto& [p, options] :
       {std::pair{problem("dilated:16x1,64x4"), PlanOptions{}}, std::pair{problem("full", 2), pass_q},
        std::pair{problem("dilated:16x1,64x2@torchscale"), PlanOptions{}}}) {
    const Counts counts = counts_of(p, options);
    EXPECT_EQ(counts.settled, 0U) << p.pattern.to_string();
    EXPECT_GT(counts.finalized_rows, 0) << p.pattern.to_string();
  }
}

}  // namespace
}  // namespace ringspan
