#include "cuda/device_warpgroup_kernels.h"

namespace ringspan::cuda {

template <>
cudaError_t launch_attend_warpgroups<DType::bfloat16>(const AttendArguments& arguments, std::int64_t residents,
                                                      cudaStream_t stream) {
  return launch_attend_warpgroups_of<DType::bfloat16>(arguments, residents, stream);
}

}  // namespace ringspan::cuda
