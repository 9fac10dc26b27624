#include "plan/capability.h"

#include <fmt/format.h>

#include "plan/strategy.h"

namespace ringspan::internal {

std::string unsupported_reason(const Problem& problem, const PlanOptions& options) {
  const StrategyRow& row = strategy_row(options.strategy);
  if (options.bucket_rows > 0 && !row.buckets) {
    return fmt::format(
        "strategy {} moves everything at once: bucket_rows ({}) must be none or auto; use exchange, ring or pass-q", row.name,
        options.bucket_rows);
  }
  if (options.computing_ranks != 0 && options.strategy != Strategy::local) {
    return fmt::format("computing_ranks ({}) is for strategy local only, not {}", options.computing_ranks, row.name);
  }
  const bool torchscale = problem.pattern.dilated && problem.pattern.dilated->dialect == Dialect::torchscale;
  if (torchscale && problem.sinks && options.backward) {
    return "the gradient of sinks is not defined in the torchscale dialect, whose merge weights are detached; use @longnet";
  }
  return {};
}

}  // namespace ringspan::internal
