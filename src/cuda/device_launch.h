// How the kernels are launched: one function per kernel and dtype, each compiled by nvcc in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/arguments.h"
#include "cuda/gradient.h"

namespace ringspan::cuda {

template <DType kType>
cudaError_t launch_attend_typed(const AttendArguments& arguments, std::int64_t blocks, cudaStream_t stream);
// With warpgroups, for 16-bit types: warpgroups_support() the shape, a device of capability 9.0, as many blocks of threads as
// it runs at a time (Runtime::residents).
template <DType kType>
cudaError_t launch_attend_warpgroups(const AttendArguments& arguments, std::int64_t residents, cudaStream_t stream);
template <DType kType>  // dq, or dk and dv in one pass
cudaError_t launch_gradient_warpgroups(Gradient gradient, const AttendArguments& arguments, std::int64_t residents,
                                       cudaStream_t stream);
template <DType kType>
cudaError_t launch_gradient_typed(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks,
                                  cudaStream_t stream);
// An error where nothing was compiled for the current device.
cudaError_t find_kernels();
cudaError_t launch_rows(const RowArguments& arguments, std::int64_t blocks, cudaStream_t stream);
cudaError_t launch_sink_gradient(const SinkArguments& arguments, cudaStream_t stream);
cudaError_t launch_sum_sinks(const SinkArguments& arguments, cudaStream_t stream);

}  // namespace ringspan::cuda
