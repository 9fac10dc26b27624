#include "cuda/device_kernels.h"

namespace ringspan::cuda {

template <>
cudaError_t launch_attend_typed<DType::bfloat16>(const AttendArguments& arguments, std::int64_t blocks, cudaStream_t stream) {
  return with_dim<TileForward, DType::bfloat16>(
      arguments.params.shape, [&](auto policy) { return launch_attend_policy<decltype(policy)>(arguments, blocks, stream); });
}

}  // namespace ringspan::cuda
