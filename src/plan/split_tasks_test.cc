// Where tasks are cut, and that what comes out is the pattern, computed once. plan_property_test checks random plans for
// devices, which are too small for most cuts.
#include "plan/split_tasks.h"

#include <gtest/gtest.h>

#include "plan/rewrite_rows.h"
#include "plan_testing/check_plan.h"

namespace ringspan {
namespace {

using internal::LaunchKind;

Problem longnet(std::int64_t tokens, int heads, int kv_heads, const char* pattern = "dilated:2048x1,4096x2,8192x4") {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = heads, p.kv_heads = kv_heads;
  p.head_dim = p.head_dim_v = 64;
  p.dtype = DType::bfloat16;
  p.pattern = Pattern::parse(pattern);
  return p;
}

struct SplitCounts {
  std::int64_t forward = 0, backward = 0;  // launches
  std::int64_t tasks = 0;                  // of attend
  bool sums = false, state = false;        // whether the arena has float32 sums, or m and l
};

SplitCounts split_counts_of(const Problem& p, PlanOptions options = {}) {
  options.device = DeviceKind::cuda;
  const Plan plan = make_plan(p, options, 0);
  SplitCounts counts;
  internal::for_launches(plan.data().forward, [&](const internal::Launch& launch) {
    ++counts.forward;
    if (launch.kind == LaunchKind::attend) counts.tasks += launch.count;
  });
  internal::for_launches(plan.data().backward, [&](const internal::Launch&) { ++counts.backward; });
  for (const internal::Region& region : plan.data().backward.regions)
    counts.sums |= region.component == internal::Component::gradients;
  for (const internal::Region& region : plan.data().forward.regions)
    counts.state |= region.component == internal::Component::state;
  return counts;
}

// One launch, and backward delta, dq, and dk with dv: nobody fills, and no state or sum goes through memory.
TEST(SplitTasks, OverlappingBranchesTakeOneLaunch) {
  for (const auto& [heads, kv_heads] : {std::pair{8, 8}, {8, 2}, {16, 8}}) {
    const SplitCounts counts = split_counts_of(longnet(8192, heads, kv_heads));
    EXPECT_EQ(counts.forward, 1);
    EXPECT_EQ(counts.backward, 3);
    EXPECT_FALSE(counts.sums);
    EXPECT_FALSE(counts.state);
    // Of each segment of 2,048 and each fourth head: rows of one branch, of two (twice), of three (three times).
    EXPECT_EQ(counts.tasks, 4 * 4 * (1 + 2 + 3));
  }
}

TEST(SplitTasks, PiecesAreThePattern) {
  struct Shape {
    const char* pattern;
    int batch, heads, kv_heads, ranks;
  };
  for (const auto& [pattern, batch, heads, kv_heads, ranks] : {Shape{"dilated:512x1,1024x2", 1, 2, 2, 1},
                                                               {"dilated:512x1,1024x2", 2, 4, 1, 1},
                                                               {"dilated:512x1,1024x2 & causal", 1, 4, 2, 2},
                                                               {"dilated:512x1,1024x4", 1, 8, 4, 1},
                                                               {"dilated:384x1,1152x3", 1, 3, 3, 1},
                                                               {"prefix:300", 1, 2, 1, 1}}) {
    Problem p = longnet(pattern[8] == '3' ? 1152 : 1024, heads, kv_heads, pattern);
    p.batch = batch, p.ranks = ranks;
    p.head_dim = p.head_dim_v = 1;
    PlanOptions options;
    options.device = DeviceKind::cuda;
    const std::vector<Plan> plans = testing::plan_all(p, options);
    EXPECT_EQ(testing::check_plans(plans), "") << pattern;
    std::size_t apart = 0;  // tasks of backward for dk and dv only
    for (const internal::AttendItem& item : plans.front().data().backward.attend_items) {
      apart += item.operands[internal::kDq].view < 0 ? 1 : 0;
    }
    EXPECT_GT(apart, 0U) << pattern << ": nothing was cut";
  }
}

TEST(SplitTasks, NotWhereBlocksWouldBeEmpty) {
  const SplitCounts counts =
      split_counts_of(longnet(4096, 8, 8, "dilated:128x1,512x4"));  // a block of 128 rows would become three
  EXPECT_GT(counts.forward, 1);
  EXPECT_TRUE(counts.state);
}

TEST(SplitTasks, NotForCallsOfALibrary) {
  PlanOptions options;
  options.partials = Partials::storage;
  EXPECT_EQ(split_counts_of(longnet(8192, 8, 8), options).tasks, 4 + 2 * 2 + 4);
}

TEST(SplitTasks, NotWhatHasNothingToCut) {
  for (const char* pattern : {"causal", "window:100,0 & causal"})
    EXPECT_EQ(split_counts_of(longnet(8192, 8, 8, pattern)).tasks, 1) << pattern;
  EXPECT_EQ(split_counts_of(longnet(8192, 8, 8, "dilated:2048x2")).tasks, 4 * 2);
}

}  // namespace
}  // namespace ringspan
