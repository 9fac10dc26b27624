// Communicator: the only way in which ranks meet. Public: an embedder can bring its own (see also ringspan_c.h, where it is a
// struct of callbacks).
//
// Contract
//  - Per (source, destination, round) at most one message; contiguous, never empty, the same size at both ends; both ends
//    use the same round number. Within a pair messages match in the order in which they were posted; the round number is
//    carried only to check that.
//  - post() never blocks on a peer. A posted buffer belongs to the transport until wait() of its request or abort() returns, or
//    a call has thrown CommError.
//  - wait() drives progress, returns when every message of the request is complete, and throws CommError when a peer died,
//    sent something unexpected, or showed no sign of life for longer than the deadline, counted from its last one or from the
//    begin of wait(), whichever came later. progress() is a sign of life: it is called about every millisecond while computing.
//  - After a CommError the communicator stays failed: every later call throws the same error. abort() tells the peers, and so
//    does a failure. After a DeviceError, which only messages in memory of a device can cause, the caller aborts. Wrong
//    arguments throw InvalidArgument, post nothing, and leave the communicator usable.
//  - One thread drives a communicator; duplicate() gives an independent one over the same ranks (collective call).
//  - Messages lie in host memory; in memory of a device only where takes_device_memory() says so. What such a message sends is
//    complete when it is posted, what it receives when it was waited for, as on the host. Besides, the messages of a round lie
//    all there or all in host memory, a rank posts them in one batch, and all ranks post such rounds in the same order.
//  - Messages of errors begin "rank R/P:" and name peer, round and time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace ringspan {

struct Message {
  enum class Direction : std::uint8_t { send, receive };
  Direction direction = Direction::send;
  int peer = 0;            // != rank()
  void* data = nullptr;    // read only for a send
  std::int64_t bytes = 0;  // > 0
};

// Identifies a posted batch; valid until waited for. 0 is never used.
using Request = std::uint64_t;

// What one transport has moved since it was made, counted by the transport itself.
struct PeerTraffic {
  std::int64_t sent_bytes = 0;  // payload only
  std::int64_t received_bytes = 0;
  std::int64_t sent_messages = 0;
  std::int64_t received_messages = 0;
};

class StreamMessages;

class Communicator {
 public:
  using Seconds = std::chrono::duration<double>;

  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual Request post(std::uint64_t round, std::span<const Message> batch) = 0;
  // True when the request is complete (a following wait() returns at once). Never blocks.
  virtual bool test(Request request) = 0;
  virtual void wait(Request request, Seconds deadline) = 0;
  virtual void progress() = 0;
  virtual void abort(const std::string& reason) noexcept = 0;
  virtual std::unique_ptr<Communicator> duplicate() = 0;

  // Whether messages may lie in memory of a device as `data` does; false for host memory, which is always taken.
  virtual bool takes_device_memory(const void* /*data*/) const { return false; }
  // Where such messages may also go in the order of streams; owned by the communicator. Null: they may not.
  virtual StreamMessages* on_streams() { return nullptr; }

  // Payload moved to and from each peer so far: size() entries.
  virtual std::span<const PeerTraffic> traffic() const = 0;
};

// Messages in memory of a device in the order of a stream: the host waits for peers to post, never for a device. `stream` is
// what the driver calls one (a cudaStream_t), of the device in whose memory the whole batch lies. One side of a message may do
// so while the other posts as above. One thread drives it and the communicator.
class StreamMessages {
 public:
  virtual ~StreamMessages() = default;

  // As Communicator::post(), after all that is enqueued on `stream` so far. InvalidArgument where the stream is null or a
  // message lies elsewhere.
  virtual Request post(void* stream, std::uint64_t round, std::span<const Message> batch) = 0;
  // Of such a request, and only here: returns when all its messages are enqueued, throws as Communicator::wait() does. What is
  // enqueued on `stream` from now on sees what was received, and may write over what was sent.
  virtual void wait(void* stream, Request request, Communicator::Seconds deadline) = 0;
};

}  // namespace ringspan
