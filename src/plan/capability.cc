#include "plan/capability.h"

#include <fmt/format.h>

#include <utility>

#include "plan/kernel_choice.h"
#include "plan/strategy.h"

namespace ringspan::internal {
namespace {

bool is_torchscale(const Problem& problem) {
  return problem.pattern.dilated && problem.pattern.dilated->dialect == Dialect::torchscale;
}

std::string partials_reason(const Problem& problem, const PlanOptions& options) {
  const char* const what = "partials 'storage' are those of a library's fused attention on a device";
  if (options.device == DeviceKind::cpu) return fmt::format("{}, but this rank computes on the CPU", what);
  if (problem.dtype == DType::float32) return fmt::format("{}, which is for 16-bit tensors, but dtype is float32", what);
  if (options.host_tensors) return fmt::format("{}; host_tensors are merged piece by piece in float32", what);
  return {};
}

std::string host_tensors_reason(const Problem& problem, const PlanOptions& options) {
  if (options.device == DeviceKind::cpu) {
    return "host_tensors stream through the memory of a device, but this rank computes on the CPU, which reads them where they "
           "are";
  }
  const Strategy only = problem.ranks == 1 ? Strategy::local : Strategy::exchange;
  if (options.strategy != only) {
    return fmt::format("host_tensors stream by strategy {} on {}: strategy ({}) must be auto or {}", to_string(only),
                       problem.ranks == 1 ? "one rank" : "several ranks", to_string(options.strategy), to_string(only));
  }
  if (problem.replicated_q && problem.ranks > 1) {
    return "host_tensors are sharded: replicated_q would need every rank's o on every host";
  }
  if (is_torchscale(problem)) {
    return "host_tensors do not know the torchscale dialect, which keeps o of every branch on the device; use @longnet";
  }
  if (options.backward && options.keep_o_float32 && problem.dtype != DType::float32) {
    return fmt::format(
        "keep_o_float32 keeps all of o on the device, but with host_tensors o ({}) lies on the host; set "
        "keep_o_float32 = false (C: round_o = 1), which computes delta from the rounded o",
        to_string(problem.dtype));
  }
  return {};
}

}  // namespace

std::string unsupported_reason(const Problem& problem, const PlanOptions& options) {
  const StrategyRow& row = strategy_row(options.strategy);
  if (options.bucket_rows > 0 && !row.buckets && !options.host_tensors) {
    return fmt::format(
        "strategy {} moves everything at once: bucket_rows ({}) must be none or auto; use exchange, ring or pass-q", row.name,
        options.bucket_rows);
  }
  if (options.computing_ranks != 0 && options.strategy != Strategy::local) {
    return fmt::format("computing_ranks ({}) is for strategy local only, not {}", options.computing_ranks, row.name);
  }
  if (options.device == DeviceKind::cpu && options.device_messages) {
    return "device_messages are messages in memory of a device, but this rank computes on the CPU";
  }
  if (options.device != DeviceKind::cpu) {
    for (const auto& [name, kernel] : {std::pair{"attend_kernel", &options.attend_kernel},
                                       std::pair{"attend_backward_kernel", &options.attend_backward_kernel}}) {
      if (kernel->empty() || is_own_kernel(*kernel) || is_fused_kernel(*kernel)) continue;
      return fmt::format(
          "{} ('{}') names a kernel of the CPU, but this rank computes on {}, whose kernels are 'own', 'mma', 'wgmma', "
          "'cudnn', 'flash_attn' and 'flash_attn_3'",
          name, *kernel, to_string(options.device));
    }
    for (const auto& [name, tile] :
         {std::pair{"attend_tile", options.attend_tile}, std::pair{"attend_backward_tile", options.attend_backward_tile}}) {
      if (tile == Tile{}) continue;
      return fmt::format("{} ({} x {}) is for kernels of the CPU, but this rank computes on {}, whose tiles are fixed", name,
                         tile.queries, tile.keys, to_string(options.device));
    }
  }
  if (options.partials == Partials::storage) {
    std::string reason = partials_reason(problem, options);
    if (!reason.empty()) return reason;
  }
  if (options.host_tensors) return host_tensors_reason(problem, options);
  if (is_torchscale(problem) && problem.sinks && options.backward) {
    return "the gradient of sinks is not defined in the torchscale dialect, whose merge weights are detached; use @longnet";
  }
  return {};
}

}  // namespace ringspan::internal
