#include "cuda/cudnn_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>

namespace ringspan::cuda {
namespace {

constexpr const char* kCublasLt[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

// Whether cuDNN will find the library that it loads later, and without which it ends the process: here already, where the
// system looks, or in a folder where cuDNN's own file looks.
bool finds_cublaslt(void* cudnn) {
  for (const char* const name : kCublasLt) {
    if (dlopen(name, RTLD_LAZY | RTLD_LOCAL) != nullptr) return true;
  }
  Dl_serinfo size{};
  if (dlinfo(cudnn, RTLD_DI_SERINFOSIZE, &size) != 0) return true;  // nobody knows
  const std::unique_ptr<void, void (*)(void*)> memory(::operator new(size.dls_size), [](void* m) { ::operator delete(m); });
  auto* const found = static_cast<Dl_serinfo*>(memory.get());
  *found = size;
  if (dlinfo(cudnn, RTLD_DI_SERINFO, found) != 0) return true;
  for (unsigned i = 0; i < found->dls_cnt; ++i) {
    for (const char* const name : kCublasLt) {
      std::error_code none;
      if (std::filesystem::exists(std::filesystem::path(found->dls_serpath[i].dls_name) / name, none)) return true;
    }
  }
  return false;
}

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
  if (!finds_cublaslt(library.handle)) {
    library.handle = nullptr;
    library.error = fmt::format("{} needs {} or {}, which cannot be found", library.file, kCublasLt[0], kCublasLt[1]);
  }
  return library;
}

}  // namespace

const CudnnLibrary& load_cudnn() {
  static const CudnnLibrary library = find();
  return library;
}

}  // namespace ringspan::cuda
