// What may meet is found without looking at all pairs, and in the order of all pairs.
#include "plan/near.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "pattern/lower.h"
#include "plan/reads.h"
#include "plan_testing/random_problem.h"

namespace ringspan::internal {
namespace {

Box box(std::int64_t first, std::int64_t stride, std::int64_t count) { return {0, 1, {0, 1, 1}, {first, stride, count}}; }

TEST(Near, FindsWhatNestedLoopsFind) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    testing::RandomProblem random(seed);
    const auto boxes = [&] {
      std::vector<Box> list;
      const std::int64_t reach = random.draw(1, 40);
      for (std::int64_t i = random.draw(0, 30); i > 0; --i) {
        list.push_back(box(random.draw(0, 200), random.draw(1, 3), random.draw(0, reach)));
      }
      if (seed % 2 == 0) {
        std::sort(list.begin(), list.end(), [](const Box& a, const Box& b) { return a.positions.first < b.positions.first; });
      }
      return list;
    };
    const std::vector<Box> a = boxes(), b = boxes();
    std::vector<std::pair<const Box*, const Box*>> found, expected;
    const auto meet = [](const Box& x, const Box& y) { return !is_empty(intersect(x, y)); };
    for (const Box& y : b) {
      for (const Box& x : a) {
        if (meet(x, y)) expected.emplace_back(&x, &y);
      }
    }
    for_each_near(std::span<const Box>(a), std::span<const Box>(b), [&](const Box& x, const Box& y) {
      if (meet(x, y)) found.emplace_back(&x, &y);
    });
    ASSERT_EQ(found, expected) << "seed " << seed;
  }
}

TEST(Near, LooksAtNeighboursOnly) {
  std::vector<Box> a, b;
  for (std::int64_t i = 0; i < 1000; ++i) {
    a.push_back(box(100 * i, 1, 60));
    b.push_back(box(100 * i + 50, 1, 60));
  }
  int visits = 0;
  for_each_near(std::span<const Box>(a), std::span<const Box>(b), [&](const Box&, const Box&) { ++visits; });
  EXPECT_EQ(visits, 1999);
}

// In the same order, from which the order of tasks and of boxes follows.
TEST(SlicesBetween, AreThoseOfAllPairsOfHulls) {
  int longest = 0;
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    testing::RandomProblem random(seed);
    Problem problem = random.problem(static_cast<int>(random.draw(2, 3)), 300);
    problem.sharding_q = problem.sharding_k = {ShardingKind::block_striped, random.draw(2, 6), {}};
    const std::vector<Progression> q = make_shard(problem.sharding_q, problem.tokens_q, problem.ranks, 0).pieces;
    const std::vector<Progression> k = make_shard(problem.sharding_k, problem.tokens_k, problem.ranks, 1).pieces;
    const Lowering lowering(problem);
    const std::vector<Hull> hulls_q = hulls(q), hulls_k = hulls(k);
    longest = std::max(longest, static_cast<int>(std::min(hulls_q.size(), hulls_k.size())));
    for (const bool queries_first : {true, false}) {
      const std::vector<Hull>&outer = queries_first ? hulls_q : hulls_k, &inner = queries_first ? hulls_k : hulls_q;
      std::vector<std::tuple<std::int64_t, std::int64_t, Slice>> found, expected;
      for (const Hull& x : outer) {
        for (const Hull& y : inner) {
          const Hull &of_q = queries_first ? x : y, &of_k = queries_first ? y : x;
          for_each_slice(problem, {of_q.begin, of_q.end, of_k.begin, of_k.end, 0, problem.heads},
                         [&](const Slice& slice) { expected.emplace_back(x.begin, y.begin, slice); });
        }
      }
      for_each_slice_between(
          lowering, outer, inner, queries_first, {0, problem.heads},
          [&](const Slice& slice, const Hull& x, const Hull& y) { found.emplace_back(x.begin, y.begin, slice); });
      ASSERT_EQ(found, expected) << "seed " << seed;
    }
  }
  EXPECT_GT(longest, 20);
}

}  // namespace
}  // namespace ringspan::internal
