#include "plan/route.h"

#include <gtest/gtest.h>

#include "plan_testing/random_problem.h"

namespace ringspan::internal {
namespace {

bool is_inside(std::span<const Box> part, std::span<const Box> whole) {
  BoxSet set;
  for (const Box& box : whole) set.add(box);
  return std::all_of(part.begin(), part.end(), [&](const Box& box) { return set.contains(box); });
}

bool is_disjoint(std::span<const Box> boxes) { return row_count(common(boxes, boxes)) == row_count(boxes); }

struct World {
  explicit World(const Problem& p) : problem(p) {
    for (int r = 0; r < p.ranks; ++r) {
      q.push_back(make_shard(p.sharding_q, p.tokens_q, p.ranks, r));
      k.push_back(make_shard(p.sharding_k, p.tokens_k, p.ranks, r));
    }
  }
  std::vector<Box> reads(int reader, int owner) const {
    return keys_read(problem, {q[static_cast<std::size_t>(reader)].pieces}, {0, problem.heads},
                     {k[static_cast<std::size_t>(owner)].pieces})
        .boxes;
  }
  Problem problem;
  std::vector<Shard> q, k;
};

TEST(RingRoutes, CarryWhatLaterReadersRead) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    testing::RandomProblem random(seed);
    const World world(random.problem(static_cast<int>(random.draw(1, 7))));
    const Problem& p = world.problem;
    const RingRoutes routes(p, world.q, world.k);
    for (int owner = 0; owner < p.ranks; ++owner) {
      const Route& route = routes.of(owner);
      for (int h = 1; h < p.ranks; ++h) {
        ASSERT_NE(route.serves(0, h), route.serves(1, p.ranks - h)) << "each reader is served from one side";
      }
      for (int direction = 0; direction < kDirections; ++direction) {
        std::int64_t needed_beyond = 0;
        for (int h = p.ranks - 1; h >= 1; --h) {
          const std::string what = testing::describe(p, {}, seed) + " hop " + std::to_string(h);
          const std::vector<Box>& carried = route.carried(direction, h);
          ASSERT_TRUE(is_disjoint(carried)) << what;
          if (route.serves(direction, h)) {
            const int reader = (owner + (direction == 0 ? h : p.ranks - h)) % p.ranks;
            const std::vector<Box> reads = world.reads(reader, owner);
            ASSERT_TRUE(is_inside(reads, carried)) << what;
            needed_beyond += row_count(reads);
          }
          ASSERT_TRUE(is_inside(route.carried(direction, h + 1), carried)) << what;
          ASSERT_EQ(carried.empty(), needed_beyond == 0) << "a row goes no further than its last reader: " << what;
        }
      }
    }
  }
}

// One direction carries all of it p - 1 times; two directions, each to its nearer side, do so as well.
TEST(RingRoutes, AFullPatternNeedsOneLegPerOwner) {
  Problem p;
  p.tokens_q = p.tokens_k = 64;
  p.ranks = 8;
  const World world(p);
  const RingRoutes routes(p, world.q, world.k);
  std::int64_t rows = 0;
  for (int h = 1; h < 8; ++h) rows += row_count(routes.of(3).carried(0, h)) + row_count(routes.of(3).carried(1, h));
  EXPECT_EQ(rows, 7 * 8);
}

TEST(Cut, IsAPartitionIntoPartsThatFit) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    testing::RandomProblem random(seed);
    std::vector<Box> boxes;
    std::int64_t first = 0;
    for (std::int64_t count = random.draw(0, 6); count > 0; --count) {
      const Progression positions{first, random.draw(1, 3), random.draw(1, 20)};
      boxes.push_back({0, random.draw(1, 2), {0, 1, random.draw(1, 4)}, positions});
      first = positions.end();
    }
    const std::int64_t limit = random.draw(8, 40);
    const std::vector<std::vector<Box>> parts = cut(boxes, limit);
    std::vector<Box> all;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      ASSERT_GT(row_count(parts[i]), 0) << "seed " << seed;
      ASSERT_LE(row_count(parts[i]), limit) << "seed " << seed;
      if (i > 0) {
        ASSERT_GT(row_count(parts[i - 1]) + row_count(parts[i]), limit) << "seed " << seed;
      }
      all.insert(all.end(), parts[i].begin(), parts[i].end());
    }
    ASSERT_TRUE(is_disjoint(all)) << "seed " << seed;
    ASSERT_EQ(row_count(all), row_count(boxes)) << "seed " << seed;
    ASSERT_EQ(row_count(common(all, boxes)), row_count(boxes)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ringspan::internal
