// The block programs for warpgroups as CUDA kernels, and how they are launched. For nvcc only; one .cu file per dtype and
// direction includes it.
#pragma once

#include "cuda/attend_warpgroup_block.h"
#include "cuda/attend_warpgroup_producer.h"
#include "cuda/device_launch.h"
#include "cuda/device_launch_blocks.h"
#include "cuda/device_warpgroup.h"
#include "cuda/gradient_warpgroup_block.h"
#include "cuda/select.h"

namespace ringspan::cuda {

template <typename P>
__global__ void __launch_bounds__(P::kThreads + P::kProducers, 1)
    attend_warpgroup_kernel(const __grid_constant__ AttendArguments arguments) {
#if RINGSPAN_WARPGROUPS
  extern __shared__ __align__(16) unsigned char shared[];
  using Consumers = HopperMachine<P::kThreads>;
  using Producers = HopperMachine<P::kProducers, P::kThreads>;
  Consumers consumers;
  if (threadIdx.x == 0) {
    AttendTiles<P>(consumers, shared).init_barriers(consumers);
    Consumers::fence_barriers();
  }
  __syncthreads();
  const auto block = static_cast<std::int64_t>(blockIdx.x);
  if (threadIdx.x >= P::kThreads) {
    Producers producers;
    Producers::template limit_registers<kProducerRegisters, false>();
    AttendWarpgroupProducer<P, Producers>(producers, arguments, shared).run(block);
  } else {
    Consumers::template limit_registers<kConsumerRegisters, true>();
    AttendWarpgroupBlock<P, Consumers>(consumers, arguments, shared).run(block);
  }
#endif
}

template <typename P, Gradient kGradient>
__global__ void __launch_bounds__(P::kThreads, 1) gradient_warpgroup_kernel(const __grid_constant__ AttendArguments arguments) {
#if RINGSPAN_WARPGROUPS
  extern __shared__ __align__(16) unsigned char shared[];
  using Machine = HopperMachine<P::kThreads>;
  Machine machine;
  GradientWarpgroupBlock<P, Machine, kGradient>(machine, arguments, shared).run(static_cast<std::int64_t>(blockIdx.x));
#endif
}

template <DType kType>
cudaError_t launch_attend_warpgroups_of(const AttendArguments& arguments, std::int64_t blocks, cudaStream_t stream) {
  return with_warpgroup_policies_of<kType>(arguments.params.shape, [&](auto policy, auto) {
    using P = decltype(policy);
    return launch_blocks(&attend_warpgroup_kernel<P>, arguments, blocks, P::kThreads + P::kProducers, P::kForwardBytes, stream);
  });
}

template <DType kType>
cudaError_t launch_gradient_warpgroups_of(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks,
                                          cudaStream_t stream) {
  return with_warpgroup_policies_of<kType>(arguments.params.shape, [&](auto, auto policy) {
    using P = decltype(policy);
    auto* const kernel =
        gradient == Gradient::dq ? &gradient_warpgroup_kernel<P, Gradient::dq> : &gradient_warpgroup_kernel<P, Gradient::dk_dv>;
    return launch_blocks(kernel, arguments, blocks, P::kThreads, P::kBackwardBytes, stream);
  });
}

}  // namespace ringspan::cuda
