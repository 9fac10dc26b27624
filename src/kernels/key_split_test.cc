// Few queries and many keys, whose keys are cut into parts: every attend kernel against attention in float64.
#include "kernels/key_split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class FewQueriesTest : public ::testing::TestWithParam<AttendKernel> {
 protected:
  const AttendKernel& kernel() const { return GetParam(); }
  Spec spec(std::int64_t n_q, std::int64_t group, std::int64_t n_k) const {
    Spec s;
    s.dtype = dtype_of(GetParam());
    s.n_q = n_q, s.group = group, s.n_k = n_k, s.head_dim = s.head_dim_v = 16;
    return s;
  }
};

// The keys of one unit are cut into 2 or 3 parts, the last one shorter.
TEST_P(FewQueriesTest, MatchTheDefinition) {
  for (const auto& [n_q, group, n_k] : {std::tuple{1, 1, 6200}, {4, 8, 4129}, {16, 3, 4500}}) {
    Spec s = spec(n_q, group, n_k);
    s.head_dim = 24, s.head_dim_v = n_q == 4 ? 80 : 33;
    World world(s);
    const std::vector<Part> parts{world.whole(-kUnbounded, n_k - n_q)};
    run_kernel(kernel(), world, parts, 1 + n_q % 3);
    expect_forward(world, parts, s.describe());
  }
}

TEST_P(FewQueriesTest, OptionsAndStridesAcrossParts) {
  Spec s = spec(3, 2, 4700);
  s.batch = 2;
  s.q_step = 5, s.k_step = 3, s.q_first = 1000, s.diagonal = 7;
  s.softcap = 8.0F, s.alibi_slope = 0.001F, s.dropout = 0.3F;
  World world(s);
  const std::vector<Part> parts{world.whole(-900, 13000)};
  run_kernel(kernel(), world, parts, 2);
  expect_forward(world, parts, s.describe());
}

// Between tasks that are not cut, on states that have seen keys.
TEST_P(FewQueriesTest, AmongOtherTasks) {
  Spec s = spec(5, 2, 4500);
  World world(s);
  Part first = world.whole(), long_one = first, last = first;
  first.k_count = 100;
  long_one.k_row = 100, long_one.k_count = 4300;
  last.k_row = 4400, last.k_count = 100;
  run_kernel(kernel(), world, {first, long_one, last}, 2);
  expect_forward(world, {world.whole()}, s.describe());
}

TEST_P(FewQueriesTest, SameBitsForAnyNumberOfThreads) {
  Spec s = spec(3, 2, 4500);
  s.kv_heads = 2;
  World one(s);
  const std::vector<Part> parts{one.whole(-kUnbounded, 4490)};
  run_kernel(kernel(), one, parts, 1);
  for (const int threads : {2, 3}) {
    World many(s);
    run_kernel(kernel(), many, parts, threads);
    EXPECT_EQ(many.m.bytes(), one.m.bytes()) << threads;
    EXPECT_EQ(many.l.bytes(), one.l.bytes()) << threads;
    EXPECT_EQ(many.acc.bytes(), one.acc.bytes()) << threads;
  }
}

// Queries so far apart that ranges of positions are dealt to threads, each with some of them.
TEST_P(FewQueriesTest, SameBitsHoweverRowsAreDealt) {
  Spec s = spec(6, 1, 700);
  s.q_step = 1000;
  World one(s);
  const std::vector<Part> parts{one.whole(), one.whole(-4700, -10)};
  run_kernel(kernel(), one, parts, 1);
  expect_forward(one, parts, s.describe());
  World many(s);
  run_kernel(kernel(), many, parts, 3);
  EXPECT_EQ(many.l.bytes(), one.l.bytes());
  EXPECT_EQ(many.acc.bytes(), one.acc.bytes());
}

// A key that only the last query sees holds NaN; a query that sees nothing keeps its state bit for bit.
TEST_P(FewQueriesTest, VisibleNanShowsInItsRowsOnly) {
  Spec s = spec(4, 2, 5000);
  World world(s);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int e = 0; e < s.head_dim; ++e) world.k.set(0, 4800, 0, e, nan), world.v.set(0, 4801, 0, e, nan);
  world.acc.fill(-0.0);
  const std::vector<std::byte> before = world.acc.bytes();
  run_kernel(kernel(), world, {world.whole(-kUnbounded, -6000)}, 2);
  EXPECT_EQ(world.acc.bytes(), before);
  run_kernel(kernel(), world, {world.whole(-kUnbounded, 4798)}, 2);  // query 2 sees key 4,800, query 3 both
  for (int head = 0; head < 2; ++head) {
    for (int row = 0; row < 4; ++row) {
      EXPECT_EQ(std::isnan(world.l.get(0, row, head, 0)), row >= 2) << row;
      EXPECT_EQ(std::isnan(world.acc.get(0, row, head, 3)), row >= 2) << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, FewQueriesTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_KERNELS)), kernel_name);

// Parts cover the keys once, in order, and do not depend on the number of threads.
TEST(KeySplit, PartsCoverTheVisibleKeys) {
  Spec s;
  s.n_q = 2, s.n_k = 100'000, s.kv_heads = 3, s.head_dim = s.head_dim_v = 1, s.gap = 0;
  World world(s);
  const AttendTask task = world.task(world.whole(-kUnbounded, 90'001));
  std::int64_t parts = 0;
  for (const int threads : {1, 4}) {
    const AttendParams params = world.params(threads);
    const KeySplit split(task, params.shape, 256);
    EXPECT_EQ(split.count(), 3 * split.parts());
    EXPECT_GT(split.parts(), 10);
    if (parts != 0) {
      EXPECT_EQ(split.parts(), parts);
    }
    parts = split.parts();
    std::int64_t next = 0;
    std::vector<std::byte> state(static_cast<std::size_t>(KeySplit::state_bytes(params.shape)));
    for (std::int64_t i = 0; i < split.parts(); ++i) {
      const AttendTask part = split.part(split.parts() + i, state.data());
      EXPECT_EQ(part.k_first, next);
      EXPECT_EQ(part.head_first, 1);
      next += part.k_count;
    }
    EXPECT_EQ(next, 90'003);
  }
}

TEST(KeySplit, ManyQueriesOrUnitsOrFewKeysStayWhole) {
  for (const auto& [n_q, kv_heads, n_k] : {std::tuple{193, 1, 10'000}, {1, 33, 10'000}, {1, 1, 4'000}}) {
    Spec s;
    s.n_q = n_q, s.n_k = n_k, s.kv_heads = kv_heads, s.head_dim = s.head_dim_v = 1;
    World world(s);
    const AttendParams params = world.params(2);
    const AttendTask task = world.task(world.whole());
    EXPECT_EQ(KeySplit(task, params.shape, 256).parts(), 1);
  }
}

}  // namespace
}  // namespace ringspan::kernels::testing
