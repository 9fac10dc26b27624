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
};

// Makes a stream on a rank's device; a duplicate of a communicator needs another one.
using DeviceStreamFactory = std::function<std::unique_ptr<DeviceStream>()>;

}  // namespace ringspan
