// A stand-in for NCCL: the functions that ringspan loads, with NCCL's interface and manners, between threads or forked
// processes with emulated devices. Messages go through shared memory, in small pieces, while a group runs on an emulated
// stream.
//
// What it insists on, so that mistakes show: a send ends only when its receive took every byte; a group is one step of its
// stream and ends when all of it has; a communicator that is not blocking is in progress until it was asked twice, and a group
// is on its stream only then. What it can be told to do wrong: stand_in.h.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl_library.h"
#include "cuda/emulated_memory.h"
#include "cuda/emulated_stream.h"
#include "nccl/stand_in.h"

#ifndef STAND_IN_VERSION
#define STAND_IN_VERSION 22703
#endif

namespace {

using ringspan::kNcclInProgress;
using ringspan::kNcclSuccess;
using ringspan::NcclConfig;
using ringspan::NcclUniqueId;

constexpr int kInternalError = 3;
constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kMaxRanks = 8;
constexpr std::uint64_t kPiece = 16 << 10;

// From one rank to another: a ring of bytes. Counters never turn back.
struct Channel {
  std::atomic<std::uint64_t> written{0};
  std::atomic<std::uint64_t> read{0};
  std::byte data[kPiece];
};

// What the ranks of one communicator share; the system makes its pages zero, which is its first state.
struct Shared {
  std::atomic<int> joined;
  Channel channels[kMaxRanks][kMaxRanks];
};

std::atomic<int> fault_rank{-1}, fault_kind{0}, fault_after{0};
std::atomic<std::int64_t> groups{0}, messages{0}, aborts{0}, live{0}, running{0};

struct Op {
  bool send = false;
  int peer = 0;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t moved = 0;
  std::uint64_t begin = 0;  // of the channel's counter
  bool begun = false;
};

struct Comm {
  ~Comm() {
    if (shared == nullptr) return;
    if (shared->joined < size) ::shm_unlink(name.c_str());  // the last to join does it otherwise
    ::munmap(shared, sizeof(Shared));
  }
  std::string name;
  Shared* shared = nullptr;
  int rank = 0, size = 0;
  bool blocking = true;
  std::atomic<bool> aborted{false};
  int polls = 0;  // until what is in progress is done
  int done_groups = 0;
  bool finalized = false;
  std::vector<Op> group;  // handed over, not on the stream yet
  ringspan::cuda::EmulatedStream* stream = nullptr;

  bool has_fault(int kind) const { return fault_rank == rank && fault_kind == kind && done_groups >= fault_after; }
};

struct Launch {
  std::shared_ptr<Comm> comm;
  std::vector<Op> ops;
  bool stalled = false;
};

// What a user's handle points to.
struct Handle {
  std::shared_ptr<Comm> comm;
};

Comm& comm_of(ringspan::NcclComm* comm) { return *reinterpret_cast<Handle*>(comm)->comm; }

bool move(Comm& comm, Op& op) {
  Channel& channel = op.send ? comm.shared->channels[comm.rank][op.peer] : comm.shared->channels[op.peer][comm.rank];
  std::atomic<std::uint64_t>& own = op.send ? channel.written : channel.read;
  if (!op.begun) op.begin = own.load(std::memory_order_relaxed), op.begun = true;
  const std::uint64_t at = op.begin + op.moved;
  const std::uint64_t other = (op.send ? channel.read : channel.written).load(std::memory_order_acquire);
  const std::uint64_t room = op.send ? kPiece - (at - other) : other - at;
  const std::uint64_t count = std::min({room, op.bytes - op.moved, kPiece - at % kPiece});
  if (count == 0) return false;
  std::byte* const piece = channel.data + at % kPiece;
  std::memcpy(op.send ? piece : op.data + op.moved, op.send ? op.data + op.moved : piece, count);
  op.moved += count;
  own.store(at + count, std::memory_order_release);
  return true;
}

bool is_done(Comm& comm, const Op& op) {
  if (op.moved < op.bytes) return false;
  return !op.send || comm.shared->channels[comm.rank][op.peer].read.load(std::memory_order_acquire) >= op.begin + op.bytes;
}

// On the stream.
void run(void* argument) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(argument));
  Comm& comm = *launch->comm;
  ++running;
  while (!comm.aborted) {
    const bool stalled = launch->stalled && fault_kind == kStandInStall;
    bool moved = false;
    bool done = !stalled;
    for (Op& op : launch->ops) {
      if (stalled) break;
      moved = move(comm, op) || moved;
      done = is_done(comm, op) && done;
    }
    if (done) break;
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  --running;
}

void put_on_stream(const std::shared_ptr<Comm>& comm) {
  auto* launch = new Launch{comm, std::move(comm->group), comm->has_fault(kStandInStall)};
  comm->group.clear();
  ++comm->done_groups;
  ++groups;
  messages += static_cast<std::int64_t>(launch->ops.size());
  comm->stream->launch(comm->stream->queue, &run, launch);
}

thread_local int group_depth = 0;
thread_local std::vector<Handle*> group_comms;

int add(Op op, ringspan::NcclComm* handle, void* stream) {
  Comm& comm = comm_of(handle);
  if (op.peer < 0 || op.peer >= comm.size || comm.finalized) return kInvalidArgument;
  const auto address = reinterpret_cast<std::uintptr_t>(op.data);
  if ((address & ringspan::cuda::kEmulatedTag) == 0) return kInvalidArgument;  // not memory of a device
  if (comm.polls > 0) return kInvalidUsage;                                    // something is in progress
  op.data = reinterpret_cast<std::byte*>(address & ~ringspan::cuda::kEmulatedTag);
  comm.stream = static_cast<ringspan::cuda::EmulatedStream*>(stream);
  comm.group.push_back(op);
  auto* h = reinterpret_cast<Handle*>(handle);
  if (std::find(group_comms.begin(), group_comms.end(), h) == group_comms.end()) group_comms.push_back(h);
  return kNcclSuccess;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = STAND_IN_VERSION;
  return kNcclSuccess;
}

