// The block programs for warpgroups as CUDA kernels, and how they are launched. For nvcc only; one .cu file per dtype and
// direction includes it.
#pragma once

#include "cuda/attend_warpgroup_block.h"
#include "cuda/attend_warpgroup_producer.h"
#include "cuda/device_launch.h"
#include "cuda/device_launch_blocks.h"
#include "cuda/device_warpgroup.h"
#include "cuda/gradient_warpgroup_block.h"
#include "cuda/gradient_warpgroup_producer.h"
#include "cuda/select.h"
#include "cuda/work_list.h"

namespace ringspan::cuda {

// A block of warpgroups with roles: multiply(machine) by the first threads, copy(machine) by half of the last warpgroup, and by
// the other half find(machine).
template <template <typename> typename Tiles, typename P, typename Multiply, typename Copy, typename Find>
__device__ __forceinline__ void run_roles(unsigned char* shared, const TensorMaps& tensor_maps, Multiply&& multiply,
                                          Copy&& copy, Find&& find) {
  using Multiplying = HopperMachine<P::kThreads>;
  using Copying = HopperMachine<P::kCopiers, P::kThreads>;
  using Finding = HopperMachine<P::kFinders, P::kThreads + P::kCopiers>;
  static_assert(P::kCopiers + P::kFinders == kWarpgroup);
  {
    Multiplying machine;  // by all threads: it shuffles, which one thread alone would wait in for ever
    if (threadIdx.x == 0) {
      Tiles<P>(machine, shared).init_barriers(machine);
      Multiplying::fence_barriers();
    }
  }
  __syncthreads();
  if (threadIdx.x < P::kThreads) {
    Multiplying::template more_registers<kConsumerRegisters>();
    Multiplying machine;
    multiply(machine);
  } else {
    Copying::template fewer_registers<kProducerRegisters>();
    if (Copying::uniform(static_cast<int>(threadIdx.x)) < P::kThreads + P::kCopiers) {  // which is the same for a warp
      Copying machine(&tensor_maps);
      copy(machine);
    } else {
      Finding machine;
      find(machine);
    }
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads + kWarpgroup, 1)
    attend_warpgroup_kernel(const __grid_constant__ AttendArguments arguments, const __grid_constant__ TensorMaps tensor_maps) {
#if RINGSPAN_WARPGROUPS
  extern __shared__ __align__(16) unsigned char shared[];
  const auto first = static_cast<int>(blockIdx.x);
  const auto residents = static_cast<int>(gridDim.x);
  run_roles<AttendTiles, P>(
      shared, tensor_maps, [&]<typename M>(M& machine) { AttendWarpgroupBlock<P, M>(machine, arguments, shared).run(); },
      [&]<typename M>(M& machine) { AttendWarpgroupProducer<P, M>(machine, arguments, shared).run(); },
      [&]<typename M>(M& machine) {
        const AttendTiles<P> tiles(machine, shared);
        WorkList<P, M, Owner::state>(machine, arguments, tiles.work_ring(), tiles.asked(), tiles.work(), first, residents)
            .run();
      });
#endif
}

template <typename P, Gradient kGradient>
__global__ void __launch_bounds__(P::kThreads + kWarpgroup, 1)
    gradient_warpgroup_kernel(const __grid_constant__ AttendArguments arguments,
                              const __grid_constant__ TensorMaps tensor_maps) {
#if RINGSPAN_WARPGROUPS
  extern __shared__ __align__(16) unsigned char shared[];
  const auto first = static_cast<int>(blockIdx.x);
  const auto residents = static_cast<int>(gridDim.x);
  run_roles<GradientTiles, P>(
      shared, tensor_maps,
      [&]<typename M>(M& machine) { GradientWarpgroupBlock<P, M, kGradient>(machine, arguments, shared).run(); },
      [&]<typename M>(M& machine) { GradientWarpgroupProducer<P, M, kGradient>(machine, arguments, shared).run(); },
      [&]<typename M>(M& machine) {
        const GradientTiles<P> tiles(machine, shared);
        WorkList<P, M, owner_of(kGradient)>(machine, arguments, tiles.work_ring(), tiles.asked(), tiles.work(), first,
                                            residents)
            .run();
      });
#endif
}

// With the tensor maps of what the device can copy by itself.
template <typename P, typename Kernel>
cudaError_t launch_roles([[maybe_unused]] const char* name, Kernel* kernel, AttendArguments arguments, std::int64_t residents,
                         int shared_bytes, cudaStream_t stream) {
  const TensorMaps tensor_maps = encode_tensor_maps(arguments.maps, P::kCols);
  const cudaError_t launched =
      launch_blocks(kernel, residents, P::kThreads + kWarpgroup, shared_bytes, stream, arguments, tensor_maps);
#ifdef RINGSPAN_CUDA_PHASES
  if (launched == cudaSuccess) return tell_phases(name, arguments.blocks, stream);
#endif
  return launched;
}

template <DType kType>
cudaError_t launch_attend_warpgroups_of(const AttendArguments& arguments, std::int64_t residents, cudaStream_t stream) {
  return with_warpgroup_policies_of<kType>(arguments.params.shape, [&](auto policy, auto) {
    using P = decltype(policy);
    return launch_roles<P>("attend", &attend_warpgroup_kernel<P>, arguments, residents, AttendTiles<P>::kBytes, stream);
  });
}

template <DType kType>
cudaError_t launch_gradient_warpgroups_of(Gradient gradient, const AttendArguments& arguments, std::int64_t residents,
                                          cudaStream_t stream) {
  return with_warpgroup_policies_of<kType>(arguments.params.shape, [&](auto, auto policy) {
    using P = decltype(policy);
    auto* const kernel =
        gradient == Gradient::dq ? &gradient_warpgroup_kernel<P, Gradient::dq> : &gradient_warpgroup_kernel<P, Gradient::dk_dv>;
    return launch_roles<P>(gradient == Gradient::dq ? "dq" : "dk and dv", kernel, arguments, residents,
                           GradientTiles<P>::kBytes, stream);
  });
}

}  // namespace ringspan::cuda
