// Transports: the communicators that come with the library, and helpers that run a function as every rank.
//
// Threads    ranks are threads of this process; a message is copied once, from the sender's buffer into the receiver's, by
//            whichever side posts later (rendezvous: a send completes only when its receive was posted).
// Processes  ranks are processes joined by stream sockets, two per pair: one for payload, one for heartbeats and aborts.
// NCCL       ranks are any of these with a GPU each; messages in memory of the GPUs go by NCCL, all others as before.
// Callbacks  ranks are whatever an embedder's C struct of callbacks says (ringspan_c.h).
//
// None allocates in post, test, wait or progress once as many requests as are ever outstanding at a time have been posted.
// docs/communicators.md has the contract in full and shows how to add a transport.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ringspan/communicator.h"

struct ringspan_communicator;

namespace ringspan {

using RankBody = std::function<void(Communicator&)>;

// One communicator per rank, each to be driven by its own thread. Destroying one means that the rank has left: peers that
// still wait for it get an error at once.
std::vector<std::unique_ptr<Communicator>> make_thread_world(int ranks);

// The same with a device per rank, as ExecuteOptions::device names it ("cuda:1"; several ranks may share one). Messages may lie
// in memory of the rank's device and are copied from device to device. Throws what making memory there would throw.
std::vector<std::unique_ptr<Communicator>> make_thread_world(const std::vector<std::string>& devices);

// Runs `body` as every rank, each on a thread of its own, and returns when all have ended. When a body throws, the others
// are aborted and the error that came first (not one that it induced in another rank) is thrown. An empty body is
// refused, here and below.
void run_thread_ranks(int ranks, const RankBody& body);
void run_thread_ranks(std::vector<std::unique_ptr<Communicator>> world, const RankBody& body);

// The two sockets that join this rank to one peer; both are connected stream sockets.
struct PeerSockets {
  int data = -1;     // payload, read only while a receive is posted: unexpected data stays in the kernel
  int control = -1;  // heartbeats, aborts and farewells, read always
};

// A communicator over sockets that are connected already; `peers` has one entry per rank, the one of `rank` is ignored. Takes
// the sockets over (those of TCP get TCP_NODELAY) and closes them in the end; when it throws they are still the caller's.
// duplicate() passes new sockets to the peers and so needs AF_UNIX.
std::unique_ptr<Communicator> make_socket_communicator(int rank, std::span<const PeerSockets> peers);

// How one forked rank ended.
struct RankOutcome {
  std::exception_ptr error{};  // null: the body returned. What it threw arrives as the same class of ringspan::Error.
  std::string message{};       // of the error
  bool told_by_peer = false;   // the error began in another rank
  int signal = 0;              // that killed the process; 0: none
};

struct ForkOptions {
  // Ranks that still run so long after the first error are killed; stopped ones are as soon as no other is left.
  Communicator::Seconds grace{10.0};
};

// Runs `body` as every rank, each in a process forked from this one and joined by AF_UNIX sockets, and returns when all have
// ended; no process is left behind. What the body changes in memory is lost, except inside a SharedMemory made before. Call it
// while this process has no other threads: they do not exist in the children.
std::vector<RankOutcome> try_forked_ranks(int ranks, const RankBody& body, const ForkOptions& options = {});

// The same, and throws the error that came first (a killed process before the errors that this induced in others).
void run_forked_ranks(int ranks, const RankBody& body, const ForkOptions& options = {});

struct NcclOptions {
  std::string device = "cuda";  // of this rank, as ExecuteOptions::device names it; NCCL wants another GPU for every rank
  std::string library{};        // a path; empty: what RINGSPAN_NCCL_LIBRARY names, else libnccl.so.2
  std::vector<std::byte> unique_id{};    // the same on all ranks; empty: rank 0 makes one and sends it through `host`
  Communicator::Seconds deadline{60.0};  // of joining the ranks
};

// Collective. A communicator over the ranks of `host` that takes messages in memory of `device` too and moves those by NCCL,
// which is loaded at run time. `host` carries everything else, must be of threads or processes (not callbacks), outlive the
// result, and not be used meanwhile. An error on one rank (no library, no device) is raised on all; ranks need the same version
// of NCCL.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options = {});

// 128 bytes for NcclOptions::unique_id of all ranks, for one communicator. Loads NCCL. Throws Unsupported where there is no
// usable library, CommError where NCCL fails.
std::vector<std::byte> make_nccl_unique_id(const std::string& library = {});

// Zeroed memory that forked ranks share with their parent: how they return results.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes);  // throws std::bad_alloc, or Error where the system refuses otherwise
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::span<std::byte> bytes() const { return {data_, bytes_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A communicator over an embedder's callbacks; calls `destroy` in the end. Throws InvalidArgument where a member is missing or
// wrong, Unsupported where one is set that this version does not know, and then has called nothing.
std::unique_ptr<Communicator> make_communicator(const ringspan_communicator& callbacks);

}  // namespace ringspan
