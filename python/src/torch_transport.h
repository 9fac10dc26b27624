// TorchTransport: ranks are those of a torch.distributed process group. Python moves the bytes (isend, irecv), this class keeps
// the contract of ringspan::Communicator: requests, deadlines, the error that stays.
//
// The process group cannot be polled, so that Python has threads that wait for its works and then call completed(). Only post
// takes the GIL; test, wait and progress do not, so kernels are never held up by the interpreter. Signs of life that are no
// messages, and the errors of other ranks, come from a Python thread that watches the group's store (transport.py).
//
// A buffer that was handed to the process group cannot be taken back. Messages of plans lie in arenas: after a failure whoever
// owns the arena keeps it forever. Those of other rounds are small, and their buffers go with the exception: the process group
// gets copies, which are Python's.
// Thread safety: one thread drives it; completed() ... outstanding_peers() may be called by any thread.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/transport.h"

namespace ringspan::python {

class TorchTransport final : public Transport {
 public:
  // post(list of (is_send, peer, memory, tag, id)) hands messages to the process group; tell(text) tells the peers that
  // this rank failed. Both return at once.
  TorchTransport(int rank, int size, nanobind::object post, nanobind::object tell);
  ~TorchTransport() override;

  void completed(std::uint64_t id);
  // The process group failed at a message; `told` is what the peers say of it, if they say anything.
  void message_failed(std::uint64_t id, const std::string& text);
  void told_by_peer(const std::string& text);
  void peer_alive(int peer);

  std::uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  // Since a message was posted or completed.
  double quiet_seconds() const;
  std::vector<int> outstanding_peers() const;

 private:
  struct Posted {
    bool send = false;
    int peer = 0;
    void* data = nullptr;
    std::int64_t bytes = 0;
    std::uint64_t round = 0;
    std::uint64_t id = 0;
  };

  void start(Operation& operation) override;
  void pump() override;
  void block(TimePoint until) override;
  TimePoint last_sign_of_life(int peer) const override;
  bool has_left(int) const override { return false; }  // a lost connection fails the communicator
  void tell_peers(const std::string& cause) override;
  void withdraw() override;
  std::unique_ptr<Communicator> make_duplicate() override;

  struct Outstanding {
    Operation* operation = nullptr;
    const char* copy = nullptr;  // what the process group was given instead of the message's buffer; lives until completed()
  };

  void hand_over();
  // Raises what a signal's handler raised on this rank; with the GIL.
  [[noreturn]] void interrupted(const nanobind::python_error& error);
  nanobind::object memory_of(const Posted& posted);  // with the GIL
  void show_life(int peer);

  nanobind::object post_;
  nanobind::object tell_;
  std::vector<Posted> batch_;
  TimePoint signals_checked_{};  // when the interpreter was last asked whether Ctrl-C was pressed

  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::int64_t> last_event_{0};
  std::vector<std::atomic<std::int64_t>> life_;  // steady clock, nanoseconds

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t signals_ = 0;
  std::uint64_t seen_ = 0;  // signals seen by the last pump
  std::uint64_t last_id_ = 0;
  std::unordered_map<std::uint64_t, Outstanding> outstanding_;
  std::string failure_;  // of the process group
  std::string told_;     // by a peer
};

}  // namespace ringspan::python
