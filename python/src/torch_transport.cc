#include "torch_transport.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "comm/rounds.h"
#include "ringspan/error.h"

namespace nb = nanobind;

namespace ringspan::python {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t now_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Where tags select (gloo), a message whose ends differ in round or size is never matched and ends at the deadline: gloo ends
// the whole process when a message is longer than its buffer. 30 bits, the upper one set: out of the way of the user's tags.
std::int64_t tag_of(std::uint64_t round, std::int64_t bytes) {
  std::uint64_t hash = round * 0x9E3779B97F4A7C15U ^ (static_cast<std::uint64_t>(bytes) + 1) * 0xC2B2AE3D27D4EB4FU;
  hash ^= hash >> 29;
  hash *= 0xBF58476D1CE4E5B9U;
  return static_cast<std::int64_t>((hash >> 35) | (std::uint64_t{1} << 29));
}

std::string text_of(const nb::python_error& error) { return nb::str(error.value()).c_str(); }

}  // namespace

TorchTransport::TorchTransport(int rank, int size, nb::object post, nb::object tell)
    : Transport(rank, size), post_(std::move(post)), tell_(std::move(tell)), life_(static_cast<std::size_t>(size)) {
  for (auto& life : life_) life = now_nanoseconds();
  last_event_ = now_nanoseconds();
}

TorchTransport::~TorchTransport() { withdraw(); }

void TorchTransport::completed(std::uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = outstanding_.find(id);
    if (found == outstanding_.end()) return;  // withdrawn
    Operation& operation = *found->second.operation;
    const char* const copy = found->second.copy;
    if (copy != nullptr && operation.message.direction == Message::Direction::receive) {
      std::memcpy(operation.message.data, copy, static_cast<std::size_t>(operation.message.bytes));
    }
    outstanding_.erase(found);
    show_life(operation.message.peer);
    operation.moved = operation.message.bytes;
    operation.complete.store(true, std::memory_order_release);
    ++signals_;
  }
  last_event_ = now_nanoseconds();
  changed_.notify_one();
}

void TorchTransport::message_failed(std::uint64_t id, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = outstanding_.find(id);
    if (found == outstanding_.end() || !failure_.empty()) return;
    failure_ = fmt::format("lost the connection to rank {}: {}", found->second.operation->message.peer, text);
    ++signals_;
  }
  changed_.notify_one();
}

void TorchTransport::told_by_peer(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (told_.empty()) told_ = text;
    ++signals_;
  }
  changed_.notify_one();
}

void TorchTransport::peer_alive(int peer) {
  if (peer >= 0 && peer < size()) show_life(peer);
}

double TorchTransport::quiet_seconds() const { return static_cast<double>(now_nanoseconds() - last_event_.load()) * 1e-9; }

std::vector<int> TorchTransport::outstanding_peers() const {
  const std::lock_guard lock(mutex_);
  std::vector<bool> named(static_cast<std::size_t>(size()));
  for (const auto& [id, entry] : outstanding_) named[static_cast<std::size_t>(entry.operation->message.peer)] = true;
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (named[static_cast<std::size_t>(peer)]) peers.push_back(peer);
  }
  return peers;
}

void TorchTransport::start(Operation& operation) {
  Posted posted{operation.message.direction == Message::Direction::send,
                operation.message.peer,
                operation.message.data,
                operation.message.bytes,
                operation.round,
                0};
  {
    const std::lock_guard lock(mutex_);
    posted.id = ++last_id_;
    outstanding_.emplace(posted.id, Outstanding{&operation, nullptr});
  }
  batch_.push_back(posted);
  if (operation.next_in_batch == nullptr) hand_over();
}

nb::object TorchTransport::memory_of(const Posted& posted) {
  auto* const data = static_cast<char*>(posted.data);
  if (posted.round < kPlanRoundsEnd) return nb::steal(PyMemoryView_FromMemory(data, posted.bytes, PyBUF_WRITE));
  nb::object copy = nb::steal(PyByteArray_FromStringAndSize(posted.send ? data : nullptr, posted.bytes));
  if (!copy.is_valid()) throw nb::python_error();
  const std::lock_guard lock(mutex_);
  outstanding_.at(posted.id).copy = PyByteArray_AS_STRING(copy.ptr());
  return copy;
}

// One call for the whole batch: transports without tags need its messages together.
void TorchTransport::hand_over() {
  std::string failure;
  {
    const nb::gil_scoped_acquire gil;
    try {
      nb::list list;
      for (const Posted& p : batch_) {
        const nb::object memory = memory_of(p);
        list.append(nb::make_tuple(p.send, p.peer, memory, tag_of(p.round, p.bytes), p.id));
      }
      post_(list);
    } catch (const nb::python_error& error) {
      batch_.clear();
      if (!error.matches(PyExc_Exception)) interrupted(error);
      failure = text_of(error);
      if (failure.empty()) failure = "the process group refused a message";
    }
  }
  batch_.clear();
  last_event_ = now_nanoseconds();
  if (!failure.empty()) fail(failure);
}

void TorchTransport::pump() {
  calls_.fetch_add(1, std::memory_order_relaxed);
  std::string failure;
  std::string told;
  {
    const std::lock_guard lock(mutex_);
    seen_ = signals_;
    if (failure_.empty() && told_.empty()) return;
    failure = failure_;
    told = told_;
  }
  if (!told.empty()) fail_told_by_peer(told);
  fail(failure);
}

void TorchTransport::block(TimePoint until) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, until, [&] { return signals_ != seen_; });
  }
  if (Clock::now() - signals_checked_ < std::chrono::milliseconds(100)) return;
  signals_checked_ = Clock::now();
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  interrupted(nb::python_error());
}

void TorchTransport::interrupted(const nb::python_error& error) {
  abort("interrupted: " + text_of(error));  // buffers of what is under way go with the exception
  throw nb::python_error(error);
}

void TorchTransport::show_life(int peer) {
  life_[static_cast<std::size_t>(peer)].store(now_nanoseconds(), std::memory_order_relaxed);
}

Transport::TimePoint TorchTransport::last_sign_of_life(int peer) const {
  return TimePoint(std::chrono::nanoseconds(life_[static_cast<std::size_t>(peer)].load(std::memory_order_relaxed)));
}

void TorchTransport::tell_peers(const std::string& cause) {
  const nb::gil_scoped_acquire gil;
  try {
    tell_(nb::str(cause.c_str()));
  } catch (const nb::python_error& error) {
    if (error.matches(PyExc_Exception)) return;  // the interpreter is going down; the peers notice that we are gone
    tell_peers(cause);                           // a signal's handler, which was due in between
    throw;
  }
}

void TorchTransport::withdraw() {
  const std::lock_guard lock(mutex_);
  outstanding_.clear();
}

std::unique_ptr<Communicator> TorchTransport::make_duplicate() {
  throw Unsupported(prefix() + "a communicator over torch.distributed has no duplicates; make another process group");
}

}  // namespace ringspan::python
