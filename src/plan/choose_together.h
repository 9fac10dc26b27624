// Choosing once for the ranks of one problem that a process plans.
#pragma once

#include <memory>

#include "plan/choose.h"

namespace ringspan::internal {

// choose(problem, options), made once as long as somebody holds it (every plan does), nobody has asked for another since, and
// nothing is thrown. Of threads that ask for the same at a time one chooses, and the others wait. Its setting is to be copied
// by whoever plans with it.
std::shared_ptr<const Choice> choose_together(const Problem& problem, const PlanOptions& options);

}  // namespace ringspan::internal
