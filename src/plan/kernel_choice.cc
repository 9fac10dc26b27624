#include "plan/kernel_choice.h"

#include <algorithm>

#include "kernels/attend.h"

namespace ringspan::internal {
namespace {

struct AskedTile {
  Tile tile;
  SizeSource source;
};

AskedTile asked_tile(const PlanOptions& options, Pass pass) {
  const bool forward = pass == Pass::forward;
  const Tile given = forward ? options.attend_tile : options.attend_backward_tile;
  if (given != Tile{}) return {given, SizeSource::given};
  const Tile tuned = forward ? options.tuned.attend_tile : options.tuned.attend_backward_tile;
  return {tuned, tuned != Tile{} ? SizeSource::tuned : SizeSource::standard};
}

struct Selected {
  kernels::AttendShape shape;
  const kernels::AttendKernel& kernel;
  SizeSource source;
};

Selected select(const Problem& problem, const PlanOptions& options, Pass pass) {
  const AskedTile asked = asked_tile(options, pass);
  kernels::AttendShape shape;
  shape.dtype = problem.dtype;
  shape.head_dim = problem.head_dim;
  shape.head_dim_v = problem.head_dim_v;
  shape.group = problem.group();
  shape.softcap = problem.softcap > 0.0F;
  shape.alibi = problem.alibi;
  shape.dropout = problem.dropout > 0.0F;
  shape.threads = options.threads;
  shape.tile = {asked.tile.queries, asked.tile.keys};
  const kernels::AttendKernel& kernel = pass == Pass::forward
                                            ? kernels::select_attend(shape, options.attend_kernel)
                                            : kernels::select_attend_backward(shape, options.attend_backward_kernel);
  return {shape, kernel, asked.source};
}

}  // namespace

KernelChoice choose_kernel(const Problem& problem, const PlanOptions& options, Pass pass) {
  if (options.device != DeviceKind::cpu) {
    const std::string& named = pass == Pass::forward ? options.attend_kernel : options.attend_backward_kernel;
    const std::string kernel = is_own_kernel(named) && named != "own" ? named : "cuda";
    KernelChoice choice{(pass == Pass::forward ? "attend_" : "attend_backward_") + kernel, {}, {}, {}};
    if (is_fused_kernel(named))
      choice.reason = named + " is asked when an attention is made on the device; until then our own kernels are planned";
    return choice;
  }
  const Selected selected = select(problem, options, pass);
  const kernels::TileSize tile = kernels::tile_of(selected.kernel, selected.shape);
  return {std::string(selected.kernel.name), {tile.queries, tile.keys}, selected.source, {}};
}

std::int64_t keys_without_state(const Problem& problem, const PlanOptions& options) {
  const std::int64_t agreed = options.most_overhead.keys_without_state;
  if (options.device != DeviceKind::cpu) return agreed;
  const Selected selected = select(problem, options, Pass::forward);
  return std::min(agreed, selected.kernel.keys_without_state(selected.shape));
}

std::int64_t kernel_scratch_bytes(const Problem& problem, const PlanOptions& options, Pass pass) {
  if (options.device != DeviceKind::cpu) return 0;
  const Selected selected = select(problem, options, pass);
  return selected.kernel.scratch_bytes(selected.shape);
}

}  // namespace ringspan::internal
