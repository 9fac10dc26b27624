#include "plan/common_parts.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace ringspan::internal {
namespace {

std::set<std::int64_t> positions_of(const Progression& p) {
  std::set<std::int64_t> found;
  for (std::int64_t i = 0; i < p.count; ++i) found.insert(p.at(i));
  return found;
}

// Parts are the progression, each position once, and two parts of any progressions are the same or share nothing. Brute force.
TEST(CommonParts, OfRandomProgressions) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
    std::vector<Progression> all(static_cast<std::size_t>(1 + below(6)));
    for (Progression& p : all) p = {below(20), std::int64_t{1} << below(3), below(20)};
    if (below(4) == 0) all.front().stride = 3;
    const auto parts = common_parts(all);
    ASSERT_TRUE(parts) << seed;
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::set<std::int64_t> found;
      std::size_t count = 0;
      for (const Progression& part : (*parts)[i]) {
        const std::set<std::int64_t> own = positions_of(part);
        count += own.size();
        found.insert(own.begin(), own.end());
        for (const std::vector<Progression>& others : *parts) {
          for (const Progression& other : others) {
            const std::set<std::int64_t> theirs = positions_of(other);
            const bool shares = std::any_of(own.begin(), own.end(), [&](std::int64_t x) { return theirs.contains(x); });
            ASSERT_EQ(shares, part == other) << seed;
          }
        }
      }
      ASSERT_EQ(found, positions_of(all[i])) << seed;
      ASSERT_EQ(count, found.size()) << seed;
    }
  }
}

TEST(CommonParts, WhatSharesNothingStaysWhole) {
  const std::vector<Progression> all{{0, 2, 50}, {1, 2, 50}, {100, 1, 7}, {107, 3, 5}, {200, 1, 1}};
  const auto parts = common_parts(all);
  ASSERT_TRUE(parts);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ((*parts)[i], std::vector{all[i]});
}

// Rows of a segment that a sparser branch has too, and the others.
TEST(CommonParts, OfBranches) {
  const auto parts = common_parts(std::vector<Progression>{{0, 1, 16}, {1, 4, 8}});
  ASSERT_TRUE(parts);
  EXPECT_EQ((*parts)[0].size(), 3U) << "every other row, and the two remainders of four left";
  EXPECT_EQ((*parts)[1], (std::vector<Progression>{{1, 4, 4}, {17, 4, 4}}));
}

TEST(CommonParts, NoneWhereStridesComeTogetherTooSeldom) {
  EXPECT_FALSE(common_parts(std::vector<Progression>{{0, 5, 9}, {0, 7, 9}}));
}

TEST(CommonParts, NoneWhereTooManyOverlap) {
  std::vector<Progression> all;
  for (std::int64_t i = 0; i < 100'000; ++i) all.push_back({i, 1, 100'000});
  EXPECT_FALSE(common_parts(all));
}

TEST(KvHeads, OfATask) {
  EXPECT_EQ(written_kv_heads({1, 2, 4}, 4), (Progression{0, 1, 2}));
  EXPECT_EQ(written_kv_heads({1, 4, 3}, 4), (Progression{0, 1, 3}));
  EXPECT_EQ(written_kv_heads({1, 8, 3}, 4), (Progression{0, 2, 3}));
  EXPECT_EQ(written_kv_heads({1, 6, 3}, 4), std::nullopt);
  EXPECT_EQ(query_heads_of({1, 2, 8}, {1, 1, 2}, 4), (std::vector{Progression{5, 2, 4}}));
  EXPECT_EQ(query_heads_of({1, 2, 8}, {0, 2, 2}, 4), (std::vector{Progression{1, 8, 2}, Progression{3, 8, 2}}));
  EXPECT_EQ(query_heads_of({0, 1, 8}, {0, 2, 4}, 1), (std::vector{Progression{0, 2, 4}}));
}

}  // namespace
}  // namespace ringspan::internal
