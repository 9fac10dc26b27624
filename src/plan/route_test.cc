#include "plan/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

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
    return keys_read(lowering, {q[static_cast<std::size_t>(reader)].pieces}, {0, problem.heads},
                     {k[static_cast<std::size_t>(owner)].pieces})
        .boxes;
  }
  Problem problem;
  Lowering lowering{problem};
  std::vector<Shard> q, k;
};

TEST(RingRoutes, CarryWhatLaterReadersRead) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    testing::RandomProblem random(seed);
    const World world(random.problem(static_cast<int>(random.draw(1, 7))));
    const Problem& p = world.problem;
    const RingRoutes routes(world.lowering, world.q, world.k);
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

TEST(RingRoutes, TakeTheSameWayForAllOwners) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    testing::RandomProblem random(seed);
    const World world(random.problem(static_cast<int>(random.draw(2, 7))));
    const RingRoutes routes(world.lowering, world.q, world.k);
    for (int owner = 1; owner < world.problem.ranks; ++owner) {
      for (int h = 1; h < world.problem.ranks; ++h) ASSERT_EQ(routes.of(owner).serves(0, h), routes.of(0).serves(0, h));
    }
  }
}

// One direction carries all of it p - 1 times; two directions, each to its nearer side, do so as well.
TEST(RingRoutes, AFullPatternNeedsOneLegPerOwner) {
  Problem p;
  p.tokens_q = p.tokens_k = 64;
  p.ranks = 8;
  const World world(p);
  const RingRoutes routes(world.lowering, world.q, world.k);
  std::int64_t rows = 0;
  for (int h = 1; h < 8; ++h) rows += row_count(routes.of(3).carried(0, h)) + row_count(routes.of(3).carried(1, h));
  EXPECT_EQ(rows, 7 * 8);
}

// Disjoint boxes of positions in order, and a limit that the heads of a position fit into.
struct RandomBoxes {
  explicit RandomBoxes(std::uint64_t seed) : random(seed) {
    std::int64_t first = 0;
    for (std::int64_t count = random.draw(0, 6); count > 0; --count) {
      const Progression positions{first, random.draw(1, 3), random.draw(1, 20)};
      boxes.push_back({0, random.draw(1, 2), {0, 1, random.draw(1, 4)}, positions});
      first = positions.end();
    }
    limit = random.draw(8, 40);
  }
  testing::RandomProblem random;
  std::vector<Box> boxes;
  std::int64_t limit = 0;
};

void expect_partition(const std::vector<std::vector<Box>>& parts, const RandomBoxes& of, std::uint64_t seed) {
  std::vector<Box> all;
  for (const std::vector<Box>& part : parts) {
    ASSERT_GT(row_count(part), 0) << "seed " << seed;
    ASSERT_LE(row_count(part), of.limit) << "seed " << seed;
    all.insert(all.end(), part.begin(), part.end());
  }
  ASSERT_TRUE(is_disjoint(all)) << "seed " << seed;
  ASSERT_EQ(row_count(all), row_count(of.boxes)) << "seed " << seed;
  ASSERT_EQ(row_count(common(all, of.boxes)), row_count(of.boxes)) << "seed " << seed;
  const std::int64_t least = (row_count(all) + of.limit - 1) / of.limit;
  ASSERT_LE(static_cast<std::int64_t>(parts.size()), std::max(2 * least - 1, std::int64_t{0})) << "seed " << seed;
}

TEST(Cut, IsAPartitionIntoPartsThatFit) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    const RandomBoxes random(seed);
    const std::vector<std::vector<Box>> parts = cut(random.boxes, random.limit);
    ASSERT_NO_FATAL_FAILURE(expect_partition(parts, random, seed));
    for (std::size_t i = 1; i < parts.size(); ++i)
      ASSERT_GT(row_count(parts[i - 1]) + row_count(parts[i]), random.limit) << "seed " << seed;
  }
}

TEST(CutInTurns, IsAPartitionIntoPartsThatFit) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    const RandomBoxes random(seed);
    const int phase = static_cast<int>(seed % 2);
    ASSERT_NO_FATAL_FAILURE(expect_partition(cut_in_turns(random.boxes, random.limit, phase), random, seed));
  }
}

TEST(CutInTurns, TakesTurnsBetweenBothHalves) {
  const std::vector<Box> boxes{{0, 1, {0, 1, 2}, {0, 1, 64}}, {0, 1, {0, 1, 2}, {192, 1, 64}}};
  for (const int phase : {0, 1}) {
    const std::vector<std::vector<Box>> parts = cut_in_turns(boxes, 64, phase);
    ASSERT_EQ(parts.size(), 4U);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool second = (i % 2 == 1) != (phase == 1);
      ASSERT_EQ(parts[i].size(), 1U);
      EXPECT_EQ(parts[i][0].positions, (Progression{(second ? 192 : 0) + 32 * static_cast<std::int64_t>(i / 2), 1, 32}));
    }
  }
}

TEST(Spread, PutsEmptyPartsBetween) {
  const Box box{0, 1, {0, 1, 1}, {0, 1, 4}};
  const auto places = [&](std::size_t parts, std::size_t count, int phase) {
    std::string text;
    for (const std::vector<Box>& part : spread(std::vector<std::vector<Box>>(parts, {box}), count, phase))
      text += part.empty() ? '-' : 'x';
    return text;
  };
  EXPECT_EQ(places(3, 6, 0), "x-x-x-");
  EXPECT_EQ(places(3, 6, 1), "-x-x-x");
  EXPECT_EQ(places(2, 7, 0), "x--x---");
  EXPECT_EQ(places(4, 4, 1), "xxxx");
  EXPECT_EQ(places(4, 2, 0), "xxxx");
  EXPECT_EQ(places(0, 3, 0), "");
  for (std::size_t count = 1; count <= 40; ++count) {
    for (std::size_t parts = 1; parts <= count; ++parts) {
      const std::string text = places(parts, count, static_cast<int>(parts % 2));
      ASSERT_EQ(text.size(), count);
      ASSERT_EQ(static_cast<std::size_t>(std::count(text.begin(), text.end(), 'x')), parts) << parts << " of " << count;
    }
  }
}

}  // namespace
}  // namespace ringspan::internal
