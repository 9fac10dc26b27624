// Ranks as threads: a channel per ordered pair holds the side that posted first; the side that posts second copies: at once in
// host memory, on its stream where one of the buffers is memory of a device. For a side that posted in the order of a stream
// the message is complete when the copy is enqueued: behind the point where that side posted, and before the point that its
// stream waits for in the end. The other points of a stream are asked about, by whoever looks.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "comm/rounds.h"
#include "comm/shared_points.h"
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
  StreamMessages* on_streams() override { return stream_ != nullptr ? &on_streams_ : nullptr; }

  // A copy that a device makes, until somebody has seen that it is done.
  struct DeviceCopy {
    DeviceStream* stream = nullptr;
    std::uint64_t event = 0;
    Operation* sides[2] = {};  // null: posted in the order of a stream
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
  class OnStreams final : public StreamMessages {
   public:
    explicit OnStreams(ThreadTransport& transport) : transport_(transport) {}
    Request post(void* stream, std::uint64_t round, std::span<const Message> batch) override;
    void wait(void* stream, Request request, Seconds deadline) override;

   private:
    ThreadTransport& transport_;
  };

  void check_batch(std::uint64_t round, std::span<const Message> batch) override;
  void start(Operation& operation) override;
  void pump() override;
  void block(TimePoint until) override;
  TimePoint last_sign_of_life(int peer) const override;
  bool has_left(int peer) const override;
  void tell_peers(const std::string& cause) override;
  void withdraw() override;
  std::unique_ptr<Communicator> make_duplicate() override;

  void copy(Channel& channel, std::unique_lock<std::mutex>& lock, Operation& send, Operation& receive);
  SharedPoint& record_point(int followers, void* stream);
  void begin_device_copy(Channel& channel, Operation& send, Operation& receive);
  static bool end_device_copies(Channel& channel, bool withdrawn);
  static void end(Operation& operation);
  bool end_device_copies();
  void await_enqueued_copies();
  void show_life();

  std::shared_ptr<ThreadWorld> world_;
  DeviceStreamFactory make_stream_;
  std::unique_ptr<DeviceStream> stream_;
  OnStreams on_streams_{*this};
  // Of the batch that is posted in the order of a stream, or null.
  void* posting_stream_ = nullptr;
  SharedPoint* posted_ = nullptr;
  int posting_ = 0;
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
    SharedPoints points;             // of the rank, for the others
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
  if (posting_stream_ != nullptr) {
    if (posted_ == nullptr) posted_ = &record_point(posting_, posting_stream_);
    operation.before = posted_;
  }
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
  lock.lock();
  --channel.copying;
  channel.idle.notify_all();
  end(send);
  end(receive);
}

Request ThreadTransport::OnStreams::post(void* stream, std::uint64_t round, std::span<const Message> batch) {
  ThreadTransport& self = transport_;
  if (stream == nullptr) {
    throw InvalidArgument(fmt::format("{}{}: the stream is null; the default stream of CUDA is cudaStreamLegacy", self.prefix(),
                                      round_name(round)));
  }
  self.posting_stream_ = stream;
  self.posting_ = static_cast<int>(batch.size());
  self.posted_ = nullptr;
  const auto reset = [](ThreadTransport* transport) { transport->posting_stream_ = nullptr; };
  const std::unique_ptr<ThreadTransport, decltype(reset)> until_return(&self, reset);
  return self.Transport::post(round, batch);
}

void ThreadTransport::check_batch(std::uint64_t round, std::span<const Message> batch) {
  if (posting_stream_ == nullptr) return;
  for (const Message& message : batch) {
    if (stream_->holds(message.data)) continue;
    throw InvalidArgument(fmt::format("{}{}: a message in the order of a stream lies at {}, which is not memory of {}",
                                      prefix(), round_name(round), fmt::ptr(message.data), stream_->name()));
  }
}

void ThreadTransport::OnStreams::wait(void* stream, Request request, Seconds deadline) {
  transport_.wait_for(request, deadline, true, [&](Operation& operation) {
    transport_.stream_->follow(*operation.after->point, stream);
    operation.after->followers.fetch_sub(1, std::memory_order_release);
  });
}

SharedPoint& ThreadTransport::record_point(int followers, void* stream) {
  SharedPoint& point = world_->endpoint(rank()).points.take(*stream_, followers);
  stream_->record(*point.point, stream);
  return point;
}

// Enters and leaves with the channel locked; `copying` keeps buffers from being withdrawn until the copy was seen to end, for
// the sides that wait on the host.
void ThreadTransport::begin_device_copy(Channel& channel, Operation& send, Operation& receive) {
  Operation* const sides[] = {&send, &receive};
  const int on_streams = (send.before != nullptr ? 1 : 0) + (receive.before != nullptr ? 1 : 0);
  SharedPoint* done = nullptr;
  const auto enqueue = [&] {
    for (const Operation* side : sides) {
      if (side->before == nullptr) continue;
      stream_->follow(*side->before->point, stream_->handle());
      side->before->followers.fetch_sub(1, std::memory_order_release);
    }
    stream_->copy(receive.message.data, send.message.data, send.message.bytes);
    if (on_streams > 0) done = &record_point(on_streams, stream_->handle());
  };
  if (on_streams == 2) {
    enqueue();
  } else {
    channel.copies.push_back({stream_.get(), 0, {}});
    ++channel.copying;
    try {
      enqueue();
      channel.copies.back().event = stream_->record();
    } catch (...) {
      channel.copies.pop_back();
      --channel.copying;
      throw;
    }
  }
  for (std::size_t index = 0; index < 2; ++index) {
    Operation& side = *sides[index];
    if (side.before == nullptr) {
      channel.copies.back().sides[index] = &side;
    } else {
      side.after = done;
      end(side);
    }
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
    for (Operation* side : copy.sides) {
      if (side != nullptr) end(*side);
    }
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

// The owner may free the operation from here on.
void ThreadTransport::end(Operation& operation) {
  operation.moved = operation.message.bytes;
  operation.complete.store(true, std::memory_order_release);
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
  await_enqueued_copies();
}

// Those of our messages that were posted in the order of a stream: no stream of ours has been told to wait for them.
void ThreadTransport::await_enqueued_copies() {
  bool any = false;
  try {
    for_each_outstanding([&](Operation& operation) {
      if (operation.after == nullptr) return;
      stream_->follow(*operation.after->point, stream_->handle());
      any = true;
    });
    if (!any) return;
    const std::uint64_t last = stream_->record();
    while (!stream_->is_complete(last)) std::this_thread::sleep_for(kPoll);
  } catch (const DeviceError&) {
    return;  // a failed device copies nothing more, and what is captured has not begun to
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
