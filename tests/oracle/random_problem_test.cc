// Random cases are valid, supported, within their work, different, the same for the same seed, and survive being printed.
#include "oracle/random_problem.h"

#include <gtest/gtest.h>

#include <set>

#include "io/problem_line.h"
#include "oracle/multiplicity.h"
#include "ringspan/error.h"

namespace ringspan::oracle {
namespace {

TEST(RandomProblem, IsValidAndWithinItsWork) {
  for (std::uint64_t index = 0; index < 2000; ++index) {
    const RandomCase drawn = draw_case(7, index);
    EXPECT_NO_THROW(drawn.problem.validate()) << io::print_problem(drawn.problem);
    EXPECT_LE(work_of(drawn.problem), kMaxRandomWork);
    EXPECT_LE(drawn.problem.tokens_q, 1500);
    EXPECT_LE(drawn.problem.tokens_k, 1500);
  }
}

TEST(RandomProblem, CanBePlanned) {
  for (std::uint64_t index = 0; index < 150; ++index) {
    const RandomCase drawn = draw_case(8, index);
    EXPECT_NO_THROW(make_plan(drawn.problem, drawn.options, drawn.problem.ranks - 1)) << io::print_problem(drawn.problem);
  }
}

TEST(RandomProblem, SurvivesBeingPrinted) {
  std::set<std::string> lines;
  for (std::uint64_t index = 0; index < 500; ++index) {
    const std::string line = io::print_problem(draw_case(9, index).problem);
    EXPECT_EQ(io::print_problem(io::parse_problem(line)), line);
    EXPECT_EQ(io::print_problem(draw_case(9, index).problem), line);
    lines.insert(line);
  }
  EXPECT_EQ(lines.size(), 500U);
  EXPECT_NE(io::print_problem(draw_case(10, 0).problem), io::print_problem(draw_case(9, 0).problem));
}

TEST(RandomProblem, DrawsEverythingThatItCan) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    Tally tally;
    for (std::uint64_t index = 0; index < 500; ++index) tally.add(draw_case(seed, index));
    EXPECT_EQ(tally.missing(), std::vector<std::string>()) << tally.to_string();
  }
}

TEST(RandomProblem, TallyNamesWhatIsMissing) {
  Tally tally;
  EXPECT_EQ(tally.missing().size(), tally.counts().size());
  RandomCase drawn;
  drawn.problem.tokens_q = drawn.problem.tokens_k = 10;
  tally.add(drawn);
  EXPECT_EQ(tally.to_string().rfind("strategy: auto 1, local 0, ", 0), 0U) << tally.to_string();
  EXPECT_EQ(tally.missing().front(), "strategy: local");
}

}  // namespace
}  // namespace ringspan::oracle
