#include "plan/box.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

namespace ringspan::internal {
namespace {

using Row = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // batch, head, position

std::multiset<Row> rows(std::span<const Box> boxes) {
  std::multiset<Row> set;
  for (const Box& box : boxes) {
    for (std::int64_t b = 0; b < box.batch_count; ++b) {
      for (std::int64_t h = 0; h < box.heads.count; ++h) {
        for (std::int64_t i = 0; i < box.positions.count; ++i)
          set.emplace(box.batch_first + b, box.heads.at(h), box.positions.at(i));
      }
    }
  }
  return set;
}

std::set<Row> as_set(std::span<const Box> boxes) {
  const std::multiset<Row> all = rows(boxes);
  return {all.begin(), all.end()};
}

bool is_disjoint(std::span<const Box> boxes) { return rows(boxes).size() == as_set(boxes).size(); }

class Random {
 public:
  explicit Random(std::uint64_t seed) : random_(seed) {}
  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  Progression progression(std::int64_t first, std::int64_t stride, std::int64_t count) {
    return {draw(0, first), draw(1, stride), draw(1, count)};
  }
  Box box() { return {draw(0, 2), draw(1, 2), progression(3, 3, 4), progression(12, 4, 9)}; }

 private:
  std::mt19937_64 random_;
};

TEST(Box, IntersectAndSubtractPartition) {
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    Random random(seed);
    const Box a = random.box();
    const Box b = random.box();
    std::vector<Box> parts;
    subtract(a, b, parts);
    ASSERT_TRUE(is_disjoint(parts)) << "seed " << seed;
    const std::set<Row> kept = as_set(parts);
    const std::set<Row> of_b = as_set(std::vector{b});
    for (const Row& row : as_set(std::vector{a})) ASSERT_NE(kept.contains(row), of_b.contains(row)) << "seed " << seed;
    const Box common = intersect(a, b);
    ASSERT_EQ(common.rows() + row_count(parts), a.rows()) << "seed " << seed;
    for (const Row& row : as_set(std::vector{common})) ASSERT_TRUE(of_b.contains(row)) << "seed " << seed;
  }
}

TEST(BoxSet, HoldsEveryRowOnceAndNoOther) {
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    Random random(seed);
    BoxSet set;
    std::vector<Box> added;
    for (std::int64_t count = random.draw(1, 12); count > 0; --count) {
      added.push_back(random.box());
      set.add(added.back());
    }
    const std::vector<Box> boxes = set.boxes();
    ASSERT_TRUE(is_disjoint(boxes)) << "seed " << seed;
    ASSERT_EQ(as_set(boxes), as_set(added)) << "seed " << seed;
    ASSERT_EQ(set.excess_rows(), 0) << "seed " << seed;
  }
}

TEST(BoxSet, ManyBoxesBecomeOneThatCoversThemAndTheExcessIsCounted) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Random random(seed);
    BoxSet set;
    std::vector<Box> added;
    const auto wanted = static_cast<std::int64_t>(BoxSet::kMaxBoxes) + random.draw(1, 300);
    for (std::int64_t i = 0; i < wanted; ++i) {  // no two of them join
      added.push_back({random.draw(0, 1), 1, {random.draw(0, 5), 1, 1}, {6 * (i * i + i), 2, random.draw(2, 3)}});
      set.add(added.back());
    }
    const std::vector<Box> boxes = set.boxes();
    ASSERT_EQ(boxes.size(), 1U);
    std::int64_t needed = 0;
    for (const Box& box : added) {
      ASSERT_TRUE(set.contains(box)) << "seed " << seed;
      needed += box.rows();
    }
    ASSERT_EQ(boxes[0].rows(), needed + set.excess_rows()) << "seed " << seed;
    ASSERT_EQ(boxes[0].positions.stride % 2, 0) << "the covering box keeps the common stride";
  }
}

TEST(BoxSet, JoinsNeighbours) {
  BoxSet set;
  for (std::int64_t i : {3, 1, 0, 2}) set.add({0, 1, {0, 1, 2}, {10 * i, 1, 10}});
  ASSERT_EQ(set.boxes().size(), 1U);
  EXPECT_EQ(set.boxes()[0].positions, (Progression{0, 1, 40}));
  set.add({0, 1, {2, 1, 3}, {0, 1, 40}});
  ASSERT_EQ(set.boxes().size(), 1U);
  EXPECT_EQ(set.boxes()[0].heads, (Progression{0, 1, 5}));
  EXPECT_TRUE(set.contains({0, 1, {1, 2, 2}, {7, 3, 11}}));
  EXPECT_FALSE(set.contains({0, 1, {1, 2, 2}, {7, 3, 12}}));
}

// Cut into residues of the sparse one, the dense one would be a million boxes.
TEST(BoxSet, ADenseBoxTakesSparseOnesIn) {
  const Progression all{0, 1, std::int64_t{1} << 40};
  BoxSet set;
  set.add({0, 1, {0, 1, 2}, {5, 1 << 20, 1000}});
  set.add({0, 1, {0, 1, 2}, {7, (1 << 20) - 1, 1000}});
  set.add({0, 1, {0, 1, 2}, all});
  ASSERT_EQ(set.boxes().size(), 1U);
  EXPECT_EQ(set.boxes()[0].positions, all);
  set.add({0, 1, {0, 1, 1}, {3, 1 << 10, 100}});
  EXPECT_EQ(set.boxes().size(), 1U);
  EXPECT_EQ(set.excess_rows(), 0);
}

// The part beyond the dense one stays.
TEST(BoxSet, ASparseBoxIsCutByADenseOne) {
  BoxSet set;
  set.add({0, 1, {0, 1, 1}, {0, 4096, 256}});
  set.add({0, 1, {0, 1, 1}, {0, 1, 1 << 19}});
  EXPECT_EQ(row_count(set.boxes()), (1 << 19) + 128);
  EXPECT_EQ(set.boxes().size(), 2U);
  EXPECT_EQ(set.excess_rows(), 0);
}

// Of two sparse ones that meet here and there neither can be cut into few.
TEST(BoxSet, SparseBoxesThatMeetAreCovered) {
  BoxSet set;
  set.add({0, 1, {0, 1, 1}, {0, 4096, 100'000}});
  set.add({0, 1, {0, 1, 1}, {0, 4097, 100'000}});
  ASSERT_EQ(set.boxes().size(), 1U);
  EXPECT_EQ(set.boxes()[0].rows(), 99'999 * 4097 + 1);
  EXPECT_EQ(set.excess_rows(), 99'999 * 4097 + 1 - (200'000 - 25)) << "25 of them are common: 0, 4096 * 4097, ...";
}

TEST(BoxSet, TakesNothing) {
  BoxSet set;
  set.add({});
  EXPECT_TRUE(set.boxes().empty());
  EXPECT_TRUE(set.contains({}));
}

}  // namespace
}  // namespace ringspan::internal
