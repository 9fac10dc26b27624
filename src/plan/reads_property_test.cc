// Who reads which rows, against brute force over the pairs of the lowered pattern.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "pattern/lower.h"
#include "plan/reads.h"
#include "plan_testing/random_problem.h"

namespace ringspan::internal {
namespace {

using Row = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // batch, head, position

bool holds(const std::vector<Progression>& pieces, std::int64_t position) {
  return std::any_of(pieces.begin(), pieces.end(), [&](const Progression& p) { return p.contains(position); });
}

// The rows of one side that take part in a pair.
std::set<Row> rows_in_pairs(const Problem& problem, const Rows& queries, HeadRange heads, const Rows& keys, bool key_side) {
  std::set<Row> rows;
  for (const Slice& slice : lower(problem)) {
    for (std::int64_t x = 0; x < slice.q.count; ++x) {
      for (std::int64_t y = 0; y < slice.k.count; ++y) {
        const std::int64_t i = slice.q.at(x), j = slice.k.at(y);
        if (j - i < slice.lo || j - i > slice.hi || !holds(queries.pieces, i) || !holds(keys.pieces, j)) continue;
        for (std::int64_t h = 0; h < slice.heads.count; ++h) {
          const std::int64_t head = slice.heads.at(h);
          if (head < heads.begin || head >= heads.end) continue;
          for (std::int64_t b = slice.batch_first; b < slice.batch_first + slice.batch_count; ++b) {
            rows.emplace(b, key_side ? head / problem.group() : head, key_side ? j : i);
          }
        }
      }
    }
  }
  return rows;
}

// "" where the boxes are those rows, each once.
std::string compare(const Reads& reads, const std::set<Row>& expected, const std::vector<Progression>& owned) {
  std::set<Row> found;
  for (const Box& box : reads.boxes) {
    if (is_empty(box)) return "an empty box";
    for (std::int64_t b = box.batch_first; b < box.batch_first + box.batch_count; ++b) {
      for (std::int64_t h = 0; h < box.heads.count; ++h) {
        for (std::int64_t i = 0; i < box.positions.count; ++i) {
          if (!found.emplace(b, box.heads.at(h), box.positions.at(i)).second) return "a row twice";
          if (!holds(owned, box.positions.at(i))) return "a row that is not the owner's";
        }
      }
    }
    const auto inside = std::count_if(owned.begin(), owned.end(), [&](const Progression& piece) {
      return ringspan::intersect(piece, box.positions).count == box.positions.count;
    });
    if (inside != 1) return "a box over several pieces";
  }
  for (const Row& row : expected) {
    if (!found.contains(row)) return "a row is missing";
  }
  const auto excess = static_cast<std::int64_t>(found.size() - expected.size());
  return excess == reads.excess_rows ? "" : "excess " + std::to_string(reads.excess_rows) + ", but " + std::to_string(excess);
}

Rows of_rank(const Sharding& sharding, std::int64_t tokens, int ranks, int rank) {
  return {make_shard(sharding, tokens, ranks, rank).pieces};
}

TEST(Reads, AreThePartnersOfThePairs) {
  for (std::uint64_t seed = 1; seed <= 1500; ++seed) {
    testing::RandomProblem random(seed);
    const Problem p = random.problem(static_cast<int>(random.draw(1, 4)));
    const int begin = static_cast<int>(random.draw(0, p.heads));
    const HeadRange heads{random.chance(2) ? 0 : begin,
                          random.chance(2) ? p.heads : static_cast<int>(random.draw(begin, p.heads))};
    const Rows queries = of_rank(p.sharding_q, p.tokens_q, p.ranks, static_cast<int>(random.draw(0, p.ranks - 1)));
    const Rows keys = of_rank(p.sharding_k, p.tokens_k, p.ranks, static_cast<int>(random.draw(0, p.ranks - 1)));
    const std::string what = testing::describe(p, {}, seed);
    const Lowering lowering(p);
    ASSERT_EQ(compare(keys_read(lowering, queries, heads, keys), rows_in_pairs(p, queries, heads, keys, true), keys.pieces), "")
        << what;
    ASSERT_EQ(
        compare(queries_reading(lowering, queries, heads, keys), rows_in_pairs(p, queries, heads, keys, false), queries.pieces),
        "")
        << what;
  }
}

// Queries wider apart than the band is wide: only some keys between them are read.
TEST(Reads, OfSparseQueriesInANarrowBand) {
  Problem p;
  p.tokens_q = p.tokens_k = 400;
  p.pattern.window = Window{2, 1};
  const Rows queries{{{3, 17, 23}}};
  const Rows keys{{{0, 1, 400}}};
  const Reads reads = keys_read(Lowering(p), queries, {0, 1}, keys);
  EXPECT_EQ(compare(reads, rows_in_pairs(p, queries, {0, 1}, keys, true), keys.pieces), "");
  EXPECT_EQ(row_count(reads.boxes), 23 * 4);
  EXPECT_EQ(reads.excess_rows, 0);
}

// Few queries with wide bands, or many with narrow ones, are named exactly; many with wide ones are covered, and that counts.
TEST(Reads, TakeMoreOnlyBeyondTheLimits) {
  struct Case {
    std::int64_t queries, left;
    bool excess;
  };
  for (const Case& c : {Case{30, 90, false}, Case{70, 60, false}, Case{70, 90, true}}) {
    Problem p;
    p.tokens_q = p.tokens_k = 7000;
    p.pattern.window = Window{c.left, 1};
    const Rows queries{{{3, 97, c.queries}}};
    const Rows keys{{{0, 1, 7000}}};
    const Reads reads = keys_read(Lowering(p), queries, {0, 1}, keys);
    EXPECT_EQ(compare(reads, rows_in_pairs(p, queries, {0, 1}, keys, true), keys.pieces), "");
    EXPECT_EQ(reads.excess_rows > 0, c.excess);
  }
}

TEST(Heads, OfAGroup) {
  for (int group = 1; group <= 6; ++group) {
    for (std::int64_t first = 0; first < 5; ++first) {
      for (std::int64_t stride = 1; stride <= 9; ++stride) {
        for (std::int64_t count = 1; count <= 9; ++count) {
          const Progression heads{first, stride, count};
          std::set<std::int64_t> expected;
          for (std::int64_t i = 0; i < count; ++i) expected.insert(heads.at(i) / group);
          std::multiset<std::int64_t> found;
          for (const Progression& part : kv_heads_of(heads, group)) {
            std::multiset<std::int64_t> readers;
            for (std::int64_t i = 0; i < part.count; ++i) found.insert(part.at(i));
            for (const Progression& reading : heads_reading(heads, group, part)) {
              for (std::int64_t i = 0; i < reading.count; ++i) readers.insert(reading.at(i));
            }
            std::multiset<std::int64_t> wanted;
            for (std::int64_t i = 0; i < count; ++i) {
              if (part.contains(heads.at(i) / group)) wanted.insert(heads.at(i));
            }
            ASSERT_EQ(readers, wanted) << to_string(heads) << " group " << group;
          }
          ASSERT_EQ(found, (std::multiset<std::int64_t>(expected.begin(), expected.end())))
              << to_string(heads) << " group " << group;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringspan::internal
