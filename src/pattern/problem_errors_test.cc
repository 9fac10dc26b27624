#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "ringspan/error.h"
#include "ringspan/problem.h"

namespace ringspan {
namespace {

using testing::HasSubstr;

Problem sound(const char* pattern = "causal") {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 16;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.pattern = Pattern::parse(pattern);
  if (problem.pattern.documents) problem.cu_seqlens_q = {0, 5, 16};
  return problem;
}

std::string error_of(const Problem& problem) {
  try {
    problem.validate();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

struct Mistake {
  const char* pattern;
  std::function<void(Problem&)> spoil;
  const char* what;
};

class ProblemMistakes : public testing::TestWithParam<Mistake> {};

TEST_P(ProblemMistakes, NameTheFieldAndWhatWasExpected) {
  Problem problem = sound(GetParam().pattern);
  ASSERT_EQ(error_of(problem), "accepted");
  GetParam().spoil(problem);
  EXPECT_THAT(error_of(problem), HasSubstr(GetParam().what));
}

TEST(ProblemErrors, ShardingsThatAreTooFineNameTheirSide) {
  Problem problem = sound();
  problem.tokens_q = problem.tokens_k = std::int64_t{1} << 30;
  problem.ranks = 2;
  problem.sharding_k = Sharding::parse("block_striped:2");
  try {
    problem.validate();
    FAIL() << "accepted";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("sharding_k: sharding.block (2)"));
  }
}

const Mistake kShapes[] = {
    {"full", [](Problem& p) { p.batch = 0; }, "batch (0) must be in [1, "},
    {"full", [](Problem& p) { p.tokens_q = -1; }, "tokens_q (-1) must be in [0, 1099511627776]"},
    {"full", [](Problem& p) { p.tokens_k = (std::int64_t{1} << 40) + 1; },
     "tokens_k (1099511627777) must be in [0, 1099511627776]"},
    {"full", [](Problem& p) { p.heads = 0; }, "heads (0) must be in [1, 1073741824]"},
    {"full", [](Problem& p) { p.heads = INT32_MAX; }, "heads (2147483647) must be in [1, 1073741824]"},
    {"full", [](Problem& p) { p.kv_heads = 0; }, "kv_heads (0) must be in [1, 1073741824]"},
    {"full", [](Problem& p) { p.kv_heads = 3; }, "heads (4) must be a multiple of kv_heads (3)"},
    {"full", [](Problem& p) { p.head_dim = 0; }, "head_dim (0) must be in [1, 256]"},
    {"full", [](Problem& p) { p.head_dim_v = 257; }, "head_dim_v (257) must be in [1, 256]"},
    {"full", [](Problem& p) { p.dtype = static_cast<DType>(7); }, "dtype (7) must be float32, bfloat16 or float16"},
    {"full", [](Problem& p) { p.batch = p.tokens_q = std::int64_t{1} << 40; }, "is more than 2^54 elements"},
    {"full", [](Problem& p) { p.ranks = 0; }, "ranks (0) must be at least 1"},
    {"full", [](Problem& p) { p.ranks = (1 << 20) + 1; }, "ranks (1048577) must be at most 1048576"},
    {"full", [](Problem& p) { p.scale = std::numeric_limits<float>::infinity(); }, "scale (inf) must be finite"},
    {"full", [](Problem& p) { p.scale = std::nanf(""); }, "scale (nan) must be finite"},
    {"full", [](Problem& p) { p.softcap = -1; },
     "softcap (-1) must be 0, or finite and at least 1.1754944e-38, the smallest normal float32"},
    {"full", [](Problem& p) { p.softcap = 0x1p-127F; }, "softcap (5.877472e-39) must be 0, or finite"},  // 1 / it may be inf
    {"full", [](Problem& p) { p.softcap = std::numeric_limits<float>::infinity(); }, "softcap (inf)"},
    {"full", [](Problem& p) { p.softcap = std::nanf(""); }, "softcap (nan)"},
    {"full", [](Problem& p) { p.dropout = 1; }, "dropout (1) must be in [0, 1)"},
    {"full", [](Problem& p) { p.dropout = -0.5F; }, "dropout (-0.5) must be in [0, 1)"},
    {"full", [](Problem& p) { p.dropout = std::nanf(""); }, "dropout (nan)"},
    {"full", [](Problem& p) { p.sharding_q = {ShardingKind::block_striped, 0, {}}; }, "sharding_q: sharding.block (0)"},
    {"full", [](Problem& p) { p.sharding_k = Sharding::parse("explicit:0-14"); },
     "sharding_k: sharding: the lists hold 15 positions of 16"},
};
INSTANTIATE_TEST_SUITE_P(Shapes, ProblemMistakes, testing::ValuesIn(kShapes));

const Mistake kDocuments[] = {
    {"full", [](Problem& p) { p.cu_seqlens_q = {0, 16}; }, "cu_seqlens_q is given, but the pattern has no documents"},
    {"full", [](Problem& p) { p.cu_seqlens_k = {0, 16}; }, "cu_seqlens_k is given, but the pattern has no documents"},
    {"documents", [](Problem& p) { p.cu_seqlens_q.clear(); }, "the pattern has documents, but cu_seqlens_q is empty"},
    {"documents", [](Problem& p) { p.cu_seqlens_q = {1, 16}; }, "cu_seqlens_q[0] (1) must be 0"},
    {"documents", [](Problem& p) { p.cu_seqlens_q = {0, 9, 7, 16}; },
     "cu_seqlens_q must ascend: cu_seqlens_q[2] (7) is below cu_seqlens_q[1] (9)"},
    {"documents", [](Problem& p) { p.cu_seqlens_q = {0, 15}; }, "cu_seqlens_q must end at tokens_q (16), not at 15"},
    {"documents", [](Problem& p) { p.cu_seqlens_k = {0, 17}; }, "cu_seqlens_k must end at tokens_k (16), not at 17"},
    {"documents", [](Problem& p) { p.cu_seqlens_k = {0, 16}; }, "cu_seqlens_k has 1 documents, cu_seqlens_q has 2"},
    {"documents", [](Problem& p) { p.tokens_k = 20; }, "tokens_k (20) must equal tokens_q (16)"},
    {"documents", [](Problem& p) { p.lengths_q = {16}; }, "lengths_q cannot be used together with documents"},
    {"documents", [](Problem& p) { p.lengths_k = {16}; }, "lengths_k cannot be used together with documents"},
    {"documents", [](Problem& p) { p.starts_k = {1}; }, "starts_k cannot be used together with documents"},
    {"full", [](Problem& p) { p.lengths_q = {1, 2}; }, "lengths_q has 2 entries, expected one per batch item (1)"},
    {"full", [](Problem& p) { p.lengths_q = {17}; }, "lengths_q[0] (17) must be in [0, 16], the tokens_q"},
    {"full", [](Problem& p) { p.lengths_k = {-1}; }, "lengths_k[0] (-1) must be in [0, 16], the tokens_k"},
    {"full", [](Problem& p) { p.starts_k = {1, 2}; }, "starts_k has 2 entries, expected one per batch item (1)"},
    {"full", [](Problem& p) { p.starts_k = {17}; }, "starts_k[0] (17) must be in [0, 16], the tokens_k"},
    {"full", [](Problem& p) { p.lengths_k = {10}, p.starts_k = {7}; },
     "starts_k[0] (7) must be in [0, 6], the tokens_k less lengths_k[0]"},
};
INSTANTIATE_TEST_SUITE_P(Documents, ProblemMistakes, testing::ValuesIn(kDocuments));

// Patterns built by hand, past the parser.
const Mistake kPatterns[] = {
    {"full", [](Problem& p) { p.pattern.align = static_cast<Align>(5); }, "pattern.align (5)"},
    {"full", [](Problem& p) { p.pattern.window = Window{-2, 0}; }, "pattern.window.left (-2) must be in [-1, "},
    {"full", [](Problem& p) { p.pattern.window = Window{0, INT64_MAX}; },
     "pattern.window.right (9223372036854775807) must be in [-1, "},
    {"full", [](Problem& p) { p.pattern.prefix = -1; }, "pattern.prefix (-1) must be in [0, "},
    {"full", [](Problem& p) { p.pattern.dilated = Dilated{}; }, "pattern.dilated has 0 branches, expected 1 to 255"},
    {"full", [](Problem& p) { p.pattern.dilated = Dilated{std::vector<DilatedBranch>(256, {4, 1})}; },
     "pattern.dilated has 256 branches"},
    {"full", [](Problem& p) { p.pattern.dilated = Dilated{{{0, 1}}}; },
     "pattern.dilated.branches[0].segment (0) must be in [1, "},
    {"full", [](Problem& p) { p.pattern.dilated = Dilated{{{-4, 1}}}; }, "pattern.dilated.branches[0].segment (-4)"},
    {"full", [](Problem& p) { p.pattern.dilated = Dilated{{{4, 1}, {8, 0}}}; },
     "pattern.dilated.branches[1].rate (0) must be in [1, "},
    {"full", [](Problem& p) { p.pattern.dilated = Dilated{{{4, 1}}, static_cast<Dialect>(9)}; }, "pattern.dilated.dialect (9)"},
    {"full", [](Problem& p) { p.pattern.blocks = {{3, 2, 0, 4}}; }, "pattern.blocks[0] (3-2,0-4): expected 0 <= begin <= end"},
    {"full", [](Problem& p) { p.pattern.blocks = {{-1, 2, 0, 4}}; },
     "pattern.blocks[0] (-1-2,0-4): expected 0 <= begin <= end"},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 2, 0, 4, BlockKind::band, 3, 1}}; }, "<= lo <= hi <="},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 2, 0, 4, BlockKind::full, 0, 1}}; },
     "lo (0) and hi (1) are for kind band only"},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 2, 0, 4, static_cast<BlockKind>(8)}}; }, "kind (8)"},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 17, 0, 4}}; },
     "pattern.blocks[0].q_end (17) must be at most tokens_q (16)"},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 2, 0, 17}}; },
     "pattern.blocks[0].k_end (17) must be at most tokens_k (16)"},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 4, 0, 4}, {4, 8, 0, 4}, {2, 6, 3, 9}}; },
     "pattern.blocks[0] (0-4,0-4) and pattern.blocks[2] (2-6,3-9) overlap"},
    {"full", [](Problem& p) { p.pattern.blocks = {{0, 8, 0, 8, BlockKind::causal}, {0, 8, 0, 8, BlockKind::inverse_causal}}; },
     "pattern.blocks[0] (0-8,0-8,causal) and pattern.blocks[1] (0-8,0-8,inverse_causal) overlap"},
};
INSTANTIATE_TEST_SUITE_P(Patterns, ProblemMistakes, testing::ValuesIn(kPatterns));

