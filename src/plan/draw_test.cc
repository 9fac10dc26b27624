#include "ringspan/draw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "ringspan/error.h"

namespace ringspan {
namespace {

using ::testing::HasSubstr;

Problem problem(std::int64_t tokens, int ranks, const char* pattern) {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  return p;
}

PlanOptions with(Strategy strategy) {
  PlanOptions options;
  options.strategy = strategy;
  return options;
}

TEST(DrawText, ShowsWhoComputesWhat) {
  EXPECT_EQ(draw_text(problem(4, 2, "causal"), with(Strategy::exchange)),
            "causal, 4 queries x 4 keys, exchange, 2 ranks\n"
            "head 0\n"
            "         AABB\n"
            "     0 A A...\n"
            "     1 A AA..\n"
            "     2 B BBB.\n"
            "     3 B BBBB\n");
  EXPECT_EQ(draw_text(problem(4, 2, "causal"), with(Strategy::pass_q)),
            "causal, 4 queries x 4 keys, pass-q, 2 ranks\n"
            "head 0\n"
            "         AABB\n"
            "     0 A A...\n"
            "     1 A AA..\n"
            "     2 B AAB.\n"
            "     3 B AABB\n");
}

TEST(DrawText, ShowsMultiplicitiesAndHeadsThatDiffer) {
  Problem p = problem(4, 1, "dilated:2x1,4x2");
  p.heads = p.kv_heads = 3;
  EXPECT_EQ(draw_text(p, with(Strategy::local)),
            "dilated:2x1,4x2@longnet, 4 queries x 4 keys, local, 1 rank\n"
            "head 0 2\n"
            "         AAAA\n"
            "     0 A 211.\n"
            "     1 A 11..\n"
            "     2 A 1.21\n"
            "     3 A ..11\n"
            "head 1\n"
            "         AAAA\n"
            "     0 A 11..\n"
            "     1 A 12.1\n"
            "     2 A ..11\n"
            "     3 A .112\n");
}

TEST(DrawText, NamesBatchItems) {
  Problem p = problem(3, 1, "full");
  p.batch = 3;
  p.heads = p.kv_heads = 2;
  p.lengths_q = {3, 2, 3};
  const std::string text = draw_text(p, {});
  EXPECT_THAT(text, HasSubstr("batch 0 2, all heads\n"));
  EXPECT_THAT(text, HasSubstr("batch 1, all heads\n"));
  EXPECT_THAT(text, HasSubstr("     2 A ...\n"));
}

TEST(DrawSvg, ColoursByRankAndEscapes) {
  const std::string svg = draw_svg(problem(8, 2, "causal & window:3,0"), with(Strategy::ring));
  EXPECT_EQ(svg.rfind("<svg ", 0), 0U);
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("causal&amp;window:3,0"));
  EXPECT_THAT(svg, HasSubstr("<title>rank 1</title></path>"));
  EXPECT_EQ(svg.find("rank 2<"), std::string::npos);
}

// The area of all cells is the number of pairs.
TEST(DrawSvg, HasACellPerPair) {
  const std::string svg = draw_svg(problem(16, 3, "causal"), with(Strategy::all_gather));
  std::int64_t area = 0;
  for (std::size_t at = svg.find("h"); at != std::string::npos; at = svg.find("h", at + 1)) {
    long width = 0, height = 0, back = 0;
    if (std::sscanf(svg.c_str() + at, "h%ldv%ldh-%ldz", &width, &height, &back) == 3) area += width * height;
  }
  EXPECT_EQ(area, 16 * 17 / 2 * 16 * 16) << "16 pixels a token";
}

TEST(Draw, NothingAtAll) {
  EXPECT_EQ(draw_text(problem(0, 2, "full"), with(Strategy::exchange)),
            "full, 0 queries x 0 keys, exchange, 2 ranks\nhead 0\n         \n");
  EXPECT_TRUE(draw_svg(problem(0, 2, "full"), with(Strategy::exchange)).ends_with("</svg>\n"));
}

TEST(Draw, RefusesLongProblems) {
  for (const auto draw : {draw_text, draw_svg}) {
    try {
      draw(problem(513, 1, "full"), {});
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "tokens_q (513) is too many to draw: at most 512; draw a shorter problem of the same kind");
    }
  }
  EXPECT_NO_THROW(draw_svg(problem(512, 4, "causal"), with(Strategy::ring)));
}

}  // namespace
}  // namespace ringspan
