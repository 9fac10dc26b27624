#include "text.h"

#include <gtest/gtest.h>

#include "ringspan/error.h"

namespace ringspan::cli {
namespace {

TEST(Text, SecondsAreRoundedBeforeMinutesAreTaken) {
  EXPECT_EQ(seconds_text(179.6), "3 min 00 s");
  EXPECT_EQ(seconds_text(120), "2 min 00 s");
  EXPECT_EQ(seconds_text(3599.4), "59 min 59 s");
  EXPECT_EQ(seconds_text(119.6), "120 s");
  EXPECT_EQ(seconds_text(1.5e-3), "1.5 ms");
}

TEST(Text, ThingsAreCounted) {
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(0, "key row"), "0 key rows");
  EXPECT_EQ(counted(1024, "rank"), "1,024 ranks");
}

TEST(Text, SeedsAreAllNumbersOf64Bits) {
  EXPECT_EQ(parse_seed("--seed", "0"), 0U);
  EXPECT_EQ(parse_seed("--seed", "18446744073709551615"), ~std::uint64_t{0});
  for (const char* text : {"-1", "18446744073709551616", "", "1.5", "x", "+1"}) {
    EXPECT_THROW(parse_seed("--seed", text), InvalidArgument) << text;
  }
}

TEST(Text, ControlCharactersAreNotPrintable) {
  EXPECT_EQ(printable("a\x1b[31m\r\n\x7f\t"), "a?[31m????");
  EXPECT_EQ(printable("a\n\x1b\n", '\n'), "a\n?\n");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a?b");
  EXPECT_EQ(printable(std::string("a\0\n", 3), '\n'), "a?\n");
  EXPECT_EQ(printable("\xc2\x9b\xc2\x80\xc2\x9f"), "??????");                      // U+009b begins a sequence as ESC [ does
  EXPECT_EQ(printable("\xc2\xa0ä\xe2\x82\xac\xc2"), "\xc2\xa0ä\xe2\x82\xac\xc2");  // a space, letters, half a letter
}

}  // namespace
}  // namespace ringspan::cli
