// NcclTransport: ranks with a GPU each. Messages in memory of the devices travel by ncclSend and ncclRecv on a stream of the
// transport's own; everything else, messages in host memory and what the ranks say about themselves, over a `host` transport of
// the same ranks.
//
// Before a batch in memory of devices each rank greets every peer of the batch over the host transport, with the round and the
// number of bytes that go either way. When the greetings of all its peers are there and agree, the batch becomes one group of
// NCCL, so that a receive and a send of it never wait for each other, and no rank's device ever waits for a peer that has not
// come. Groups are started in the order in which their batches were posted, which is the same on all ranks.
//
// Deadlines: until all have greeted, that of silence on the host transport. From then on only a group that ends is a sign of
// life: NCCL does not tell what it has moved. The groups that run may therefore take several deadlines, and a time for their
// bytes (patience()). A failure of any kind ends in ncclCommAbort, so that no kernel waits any longer.
// NCCL's communicator is non-blocking: no call of it waits for a peer.
//
// Cost: a host message of 24 bytes each way per pair and round, on top. Thread safety: as a communicator.
#pragma once

#include <deque>
#include <memory>
#include <type_traits>
#include <vector>

#include "comm/device_stream.h"
#include "comm/nccl_library.h"
#include "comm/transport.h"

namespace ringspan {

class NcclTransport final : public Transport {
 public:
  struct Setup {
    DeviceStreamFactory make_stream;
    std::string library;               // as NcclLibrary::load takes it
    std::vector<std::byte> unique_id;  // empty: rank 0 makes one
    Seconds deadline{60.0};            // of joining the ranks
  };

  // Collective. `host` must be one of the library's transports and outlive the result. An error on one rank is raised on all.
  static std::unique_ptr<Communicator> make(Communicator& host, const Setup& setup);

  ~NcclTransport() override;
  bool takes_device_memory(const void* data) const override { return stream_ != nullptr && stream_->holds(data); }

 private:
  // What a rank says to a peer before a batch.
  struct Hello {
    std::uint64_t round = 0;
    std::int64_t to_you = 0;  // bytes; 0: no message
    std::int64_t from_you = 0;
  };
  struct Greeting {
    int peer = 0;
    Operation* send = nullptr;
    Operation* receive = nullptr;
    Hello out, in;
    Request request = 0;
  };
  // A posted batch.
  struct Flight {
    enum class Phase : std::uint8_t {
      host,       // all in host memory
      greeting,   // waiting for the peers' greetings
      ready,      // they have come; earlier groups come first
      launching,  // NCCL has been given the group
      flying      // it is on the stream
    };
    Phase phase = Phase::host;
    Operation* first = nullptr;
    std::vector<Greeting> greetings;
    std::size_t greeted = 0;
    Request host_request = 0;
    std::uint64_t event = 0;
  };

  // What has come of joining on a rank: an error of its own, not within the deadline, or no more waiting because of another.
  enum class Verdict : std::uint8_t { joined, failed, late, gave_up };
  class Verdicts;

  static constexpr std::chrono::microseconds kPoll{50};  // of what a device does

  NcclTransport(Transport& host, const Setup& setup);

  void check_batch(std::uint64_t round, std::span<const Message> batch) override;
  void start(Operation& operation) override;
  void pump() override;
  void block(TimePoint until) override;
  TimePoint last_sign_of_life(int peer) const override;
  std::string silence(const Operation& operation) const override;
  double patience(double deadline) const override;
  bool has_left(int peer) const override;
  void tell_peers(const std::string& cause) override;
  void withdraw() override;
  std::unique_ptr<Communicator> make_duplicate() override;

  void load();
  void join();
  NcclUniqueId agree_on_id(Seconds deadline);
  Verdict join_nccl(const NcclUniqueId& id, Seconds deadline, Verdicts& verdicts);
  void post_host(Flight& flight);
  void greet(Flight& flight);
  bool advance(Flight& flight);
  void check(const Greeting& greeting);
  void launch(Flight& flight);
  void poll_nccl(Flight& flight);
  void land(Flight& flight);
  int async_error();
  bool group_in_progress() const;
  [[noreturn]] void fail_nccl(const char* call, int status);
  std::string error_text(int status) const;
  // Runs what the host transport may fail at; we fail with it.
  template <typename Action>
  std::invoke_result_t<const Action&> on_host(const Action& action) {
    try {
      return action();
    } catch (const CommError&) {
      fail_as(host_, pending_with(failed_peer(host_)));
    }
  }
  const Operation* pending_with(int peer) const;
  void leave() noexcept;
  void abort_nccl() noexcept;

  Transport& host_;
  std::unique_ptr<Communicator> owned_host_;  // of a duplicate
  Setup setup_;
  const NcclLibrary* nccl_ = nullptr;
  std::unique_ptr<DeviceStream> stream_;
  NcclComm* comm_ = nullptr;

  std::vector<Operation*> batch_;  // that is being posted
  std::vector<Message> messages_;
  std::deque<Flight> flights_;  // stable addresses
  std::vector<Flight*> free_;
  std::vector<Flight*> pending_;               // in the order of posting
  std::vector<std::uint64_t> greetings_sent_;  // per peer
  std::vector<bool> left_;                     // as of before the last pump
  TimePoint nccl_life_;
};

}  // namespace ringspan
