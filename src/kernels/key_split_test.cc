// Few queries and many keys, whose keys are cut into parts: every attend kernel against attention in float64.
#include "kernels/key_split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class FewQueriesTest : public KernelTest {
 protected:
  Spec spec(std::int64_t n_q, std::int64_t group, std::int64_t n_k) const {
    Spec s;
    s.dtype = dtype();
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

// Less than one block of products of anything.
TEST_P(FewQueriesTest, OfFewKeysOfAShortHead) {
  for (const auto& [n_q, group, n_k] : {std::tuple{1, 1, 1}, {3, 2, 2}, {4, 4, 1}, {9, 1, 3}, {16, 3, 1}}) {
    Spec s = spec(n_q, group, n_k);
    s.head_dim = 4;
    World world(s);
    const std::vector<Part> parts{world.whole()};
    run_kernel(kernel(), world, parts, 1);
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

// Units that are computed together, tile by tile of all of them, units that are too many to be cut, and as many together as
// there is room for: as with a thread each.
TEST_P(FewQueriesTest, SameBitsForAnyNumberOfThreads) {
  for (const auto& [n_q, group, batch, kv_heads] : {std::tuple{3, 2, 1, 2}, {1, 2, 2, 5}, {1, 1, 3, 11}, {33, 1, 1, 12}}) {
    Spec s = spec(n_q, group, 4200);
    s.batch = batch, s.kv_heads = kv_heads, s.head_dim = s.head_dim_v = 8;
    World one(s);
    const std::vector<Part> parts{one.whole(-kUnbounded, 4190)};
    run_kernel(kernel(), one, parts, 1);
    expect_forward(one, parts, s.describe());
    for (const int threads : {2, 3}) {
      World many(s);
      run_kernel(kernel(), many, parts, threads);
      EXPECT_EQ(many.m.bytes(), one.m.bytes()) << s.describe() << threads;
      EXPECT_EQ(many.l.bytes(), one.l.bytes()) << s.describe() << threads;
      EXPECT_EQ(many.acc.bytes(), one.acc.bytes()) << s.describe() << threads;
    }
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

// Where the first keys have no weight and values that are not finite, or are NaN: what follows does not depend on how long a
// thread keeps the state of a row to itself. Few queries, and many, whose ranges of positions are dealt to threads.
TEST_P(FewQueriesTest, SameBitsAfterKeysThatAreNotFinite) {
  // The reference splits no keys, and takes long.
  const int keys = kernel().name.find("reference") == std::string_view::npos ? 8192 : 2048;
  for (const auto& [n_q, kv_heads] : {std::pair{1, 2}, {700, 1}}) {
    for (const double key : {-kInfinity, kNan}) {
      Spec s = spec(n_q, 1, keys);
      s.kv_heads = kv_heads;
      const auto world = [&] {
        World result(s);
        result.q.for_each([&](auto b, auto r, auto h, auto e) { result.q.set(b, r, h, e, 1.0); });
        result.k.for_each([&](auto b, auto r, auto h, auto e) { result.k.set(b, r, h, e, r < 1024 && e == 0 ? key : -1.0); });
        result.v.set(0, 100, 0, 5, kInfinity);
        return result;
      };
      World one = world();
      run_kernel(kernel(), one, {one.whole()}, 1);
      const bool is_nan = std::isnan(key);
      EXPECT_EQ(std::isnan(one.l.get(0, 0, 0, 0)), is_nan);
      EXPECT_EQ(std::isnan(one.acc.get(0, 0, 0, 5)), is_nan);
      for (const int threads : {2, 3}) {
        World many = world();
        run_kernel(kernel(), many, {many.whole()}, threads);
        EXPECT_TRUE(many.m.bytes() == one.m.bytes()) << s.describe() << ' ' << key << ' ' << threads;
        if (is_nan) continue;
        EXPECT_TRUE(many.l.bytes() == one.l.bytes()) << s.describe() << ' ' << threads;
        EXPECT_TRUE(many.acc.bytes() == one.acc.bytes()) << s.describe() << ' ' << threads;
      }
    }
  }
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

// The second of two tiles that not every query sees whole: values of the first are finite, and one of its own is not.
TEST_P(FewQueriesTest, InfinityAfterATileOfFiniteValues) {
  Spec s = spec(40, 1, 0);
  const TileSizes sizes = kernel().tile_sizes(World(s).params(1).shape);
  if (sizes.step.keys > 0) s.tile.keys = (sizes.least.keys + sizes.step.keys - 1) / sizes.step.keys * sizes.step.keys;
  const std::int64_t tile = sizes.step.keys > 0 ? s.tile.keys : 64;
  s.n_k = 2 * tile;
  World world(s);
  world.v.set(0, tile + 11, 0, 5, kInfinity);
  run_kernel(kernel(), world, {world.whole(-kUnbounded, tile - 20)});  // query 31 is the first that sees it
  for (std::int64_t row = 0; row < 40; ++row) EXPECT_EQ(std::isfinite(world.acc.get(0, row, 0, 5)), row < 31) << row;
}

INSTANTIATE_TEST_SUITE_P(Kernels, FewQueriesTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_KERNELS)), kernel_name);

// Of each unit, the steps of all items cover the keys once and in order; parts do not depend on the number of threads.
TEST(KeySplit, StepsCoverTheVisibleKeysOfEachUnit) {
  Spec s;
  s.n_q = 2, s.n_k = 100'000, s.batch = 2, s.kv_heads = 5, s.head_dim = s.head_dim_v = 1, s.gap = 0;
  World world(s);
  const AttendTask task = world.task(world.whole(-kUnbounded, 90'001));
  std::int64_t parts = 0;
  for (const int threads : {1, 4, 100}) {
    const AttendParams params = world.params(threads);
    const KeySplit split(task, params.shape, 256, threads);
    ASSERT_TRUE(split.cuts());
    EXPECT_EQ(split.parts(), parts == 0 ? 6 : parts);
    parts = split.parts();
    EXPECT_EQ(split.items(), threads == 1 ? 2 * parts : threads == 4 ? 4 * parts : 10 * parts);
    std::vector<std::byte> states(static_cast<std::size_t>(KeySplit::state_bytes(params.shape)));
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> next;  // of a unit
    for (std::int64_t i = 0; i < split.items(); ++i) {
      const KeySplit::Item item = split.item(i);
      std::set<const void*> used;
      for (std::int64_t n = 0; n < item.steps; ++n) {
        const KeySplit::Step step = split.step(item, n, states.data());
        EXPECT_EQ(step.task.batch_first, step.unit.batch);
        EXPECT_EQ(step.task.head_first, step.unit.kv_head);
        EXPECT_EQ(step.task.k_first,
                  std::exchange(next[std::pair(step.unit.batch, step.unit.kv_head)], step.task.k_first + step.task.k_count));
        EXPECT_LE(static_cast<const float*>(step.task.acc.data) + s.n_q,
                  reinterpret_cast<const float*>(states.data() + states.size()));
        used.insert(step.task.m.data);
      }
      EXPECT_EQ(static_cast<std::int64_t>(used.size()), item.units);
      EXPECT_EQ(item.steps > item.units, item.units > 1);  // heads lie side by side: tile by tile
    }
    EXPECT_EQ(next.size(), 10U);
    for (const auto& [unit, end] : next) EXPECT_EQ(end, 90'003) << unit.first << ' ' << unit.second;
  }
}

TEST(KeySplit, ManyQueriesOrFewKeysStayWhole) {
  for (const auto& [n_q, kv_heads, n_k] : {std::tuple{193, 1, 10'000}, {49, 33, 10'000}, {1, 1, 4'000}, {1, 33, 4'000}}) {
    Spec s;
    s.n_q = n_q, s.n_k = n_k, s.kv_heads = kv_heads, s.head_dim = s.head_dim_v = 1;
    World world(s);
    const AttendParams params = world.params(2);
    const AttendTask task = world.task(world.whole());
    EXPECT_FALSE(KeySplit(task, params.shape, 256, 2).cuts());
  }
}

}  // namespace
}  // namespace ringspan::kernels::testing
