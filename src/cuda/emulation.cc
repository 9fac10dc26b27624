#include "cuda/emulation.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "base/check.h"
#include "cuda/attend_block.h"
#include "cuda/attend_warpgroup_block.h"
#include "cuda/attend_warpgroup_producer.h"
#include "cuda/emulated_machine.h"
#include "cuda/emulated_warpgroup.h"
#include "cuda/gradient_block.h"
#include "cuda/gradient_warpgroup_block.h"
#include "cuda/gradient_warpgroup_producer.h"
#include "cuda/make_tile_maps.h"
#include "cuda/row_block.h"
#include "cuda/schedule.h"
#include "cuda/select.h"
#include "cuda/sink_block.h"
#include "cuda/work_list.h"
#include "kernels/reference.h"

namespace ringspan::cuda {
namespace {

std::vector<Chunk> shared_memory(int bytes) {  // full of NaN
  return std::vector<Chunk>(static_cast<std::size_t>(bytes + 15) / 16, Chunk{{~0U, ~0U, ~0U, ~0U}});
}

// One block on memory of its own. `more`: what the program is made with beside that.
template <template <typename, typename> typename Block, typename P, typename... More>
void run_block(const AttendArguments& arguments, std::int64_t block, More... more) {
  using Machine = EmulatedMachine<P::kThreads>;
  std::vector<Chunk> shared = shared_memory(P::kBytes);
  auto* const bytes = reinterpret_cast<unsigned char*>(shared.data());
  Machine machine(bytes, P::kBytes);
  const auto program = std::make_unique<Block<P, Machine>>(machine, arguments, bytes, more...);
  program->run(block);
}
// One block of warpgroups with roles. roles(block, multiplying, copying, finding, shared) runs their programs.
template <template <typename> typename Tiles, typename P, typename Roles>
void run_warpgroup_block(int shared_bytes, Roles&& roles) {
  std::vector<Chunk> shared = shared_memory(shared_bytes);
  auto* const bytes = reinterpret_cast<unsigned char*>(shared.data());
  EmulatedBlock block(bytes, shared_bytes);
  EmulatedHopperMachine<P::kThreads> multiplying(block, 0);
  EmulatedHopperMachine<P::kCopiers> copying(block, 1);
  EmulatedHopperMachine<P::kFinders> finding(block, 2);
  Tiles<P>(multiplying, bytes).init_barriers(multiplying);
  roles(block, multiplying, copying, finding, bytes);
}

template <typename P, typename M>
using DqBlock = GradientBlock<P, M, Gradient::dq>;
template <typename P, typename M>
using DkDvBlock = GradientBlock<P, M, Gradient::dk_dv>;
template <typename P, typename M>
using DkBlock = GradientBlock<P, M, Gradient::dk>;
template <typename P, typename M>
using DvBlock = GradientBlock<P, M, Gradient::dv>;

template <typename P>
void run_gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t block) {
  if (gradient == Gradient::dq) return run_block<DqBlock, P>(arguments, block, block);
  if constexpr (P::kFuseKeyGradients) {
    run_block<DkDvBlock, P>(arguments, block, block);
  } else {
    if (gradient == Gradient::dk) run_block<DkBlock, P>(arguments, block, block);
    if (gradient == Gradient::dv) run_block<DvBlock, P>(arguments, block, block);
  }
}

std::int64_t residents_of(const AttendArguments& arguments) { return std::min(arguments.blocks, kEmulatedResidents); }

template <typename P, Owner kOwner, typename M, typename Tiles>
void find_work_of_resident(M& machine, const AttendArguments& arguments, const Tiles& tiles, std::int64_t first) {
  WorkList<P, M, kOwner>(machine, arguments, tiles.work_ring(), tiles.asked(), tiles.work(), static_cast<int>(first),
                         static_cast<int>(residents_of(arguments)))
      .run();
}

template <typename P>
void run_warpgroup_attend(const AttendArguments& arguments, std::int64_t first) {
  run_warpgroup_block<AttendTiles, P>(
      AttendTiles<P>::kBytes, [&](EmulatedBlock& roles, auto& multiplying, auto& copying, auto& finding, auto* shared) {
        using Multiplying = std::remove_reference_t<decltype(multiplying)>;
        const auto attend = std::make_unique<AttendWarpgroupBlock<P, Multiplying>>(multiplying, arguments, shared);
        AttendWarpgroupProducer<P, std::remove_reference_t<decltype(copying)>> producer(copying, arguments, shared);
        roles.run_roles(
            {[&] { attend->run(); }, [&] { producer.run(); },
             [&] { find_work_of_resident<P, Owner::state>(finding, arguments, AttendTiles<P>(finding, shared), first); }});
      });
}

template <typename P, Gradient kGradient>
void run_warpgroup_gradient(const AttendArguments& arguments, std::int64_t first) {
  run_warpgroup_block<GradientTiles, P>(GradientTiles<P>::kBytes, [&](EmulatedBlock& roles, auto& multiplying, auto& copying,
                                                                      auto& finding, auto* shared) {
    using Multiplying = std::remove_reference_t<decltype(multiplying)>;
    using Copying = std::remove_reference_t<decltype(copying)>;
    const auto gradient = std::make_unique<GradientWarpgroupBlock<P, Multiplying, kGradient>>(multiplying, arguments, shared);
    GradientWarpgroupProducer<P, Copying, kGradient> producer(copying, arguments, shared);
    roles.run_roles(
        {[&] { gradient->run(); }, [&] { producer.run(); },
         [&] { find_work_of_resident<P, owner_of(kGradient)>(finding, arguments, GradientTiles<P>(finding, shared), first); }});
  });
}

// Calls launch(arguments, blocks) for every wave.
template <typename Launch>
void for_waves(TileKernel kernel, const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks, Owner owner,
               Launch&& launch) {
  const Schedule schedule = schedule_attend(tasks, owner, params.shape.group, tile_sizes(kernel, params.shape).rows(owner));
  std::vector<kernels::AttendTask> ordered;
  for (const std::int64_t index : schedule.order) ordered.push_back(tasks[static_cast<std::size_t>(index)]);
  for (const Wave& wave : schedule.waves) {
    AttendArguments arguments;
    arguments.kernel = kernel;
    set_params(arguments, params);
    std::vector<TaskPlaces> places;
    if (kernel == TileKernel::wgmma) {
      arguments.maps = tile_maps_of(params.shape, tasks, owner);
      places = places_in(arguments.maps, params.shape, ordered, owner);
      arguments.places = places.data();
    }
    arguments.tasks = ordered.data();
    arguments.groups = schedule.groups.data() + wave.first;
    arguments.group_count = wave.count;
    arguments.blocks = wave.blocks;
    std::int32_t taken = 0;
    arguments.taken = &taken;
    launch(arguments, wave.blocks);
    RINGSPAN_CHECK(taken == 0);  // the next launch may use it
  }
}

template <TileKernel kNamed>
void run_attend(const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks,
                const kernels::Context& context) {
  for_waves(tile_kernel(kNamed, params.shape), params, tasks, Owner::state,
            [&](const AttendArguments& arguments, std::int64_t blocks) {
              emulate_attend(arguments, blocks, context.pool, context.progress);
            });
}

template <TileKernel kNamed>
void run_attend_backward(const kernels::AttendParams& params, std::span<const kernels::AttendTask> tasks,
                         const kernels::Context& context) {
  const TileKernel kernel = tile_kernel(kNamed, params.shape);
  const auto launch = [&](Gradient gradient) {
    return [&context, gradient](const AttendArguments& arguments, std::int64_t blocks) {
      emulate_gradient(gradient, arguments, blocks, context.pool, context.progress);
    };
  };
  for_waves(kernel, params, tasks, Owner::query_gradients, launch(Gradient::dq));
  if (tile_sizes(kernel, params.shape).fuses_key_gradients)
    return for_waves(kernel, params, tasks, Owner::key_gradients, launch(Gradient::dk_dv));
  for_waves(kernel, params, tasks, Owner::key_gradients, launch(Gradient::dk));
  for_waves(kernel, params, tasks, Owner::key_gradients, launch(Gradient::dv));
}

template <DType kType>
bool supports(const kernels::AttendShape& shape) {
  return shape.dtype == kType && is_supported(shape);
}

constexpr kernels::AttendKernel kForward[] = {
    {"attend_f32_cuda", supports<DType::float32>, kernels::reference_scratch_bytes, run_attend<TileKernel::mma>,
     kernels::no_tile_sizes, kernels::any_keys},
    {"attend_bf16_cuda", supports<DType::bfloat16>, kernels::reference_scratch_bytes, run_attend<TileKernel::mma>,
     kernels::no_tile_sizes, kernels::any_keys},
    {"attend_f16_cuda", supports<DType::float16>, kernels::reference_scratch_bytes, run_attend<TileKernel::mma>,
     kernels::no_tile_sizes, kernels::any_keys},
    {"attend_bf16_wgmma_cuda", supports<DType::bfloat16>, kernels::reference_scratch_bytes, run_attend<TileKernel::wgmma>,
     kernels::no_tile_sizes, kernels::any_keys},
    {"attend_f16_wgmma_cuda", supports<DType::float16>, kernels::reference_scratch_bytes, run_attend<TileKernel::wgmma>,
     kernels::no_tile_sizes, kernels::any_keys},
};
constexpr kernels::AttendKernel kBackward[] = {
    {"attend_backward_f32_cuda", supports<DType::float32>, kernels::reference_scratch_bytes,
     run_attend_backward<TileKernel::mma>, kernels::no_tile_sizes, kernels::any_keys, true},
    {"attend_backward_bf16_cuda", supports<DType::bfloat16>, kernels::reference_scratch_bytes,
     run_attend_backward<TileKernel::mma>, kernels::no_tile_sizes, kernels::any_keys, true},
    {"attend_backward_f16_cuda", supports<DType::float16>, kernels::reference_scratch_bytes,
     run_attend_backward<TileKernel::mma>, kernels::no_tile_sizes, kernels::any_keys, true},
    {"attend_backward_bf16_wgmma_cuda", supports<DType::bfloat16>, kernels::reference_scratch_bytes,
     run_attend_backward<TileKernel::wgmma>, kernels::no_tile_sizes, kernels::any_keys, true},
    {"attend_backward_f16_wgmma_cuda", supports<DType::float16>, kernels::reference_scratch_bytes,
     run_attend_backward<TileKernel::wgmma>, kernels::no_tile_sizes, kernels::any_keys, true},
};

}  // namespace

