// Ranks as threads: a channel per ordered pair holds the side that posted first; the side that posts second copies: at once in
// host memory, on its stream where one of the buffers is memory of a device.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "comm/thread_world.h"
#include "comm/transport.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

constexpr std::chrono::microseconds kPoll{50};  // of copies of devices
// A long copy shows a sign of life after each piece.
constexpr std::int64_t kCopyPiece = std::int64_t{4} << 20;

class ThreadWorld;

class ThreadTransport final : public Transport {
 public:
  // `make_stream` may be empty: no device.
  ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank, DeviceStreamFactory make_stream);
  ~ThreadTransport() override;
  bool takes_device_memory(const void* data) const override { return stream_ != nullptr && stream_->holds(data); }

  // A copy that a device makes, until somebody has seen that it is done.
  struct DeviceCopy {
    DeviceStream* stream = nullptr;
    std::uint64_t event = 0;
    Operation* send = nullptr;
    Operation* receive = nullptr;
  };

  // From one rank to another. Only one of the queues is ever non-empty. The mutex is never held during a copy.
  struct Channel {
    std::mutex mutex;
    std::condition_variable idle;
    OperationQueue sends;
    OperationQueue receives;
    int copying = 0;  // by this process's threads and by devices
    std::vector<DeviceCopy> copies;
  };

 private:
  void start(Operation& operation) override;
  void pump() override;
  void block(TimePoint until) override;
  TimePoint last_sign_of_life(int peer) const override;
  bool has_left(int peer) const override;
  void tell_peers(const std::string& cause) override;
  void withdraw() override;
  std::unique_ptr<Communicator> make_duplicate() override;

  void copy(Channel& channel, std::unique_lock<std::mutex>& lock, Operation& send, Operation& receive);
  void begin_device_copy(Channel& channel, Operation& send, Operation& receive);
  static bool end_device_copies(Channel& channel, bool withdrawn);
  bool end_device_copies();
  void show_life();

  std::shared_ptr<ThreadWorld> world_;
  DeviceStreamFactory make_stream_;
  std::unique_ptr<DeviceStream> stream_;
  bool copies_left_ = false;  // as of the last pump
  std::uint64_t seen_ = 0;    // signals seen by the last pump
  std::uint64_t duplicates_ = 0;
};

// What the ranks share. Owned by all of its transports together.
class ThreadWorld {
 public:
  // What others may touch of a rank.
  struct Endpoint {
    std::atomic<std::int64_t> life{0};  // steady clock, nanoseconds
    std::atomic<bool> left{false};
    DeviceStream* stream = nullptr;  // of the rank while its operations are in channels
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t signals = 0;
    std::string cause;  // why it must fail; empty: it need not
    bool told_by_peer = false;
  };

  explicit ThreadWorld(int size)
      : size_(size),
        endpoints_(static_cast<std::size_t>(size)),
        channels_(static_cast<std::size_t>(size) * static_cast<std::size_t>(size)) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    for (Endpoint& endpoint : endpoints_) endpoint.life = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }

  int size() const { return size_; }
  Endpoint& endpoint(int rank) { return endpoints_[static_cast<std::size_t>(rank)]; }
  ThreadTransport::Channel& channel(int from, int to) {
    return channels_[static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) + static_cast<std::size_t>(to)];
  }

  void signal(int rank) {
    Endpoint& target = endpoint(rank);
    {
      const std::lock_guard lock(target.mutex);
      ++target.signals;
    }
    target.changed.notify_one();
  }

  // Makes a rank fail at its next call. The first cause stays.
  void make_fail(int rank, const std::string& cause, bool told_by_peer) {
    Endpoint& target = endpoint(rank);
    {
      const std::lock_guard lock(target.mutex);
      ++target.signals;
      if (target.cause.empty()) {
        target.cause = cause;
        target.told_by_peer = told_by_peer;
      }
    }
    target.changed.notify_one();
  }

  // The world of the number-th duplicate, made by the first rank to ask and forgotten when all have.
  std::shared_ptr<ThreadWorld> duplicate(std::uint64_t number) {
    const std::lock_guard lock(duplicates_mutex_);
    auto& [world, taken] = duplicates_[number];
    if (world == nullptr) world = std::make_shared<ThreadWorld>(size_);
    std::shared_ptr<ThreadWorld> result = world;
    if (++taken == size_) duplicates_.erase(number);
    return result;
  }

 private:
  struct Duplicate {
    std::shared_ptr<ThreadWorld> world;
    int taken = 0;
  };

  int size_;
  std::vector<Endpoint> endpoints_;
  std::vector<ThreadTransport::Channel> channels_;
  std::mutex duplicates_mutex_;
  std::map<std::uint64_t, Duplicate> duplicates_;
};

