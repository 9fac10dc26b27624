// Parts of Plan::to_string that pages about all ranks have too.
#pragma once

#include <string>

#include "plan/plan_data.h"

namespace ringspan::internal {

void append_problem(std::string& out, const Problem& problem);
// `times`: what it takes by the model, before the model itself. Candidates that lost are named.
void append_strategy(std::string& out, const PlanData& data, const std::string& times);

}  // namespace ringspan::internal
