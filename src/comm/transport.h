// Transport: what all transports share: checking of batches, request slots, waiting with deadlines, the error that stays,
// its wording, traffic counters. A transport adds how bytes move (start, pump, block) and how peers are told.
//
// Contract: see ringspan/communicator.h. Besides: wrong arguments (InvalidArgument) post nothing and leave the communicator
// usable; a failure (CommError) withdraws every posted buffer before it is thrown, and tells the peers as abort() does.
// Cost: no allocation once the pools have reached the number of operations that are outstanding at a time.
// Thread safety: one thread at a time, except Operation::complete, which a peer's thread may set.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "comm/batch_checker.h"
#include "ringspan/communicator.h"
#include "ringspan/error.h"

namespace ringspan {

struct SharedPoint;  // shared_points.h

inline bool sends(const Message& message) { return message.direction == Message::Direction::send; }

// A CommError that another rank caused and told us about; the rank where it began throws a plain CommError or its own error.
class PeerFailure : public CommError {
 public:
  using CommError::CommError;
};

class Transport : public Communicator {
 public:
  int rank() const final { return rank_; }
  int size() const final { return size_; }
  std::span<const PeerTraffic> traffic() const final { return traffic_; }

  Request post(std::uint64_t round, std::span<const Message> batch) final;
  bool test(Request request) final;
  void wait(Request request, Seconds deadline) final {
    wait_for(request, deadline, false, [](Operation&) {});
  }
  void progress() final;
  void abort(const std::string& reason) noexcept final;
  std::unique_ptr<Communicator> duplicate() final;

 protected:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;

  // One posted message.
  struct Operation {
    Message message;
    std::uint64_t round = 0;
    std::int64_t moved = 0;     // payload bytes moved so far, kept by the transport
    Operation* next = nullptr;  // in a Queue
    Operation* next_in_batch = nullptr;
    // In the order of a stream: the message comes after `before`, and what comes after `after` sees it. Else both are null.
    SharedPoint* before = nullptr;
    SharedPoint* after = nullptr;
    // After this the transport touches neither the operation nor, but in the order of a stream, its buffer.
    std::atomic<bool> complete{false};
  };

  // How long peers have been silent while this rank listened: from the begin of a wait on, and anew where this rank itself has
  // not looked for long. Then it was stopped, and its peers may have been too.
  class Listening {
   public:
    void look() {  // many times a second
      const TimePoint now = Clock::now();
      if (now - looked_ > kAbsence) since_ = now;
      looked_ = now;
    }
    // As of the last look.
    Seconds silence(TimePoint last_sign_of_life) const { return looked_ - std::max(since_, last_sign_of_life); }
    Seconds so_far() const { return looked_ - since_; }

   private:
    static constexpr std::chrono::milliseconds kAbsence{500};
    TimePoint since_ = Clock::now();
    TimePoint looked_ = since_;
  };

  // First in, first out; links operations that live elsewhere.
  class OperationQueue {
   public:
    bool empty() const { return head_ == nullptr; }
    Operation* front() const { return head_; }
    void push(Operation* operation) {
      operation->next = nullptr;
      (head_ == nullptr ? head_ : tail_->next) = operation;
      tail_ = operation;
    }
    Operation* pop() {
      Operation* operation = head_;
      head_ = operation->next;
      return operation;
    }
    void clear() { head_ = nullptr; }

   private:
    Operation* head_ = nullptr;
    Operation* tail_ = nullptr;
  };

  Transport(int rank, int size);

