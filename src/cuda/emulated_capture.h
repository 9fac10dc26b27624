// EmulatedCapture: what a stream capture, as a CUDA graph begins with, is on the emulated device. While it is active, work is
// written down instead of done, and what CUDA forbids then throws: waiting for the stream, and asking about or recording an
// event that outlives the capture. replay() does the work as it was written down: pointers as they were, contents as they are.
//
// Thread safety: one thread, that of the runtime it was given to.
#pragma once

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

  void replay() const {
    for (const auto& step : work) step();
  }
};

}  // namespace ringspan::cuda
