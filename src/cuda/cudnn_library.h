// cuDNN's shared library, found at run time: the file that RINGSPAN_CUDNN_LIBRARY names, else libcudnn.so.9 as the system finds
// it or as the process has it already (torch's). Once per process; it stays loaded.
#pragma once

#include <cstddef>
#include <string>

namespace ringspan::cuda {

struct CudnnLibrary {
  void* handle = nullptr;  // null: see error
  std::string file;
  std::size_t version = 0;  // 92800 is 9.28.0
  std::string error;
};

const CudnnLibrary& load_cudnn();

}  // namespace ringspan::cuda