ThreadTransport::ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank, DeviceStreamFactory make_stream)
    : Transport(rank, world->size()),
      world_(std::move(world)),
      make_stream_(std::move(make_stream)),
      stream_(make_stream_ ? make_stream_() : nullptr) {
  world_->endpoint(rank).stream = stream_.get();
}

ThreadTransport::~ThreadTransport() {
  withdraw();
  world_->endpoint(rank()).left.store(true, std::memory_order_release);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) world_->signal(peer);
  }
}

void ThreadTransport::start(Operation& operation) {
  const bool sending = operation.message.direction == Message::Direction::send;
  const int peer = operation.message.peer;
  Channel& channel = sending ? world_->channel(rank(), peer) : world_->channel(peer, rank());
  std::unique_lock lock(channel.mutex);
  OperationQueue& others = sending ? channel.receives : channel.sends;
  if (others.empty()) {
    (sending ? channel.sends : channel.receives).push(&operation);
    return;
  }
  Operation& other = *others.front();
  if (other.round != operation.round || other.message.bytes != operation.message.bytes) {
    const Operation& send = sending ? operation : other;
    const Operation& receive = sending ? other : operation;
    const std::string at_sender = mismatch_at_sender(send, receive.round, receive.message.bytes);
    const std::string at_receiver = mismatch_at_receiver(receive, send.round, send.message.bytes);
    lock.unlock();
    world_->make_fail(peer, sending ? at_receiver : at_sender, false);
    fail(sending ? at_sender : at_receiver);
  }
  others.pop();
  Operation& send = sending ? operation : other;
  Operation& receive = sending ? other : operation;
  // The other side's buffer is where that side says: its device may be one that ours does not know.
  DeviceStream* const other_stream = world_->endpoint(peer).stream;
  if (stream_ != nullptr && (stream_->holds(operation.message.data) || other_stream->holds(other.message.data))) {
    begin_device_copy(channel, send, receive);
    lock.unlock();
  } else {
    copy(channel, lock, send, receive);
  }
  world_->signal(peer);
}

// Enters and leaves with the channel locked; in between `copying` keeps both buffers from being withdrawn.
void ThreadTransport::copy(Channel& channel, std::unique_lock<std::mutex>& lock, Operation& send, Operation& receive) {
  ++channel.copying;
  lock.unlock();
  const auto* source = static_cast<const std::byte*>(send.message.data);
  auto* destination = static_cast<std::byte*>(receive.message.data);
  const std::int64_t bytes = send.message.bytes;
  for (std::int64_t at = 0; at < bytes; at += kCopyPiece) {
    std::memcpy(destination + at, source + at, static_cast<std::size_t>(std::min(kCopyPiece, bytes - at)));
    show_life();
  }
  send.moved = receive.moved = bytes;
  lock.lock();
  --channel.copying;
  channel.idle.notify_all();
  // The owners may free the operations from here on.
  send.complete.store(true, std::memory_order_release);
  receive.complete.store(true, std::memory_order_release);
}

// Enters and leaves with the channel locked; `copying` keeps both buffers from being withdrawn until the copy was seen to end.
void ThreadTransport::begin_device_copy(Channel& channel, Operation& send, Operation& receive) {
  channel.copies.push_back({stream_.get(), 0, &send, &receive});
  ++channel.copying;
  try {
    stream_->copy(receive.message.data, send.message.data, send.message.bytes);
    channel.copies.back().event = stream_->record();
  } catch (...) {
    channel.copies.pop_back();
    --channel.copying;
    throw;
  }
}

