#include "plan/capability.h"

#include <fmt/format.h>

#include <utility>

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
  if (options.device != DeviceKind::cpu) {
    for (const auto& [name, kernel] : {std::pair{"attend_kernel", &options.attend_kernel},
                                       std::pair{"attend_backward_kernel", &options.attend_backward_kernel}}) {
      if (kernel->empty()) continue;
      return fmt::format("{} ('{}') names a kernel of the CPU, but this rank computes on {}, whose kernels have no names", name,
                         *kernel, to_string(options.device));
    }
    for (const auto& [name, tile] :
         {std::pair{"attend_tile", options.attend_tile}, std::pair{"attend_backward_tile", options.attend_backward_tile}}) {
      if (tile == Tile{}) continue;
      return fmt::format("{} ({} x {}) is for kernels of the CPU, but this rank computes on {}, whose tiles are fixed", name,
                         tile.queries, tile.keys, to_string(options.device));
    }
  }
  const bool torchscale = problem.pattern.dilated && problem.pattern.dilated->dialect == Dialect::torchscale;
  if (torchscale && problem.sinks && options.backward) {
    return "the gradient of sinks is not defined in the torchscale dialect, whose merge weights are detached; use @longnet";
  }
  return {};
}

}  // namespace ringspan::internal
