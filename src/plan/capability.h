// What is supported: one predicate, used by make_plan to refuse and by `ringspan capabilities` to show the table. Before it,
// what no option may be.
#pragma once

#include <string>

#include "ringspan/plan.h"

namespace ringspan::internal {

// Throws what names the option, its value and what was expected. The problem is valid by itself.
void validate_options(const Problem& problem, const PlanOptions& options, int rank);

// Empty where the combination is supported, otherwise why not (lower case, with the alternative). The problem is valid by
// itself; the strategy is not automatic.
std::string unsupported_reason(const Problem& problem, const PlanOptions& options);

}  // namespace ringspan::internal
