#include "pattern/lower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace ringspan {
namespace {

using testing::ElementsAre;

Problem make_problem(const char* pattern, std::int64_t tokens_q, std::int64_t tokens_k, int heads = 1) {
  Problem problem;
  problem.tokens_q = tokens_q;
  problem.tokens_k = tokens_k;
  problem.heads = problem.kv_heads = heads;
  problem.pattern = Pattern::parse(pattern);
  return problem;
}

std::vector<std::string> printed(const Problem& problem) {
  problem.validate();
  std::vector<std::string> result;
  for (const Slice& slice : lower(problem)) result.push_back(to_string(slice));
  return result;
}

std::int64_t visits(const Problem& problem, const Restriction& restriction) {
  std::int64_t count = 0;
  for_each_slice(problem, restriction, [&](const Slice&) { ++count; });
  return count;
}

TEST(Lower, PlainTermsAreOneSlice) {
  EXPECT_THAT(printed(make_problem("full", 4, 6, 2)), ElementsAre("batch 0 heads 0..1 q 0..3 k 0..5 band [-3, 5] diagonal 2"));
  EXPECT_THAT(printed(make_problem("causal", 4, 6)), ElementsAre("batch 0 heads 0 q 0..3 k 0..5 band [-3, 2] diagonal 2"));
  EXPECT_THAT(printed(make_problem("causal@top_left", 4, 6)), ElementsAre("batch 0 heads 0 q 0..3 k 0..3 band [-3, 0]"));
  EXPECT_THAT(printed(make_problem("window:2,1", 8, 8)), ElementsAre("batch 0 heads 0 q 0..7 k 0..7 band [-2, 1]"));
  EXPECT_THAT(printed(make_problem("causal & window:2,1", 8, 8)), ElementsAre("batch 0 heads 0 q 0..7 k 0..7 band [-2, 0]"));
}

TEST(Lower, CausalWithMoreQueriesThanKeysSkipsTheFirst) {
  EXPECT_THAT(printed(make_problem("causal", 6, 4)), ElementsAre("batch 0 heads 0 q 2..5 k 0..3 band [-5, -2] diagonal -2"));
}

TEST(Lower, NothingHasNoSlices) {
  EXPECT_THAT(printed(make_problem("full", 0, 0)), ElementsAre());
  EXPECT_THAT(printed(make_problem("full", 3, 0)), ElementsAre());
  EXPECT_THAT(printed(make_problem("dilated:4x2", 0, 5)), ElementsAre());
  EXPECT_THAT(printed(make_problem("block:", 4, 4)), ElementsAre());
  Problem documents = make_problem("documents & causal", 0, 0);
  documents.cu_seqlens_q = {0};
  EXPECT_THAT(printed(documents), ElementsAre());
  documents.cu_seqlens_q = {0, 0, 0};
  EXPECT_THAT(printed(documents), ElementsAre());
}

TEST(Lower, DocumentsHaveDiagonalsOfTheirOwn) {
  Problem problem = make_problem("documents & causal", 5, 7);
  problem.cu_seqlens_q = {0, 2, 2, 5};
  problem.cu_seqlens_k = {0, 4, 6, 7};
  EXPECT_THAT(printed(problem), ElementsAre("batch 0 heads 0 q 0..1 k 0..3 band [-1, 2] diagonal 2",
                                            "batch 0 heads 0 q 4 k 6 band [2, 2] diagonal 2"));
}

TEST(Lower, EqualLengthsShareASlice) {
  Problem problem = make_problem("causal", 8, 8);
  problem.batch = 5;
  problem.lengths_q = problem.lengths_k = {8, 8, 3, 0, 8};
  EXPECT_THAT(printed(problem),
              ElementsAre("batch 0..1 heads 0 q 0..7 k 0..7 band [-7, 0]", "batch 2 heads 0 q 0..2 k 0..2 band [-2, 0]",
                          "batch 4 heads 0 q 0..7 k 0..7 band [-7, 0]"));
}

TEST(Lower, StartsOfKeysMakePaddingBeforeThem) {
  Problem problem = make_problem("causal", 8, 8);
  problem.batch = 4;
  problem.starts_k = {0, 3, 3, 8};
  EXPECT_THAT(printed(problem),
              ElementsAre("batch 0 heads 0 q 0..7 k 0..7 band [-7, 0]", "batch 1..2 heads 0 q 3..7 k 3..7 band [-4, 0]"));
  problem.lengths_k = {8, 2, 4, 0};
  EXPECT_THAT(printed(problem), ElementsAre("batch 0 heads 0 q 0..7 k 0..7 band [-7, 0]",
                                            "batch 1 heads 0 q 6..7 k 3..4 band [-4, -3] diagonal -3",
                                            "batch 2 heads 0 q 4..7 k 3..6 band [-4, -1] diagonal -1"));
}

TEST(Lower, PrefixIsTwoDisjointSlices) {
  EXPECT_THAT(printed(make_problem("prefix:3", 6, 6)),
              ElementsAre("batch 0 heads 0 q 0..5 k 0..2 band [-5, 2]", "batch 0 heads 0 q 3..5 k 3..5 band [-2, 0]"));
  EXPECT_THAT(printed(make_problem("prefix:3 & causal", 6, 6)), ElementsAre("batch 0 heads 0 q 0..5 k 0..5 band [-5, 0]"));
}

TEST(Lower, DilatedSegmentsRestartAndTheLastIsShorter) {
  EXPECT_THAT(
      printed(make_problem("dilated:4x2 & causal", 7, 7, 3)),
      ElementsAre("batch 0 heads 0..2:2 q 0..2:2 k 0..2:2 band [-2, 0]", "batch 0 heads 1 q 1..3:2 k 1..3:2 band [-2, 0]",
                  "batch 0 heads 0..2:2 q 4..6:2 k 4..6:2 band [-2, 0]", "batch 0 heads 1 q 5 k 5 band [0, 0]"));
}

TEST(Lower, HeadClassesOfTheDialects) {
  EXPECT_THAT(
      printed(make_problem("dilated:8x2,8x4@torchscale", 8, 8, 5)),
      ElementsAre("batch 0 heads 0..2 q 0..6:2 k 0..6:2 band [-6, 6]", "batch 0 heads 3..4 q 1..7:2 k 1..7:2 band [-6, 6]",
                  "batch 0 heads 0..1 q 0..4:4 k 0..4:4 band [-4, 4] state 1",
                  "batch 0 heads 2..3 q 1..5:4 k 1..5:4 band [-4, 4] state 1",
                  "batch 0 heads 4 q 2..6:4 k 2..6:4 band [-4, 4] state 1"));
  EXPECT_THAT(
      printed(make_problem("dilated:8x1,8x4@head_groups", 8, 8, 5)),
      ElementsAre("batch 0 heads 0..2 q 0..7 k 0..7 band [-7, 7]", "batch 0 heads 3..4 q 1..5:4 k 1..5:4 band [-4, 4]"));
}

TEST(Lower, GlobalSegmentsIgnoreDocuments) {
  Problem problem = make_problem("documents & dilated:4x1@global", 8, 8);
  problem.cu_seqlens_q = {0, 3, 8};
  EXPECT_THAT(printed(problem), ElementsAre("batch 0 heads 0 q 0..2 k 0..2 band [-2, 2]", "batch 0 heads 0 q 3 k 3 band [0, 0]",
                                            "batch 0 heads 0 q 4..7 k 4..7 band [-3, 3]"));
  problem.pattern.dilated->global = false;
  EXPECT_THAT(printed(problem),
              ElementsAre("batch 0 heads 0 q 0..2 k 0..2 band [-2, 2]", "batch 0 heads 0 q 3..6 k 3..6 band [-3, 3]",
                          "batch 0 heads 0 q 7 k 7 band [0, 0]"));
}

TEST(Lower, PairCounts) {
  EXPECT_TRUE(pair_count(make_problem("causal", 100, 100, 3)) == 3 * 5050);
  Problem problem = make_problem("dilated:8x1,16x4", 64, 64, 4);
  problem.batch = 2;
  EXPECT_TRUE(pair_count(problem) == 2 * 4 * (8 * 64 + 4 * 16));
}

// The prototypes took time and memory in proportion to all ranks; one rank's part must cost what is in it.
TEST(LowerCost, AShardOfLongNetVisitsItsOwnSegmentsOnly) {
  const Problem problem = make_problem("causal & dilated:geometric(2048,4,5)", 1048576, 1048576, 8);
  Restriction restriction = unrestricted(problem);
  restriction.q_begin = 37 * 16384;
  restriction.q_end = 38 * 16384;
  // 8 segments of rate 1, 2 of rate 4 with a class for each residue, 1 each of rates 16, 64, 256 with a class for each head.
  EXPECT_EQ(visits(problem, restriction), 8 + 2 * 4 + 3 * 8);
  std::swap(restriction.q_begin, restriction.k_begin);
  std::swap(restriction.q_end, restriction.k_end);
  EXPECT_EQ(visits(problem, restriction), 8 + 2 * 4 + 3 * 8);
  restriction.head_begin = 5;
  restriction.head_end = 6;
  EXPECT_EQ(visits(problem, restriction), 8 + 2 + 3);
}

TEST(LowerCost, ATrillionTokensAreNotTouched) {
  const std::int64_t n = std::int64_t{1} << 40;
  const Problem problem = make_problem("dilated:64x1,128x2", n, n, 2);
  Restriction restriction = unrestricted(problem);
  restriction.q_begin = n - 1000;
  restriction.q_end = n - 990;
  for (int call = 0; call < 1000; ++call) ASSERT_EQ(visits(problem, restriction), 1 + 2);
  std::swap(restriction.q_begin, restriction.k_begin);
  std::swap(restriction.q_end, restriction.k_end);
  for (int call = 0; call < 1000; ++call) ASSERT_EQ(visits(problem, restriction), 1 + 2);
  restriction = {0, n / 2, n / 2, n, 0, 2};  // no segment holds both
  EXPECT_EQ(visits(problem, restriction), 0);
}

TEST(LowerCost, DocumentsAreFoundBySearch) {
  const std::int32_t documents = 1000000;
  Problem problem = make_problem("documents & causal", documents * 10L, documents * 10L);
  for (std::int32_t d = 0; d <= documents; ++d) problem.cu_seqlens_q.push_back(d * 10);
  Restriction restriction = unrestricted(problem);
  restriction.q_begin = 5000005;
  restriction.q_end = 5000015;
  for (int call = 0; call < 1000; ++call) ASSERT_EQ(visits(problem, restriction), 2);
}

}  // namespace
}  // namespace ringspan
