// NcclLibrary: the functions of NCCL that are used, found at run time, and the few types that they need, declared here, so that
// nothing of NCCL is needed to compile.
//
// Contract: what is declared here has the binary interface of NCCL 2.14 (ncclCommInitRankConfig with the configuration of that
// release) and later 2.x; load() refuses any other version, as ncclGetVersion tells it. The library stays loaded for good.
// Thread safety: load() may be called by any thread; the functions are as thread-safe as NCCL's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ringspan {

struct NcclComm;  // ncclComm, opaque

struct NcclUniqueId {  // ncclUniqueId
  static constexpr std::size_t kBytes = 128;
  char internal[kBytes];
};

struct NcclConfig {  // ncclConfig_t as of 2.14; later releases take it by its size and version
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

// ncclResult_t, an enumeration.
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;
inline constexpr int kNcclUint8 = 1;  // of ncclDataType_t

class NcclLibrary {
 public:
  // `path`: what to load; empty: RINGSPAN_NCCL_LIBRARY, else libnccl.so.2. Loaded once per path. Throws Unsupported that names
  // what was tried and what the loader said, or the version.
  static const NcclLibrary& load(const std::string& path = {});

  int version = 0;     // 22703
  std::string loaded;  // the file that was loaded

  int (*get_unique_id)(NcclUniqueId*) = nullptr;
  int (*comm_init_rank_config)(NcclComm**, int ranks, NcclUniqueId, int rank, NcclConfig*) = nullptr;
  int (*comm_finalize)(NcclComm*) = nullptr;
  int (*comm_destroy)(NcclComm*) = nullptr;
  int (*comm_abort)(NcclComm*) = nullptr;
  int (*comm_get_async_error)(NcclComm*, int*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  const char* (*get_last_error)(NcclComm*) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void*, std::size_t, int type, int peer, NcclComm*, void* stream) = nullptr;
  int (*recv)(void*, std::size_t, int type, int peer, NcclComm*, void* stream) = nullptr;
};

// "2.27.3"
std::string nccl_version_text(int version);

}  // namespace ringspan
