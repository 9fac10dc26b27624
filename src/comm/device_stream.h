// DeviceStream: what a transport needs of a device to move messages that lie in its memory: a stream of its own, copies, points
// of the stream that can be asked for. Implemented by src/cuda; the transports know no device.
//
// Everything is enqueued in order and never waited for. Errors of the device are thrown as DeviceError.
// Thread safety: one thread at a time, except is_complete() and holds(), which any thread may call.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/function_ref.h"

namespace ringspan {

// A place in the order of a stream.
class StreamPoint {
 public:
  virtual ~StreamPoint() = default;
};

class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual std::string name() const = 0;  // of the device
  virtual bool holds(const void* data) const = 0;
  // What the driver calls a stream (a cudaStream_t).
  virtual void* handle() const = 0;
  // Runs the action with the device as the calling thread's current one.
  virtual void with_device(FunctionRef<void()> action) = 0;
  // Between memories of any devices, and the host's.
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;
  virtual std::uint64_t record() = 0;
  virtual bool is_complete(std::uint64_t event) = 0;

  // Of streams by their handles. A point stands for all that is enqueued on `stream`, of this device, when it is recorded; what
  // is enqueued on `stream`, of any device, after follow() comes after it. Both may be used while a stream is captured.
  virtual std::unique_ptr<StreamPoint> make_point() = 0;
  virtual void record(StreamPoint& point, void* stream) = 0;
  virtual void follow(const StreamPoint& point, void* stream) = 0;
};

// Makes a stream on a rank's device; a duplicate of a communicator needs another one.
using DeviceStreamFactory = std::function<std::unique_ptr<DeviceStream>()>;

}  // namespace ringspan
