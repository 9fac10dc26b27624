#include "cuda/device_warpgroup_kernels.h"

namespace ringspan::cuda {

template <>
cudaError_t launch_gradient_warpgroups<DType::float16>(Gradient gradient, const AttendArguments& arguments,
                                                       std::int64_t residents, cudaStream_t stream) {
  return launch_gradient_warpgroups_of<DType::float16>(gradient, arguments, residents, stream);
}

}  // namespace ringspan::cuda
