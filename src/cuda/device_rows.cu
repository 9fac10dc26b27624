// The row kernels on the device.
#include "cuda/device_kernels.h"
#include "cuda/device_launch.h"
#include "cuda/row_block.h"
#include "cuda/sink_block.h"

namespace ringspan::cuda {
namespace {

template <RowOp kOp>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(const __grid_constant__ RowArguments arguments) {
  __shared__ kernels::RowTask shared;
  CudaMachine<kRowThreads> machine;
  RowBlock<CudaMachine<kRowThreads>, kOp>(machine, arguments, shared).run(static_cast<std::int64_t>(blockIdx.x));
}

__global__ void __launch_bounds__(kRowThreads) sink_gradient_kernel(const __grid_constant__ SinkArguments arguments) {
  __shared__ double shared[kRowThreads];
  CudaMachine<kRowThreads> machine;
  sink_gradient_block(machine, arguments, static_cast<std::int64_t>(blockIdx.x), shared);
}

__global__ void __launch_bounds__(kRowThreads) sum_sinks_kernel(const __grid_constant__ SinkArguments arguments) {
  CudaMachine<kRowThreads> machine;
  sum_sinks_block(machine, arguments, static_cast<std::int64_t>(blockIdx.x));
}

}  // namespace

cudaError_t find_kernels() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, rows_kernel<RowOp::fill>);
}

cudaError_t launch_rows(const RowArguments& arguments, std::int64_t blocks, cudaStream_t stream) {
  with_row_op(arguments.op,
              [&](auto op) { rows_kernel<op.value><<<static_cast<unsigned>(blocks), kRowThreads, 0, stream>>>(arguments); });
  return cudaGetLastError();
}

cudaError_t launch_sink_gradient(const SinkArguments& arguments, cudaStream_t stream) {
  sink_gradient_kernel<<<static_cast<unsigned>(arguments.heads), kRowThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

cudaError_t launch_sum_sinks(const SinkArguments& arguments, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((arguments.heads + kRowThreads - 1) / kRowThreads);
  sum_sinks_kernel<<<blocks, kRowThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace ringspan::cuda
