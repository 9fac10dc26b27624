#include "cuda/device_kernels.h"

namespace ringspan::cuda {

template <>
cudaError_t launch_attend_typed<DType::float32>(const AttendArguments& arguments, std::int64_t blocks, cudaStream_t stream) {
  return with_dim<TileForward, DType::float32>(
      arguments.params.shape, [&](auto policy) { return launch_attend_policy<decltype(policy)>(arguments, blocks, stream); });
}

}  // namespace ringspan::cuda