  // Refuses (InvalidArgument) a batch that this transport cannot take, before anything of it is posted.
  virtual void check_batch(std::uint64_t /*round*/, std::span<const Message> /*batch*/) {}
  // Takes a checked operation over; may complete it at once. Never waits for a peer.
  virtual void start(Operation& operation) = 0;
  // Moves what can be moved, shows a sign of life, and fails if a peer has told us to.
  virtual void pump() = 0;
  // Sleeps until something may have changed since the last pump(), at most until `until`.
  virtual void block(TimePoint until) = 0;
  virtual TimePoint last_sign_of_life(int peer) const = 0;
  // What the peer of a message did not do for longer than the deadline: "no sign of life".
  virtual std::string silence(const Operation& /*operation*/) const { return "no sign of life"; }
  // For how many seconds it need not, where that may rightly take longer than the deadline.
  virtual double patience(double deadline) const { return deadline; }
  // True when the peer has left for good and nothing that is not complete by now ever will be.
  virtual bool has_left(int peer) const = 0;
  // Tells the peers that they must fail too; `cause` says which rank it began in: "rank 3 failed: ...", "rank 3 aborted: ...".
  // What it throws is thrown in place of the failure.
  virtual void tell_peers(const std::string& cause) = 0;
  // After this no posted buffer is touched any more.
  virtual void withdraw() = 0;
  virtual std::unique_ptr<Communicator> make_duplicate() = 0;

  // wait() of a request that was posted in the order of a stream or was not; `land` is called for each message in the end.
  void wait_for(Request request, Seconds deadline, bool on_stream, FunctionRef<void(Operation&)> land);
  // What was posted and not yet waited for.
  void for_each_outstanding(FunctionRef<void(Operation&)> action);

  // Makes the communicator failed and throws. `cause` follows "rank 3/8: waiting for ...: ".
  [[noreturn]] void fail(std::string_view cause);
  // The same about a message that wait() may not be waiting for.
  [[noreturn]] void fail(const Operation& operation, std::string_view cause);
  // The same where a peer told us. The cause is passed on unchanged: whoever told us may not have reached everyone yet, and
  // our leaving must not look like the cause.
  [[noreturn]] void fail_told_by_peer(const std::string& cause);

  bool failed() const { return failed_; }
  std::string prefix() const;  // "rank 3/8: "

  // For a transport that sends a part of its messages over another one of the same ranks.
  static TimePoint last_sign_of_life(const Transport& other, int peer) { return other.last_sign_of_life(peer); }
  static bool has_left(const Transport& other, int peer) { return other.has_left(peer); }
  static void block(Transport& other, TimePoint until) { other.block(until); }
  // While it is subordinate, a failure of the other one tells nobody: we do, in our words.
  static void subordinate(Transport& other, bool is) { other.subordinate_ = is; }
  // Fails with the other's failure; `operation`: of ours, with the peer that its failure was about, or null.
  [[noreturn]] void fail_as(const Transport& other, const Operation* operation);
  static int failed_peer(const Transport& other) { return other.failed_peer_; }  // -1: none in particular
  // Makes the other one failed, unless it is, and tells its peers, which are ours; throws nothing of it.
  static void give_up(Transport& other, const std::string& cause);

  // The two faces of a message whose ends differ.
  static std::string mismatch_at_receiver(const Operation& receive, std::uint64_t round, std::int64_t bytes);
  static std::string mismatch_at_sender(const Operation& send, std::uint64_t round, std::int64_t bytes);

 private:
  struct Slot {
    Operation* first = nullptr;
    Operation* pending = nullptr;  // the first that was not seen complete
    std::uint64_t round = 0;
    std::uint32_t generation = 0;
    bool active = false;
  };

  void throw_if_failed() const;
  void check_not_outstanding(std::uint64_t round, const Message& message) const;
  Operation* take_operation();
  std::uint32_t take_slot();
  Slot& find(Request request);
  void release(Slot& slot, std::uint32_t index);
  static bool is_complete(Slot& slot);
  TimePoint check_peers(const Operation* pending, const Listening& listening, double deadline);
  void become_failed(std::string_view cause, bool told_by_peer);
  void tell_and_withdraw(const std::string& cause);

  int rank_;
  int size_;
  std::vector<PeerTraffic> traffic_;
  BatchChecker checker_;
  std::deque<Operation> operations_;  // stable addresses
  Operation* free_operations_ = nullptr;
  std::deque<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  const Operation* awaited_ = nullptr;  // what wait() is waiting for; errors name it
  bool failed_ = false;
  bool told_by_peer_ = false;
  bool peers_told_ = false;
  bool subordinate_ = false;
  int failed_peer_ = -1;
  std::string failure_;
  std::string cause_;  // of the failure, without who waited for what
};

}  // namespace ringspan
