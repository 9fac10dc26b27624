// The block programs as CUDA kernels, and how they are launched. For nvcc only; one .cu file per dtype and direction includes
// it, so that they compile side by side.
#pragma once

#include "cuda/attend_block.h"
#include "cuda/device_launch.h"
#include "cuda/device_launch_blocks.h"
#include "cuda/device_machine.h"
#include "cuda/gradient_block.h"
#include "cuda/tile_policy.h"

namespace ringspan::cuda {

template <typename P>
__global__ void __launch_bounds__(P::kThreads) attend_kernel(const __grid_constant__ AttendArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  CudaMachine<P::kThreads> machine;
  AttendBlock<P, CudaMachine<P::kThreads>>(machine, arguments, shared).run(static_cast<std::int64_t>(blockIdx.x));
}

template <typename P, Gradient kGradient>
__global__ void __launch_bounds__(P::kThreads) gradient_kernel(const __grid_constant__ AttendArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  CudaMachine<P::kThreads> machine;
  const auto block = static_cast<std::int64_t>(blockIdx.x);
  GradientBlock<P, CudaMachine<P::kThreads>, kGradient>(machine, arguments, shared, block).run(block);
}

template <typename P>
cudaError_t launch_attend_policy(const AttendArguments& arguments, std::int64_t blocks, cudaStream_t stream) {
  return launch_blocks(&attend_kernel<P>, blocks, P::kThreads, P::kBytes, stream, arguments);
}

template <typename P>
cudaError_t launch_gradient_policy(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks,
                                   cudaStream_t stream) {
  const auto launch = [&](auto* kernel) { return launch_blocks(kernel, blocks, P::kThreads, P::kBytes, stream, arguments); };
  if (gradient == Gradient::dq) return launch(&gradient_kernel<P, Gradient::dq>);
  if constexpr (P::kFuseKeyGradients) {
    if (gradient == Gradient::dk_dv) return launch(&gradient_kernel<P, Gradient::dk_dv>);
  } else {
    if (gradient == Gradient::dk) return launch(&gradient_kernel<P, Gradient::dk>);
    if (gradient == Gradient::dv) return launch(&gradient_kernel<P, Gradient::dv>);
  }
  return cudaErrorInvalidValue;
}

// Calls launch(Policy<type, dim>{}) with that of the shape, for one dtype.
template <template <DType, int> typename Policy, DType kType, typename Launch>
cudaError_t with_dim(const kernels::AttendShape& shape, Launch&& launch) {
  switch (padded_dim(shape.head_dim, shape.head_dim_v)) {
    case 64:
      return launch(Policy<kType, 64>{});
    case 128:
      return launch(Policy<kType, 128>{});
    default:
      return launch(Policy<kType, 256>{});
  }
}

}  // namespace ringspan::cuda
