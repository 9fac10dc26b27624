#include "ringspan/draw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "ringspan/error.h"

namespace ringspan {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

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

TEST(DrawText, ExplainsCharactersOnlyWhereTheyOccur) {
  const std::string more = "'+' attends more than 9 times\n", later = "'*' is any rank from 52 on\n";
  const std::string often = draw_text(problem(4, 1, "dilated:4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1"), {});
  EXPECT_THAT(often, HasSubstr("     3 A ++++\n" + more));
  EXPECT_THAT(often, Not(HasSubstr(later)));
  const std::string wide = draw_text(problem(53, 53, "window:0,0"), with(Strategy::exchange));
  EXPECT_THAT(wide, HasSubstr("*\n" + later));
  EXPECT_THAT(wide, Not(HasSubstr(more)));
  const std::string plain = draw_text(problem(52, 52, "dilated:4x1+dilated:8x2"), with(Strategy::exchange));
  EXPECT_THAT(plain, AllOf(Not(HasSubstr(more)), Not(HasSubstr(later))));
}

// From `begin` up to the next `after`.
std::string up_to(const std::string& text, std::size_t begin, const char* after) {
  return text.substr(begin, text.find(after, begin) - begin);
}

// What the legend says, "fill name".
std::vector<std::string> keys(const std::string& svg) {
  std::vector<std::string> found;
  const std::string both = "/><text ", fill = "fill=\"";
  for (std::size_t at = svg.find(both); at != std::string::npos; at = svg.find(both, at + 1)) {
    const std::size_t rect = svg.rfind("<rect ", at), colour = svg.rfind(fill, at) + fill.size(),
                      text = svg.find('>', at + 2) + 1;
    if (colour > rect) found.push_back(up_to(svg, colour, "\"") + " " + up_to(svg, text, "<"));
  }
  return found;
}

TEST(DrawSvg, EveryTextIsInsideThePage) {
  Problem narrow = problem(32, 4, "dilated:4x1,8x1,16x1,32x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1");
  narrow.heads = narrow.kv_heads = 2;
  Problem many = problem(2, 1, "dilated:1x1,2x2");
  many.heads = many.kv_heads = 200;
  for (const std::string& svg :
       {draw_svg(narrow, {}), draw_svg(many, {}), draw_svg(problem(40, 40, "causal"), with(Strategy::exchange))}) {
    const double page = std::stod(svg.substr(svg.find("width=\"") + 7));
    const std::string begin = "<text x=\"";
    int texts = 0;
    for (std::size_t at = svg.find(begin); at != std::string::npos; at = svg.find(begin, at + 1)) {
      const std::string tag = up_to(svg, at, ">"), words = up_to(svg, svg.find('>', at) + 1, "<");
      if (tag.find("text-anchor") != std::string::npos) continue;
      const double x = std::stod(tag.substr(begin.size()));  // below 0: the name of a panel, which is 128 wide at least
      EXPECT_LE(6.5 * static_cast<double>(words.size()), x < 0 ? 128 : page - x) << words;
      ++texts;
    }
    EXPECT_GT(texts, 3);
  }
}

TEST(DrawSvg, WrappedTitlesAreWhole) {
  const char* pattern = "dilated:4x1,8x1,16x1,32x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1,4x1";
  std::string svg = draw_svg(problem(8, 1, pattern), {});
  const std::string broken = "</text>\n<text ";
  for (std::size_t at = svg.find(broken); at != std::string::npos; at = svg.find(broken)) {
    svg.erase(at, svg.find('>', at + broken.size()) + 1 - at);
  }
  EXPECT_THAT(svg, HasSubstr(std::string(pattern) + "@longnet, 8 queries x 8 keys, local, 1 rank"));
}

TEST(DrawSvg, TheLegendNamesAllRanksInDistantColours) {
  const std::vector<std::string> found = keys(draw_svg(problem(48, 24, "causal"), with(Strategy::exchange)));
  ASSERT_EQ(found.size(), 24U);
  for (std::size_t a = 0; a < found.size(); ++a) {
    EXPECT_THAT(found[a], EndsWith(" " + std::to_string(a)));
    for (std::size_t b = 0; b < a; ++b) {
      int distance = 0;
      for (const std::size_t at : {1U, 3U, 5U}) {
        const auto channel = [&](std::size_t rank) { return std::stoi(found[rank].substr(at, 2), nullptr, 16); };
        distance += std::abs(channel(a) - channel(b));
      }
      EXPECT_GE(distance, 36) << found[a] << ", " << found[b];
    }
  }
  EXPECT_EQ(keys(draw_svg(problem(300, 300, "window:0,0"), with(Strategy::exchange))).size(), 300U);
}

TEST(DrawSvg, RanksThatOnlyHoldAreApart) {
  const std::string svg = draw_svg(problem(30, 30, "causal"), with(Strategy::local));
  const std::size_t compute = svg.find("ranks that compute"), hold = svg.find("ranks that only hold");
  ASSERT_LT(compute, hold);
  EXPECT_EQ(keys(svg.substr(compute, hold - compute)).size(), 1U);
  EXPECT_EQ(keys(svg.substr(hold)).size(), 29U);
  EXPECT_THAT(svg, HasSubstr("ranks 24 apart share a colour"));
}

TEST(DrawSvg, ExplainsShadesAndAxes) {
  const std::string svg = draw_svg(problem(8, 1, "dilated:4x1,4x1,4x1,8x1,8x1"), {});
  EXPECT_THAT(svg, HasSubstr("rows: queries, columns: keys"));
  EXPECT_THAT(svg, HasSubstr("text-anchor=\"end\">6</text>"));
  EXPECT_THAT(svg, HasSubstr("text-anchor=\"middle\">6</text>"));
  const std::vector<std::string> found = keys(svg);
  ASSERT_EQ(found.size(), 5U);
  EXPECT_THAT(found[1], EndsWith(" 1 time"));
  EXPECT_THAT(found[4], EndsWith(" 4 or more times"));
  EXPECT_THAT(draw_svg(problem(8, 1, "causal"), {}), Not(HasSubstr(" time")));
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
  EXPECT_THROW(draw_text(problem(5, 1025, "full"), {}), InvalidArgument);
  EXPECT_NO_THROW(draw_svg(problem(512, 4, "causal"), with(Strategy::ring)));
}

}  // namespace
}  // namespace ringspan
