// What is implemented, combination by combination, asked of the very functions that refuse: Problem::validate(), make_plan()
// and the choice of kernels. Each cell is a small problem that can be planned and run.
#pragma once

#include <string>
#include <vector>

#include "ringspan/plan.h"

namespace ringspan::cli {

struct Feature {
  const char* name;
  void (*apply)(Problem&, PlanOptions&);
};

// The axes of the table. A feature changes the small problem that base_problem() makes.
const std::vector<Feature>& capability_patterns();
const std::vector<Feature>& capability_options();

struct Cell {
  std::string pattern, option;
  DType dtype = DType::float32;
  Pass pass = Pass::forward;
  Strategy strategy = Strategy::ring;
  Problem problem;
  PlanOptions plan;
  std::string reason;  // empty: supported
  bool supported() const { return reason.empty(); }
};

// Why this is refused, as an Unsupported or InvalidArgument would say; empty where it is not.
std::string refusal(const Problem& problem, const PlanOptions& plan);

// All cells: pattern x option x dtype x pass x strategy, in this order.
std::vector<Cell> capability_cells();

}  // namespace ringspan::cli