// Completes what the devices have done, whoever had begun it: neither side depends on the other to look. True: copies are left.
// A device that failed copies nothing more; `withdrawn`: then its copies end without being complete.
bool ThreadTransport::end_device_copies(Channel& channel, bool withdrawn) {
  std::size_t kept = 0;
  std::exception_ptr failure;
  for (std::size_t index = 0; index < channel.copies.size(); ++index) {
    DeviceCopy& copy = channel.copies[index];
    bool complete = false;
    bool ended = false;
    try {
      complete = copy.stream->is_complete(copy.event);
    } catch (const DeviceError&) {
      if (!withdrawn) failure = std::current_exception();  // the copy is kept, to be withdrawn
      ended = withdrawn;
    }
    if (!complete && !ended) {
      channel.copies[kept++] = copy;
      continue;
    }
    --channel.copying;
    if (!complete) continue;
    copy.send->moved = copy.receive->moved = copy.send->message.bytes;
    // The owners may free the operations from here on.
    Operation* const receive = copy.receive;
    copy.send->complete.store(true, std::memory_order_release);
    receive->complete.store(true, std::memory_order_release);
  }
  if (kept != channel.copies.size()) channel.idle.notify_all();
  channel.copies.resize(kept);
  if (failure != nullptr) std::rethrow_exception(failure);
  return kept > 0;
}

bool ThreadTransport::end_device_copies() {
  bool left = false;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    for (Channel* channel : {&world_->channel(rank(), peer), &world_->channel(peer, rank())}) {
      const std::lock_guard lock(channel->mutex);
      left = end_device_copies(*channel, false) || left;
    }
  }
  return left;
}

void ThreadTransport::show_life() {
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch());
  world_->endpoint(rank()).life.store(now.count(), std::memory_order_relaxed);
}

void ThreadTransport::pump() {
  show_life();
  copies_left_ = stream_ != nullptr && end_device_copies();
  ThreadWorld::Endpoint& self = world_->endpoint(rank());
  std::unique_lock lock(self.mutex);
  seen_ = self.signals;
  if (self.cause.empty()) return;
  const std::string cause = self.cause;
  const bool told_by_peer = self.told_by_peer;
  lock.unlock();
  if (told_by_peer) fail_told_by_peer(cause);
  fail(cause);
}

void ThreadTransport::block(TimePoint until) {
  ThreadWorld::Endpoint& self = world_->endpoint(rank());
  if (copies_left_) until = std::min(until, Clock::now() + kPoll);
  std::unique_lock lock(self.mutex);
  self.changed.wait_until(lock, until, [&] { return self.signals != seen_; });
}

Transport::TimePoint ThreadTransport::last_sign_of_life(int peer) const {
  return TimePoint(std::chrono::nanoseconds(world_->endpoint(peer).life.load(std::memory_order_relaxed)));
}

bool ThreadTransport::has_left(int peer) const { return world_->endpoint(peer).left.load(std::memory_order_acquire); }

void ThreadTransport::tell_peers(const std::string& cause) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) world_->make_fail(peer, cause, true);
  }
}

void ThreadTransport::withdraw() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    for (const bool sending : {true, false}) {
      Channel& channel = sending ? world_->channel(rank(), peer) : world_->channel(peer, rank());
      std::unique_lock lock(channel.mutex);
      (sending ? channel.sends : channel.receives).clear();
      while (channel.copying > 0) {
        if (end_device_copies(channel, true)) {
          channel.idle.wait_for(lock, kPoll);
        } else {
          channel.idle.wait(lock, [&] { return channel.copying == 0 || !channel.copies.empty(); });
        }
      }
    }
  }
}

std::unique_ptr<Communicator> ThreadTransport::make_duplicate() {
  return std::make_unique<ThreadTransport>(world_->duplicate(duplicates_++), rank(), make_stream_);
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_world_of(std::span<const DeviceStreamFactory> streams) {
  if (streams.empty()) throw InvalidArgument("ranks (0) must be at least 1");
  const auto without = std::count_if(streams.begin(), streams.end(), [](const DeviceStreamFactory& stream) { return !stream; });
  RINGSPAN_CHECK(without == 0 || without == static_cast<std::ptrdiff_t>(streams.size()));
  const auto world = std::make_shared<ThreadWorld>(static_cast<int>(streams.size()));
  std::vector<std::unique_ptr<Communicator>> result;
  result.reserve(streams.size());
  for (const DeviceStreamFactory& stream : streams) {
    result.push_back(std::make_unique<ThreadTransport>(world, static_cast<int>(result.size()), stream));
  }
  return result;
}

std::vector<std::unique_ptr<Communicator>> make_thread_world(int ranks) {
  if (ranks < 1) throw InvalidArgument(fmt::format("ranks ({}) must be at least 1", ranks));
  return make_thread_world_of(std::vector<DeviceStreamFactory>(static_cast<std::size_t>(ranks)));
}

}  // namespace ringspan