void emulate_attend(const AttendArguments& arguments, std::int64_t blocks, ThreadPool& pool, FunctionRef<void()> progress) {
  const bool warpgroups = arguments.kernel == TileKernel::wgmma;
  pool.parallel_for(
      warpgroups ? residents_of(arguments) : blocks,
      [&](std::int64_t block, int) {
        if (warpgroups) {
          return with_warpgroup_policies(arguments.params.shape,
                                         [&](auto policy, auto) { run_warpgroup_attend<decltype(policy)>(arguments, block); });
        }
        with_policies(arguments.params.shape,
                      [&](auto policy, auto) { run_block<AttendBlock, decltype(policy)>(arguments, block); });
      },
      progress);
}

void emulate_gradient(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks, ThreadPool& pool,
                      FunctionRef<void()> progress) {
  const bool warpgroups = arguments.kernel == TileKernel::wgmma;
  pool.parallel_for(
      warpgroups ? residents_of(arguments) : blocks,
      [&](std::int64_t block, int) {
        if (warpgroups) {
          return with_warpgroup_policies(arguments.params.shape, [&](auto, auto policy) {
            if (gradient == Gradient::dq) return run_warpgroup_gradient<decltype(policy), Gradient::dq>(arguments, block);
            run_warpgroup_gradient<decltype(policy), Gradient::dk_dv>(arguments, block);
          });
        }
        with_policies(arguments.params.shape,
                      [&](auto, auto policy) { run_gradient<decltype(policy)>(gradient, arguments, block); });
      },
      progress);
}

void emulate_rows(const RowArguments& arguments, std::int64_t blocks) {
  EmulatedMachine<kRowThreads> machine;
  kernels::RowTask shared;
  with_row_op(arguments.op, [&](auto op) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      RowBlock<EmulatedMachine<kRowThreads>, op.value>(machine, arguments, shared).run(block);
    }
  });
}

void emulate_sink_gradient(const SinkArguments& arguments) {
  EmulatedMachine<kRowThreads> machine;
  double shared[kRowThreads];
  for (std::int64_t head = 0; head < arguments.heads; ++head) sink_gradient_block(machine, arguments, head, shared);
}

void emulate_sum_sinks(const SinkArguments& arguments) {
  EmulatedMachine<kRowThreads> machine;
  for (std::int64_t block = 0; block * kRowThreads < arguments.heads; ++block) sum_sinks_block(machine, arguments, block);
}

std::span<const kernels::AttendKernel> emulated_attend_kernels() { return kForward; }
std::span<const kernels::AttendKernel> emulated_attend_backward_kernels() { return kBackward; }

}  // namespace ringspan::cuda
