// What is left of CUDA in a library that was built without it; compiled only then (CMakeLists.txt).
#include "cuda/report.h"
#include "cuda/runtime.h"
#include "ringspan/error.h"

namespace ringspan::cuda {

std::unique_ptr<Runtime> make_cuda_runtime(int, void*) {
  throw Unsupported("this library was built without CUDA: device must be cpu (or cuda-emulated, for tests)");
}

std::vector<std::string> cuda_report() {
  return {
      "cuda: this library was built without CUDA (no nvcc was found, or RINGSPAN_CUDA was OFF); everything runs on the CPU"};
}

}  // namespace ringspan::cuda
