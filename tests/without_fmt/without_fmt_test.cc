// python/without_fmt, with which wheels are built, gives what {fmt} gives.
#include <gtest/gtest.h>

#include "without_fmt/cases.h"

std::vector<std::string> rendered_without_fmt();

namespace {

TEST(WithoutFmt, GivesWhatFmtGives) {
  const std::vector<std::string> expected = rendered(), found = rendered_without_fmt();
  ASSERT_GT(expected.size(), 20000u);
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(expected[i], found[i]) << "case " << i;
}

}  // namespace
