// The table of `ringspan capabilities` is true: every cell runs and agrees with the oracle, or is refused with the reason that
// the table gives.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "api_testing/world.h"
#include "capability_table.h"
#include "cuda/device_world.h"
#include "cuda/partials_bounds.h"
#include "ringspan/error.h"

namespace ringspan::cli {
namespace {

std::string name_of(const Cell& cell) {
  return cell.pattern + ", " + cell.option + ", " + std::string(to_string(cell.dtype)) + ", " +
         (cell.pass == Pass::forward ? "forward" : "backward") + ", " + std::string(to_string(cell.strategy));
}

testing::Case case_of(const Cell& cell) {
  testing::Case test;
  test.problem = cell.problem;
  test.options = cell.plan;
  if (test.options.device != DeviceKind::cpu) test.execute.device = "cuda-emulated";
  test.execute.deterministic = test.options.partials == Partials::float32;
  return test;
}

std::string judge(const Cell& cell) {
  testing::Case test = case_of(cell);
  if (test.options.device == DeviceKind::cpu) return testing::judge(test);
  const testing::Whole whole(test);
  const testing::Outputs outputs = testing::run(test, whole, testing::device_script(test.execute.device));
  if (test.options.partials == Partials::storage) {  // a library computes what it can, and delta from the rounded o
    test.widen = testing::partials_bounds(test.problem);
    test.options.keep_o_float32 = false;
  }
  return testing::judge(test, whole, outputs);
}

class Capabilities : public ::testing::TestWithParam<Strategy> {};

TEST_P(Capabilities, every_cell_runs_or_is_refused_as_the_table_says) {
  int ran = 0;
  for (const Cell& cell : capability_cells()) {
    if (cell.strategy != GetParam()) continue;
    SCOPED_TRACE(name_of(cell));
    if (cell.supported()) {
      ++ran;
      ASSERT_EQ(judge(cell), "");
      continue;
    }
    try {
      judge(cell);
      FAIL() << "the table says: " << cell.reason;
    } catch (const Unsupported& error) {
      ASSERT_NE(std::string(error.what()).find(cell.reason), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(ran, 500);
}

INSTANTIATE_TEST_SUITE_P(strategies, Capabilities,
                         ::testing::Values(Strategy::local, Strategy::all_gather, Strategy::exchange, Strategy::ring,
                                           Strategy::pass_q, Strategy::ulysses));

TEST(CapabilityTable, every_axis_value_is_a_column_or_a_row_once) {
  std::map<std::string, int> cells;
  for (const Cell& cell : capability_cells()) ++cells[name_of(cell)];
  EXPECT_EQ(cells.size(), capability_patterns().size() * capability_options().size() * 3 * 2 * 6);
  for (const auto& [name, count] : cells) EXPECT_EQ(count, 1) << name;
}

TEST(CapabilityTable, a_problem_that_the_planner_refuses_is_refused_by_the_table) {
  Problem problem = capability_cells().front().problem;
  PlanOptions plan;
  plan.strategy = Strategy::all_gather;
  plan.bucket_rows = 4;
  EXPECT_THROW(make_plan(problem, plan, 0), Unsupported);
  EXPECT_NE(refusal(problem, plan), "");
}

}  // namespace
}  // namespace ringspan::cli
