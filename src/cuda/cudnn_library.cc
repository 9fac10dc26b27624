#include "cuda/cudnn_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace ringspan::cuda {
namespace {

CudnnLibrary find() {
  CudnnLibrary library;
  const char* const named = std::getenv("RINGSPAN_CUDNN_LIBRARY");
  library.file = named != nullptr && *named != '\0' ? named : "libcudnn.so.9";
  library.handle = dlopen(library.file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library.handle == nullptr) {
    const char* const reason = dlerror();
    library.error =
        fmt::format("cannot load {}; RINGSPAN_CUDNN_LIBRARY can name another file", reason != nullptr ? reason : library.file);
    return library;
  }
  using Version = std::size_t (*)();
  const auto version = reinterpret_cast<Version>(dlsym(library.handle, "cudnnGetVersion"));
  if (version == nullptr) {
    library.handle = nullptr;
    library.error = fmt::format("{} has no cudnnGetVersion", library.file);
    return library;
  }
  library.version = version();
  return library;
}

}  // namespace

const CudnnLibrary& load_cudnn() {
  static const CudnnLibrary library = find();
  return library;
}

}  // namespace ringspan::cuda
