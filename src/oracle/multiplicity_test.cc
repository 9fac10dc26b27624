#include "oracle/multiplicity.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ringspan::oracle {
namespace {

Problem make_problem(std::int64_t tokens_q, std::int64_t tokens_k, int heads = 1) {
  Problem problem;
  problem.tokens_q = tokens_q;
  problem.tokens_k = tokens_k;
  problem.heads = problem.kv_heads = heads;
  return problem;
}

// One line per query, one digit per key, '.' for 0.
std::string draw(const Problem& problem, std::int64_t head = 0, int state = -1, std::int64_t batch = 0) {
  std::string text;
  for (std::int64_t i = 0; i < problem.tokens_q; ++i) {
    for (std::int64_t j = 0; j < problem.tokens_k; ++j) {
      const int count = multiplicity(problem, batch, head, i, j, state);
      text += count == 0 ? '.' : static_cast<char>('0' + count);
    }
    text += '\n';
  }
  return text;
}

TEST(Multiplicity, FullIsOneEverywhere) { EXPECT_EQ(draw(make_problem(2, 3)), "111\n111\n"); }

TEST(Multiplicity, CausalIsBottomRightAligned) {
  Problem problem = make_problem(2, 4);
  problem.pattern.causal = true;
  EXPECT_EQ(draw(problem), "111.\n1111\n");
  EXPECT_EQ(diagonal(problem, 0, 0), 2);
  problem.pattern.align = Align::top_left;
  EXPECT_EQ(draw(problem), "1...\n11..\n");
  EXPECT_EQ(diagonal(problem, 0, 0), 0);
}

TEST(Multiplicity, CausalWithMoreQueriesThanKeysLeavesTheFirstOnesEmpty) {
  Problem problem = make_problem(4, 2);
  problem.pattern.causal = true;
  EXPECT_EQ(draw(problem), "..\n..\n1.\n11\n");
}

TEST(Multiplicity, WindowIsInclusiveAndAligned) {
  Problem problem = make_problem(3, 5);
  problem.pattern.window = Window{1, 0};
  EXPECT_EQ(draw(problem), ".11..\n..11.\n...11\n");
  problem.pattern.window = Window{-1, 1};
  EXPECT_EQ(draw(problem), "1111.\n11111\n11111\n");
}

TEST(Multiplicity, DocumentsHaveDiagonalsOfTheirOwn) {
  Problem problem = make_problem(4, 5);
  problem.pattern.documents = problem.pattern.causal = true;
  problem.cu_seqlens_q = {0, 1, 1, 4};
  problem.cu_seqlens_k = {0, 3, 4, 5};
  EXPECT_EQ(draw(problem), "111..\n.....\n.....\n....1\n");
  EXPECT_EQ(diagonal(problem, 0, 0), 2);
  EXPECT_EQ(diagonal(problem, 0, 3), 1);
}

TEST(Multiplicity, LengthsMakePaddingAndMoveTheDiagonal) {
  Problem problem = make_problem(3, 3);
  problem.batch = 2;
  problem.pattern.causal = true;
  problem.lengths_q = {3, 1};
  problem.lengths_k = {3, 2};
  EXPECT_EQ(draw(problem, 0, -1, 0), "1..\n11.\n111\n");
  EXPECT_EQ(draw(problem, 0, -1, 1), "11.\n...\n...\n");
  EXPECT_EQ(diagonal(problem, 1, 0), 1);
}

TEST(Multiplicity, StartsOfKeysMakePaddingBeforeThem) {
  Problem problem = make_problem(3, 4);
  problem.batch = 2;
  problem.pattern.causal = true;
  problem.starts_k = {2, 1};
  EXPECT_EQ(draw(problem, 0, -1, 0), "....\n..1.\n..11\n");
  EXPECT_EQ(draw(problem, 0, -1, 1), ".1..\n.11.\n.111\n");
  problem.lengths_k = {2, 1};
  problem.pattern.causal = false;
  problem.pattern.prefix = 1;
  EXPECT_EQ(draw(problem, 0, -1, 0), "..1.\n..1.\n..11\n");
  EXPECT_EQ(draw(problem, 0, -1, 1), ".1..\n.1..\n.1..\n");
}

TEST(Multiplicity, PrefixIsSeenByAll) {
  Problem problem = make_problem(3, 3);
  problem.pattern.prefix = 2;
  EXPECT_EQ(draw(problem), "11.\n11.\n111\n");
}

TEST(Multiplicity, BlocksAreRelativeToTheFrame) {
  Problem problem = make_problem(6, 6);
  problem.pattern.documents = true;
  problem.cu_seqlens_q = {0, 2, 6};
  problem.pattern.blocks = std::vector<Block>{{0, 2, 0, 1, BlockKind::full, 0, 0}, {2, 4, 1, 4, BlockKind::causal, 0, 0}};
  EXPECT_EQ(draw(problem), "1.....\n1.....\n..1...\n..1...\n...11.\n...111\n");
  problem.pattern.blocks =
      std::vector<Block>{{0, 2, 0, 2, BlockKind::inverse_causal, 0, 0}, {2, 4, 0, 4, BlockKind::band, -2, -1}};
  EXPECT_EQ(draw(problem), "11....\n.1....\n..11..\n...1..\n..11..\n...11.\n");
}

TEST(Multiplicity, DilatedBranchesAreSummed) {
  Problem problem = make_problem(5, 5, 2);
  problem.pattern.dilated = Dilated{{{2, 1}, {4, 2}}, Dialect::longnet, false};
  EXPECT_EQ(draw(problem, 0), "211..\n11...\n1.21.\n..11.\n....2\n");
  EXPECT_EQ(draw(problem, 1), "11...\n12.1.\n..11.\n.112.\n....1\n");
}

TEST(Multiplicity, DilatedQueriesStandAtTheDiagonal) {
  Problem problem = make_problem(2, 4);
  problem.pattern.dilated = Dilated{{{2, 1}}, Dialect::longnet, false};
  EXPECT_EQ(draw(problem), "..11\n..11\n");
  problem.pattern.align = Align::top_left;
  EXPECT_EQ(draw(problem), "11..\n11..\n");
  problem = make_problem(5, 3);  // bottom right: the first two queries stand before the keys
  problem.pattern.dilated = Dilated{{{2, 1}}, Dialect::longnet, false};
  EXPECT_EQ(draw(problem), "...\n...\n11.\n11.\n..1\n");
}

TEST(Multiplicity, DilatedSegmentsRestartInDocumentsUnlessGlobal) {
  Problem problem = make_problem(6, 6);
  problem.pattern.documents = true;
  problem.cu_seqlens_q = {0, 3, 6};
  problem.pattern.dilated = Dilated{{{2, 1}}, Dialect::longnet, false};
  EXPECT_EQ(draw(problem), "11....\n11....\n..1...\n...11.\n...11.\n.....1\n");
  problem.pattern.dilated->global = true;
  EXPECT_EQ(draw(problem), "11....\n11....\n..1...\n...1..\n....11\n....11\n");
}

TEST(Multiplicity, TorchscaleSpreadsHeadsInBlocksAndKeepsStatesApart) {
  Problem problem = make_problem(4, 4, 4);
  problem.pattern.dilated = Dilated{{{2, 1}, {4, 2}}, Dialect::torchscale, false};
  EXPECT_EQ(draw(problem, 1, 0), "11..\n11..\n..11\n..11\n");
  EXPECT_EQ(draw(problem, 1, 1), "1.1.\n....\n1.1.\n....\n");
  EXPECT_EQ(draw(problem, 2, 1), "....\n.1.1\n....\n.1.1\n");
  EXPECT_EQ(draw(problem, 1, -1), "211.\n11..\n1.21\n..11\n");
}

TEST(Multiplicity, HeadGroupsRunOneBranchEach) {
  Problem problem = make_problem(4, 4, 3);
  problem.pattern.dilated = Dilated{{{2, 1}, {4, 2}}, Dialect::head_groups, false};
  for (int head : {0, 1}) EXPECT_EQ(draw(problem, head), "11..\n11..\n..11\n..11\n") << head;
  EXPECT_EQ(draw(problem, 2), "....\n.1.1\n....\n.1.1\n");  // branch 1 looks at residue 1
  EXPECT_EQ(head_class(problem, 1), 0);
  EXPECT_EQ(head_class(problem, 2), 1);
}

TEST(Multiplicity, BoundsAndRowsAgreeWithTheElements) {
  Problem problem = make_problem(23, 29, 3);
  problem.pattern.documents = problem.pattern.causal = true;
  problem.cu_seqlens_q = {0, 7, 7, 20, 23};
  problem.cu_seqlens_k = {0, 3, 8, 25, 29};
  for (const bool global : {false, true}) {
    problem.pattern.dilated = Dilated{{{4, 1}, {9, 3}}, Dialect::longnet, global};
    problem.pattern.window = Window{5, 3};
    std::int64_t seen = 0;
    for (std::int64_t head = 0; head < 3; ++head) {
      for (std::int64_t i = 0; i < problem.tokens_q; ++i) {
        const Range keys = key_bounds(problem, 0, i);
        std::vector<std::uint8_t> row(static_cast<std::size_t>(keys.end - keys.begin));
        multiplicity_row(problem, 0, head, i, -1, keys, row);
        for (std::int64_t j = 0; j < problem.tokens_k; ++j) {
          const int count = multiplicity(problem, 0, head, i, j);
          const bool inside = keys.begin <= j && j < keys.end;
          ASSERT_EQ(count, inside ? row[static_cast<std::size_t>(j - keys.begin)] : 0) << i << ' ' << j;
          if (count == 0) continue;
          const Range queries = query_bounds(problem, 0, j);
          ASSERT_TRUE(queries.begin <= i && i < queries.end) << i << ' ' << j;
          seen += count;
        }
      }
    }
    EXPECT_GT(seen, 50);
  }
}

}  // namespace
}  // namespace ringspan::oracle