TEST(Problem, SoundOnesPass) {
  EXPECT_EQ(error_of(Problem{}), "accepted");  // no tokens at all
  Problem problem = sound("documents");
  problem.tokens_k = 9;
  problem.cu_seqlens_k = {0, 0, 9};
  EXPECT_EQ(error_of(problem), "accepted");
  problem = sound();
  problem.tokens_q = problem.tokens_k = std::int64_t{1} << 40;
  problem.softcap = std::numeric_limits<float>::min();
  EXPECT_EQ(error_of(problem), "accepted");
  // Rectangles that overlap, in pairs that do not.
  problem = sound();
  problem.pattern.blocks = {{0, 8, 0, 8, BlockKind::causal}, {0, 8, 0, 8, BlockKind::band, 1, 7}};
  EXPECT_EQ(error_of(problem), "accepted");
}

TEST(Problem, OverlapIsFoundAmongManyBlocks) {
  Problem problem = sound();
  problem.tokens_q = problem.tokens_k = 200 * 64;
  problem.pattern.blocks.emplace();
  for (std::int64_t q = 0; q < 200; ++q) {
    for (std::int64_t k = 0; k < 200; k += 2) problem.pattern.blocks->push_back({q * 64, q * 64 + 64, k * 64, k * 64 + 64});
  }
  EXPECT_EQ(error_of(problem), "accepted");
  problem.pattern.blocks->push_back({64, 65, 65, 129});
  EXPECT_THAT(error_of(problem),
              HasSubstr("pattern.blocks[101] (64-128,128-192) and pattern.blocks[20000] (64-65,65-129) overlap"));
}

TEST(Problem, ScaleDefaultsToTheRootOfTheHeadDim) {
  Problem problem = sound();
  EXPECT_FLOAT_EQ(problem.effective_scale(), 0.125F);
  problem.scale = 2;
  EXPECT_EQ(problem.effective_scale(), 2);
  EXPECT_EQ(problem.group(), 2);
}

}  // namespace
}  // namespace ringspan