int ncclGetUniqueId(NcclUniqueId* id) {
  std::random_device random;
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "/ringspan-stand-in-%d-%08x%08x", static_cast<int>(::getpid()), random(),
                random());
  const int file = ::shm_open(id->internal, O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0) return kInternalError;
  const bool sized = ::ftruncate(file, sizeof(Shared)) == 0;
  ::close(file);
  return sized ? kNcclSuccess : kInternalError;
}

int ncclCommInitRankConfig(ringspan::NcclComm** result, int size, NcclUniqueId id, int rank, NcclConfig* config) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size || config->magic != 0xcafebeef) return kInvalidArgument;
  if (fault_rank == rank && fault_kind == kStandInCannotJoin) {
    while (aborts < fault_after) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return kInternalError;
  }
  // Where the others have given up already, their memory is gone: this rank waits for them in another.
  const int file = ::shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(Shared)) != 0) return kInvalidArgument;
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory == MAP_FAILED) return kInternalError;
  auto comm = std::make_shared<Comm>();
  comm->name = id.internal;
  comm->shared = static_cast<Shared*>(memory);
  comm->rank = rank;
  comm->size = size;
  comm->blocking = config->blocking != 0;
  comm->polls = 2;
  if (comm->has_fault(kStandInNeverJoins)) comm->polls = 1 << 30;
  ++live;
  const bool last = comm->polls == 2 && ++comm->shared->joined == size;
  if (last) ::shm_unlink(id.internal);
  *result = reinterpret_cast<ringspan::NcclComm*>(new Handle{comm});
  if (!comm->blocking) return kNcclInProgress;
  while (comm->shared->joined < size) std::this_thread::sleep_for(std::chrono::microseconds(100));
  comm->polls = 0;
  return kNcclSuccess;
}

int ncclCommGetAsyncError(ringspan::NcclComm* handle, int* state) {
  const auto& comm = reinterpret_cast<Handle*>(handle)->comm;
  *state = kNcclSuccess;
  if (comm->has_fault(kStandInAsyncError)) *state = kRemoteError;
  if (comm->polls == 0 || *state != kNcclSuccess) return kNcclSuccess;
  if (comm->polls == 1 && comm->shared->joined < comm->size) {
    *state = kNcclInProgress;
    return kNcclSuccess;
  }
  --comm->polls;
  if (comm->polls > 0) *state = kNcclInProgress;
  if (comm->polls == 0 && !comm->group.empty()) put_on_stream(comm);
  return kNcclSuccess;
}

int ncclCommFinalize(ringspan::NcclComm* handle) {
  Comm& comm = comm_of(handle);
  if (comm.finalized || comm.aborted) return kInvalidUsage;
  comm.finalized = true;
  comm.polls = 2;
  return comm.blocking ? kNcclSuccess : kNcclInProgress;
}

int ncclCommDestroy(ringspan::NcclComm* handle) {
  --live;
  delete reinterpret_cast<Handle*>(handle);
  return kNcclSuccess;
}

int ncclCommAbort(ringspan::NcclComm* handle) {
  ++aborts;
  --live;
  comm_of(handle).aborted = true;
  delete reinterpret_cast<Handle*>(handle);
  return kNcclSuccess;
}

const char* ncclGetErrorString(int status) {
  switch (status) {
    case kNcclSuccess:
      return "no error";
    case kInternalError:
      return "internal error of the stand-in";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ringspan::NcclComm*) { return "told by the stand-in"; }

int ncclGroupStart() {
  ++group_depth;
  return kNcclSuccess;
}

int ncclGroupEnd() {
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0) return kNcclSuccess;
  int status = kNcclSuccess;
  for (Handle* handle : group_comms) {
    Comm& comm = *handle->comm;
    if (comm.has_fault(kStandInGroupFails)) {
      comm.group.clear();
      status = kInternalError;
    } else if (comm.blocking) {
      put_on_stream(handle->comm);
    } else {
      comm.polls = 2;
      if (status == kNcclSuccess) status = kNcclInProgress;
    }
  }
  group_comms.clear();
  return status;
}

int ncclSend(const void* data, std::size_t count, int type, int peer, ringspan::NcclComm* comm, void* stream) {
  if (type != ringspan::kNcclUint8) return kInvalidArgument;
  ncclGroupStart();
  const int status = add({true, peer, const_cast<std::byte*>(static_cast<const std::byte*>(data)), count}, comm, stream);
  const int ended = ncclGroupEnd();
  return status != kNcclSuccess ? status : ended;
}

int ncclRecv(void* data, std::size_t count, int type, int peer, ringspan::NcclComm* comm, void* stream) {
  if (type != ringspan::kNcclUint8) return kInvalidArgument;
  ncclGroupStart();
  const int status = add({false, peer, static_cast<std::byte*>(data), count}, comm, stream);
  const int ended = ncclGroupEnd();
  return status != kNcclSuccess ? status : ended;
}

void stand_in_fault(int rank, int kind, int after) {
  fault_rank = rank;
  fault_kind = kind;
  fault_after = after;
}

std::int64_t stand_in_count(int what) {
  const std::atomic<std::int64_t>* counts[] = {&groups, &messages, &aborts, &live, &running};
  return *counts[what];
}

}  // extern "C"
