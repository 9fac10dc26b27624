#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ringspan/error.h"
#include "ringspan/pattern.h"

namespace ringspan {
namespace {

using testing::HasSubstr;

std::string error_of(std::string_view text) {
  try {
    Pattern::parse(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

// The column (from 0) of the caret, checked against the text above it.
std::size_t caret_of(std::string_view text) {
  const std::string message = error_of(text);
  const std::size_t last = message.rfind('\n');
  EXPECT_THAT(message, HasSubstr("\n  " + std::string(text) + "\n")) << message;
  return message.find('^', last) - last - 3;
}

TEST(PatternParse, EveryTerm) {
  EXPECT_EQ(Pattern::parse("full"), Pattern{});
  EXPECT_TRUE(Pattern::parse("causal").causal);
  EXPECT_EQ(Pattern::parse("window:1023,0").window, (Window{1023, 0}));
  EXPECT_EQ(Pattern::parse("window:-1,5").window, (Window{-1, 5}));
  EXPECT_TRUE(Pattern::parse("documents").documents);
  EXPECT_EQ(Pattern::parse("prefix:100").prefix, 100);
  const Pattern blocks =
      Pattern::parse("block:0-4,0-8;4-8,0-8,causal;8-12,0-8,inverse_causal;12-16,0-8,band(-3,5);16-17,1-2,full");
  ASSERT_EQ(blocks.blocks->size(), 5U);
  EXPECT_EQ(blocks.blocks->at(0), (Block{0, 4, 0, 8}));
  EXPECT_EQ(blocks.blocks->at(1), (Block{4, 8, 0, 8, BlockKind::causal}));
  EXPECT_EQ(blocks.blocks->at(2), (Block{8, 12, 0, 8, BlockKind::inverse_causal}));
  EXPECT_EQ(blocks.blocks->at(3), (Block{12, 16, 0, 8, BlockKind::band, -3, 5}));
  const Pattern dilated = Pattern::parse("dilated:2048x1,4096x2,8192x4@longnet");
  EXPECT_EQ(dilated.dilated, (Dilated{{{2048, 1}, {4096, 2}, {8192, 4}}}));
  EXPECT_EQ(Pattern::parse("dilated:64x2@torchscale@global").dilated, (Dilated{{{64, 2}}, Dialect::torchscale, true}));
}

TEST(PatternParse, GeometricIsTheSequenceOfLongNet) {
  EXPECT_EQ(Pattern::parse("dilated:geometric(2048,4,5)").to_string(),
            "dilated:2048x1,8192x4,32768x16,131072x64,524288x256@longnet");
}

TEST(PatternParse, TermsIntersect) {
  const Pattern pattern = Pattern::parse(" causal & window:7,3&documents & dilated : 16x2 , 32 x 4 @head_groups ");
  EXPECT_TRUE(pattern.causal && pattern.documents);
  EXPECT_EQ(pattern.to_string(), "causal&window:7,3&documents&dilated:16x2,32x4@head_groups");
  EXPECT_EQ(Pattern::parse("causal & full & causal"), Pattern::parse("causal"));
  EXPECT_EQ(Pattern::parse("window:5,-1 & window:-1,2 & window:9,1").window, (Window{5, 1}));
}

TEST(PatternParse, PlusSumsDilatedBranches) {
  EXPECT_EQ(Pattern::parse("dilated:16x1 + dilated:64x4"), Pattern::parse("dilated:16x1,64x4"));
  EXPECT_EQ(Pattern::parse("causal & dilated:16x1@global + dilated:64x4@global & documents").to_string(),
            "causal&documents&dilated:16x1,64x4@longnet@global");
}

TEST(PatternParse, OneAlignmentForTheWholePattern) {
  EXPECT_EQ(Pattern::parse("causal@top_left").align, Align::top_left);
  EXPECT_EQ(Pattern::parse("causal & documents@top_left").align, Align::top_left);
  EXPECT_EQ(Pattern::parse("causal@bottom_right").align, Align::bottom_right);
  EXPECT_EQ(Pattern::parse("full@top_left").to_string(), "full@top_left");
  EXPECT_EQ(Pattern::parse("dilated:8x2@top_left@torchscale").to_string(), "dilated:8x2@torchscale@top_left");
  EXPECT_THAT(error_of("causal@top_left & window:1,1@bottom_right"), HasSubstr("a pattern has one alignment"));
  EXPECT_EQ(caret_of("causal@top_left & window:1,1@bottom_right"), 29U);
}

TEST(PatternParse, TextRoundTrips) {
  for (const char* text :
       {"full", "causal", "causal@top_left", "window:-1,-1", "causal&window:3,-1&documents&prefix:0",
        "block:", "block:@top_left", "block:0-4,0-8,causal;4-8,0-8,band(-3,5)", "dilated:16x2,32x4@torchscale@global",
        "causal&documents&prefix:3&block:1-2,3-4&dilated:7x3@head_groups"}) {
    EXPECT_EQ(Pattern::parse(text).to_string(), text);
  }
}

TEST(PatternParse, StatesAndScale) {
  EXPECT_EQ(Pattern::parse("causal").states(), 1);
  EXPECT_EQ(Pattern::parse("dilated:4x1,8x2").states(), 1);
  EXPECT_EQ(Pattern::parse("dilated:4x1,8x2@torchscale").states(), 2);
  EXPECT_EQ(Pattern::parse("dilated:4x1,8x2@torchscale").output_scale(), 1.0F);
  EXPECT_EQ(Pattern::parse("dilated:4x1,8x2@head_groups").output_scale(), 0.5F);
}

struct Mistake {
  const char* text;
  std::size_t caret;
  const char* what;
};

class PatternMistakes : public testing::TestWithParam<Mistake> {};

TEST_P(PatternMistakes, PointAtTheCharacter) {
  const Mistake& mistake = GetParam();
  EXPECT_THAT(error_of(mistake.text), HasSubstr(mistake.what));
  EXPECT_EQ(caret_of(mistake.text), mistake.caret) << error_of(mistake.text);
}

INSTANTIATE_TEST_SUITE_P(
    All, PatternMistakes,
    testing::Values(
        Mistake{"", 0, "expected a term: full, causal"}, Mistake{"causal &", 8, "expected a term"},
        Mistake{"causl", 0, "unknown term 'causl'"}, Mistake{"causal window:1,2", 7, "expected '&' or the end"},
        Mistake{"window", 6, "expected ':' after window"}, Mistake{"window:x,0", 7, "expected a number of keys"},
        Mistake{"window:1", 8, "expected ',' after the left bound"}, Mistake{"window:-2,0", 7, "-2: expected"},
        Mistake{"prefix:-1", 7, "-1: expected a number of keys in [0"},
        Mistake{"prefix:99999999999999999999", 7, "expected a number of keys"},
        Mistake{"prefix:1 & prefix:2", 11, "one prefix"}, Mistake{"block:0-4,0-4&block:4-8,0-4", 14, "one list of blocks"},
        Mistake{"block:4-2,0-4", 8, "the end of the queries is before their beginning (4)"},
        Mistake{"block:0-4", 9, "expected ',' after the queries"}, Mistake{"block:0-4,0", 11, "expected '-'"},
        Mistake{"block:0-4,0-4,diagonal", 14, "expected the kind of the block"},
        Mistake{"block:0-4,0-4,band(3,1)", 21, "below the lowest (3)"},
        Mistake{"block:0-4,0-4;2-6,3-9", 0, "pattern.blocks[0] (0-4,0-4) and pattern.blocks[1] (2-6,3-9) overlap"},
        Mistake{"dilated:0x1", 8, "0: expected a segment in [1"}, Mistake{"dilated:8x0", 10, "0: expected a rate in [1"},
        Mistake{"dilated:-8x1", 8, "-8: expected a segment"}, Mistake{"dilated:8", 9, "expected 'x' after the segment"},
        Mistake{"dilated:8x2,", 12, "expected a segment"}, Mistake{"dilated:linear(1,2,3)", 8, "not 'linear'"},
        Mistake{"dilated:geometric(8,2,0)", 22, "expected a number of branches in [1"},
        Mistake{"dilated:geometric(8,2,99)", 22, "would be larger than"},
        Mistake{"dilated:geometric(8,1,999)", 22, "at most 255 branches"},
        Mistake{"prefix:3 & prefix:4", 11, "a pattern holds one prefix"},
        Mistake{"dilated:8x1 & dilated:16x2", 14, "one dilated term"}, Mistake{"dilated:8x1@longet", 12, "expected longnet"},
        Mistake{"dilated:8x1@longnet@torchscale", 20, "one dialect"}, Mistake{"causal@longnet", 7, "belongs after dilated"},
        Mistake{"causal@left", 7, "expected top_left or bottom_right"},
        Mistake{"dilated:8x1@torchscale + dilated:16x2", 25, "one dialect only"},
        Mistake{"dilated:8x1@global + dilated:16x2", 21, "all @global or none"},
        Mistake{"causal + dilated:8x1", 7, "cannot follow 'causal'"},
        Mistake{"dilated:8x1 + causal", 14, "'+' sums dilated terms only, not 'causal'"}));

TEST(PatternParse, LongTextsAreCutAroundTheMistake) {
  std::string text = "block:";
  for (int i = 0; i < 100; ++i) text += std::to_string(i) + "-" + std::to_string(i + 1) + ",0-4;";
  const std::string message = error_of(text);
  EXPECT_LT(message.size(), 300U);
  EXPECT_THAT(message, HasSubstr("expected the first of the queries"));
}

}  // namespace
}  // namespace ringspan
