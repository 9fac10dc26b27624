#include "base/cut_text.h"

#include <gtest/gtest.h>

#include <string>

namespace ringspan::internal {
namespace {

TEST(CutText, EndsWithAWholeCharacter) {
  const std::string text = "aé€😀z";  // of 1, 2, 3, 4 and 1 bytes
  const std::size_t expected[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11, 11};
  for (std::size_t bytes = 0; bytes < std::size(expected); ++bytes) {
    EXPECT_EQ(cut_text(text, bytes), text.substr(0, expected[bytes])) << bytes;
  }
}

TEST(CutText, TakesWhatWasCutAlready) {
  EXPECT_EQ(cut_text("ab\xC3", 100), "ab");
  EXPECT_EQ(cut_text("ab\xF0\x9F\x98", 100), "ab");
  EXPECT_EQ(cut_text("", 100), "");
}

TEST(CutText, WhatIsNotUtf8IsCutAnywhere) {
  const std::string text(10, '\x80');
  for (std::size_t bytes = 0; bytes <= 10; ++bytes) EXPECT_EQ(cut_text(text, bytes).size(), bytes);
}

}  // namespace
}  // namespace ringspan::internal
