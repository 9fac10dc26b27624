#include "kernels/attend_tiled.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "kernels/finish_row.h"
#include "kernels/forward_scratch.h"
#include "kernels/key_split.h"
#include "kernels/position_split.h"
#include "kernels/progress.h"
#include "kernels/task_view.h"
#include "kernels/turnstile.h"
#include "kernels/unit_forward.h"

namespace ringspan::kernels {
namespace {

std::int64_t thread_bytes(const TileOps& ops, const AttendShape& shape) {
  std::int64_t bytes = 0;
  const ForwardScratch layout(ops, shape, nullptr, &bytes);
  return bytes;
}

}  // namespace

TileDims tile_dims(const AttendShape& shape, TileSizes (*sizes)(const TileDims&)) {
  TileDims dims{static_cast<int>(shape.dtype), shape.head_dim, shape.head_dim_v, shape.tile};
  const TileSize own = sizes(dims).own;
  if (dims.tile.queries == 0) dims.tile.queries = own.queries;
  if (dims.tile.keys == 0) dims.tile.keys = own.keys;
  return dims;
}

std::int64_t attend_tiled_scratch_bytes(const TileOps& ops, const AttendShape& shape) {
  return Turnstile::bytes(shape.threads) + thread_bytes(ops, shape) * shape.threads;
}

// A task of fewer is not cut either (key_split.h).
std::int64_t attend_tiled_keys_without_state(const TileOps& ops, const AttendShape& shape) {
  const ForwardScratch layout(ops, shape, nullptr, nullptr);
  return std::min<std::int64_t>(layout.run_tiles * layout.dims.tile.keys, 2 * kSplitMinKeys - 1);
}

namespace {

// What every thread does with its part of the scratch.
class Threads {
 public:
  Threads(const TileOps& ops, const AttendParams& params, const Context& context)
      : ops_(ops),
        params_(params),
        context_(context),
        tile_(tile_dims(params.shape, ops.forward_sizes).tile),
        bytes_(thread_bytes(ops, params.shape)) {}

  std::int64_t key_tile() const { return tile_.keys; }

  ForwardScratch scratch(std::int64_t thread) const {
    return {ops_, params_.shape, context_.scratch + Turnstile::bytes(params_.shape.threads) + thread * bytes_, nullptr};
  }

  // Tasks one after the other, units and ranges of positions dealt to the threads, the long ranges of all units first.
  void run(std::span<const AttendTask> tasks) const {
    const Units units(tasks, params_.shape.group);
    const PositionSplit split(tasks, units.count(), context_.pool.size(), kMinSplitTiles * tile_.queries);
    context_.pool.parallel_for(
        units.count() * split.count(),
        [&](std::int64_t item, int thread) {
          const ForwardScratch scratch = this->scratch(thread);
          Progress progress(context_, thread);
          const Unit unit = units.at(item % units.count());
          const std::int64_t later = item + context_.pool.size();  // of this thread, likely
          const bool is_last = split.count() > 1 || later >= units.count();
          UnitForward forward(ops_, params_, scratch, progress, unit, split.at(item / units.count()));
          for (std::size_t i = 0; i + 1 < tasks.size(); ++i) forward.run(tasks[i], &tasks[i + 1], unit);
          if (tasks.empty()) return;
          forward.run(tasks.back(), is_last ? nullptr : tasks.data(), is_last ? unit : units.at(later));
        },
        context_.progress);
  }

  // The items of one task, each merged when those before it are.
  void run(const AttendTask& whole, const KeySplit& split) const {
    Turnstile turnstile(context_.scratch, params_.shape.threads);
    const std::int64_t count = split.items(), threads = context_.pool.size();
    context_.pool.parallel_for(
        count,
        [&](std::int64_t index, int thread) {
          const ForwardScratch scratch = this->scratch(thread);
          Progress progress(context_, thread);
          std::optional<Turnstile::Item> place;
          if (split.parts() > 1) place.emplace(turnstile, index, progress);
          const KeySplit::Item item = split.item(index);
          const KeySplit::Item later = split.item(std::min(index + threads, count - 1));  // of this thread, likely
          split.clear(item, scratch.partial);
          KeySplit::Step step = split.step(item, 0, scratch.partial);
          for (std::int64_t i = 0; i < item.steps; ++i) {
            const bool is_last = i + 1 == item.steps;
            const KeySplit::Step next = split.step(is_last ? later : item, is_last ? 0 : i + 1, scratch.partial);
            UnitForward(ops_, params_, scratch, progress, step.unit, Positions::all())
                .run(step.task, is_last && index + threads >= count ? nullptr : &next.task, next.unit);
            step = next;
          }
          if (place) place->pass(1);
          split.merge(item, scratch.partial);
        },
        context_.progress);
    if (whole.o.data == nullptr) return;
    for (std::int64_t b = 0; b < whole.batch_count; ++b) {
      for (std::int64_t t = 0; t < whole.head_count; ++t) {
        for (std::int64_t row = 0; row < whole.q_count; ++row) finish_task_row(params_, whole, b, t, row);
      }
    }
  }

 private:
  const TileOps& ops_;
  const AttendParams& params_;
  const Context& context_;
  TileSize tile_;
  std::int64_t bytes_;
};

}  // namespace

void attend_tiled(const TileOps& ops, const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
  RINGSPAN_CHECK(context.pool.size() <= params.shape.threads);
  const Threads threads(ops, params, context);
  std::size_t done = 0;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    RINGSPAN_CHECK(tasks[i].m.data != nullptr || tasks[i].k_count <= attend_tiled_keys_without_state(ops, params.shape));
    const KeySplit split(tasks[i], params.shape, threads.key_tile(), context.pool.size());
    if (!split.cuts()) continue;
    threads.run(tasks.subspan(done, i - done));
    threads.run(tasks[i], split);
    done = i + 1;
  }
  threads.run(tasks.subspan(done));
}

}  // namespace ringspan::kernels
