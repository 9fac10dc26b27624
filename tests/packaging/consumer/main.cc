// Uses the installed library from outside: symbols resolve, exceptions cross its border, versions agree.
#include <ringspan/ringspan.h>

#include <cstdio>
#include <cstring>

int main() {
  const ringspan::Pattern pattern = ringspan::Pattern::parse("causal & window:127,0");
  if (pattern.to_string().find("window:127,0") == std::string::npos) return 1;

  try {
    ringspan::parse_dtype("float128");
    return 2;
  } catch (const ringspan::InvalidArgument& error) {
    if (std::strstr(error.what(), "float128") == nullptr) return 3;
  }

  ringspan::Problem problem;
  problem.tokens_q = problem.tokens_k = 10'000;
  problem.pattern = pattern;
  problem.ranks = 8;
  const ringspan::Plan plan = ringspan::make_plan(problem, {}, 3);
  std::puts(plan.to_string().c_str());
  return plan.arena_bytes() > 0 ? 0 : 4;
}
