#include "ringspan/tuning.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "api/tune_file.h"
#include "plan/kernel_choice.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here changes the environment
  return value == nullptr ? "" : value;
}

// The kernels that would run with their own tiles; none for a problem that is not valid, of which the plan will say more.
struct Kernels {
  std::string attend, attend_backward;
};

Kernels kernels_of(const Problem& problem, PlanOptions options) {
  options.attend_tile = options.attend_backward_tile = {};
  try {
    problem.validate();
    return {internal::choose_kernel(problem, options, Pass::forward).name,
            internal::choose_kernel(problem, options, Pass::backward).name};
  } catch (const Error&) {
    return {};
  }
}

bool is_named() { return std::getenv("RINGSPAN_TUNE_FILE") != nullptr; }  // NOLINT(concurrency-mt-unsafe)

// Somebody else's cache, as where a container's user is not the one whose HOME it has: nothing was measured for us.
bool is_out_of_reach(const std::string& path) { return !is_named() && ::access(path.c_str(), F_OK) != 0 && errno == EACCES; }

}  // namespace

std::string tuning_file() {
  if (is_named()) return variable("RINGSPAN_TUNE_FILE");
  std::string cache = variable("XDG_CACHE_HOME");
  if (!cache.starts_with('/')) {  // the standard says that others do not count
    const std::string home = variable("HOME");
    if (home.empty()) return "";
    cache = home + "/.cache";
  }
  return cache + "/ringspan/tune.json";
}

PlanOptions with_tuned_sizes(const Problem& problem, PlanOptions options) {
  const std::string path = tuning_file();
  if (path.empty() || is_out_of_reach(path) || options.tuned != TunedSizes{} || options.device != DeviceKind::cpu)
    return options;
  const auto entries = internal::read_tune_file(path, internal::this_machine());
  if (entries.empty() || problem.head_dim != problem.head_dim_v) return options;
  const Kernels kernels = kernels_of(problem, options);
  for (const internal::TuneEntry& entry : entries) {
    if (entry.dtype != problem.dtype || entry.head_dim != problem.head_dim) continue;
    const bool forward = entry.attend_kernel == kernels.attend,
               backward = entry.attend_backward_kernel == kernels.attend_backward;
    if (!forward && !backward) continue;
    if (forward) options.tuned.attend_tile = entry.attend_tile;
    if (backward) options.tuned.attend_backward_tile = entry.attend_backward_tile;
    if (forward && backward) options.tuned.bucket_rows = entry.bucket_rows;
    if (options.tuned != TunedSizes{}) options.tuned.source = fmt::format("{}, {}", path, entry.date);
  }
  try {  // sizes that the kernels do not take
    PlanOptions tuned = options;
    tuned.attend_tile = tuned.attend_backward_tile = {};
    if (options.tuned.attend_tile != Tile{}) internal::choose_kernel(problem, tuned, Pass::forward);
    if (options.tuned.attend_backward_tile != Tile{}) internal::choose_kernel(problem, tuned, Pass::backward);
  } catch (const InvalidArgument& error) {
    internal::refuse_tune_file(path, error.what());
  }
  return options;
}

}  // namespace ringspan
