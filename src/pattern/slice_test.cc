#include "pattern/slice.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace ringspan {
namespace {

using Pair = std::pair<std::int64_t, std::int64_t>;

std::set<std::int64_t> members(const Progression& p) {
  std::set<std::int64_t> result;
  for (std::int64_t x = 0; x < p.count; ++x) result.insert(p.at(x));
  return result;
}

std::set<Pair> pairs(const Slice& s) {
  std::set<Pair> result;
  for (std::int64_t a = 0; a < s.q.count; ++a) {
    for (std::int64_t b = 0; b < s.k.count; ++b) {
      const std::int64_t difference = s.k.at(b) - s.q.at(a);
      if (s.lo <= difference && difference <= s.hi) result.insert({s.q.at(a), s.k.at(b)});
    }
  }
  return result;
}

Slice make_slice(Progression q, Progression k, std::int64_t lo = kNoLow, std::int64_t hi = kNoHigh) {
  Slice slice;
  slice.heads = {0, 1, 1};
  slice.q = q;
  slice.k = k;
  slice.lo = lo;
  slice.hi = hi;
  return slice;
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t operator()(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  Progression progression() { return {(*this)(-20, 20), (*this)(1, 9), (*this)(0, 12)}; }
  Slice slice() {
    const std::int64_t lo = (*this)(-70, 60);
    Slice slice = make_slice(progression(), progression(), lo, lo + (*this)(-1, (*this)(0, 60)));
    if ((*this)(0, 4) == 0) slice.lo = kNoLow;
    if ((*this)(0, 4) == 0) slice.hi = kNoHigh;
    return slice;
  }

 private:
  std::mt19937_64 engine_;
};

constexpr unsigned kSeed = 7;

TEST(Progression, IntersectionIsTheCommonPositions) {
  Random random(kSeed);
  for (int round = 0; round < 20000; ++round) {
    const Progression a = random.progression(), b = random.progression();
    std::set<std::int64_t> expected;
    for (const std::int64_t x : members(a)) {
      if (b.contains(x)) expected.insert(x);
    }
    ASSERT_EQ(members(intersect(a, b)), expected) << to_string(a) << " and " << to_string(b) << ", seed " << kSeed;
  }
}

TEST(Progression, IntersectionOfCoprimeStridesBeyond64BitPeriods) {
  const Progression a{3, 4294967291, 1000};  // both strides are prime; their product is near 2^64
  const Progression b{3, 4294967279, 1000};
  EXPECT_EQ(intersect(a, b), (Progression{3, 1, 1}));
  const Progression c{0, 1048576, 1048576}, d{7, 1048575, 1048576};
  const Progression common = intersect(c, d);
  ASSERT_EQ(common.count, 1);
  EXPECT_EQ(common.first % 1048576, 0);
  EXPECT_EQ(common.first % 1048575, 7);
}

TEST(Progression, ClipKeepsWhatIsInside) {
  Random random(kSeed);
  for (int round = 0; round < 5000; ++round) {
    const Progression a = random.progression();
    const std::int64_t begin = random(-30, 60), end = begin + random(-2, 50);
    std::set<std::int64_t> expected;
    for (const std::int64_t x : members(a)) {
      if (begin <= x && x < end) expected.insert(x);
    }
    ASSERT_EQ(members(clip(a, begin, end)), expected) << to_string(a) << " in [" << begin << ", " << end << "), seed " << kSeed;
  }
}

TEST(Slice, NormalizeKeepsPairsIsIdempotentAndExactAtTheEdges) {
  Random random(kSeed);
  for (int round = 0; round < 30000; ++round) {
    const Slice slice = random.slice();
    const Slice normal = normalize(slice);
    const std::set<Pair> expected = pairs(slice);
    ASSERT_EQ(pairs(normal), expected) << to_string(slice) << " -> " << to_string(normal) << ", seed " << kSeed;
    ASSERT_EQ(normalize(normal), normal) << to_string(slice) << ", seed " << kSeed;
    ASSERT_EQ(normal.q.empty(), expected.empty()) << to_string(slice);
    ASSERT_EQ(is_empty(slice), expected.empty()) << to_string(slice);
    if (expected.empty()) continue;
    std::set<std::int64_t> q, k, differences;
    for (const auto& [i, j] : expected) {
      q.insert(i);
      k.insert(j);
      differences.insert(j - i);
    }
    ASSERT_EQ(normal.q.first, *q.begin()) << to_string(slice);
    ASSERT_EQ(normal.q.last(), *q.rbegin()) << to_string(slice);
    ASSERT_EQ(normal.k.first, *k.begin()) << to_string(slice);
    ASSERT_EQ(normal.k.last(), *k.rbegin()) << to_string(slice);
    if (normal.q.stride == normal.k.stride) {  // then the band is exact too
      ASSERT_EQ(normal.lo, *differences.begin()) << to_string(slice);
      ASSERT_EQ(normal.hi, *differences.rbegin()) << to_string(slice);
    }
  }
}

TEST(Slice, PairCountEqualsEnumeration) {
  Random random(kSeed + 1);
  for (int round = 0; round < 30000; ++round) {
    Slice slice = random.slice();
    slice.heads.count = random(0, 3);
    slice.batch_count = random(0, 2);
    const auto expected = static_cast<Int128>(pairs(slice).size()) * slice.heads.count * slice.batch_count;
    ASSERT_TRUE(pair_count(slice) == expected) << to_string(slice) << ": " << to_string(pair_count(slice)) << " instead of "
                                               << to_string(expected) << ", seed " << kSeed + 1;
  }
}

TEST(Slice, PairCountOfABillionTokensNeeds128Bits) {
  const std::int64_t n = std::int64_t{1} << 40;
  Slice causal = make_slice({0, 1, n}, {0, 1, n}, kNoLow, 0);
  causal.heads.count = 1000;
  EXPECT_TRUE(pair_count(causal) == Int128{n} * (n + 1) / 2 * 1000);
}

TEST(Slice, NarrowBandsOverCoprimeStridesAreAnsweredWithoutEnumeration) {
  // q = 0, 1048573, ... and k = 1, 1048583, ...: a partner at a distance of exactly 5 exists once every 2^40 positions.
  const std::int64_t many = std::int64_t{1} << 20;
  const Slice slice = make_slice({0, 1048573, many}, {1, 1048583, many}, 5, 6);
  const Slice normal = normalize(slice);
  ASSERT_FALSE(normal.q.empty());
  EXPECT_LE(normal.q.count * normal.k.count, 1LL << 41);
  EXPECT_TRUE(pair_count(normal) == pair_count(slice));
  EXPECT_TRUE(pair_count(slice) > 0);
  EXPECT_TRUE(is_empty(make_slice({0, 1048574, many}, {1, 1048576, many}, 2, 2)));  // differences are odd
}

TEST(Slice, RestrictionsNeverShiftAnything) {
  const Slice slice = make_slice({0, 1, 100}, {0, 1, 100}, -10, 0);
  const Slice part = restrict_k(restrict_q(slice, {1, 4, 25}), {0, 4, 25});
  EXPECT_EQ(part.lo, -10);
  const Slice normal = normalize(part);
  EXPECT_EQ(normal.lo, -9);
  EXPECT_EQ(normal.hi, -1);
  EXPECT_EQ(normal.q, (Progression{1, 4, 25}));
}

TEST(Slice, Printing) {
  EXPECT_EQ(to_string(Progression{3, 4, 25}), "3..99:4");
  EXPECT_EQ(to_string(Progression{3, 1, 2}), "3..4");
  EXPECT_EQ(to_string(Progression{3, 4, 1}), "3");
  EXPECT_EQ(to_string(Progression{3, 4, 0}), "-");
  Slice slice = make_slice({0, 1, 8}, {1, 2, 4}, kNoLow, 0);
  EXPECT_EQ(to_string(slice), "batch 0 heads 0 q 0..7 k 1..7:2 band [*, 0]");
  slice.state = 2;
  slice.diagonal = -3;
  EXPECT_EQ(to_string(slice), "batch 0 heads 0 q 0..7 k 1..7:2 band [*, 0] diagonal -3 state 2");
}

}  // namespace
}  // namespace ringspan
