#include "comm/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "ringspan/error.h"

namespace ringspan {
namespace {

constexpr const char* kDefault = "libnccl.so.2";
constexpr const char* kVariable = "RINGSPAN_NCCL_LIBRARY";
constexpr int kOldest = 21400;
constexpr int kNextMajor = 30000;

template <typename Function>
void find(void* handle, const char* name, const std::string& path, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function == nullptr) throw Unsupported(fmt::format("nccl: {} has no {}", path, name));
}

std::unique_ptr<NcclLibrary> load_now(const std::string& path, const char* named_by) {
  // Local: its symbols are no one else's business. It is never closed, since it has threads and handlers of its own.
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    throw Unsupported(fmt::format("nccl: cannot load {}{}: {}; {} can name another file", path, named_by,
                                  reason == nullptr ? "no reason is given" : reason, kVariable));
  }
  auto library = std::make_unique<NcclLibrary>();
  int (*get_version)(int*) = nullptr;
  find(handle, "ncclGetVersion", path, get_version);
  const int status = get_version(&library->version);
  if (status != kNcclSuccess) throw Unsupported(fmt::format("nccl: ncclGetVersion of {} failed with {}", path, status));
  if (library->version < kOldest || library->version >= kNextMajor) {
    throw Unsupported(fmt::format("nccl: {} is version {} ({}); at least {} and less than 3 is needed", path,
                                  nccl_version_text(library->version), library->version, nccl_version_text(kOldest)));
  }
  find(handle, "ncclGetUniqueId", path, library->get_unique_id);
  find(handle, "ncclCommInitRankConfig", path, library->comm_init_rank_config);
  find(handle, "ncclCommFinalize", path, library->comm_finalize);
  find(handle, "ncclCommDestroy", path, library->comm_destroy);
  find(handle, "ncclCommAbort", path, library->comm_abort);
  find(handle, "ncclCommGetAsyncError", path, library->comm_get_async_error);
  find(handle, "ncclGetErrorString", path, library->get_error_string);
  find(handle, "ncclGetLastError", path, library->get_last_error);
  find(handle, "ncclGroupStart", path, library->group_start);
  find(handle, "ncclGroupEnd", path, library->group_end);
  find(handle, "ncclSend", path, library->send);
  find(handle, "ncclRecv", path, library->recv);
  Dl_info info{};
  const bool known = ::dladdr(reinterpret_cast<void*>(library->send), &info) != 0 && info.dli_fname != nullptr;
  library->loaded = known ? info.dli_fname : path;
  return library;
}

}  // namespace

const NcclLibrary& NcclLibrary::load(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<NcclLibrary>> loaded;
  const char* variable = std::getenv(kVariable);
  const bool by_variable = path.empty() && variable != nullptr && *variable != '\0';
  const std::string wanted = !path.empty() ? path : by_variable ? variable : kDefault;
  const std::lock_guard lock(mutex);
  std::unique_ptr<NcclLibrary>& library = loaded[wanted];
  if (library == nullptr) library = load_now(wanted, by_variable ? " (named by RINGSPAN_NCCL_LIBRARY)" : "");
  return *library;
}

std::string nccl_version_text(int version) {
  // Until 2.8 a version had four digits.
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int minor = version >= 10000 ? version / 100 % 100 : version / 100 % 10;
  return fmt::format("{}.{}.{}", major, minor, version % 100);
}

}  // namespace ringspan
