#include "comm/transport.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/check.h"
#include "comm/rounds.h"

namespace ringspan {
namespace {

constexpr std::size_t kFirstSlots = 64;
constexpr int kFirstPeers = 64;          // whose messages have their place from the start; more are made as they come
constexpr std::uint32_t kSlotBits = 24;  // of a request; the rest is the slot's generation
// How long block() may sleep: a waiting rank shows a sign of life at least this often.
constexpr std::chrono::milliseconds kTick{20};

std::string describe(const Message& message, std::uint64_t round) {
  return sends(message)
             ? fmt::format("waiting to send {} bytes to rank {} in {}", message.bytes, message.peer, round_name(round))
             : fmt::format("waiting for {} bytes from rank {} in {}", message.bytes, message.peer, round_name(round));
}

}  // namespace

Transport::Transport(int rank, int size)
    : rank_(rank), size_(size), traffic_(static_cast<std::size_t>(size)), checker_(rank, size) {
  free_slots_.reserve(kFirstSlots);
  for (std::size_t i = 0; i < kFirstSlots; ++i) {
    slots_.emplace_back();
    free_slots_.push_back(static_cast<std::uint32_t>(kFirstSlots - 1 - i));
  }
  const std::size_t operations = kFirstSlots + 4 * static_cast<std::size_t>(std::min(size, kFirstPeers));
  for (std::size_t i = 0; i < operations; ++i) {
    Operation& operation = operations_.emplace_back();
    operation.next_in_batch = free_operations_;
    free_operations_ = &operation;
  }
}

Request Transport::post(std::uint64_t round, std::span<const Message> batch) {
  throw_if_failed();
  checker_.check(round, batch);
  for (const Message& message : batch) check_not_outstanding(round, message);
  check_batch(round, batch);
  pump();
  const std::uint32_t index = take_slot();
  Slot& slot = slots_[index];
  slot.round = round;
  Operation** link = &slot.first;
  for (const Message& message : batch) {
    Operation* operation = take_operation();
    operation->message = message;
    operation->round = round;
    *link = operation;
    link = &operation->next_in_batch;
  }
  slot.pending = slot.first;
  for (Operation* operation = slot.first; operation != nullptr; operation = operation->next_in_batch) start(*operation);
  return (static_cast<Request>(slot.generation) << kSlotBits) | (index + 1);
}

bool Transport::test(Request request) {
  throw_if_failed();
  Slot& slot = find(request);
  pump();
  return is_complete(slot);
}

void Transport::wait_for(Request request, Seconds deadline, bool on_stream, FunctionRef<void(Operation&)> land) {
  throw_if_failed();
  Slot& slot = find(request);
  if (slot.first != nullptr && (slot.first->before != nullptr) != on_stream) {
    throw InvalidArgument(fmt::format("{}request {} was {}posted in the order of a stream, and is waited for likewise",
                                      prefix(), request, on_stream ? "not " : ""));
  }
  if (std::isnan(deadline.count())) throw InvalidArgument(prefix() + "the deadline of wait is not a number");
  Listening listening;
  while (true) {
    awaited_ = slot.pending;
    pump();
    if (is_complete(slot)) break;
    listening.look();
    const TimePoint expiry = check_peers(slot.pending, listening, deadline.count());
    block(std::min(expiry, Clock::now() + kTick));
  }
  awaited_ = nullptr;
  for (Operation* operation = slot.first; operation != nullptr; operation = operation->next_in_batch) land(*operation);
  release(slot, static_cast<std::uint32_t>(request & ((1U << kSlotBits) - 1)) - 1);
}

void Transport::for_each_outstanding(FunctionRef<void(Operation&)> action) {
  for (const Slot& slot : slots_) {
    if (!slot.active) continue;
    for (Operation* operation = slot.first; operation != nullptr; operation = operation->next_in_batch) action(*operation);
  }
}

void Transport::progress() {
  throw_if_failed();
  pump();
}

void Transport::abort(const std::string& reason) noexcept {
  if (failed_) return;
  try {
    // The reason is often an error of this rank, which begins with the same words.
    const std::string what = "aborted: " + std::string(without_rank_prefix(reason, rank_, size_));
    become_failed(what, false);
    tell_and_withdraw(fmt::format("rank {} {}", rank_, what));
  } catch (...) {
    failed_ = true;
    withdraw();
  }
}

std::unique_ptr<Communicator> Transport::duplicate() {
  throw_if_failed();
  return make_duplicate();
}

void Transport::fail(std::string_view cause) {
  become_failed(cause, false);
  if (!subordinate_) tell_and_withdraw(fmt::format("rank {} failed: {}", rank_, failure_.substr(prefix().size())));
  throw CommError(failure_);
}

void Transport::fail(const Operation& operation, std::string_view cause) {
  awaited_ = &operation;
  failed_peer_ = operation.message.peer;
  fail(cause);
}

void Transport::fail_told_by_peer(const std::string& cause) {
  become_failed(cause, true);
  if (!subordinate_) tell_and_withdraw(cause);
  throw PeerFailure(failure_);
}

void Transport::fail_as(const Transport& other, const Operation* operation) {
  const std::string cause = other.cause_;
  if (other.told_by_peer_) fail_told_by_peer(cause);
  if (operation != nullptr) fail(*operation, cause);
  fail(cause);
}

void Transport::give_up(Transport& other, const std::string& cause) {
  if (!other.failed_) other.become_failed(cause, false);
  if (!other.peers_told_) other.tell_and_withdraw(cause);
}

void Transport::tell_and_withdraw(const std::string& cause) {
  peers_told_ = true;
  try {
    tell_peers(cause);
  } catch (...) {
    withdraw();
    throw;
  }
  withdraw();
}

void Transport::become_failed(std::string_view cause, bool told_by_peer) {
  RINGSPAN_CHECK(!failed_);
  failed_ = true;
  told_by_peer_ = told_by_peer;
  failure_ = prefix();
  if (awaited_ != nullptr) failure_ += describe(awaited_->message, awaited_->round) + ": ";
  failure_ += cause;
  cause_ = cause;
}

void Transport::throw_if_failed() const {
  if (!failed_) return;
  if (told_by_peer_) throw PeerFailure(failure_);
  throw CommError(failure_);
}

std::string Transport::prefix() const { return rank_prefix(rank_, size_); }

std::string Transport::mismatch_at_receiver(const Operation& receive, std::uint64_t round, std::int64_t bytes) {
  return fmt::format("message from rank {} is of {} with {} bytes; expected {} with {} bytes", receive.message.peer,
                     round_name(round), bytes, round_name(receive.round), receive.message.bytes);
}

std::string Transport::mismatch_at_sender(const Operation& send, std::uint64_t round, std::int64_t bytes) {
  return fmt::format("message to rank {} is of {} with {} bytes; rank {} expects {} with {} bytes", send.message.peer,
                     round_name(send.round), send.message.bytes, send.message.peer, round_name(round), bytes);
}

void Transport::check_not_outstanding(std::uint64_t round, const Message& message) const {
  for (const Slot& slot : slots_) {
    if (!slot.active || slot.round != round) continue;
    for (const Operation* other = slot.first; other != nullptr; other = other->next_in_batch) {
      if (other->message.peer != message.peer || other->message.direction != message.direction) continue;
      checker_.refuse_second(round, message);
    }
  }
}

Transport::Operation* Transport::take_operation() {
  if (free_operations_ == nullptr) free_operations_ = &operations_.emplace_back();
  Operation* operation = free_operations_;
  free_operations_ = operation->next_in_batch;
  operation->moved = 0;
  operation->next = nullptr;
  operation->next_in_batch = nullptr;
  operation->before = operation->after = nullptr;
  operation->complete.store(false, std::memory_order_relaxed);
  return operation;
}

std::uint32_t Transport::take_slot() {
  if (free_slots_.empty()) {
    RINGSPAN_CHECK(slots_.size() < (1U << kSlotBits) - 1);
    slots_.emplace_back();
    free_slots_.reserve(slots_.size());
    free_slots_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
  }
  const std::uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[index];
  slot.first = slot.pending = nullptr;
  slot.active = true;
  ++slot.generation;
  return index;
}

Transport::Slot& Transport::find(Request request) {
  const Request index = (request & ((1U << kSlotBits) - 1)) - 1;
  if (index >= slots_.size() || !slots_[index].active || slots_[index].generation != request >> kSlotBits) {
    throw InvalidArgument(fmt::format("{}request {} is not outstanding", prefix(), request));
  }
  return slots_[index];
}

void Transport::release(Slot& slot, std::uint32_t index) {
  while (slot.first != nullptr) {
    Operation* operation = slot.first;
    slot.first = operation->next_in_batch;
    PeerTraffic& traffic = traffic_[static_cast<std::size_t>(operation->message.peer)];
    (sends(operation->message) ? traffic.sent_bytes : traffic.received_bytes) += operation->moved;
    (sends(operation->message) ? traffic.sent_messages : traffic.received_messages) += 1;
    operation->next_in_batch = free_operations_;
    free_operations_ = operation;
  }
  slot.active = false;
  free_slots_.push_back(index);
}

bool Transport::is_complete(Slot& slot) {
  while (slot.pending != nullptr && slot.pending->complete.load(std::memory_order_acquire)) {
    slot.pending = slot.pending->next_in_batch;
  }
  return slot.pending == nullptr;
}

// Fails when a peer that an incomplete message needs has left or was silent for longer than the deadline; otherwise returns
// when the next one could be. Silence before the wait began does not count: nobody was listening.
Transport::TimePoint Transport::check_peers(const Operation* pending, const Listening& listening, double deadline) {
  const double patience = this->patience(deadline);
  double rest = std::numeric_limits<double>::infinity();
  for (const Operation* operation = pending; operation != nullptr; operation = operation->next_in_batch) {
    const int peer = operation->message.peer;
    const bool left = has_left(peer);
    if (operation->complete.load(std::memory_order_acquire)) continue;
    if (left) {
      pump();  // a rank that failed says so before it leaves
      fail(*operation, fmt::format("rank {} has left", peer));
    }
    const double silence = listening.silence(last_sign_of_life(peer)).count();
    if (silence >= patience) {
      const std::string extended = patience == deadline ? "" : fmt::format(", extended to {:.1f} s", patience);
      const std::string length = silence < 1.0 ? fmt::format("{:.2g}", silence) : fmt::format("{:.1f}", silence);
      fail(*operation, fmt::format("{} for {} s (deadline {:g} s{})", this->silence(*operation), length, deadline, extended));
    }
    rest = std::min(rest, patience - silence);
  }
  const TimePoint now = Clock::now();
  if (rest > 3600.0) return now + std::chrono::hours(1);
  return now + std::chrono::duration_cast<Clock::duration>(Seconds(rest));
}

}  // namespace ringspan
