// Queue: where launches run. The CPU queue is synchronous; a device's is a stream. The executor treats every queue as
// asynchronous: it orders host access (communication) after launches with events.
#pragma once

#include <cstdint>
#include <memory>

#include "base/function_ref.h"

namespace ringspan {

enum class MemorySpace : std::uint8_t { host, fake_device };

// The n-th recorded point of a queue; 0 is complete from the start.
using Event = std::uint64_t;

// A launch: what to run, on resolved arguments that stay alive until a later event is complete.
struct LaunchCall {
  void (*function)(void* argument) = nullptr;
  void* argument = nullptr;
};

class Queue {
 public:
  virtual ~Queue() = default;
  virtual MemorySpace memory_space() const = 0;
  // Runs the call after everything launched before. Never fails on a CPU; throws DeviceError on a device.
  virtual void launch(LaunchCall call) = 0;
  virtual Event record() = 0;
  virtual bool is_complete(Event event) = 0;
  // Blocks until the event is complete, calling `progress` about every millisecond.
  virtual void wait(Event event, FunctionRef<void()> progress) = 0;
};

std::unique_ptr<Queue> make_cpu_queue();
// Runs launches on its own thread, later, with delays drawn from `seed`: what a device does, so that a missing event shows.
std::unique_ptr<Queue> make_fake_device_queue(std::uint64_t seed);

}  // namespace ringspan
