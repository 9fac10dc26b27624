// How a kernel with shared memory of a size of its own is launched. For nvcc only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arguments.h"

namespace ringspan::cuda {

template <typename Kernel, typename... Arguments>
cudaError_t launch_blocks(Kernel* kernel, std::int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                          const Arguments&... arguments) {
  // Beyond 48 KiB a kernel has to ask, once per device; asking again costs about a microsecond.
  const cudaError_t status =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<std::size_t>(shared_bytes), stream>>>(
      arguments...);
  return cudaGetLastError();
}

}  // namespace ringspan::cuda
