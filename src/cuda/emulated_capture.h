// EmulatedCapture: what tests see of an emulated device, and what a stream capture, as a CUDA graph begins with, is on the
// emulated device. While it is active, work is written down instead of done, and what CUDA forbids then throws: waiting for the
// stream, and asking about or recording an event that outlives the capture. replay() does the work as it was written down:
// pointers as they were, contents as they are.
//
// Thread safety: one thread, that of the runtime it was given to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace ringspan::cuda {

struct EmulatedCapture {
  bool active = false;
  std::vector<std::function<void()>> work;
  // Of the runtime since it was made, whether captured or not.
  std::int64_t waits = 0;
  std::int64_t allocations = 0;
  // Bytes that are allocated now, and the most that were: of the device, and of pinned host memory.
  struct Bytes {
    std::int64_t now = 0, most = 0;
    void add(std::int64_t bytes) { most = std::max(most, now += bytes); }
  };
  Bytes device, host;
  // Copied beside the kernels, from pinned host memory and to it.
  std::int64_t copied_to_device = 0, copied_to_host = 0;
  // Events by which one stream waits for the other: counted from 0. The one of this number is forgotten (a planted bug).
  std::int64_t events = 0;
  std::int64_t forgotten_event = -1;

  void replay() const {
    for (const auto& step : work) step();
  }
};

}  // namespace ringspan::cuda
