#include "cuda/device_kernels.h"

namespace ringspan::cuda {

template <>
cudaError_t launch_gradient_typed<DType::float16>(Gradient gradient, const AttendArguments& arguments, std::int64_t blocks,
                                                  cudaStream_t stream) {
  return with_dim<TileBackward, DType::float16>(arguments.params.shape, [&](auto policy) {
    return launch_gradient_policy<decltype(policy)>(gradient, arguments, blocks, stream);
  });
}

}  // namespace ringspan::cuda
