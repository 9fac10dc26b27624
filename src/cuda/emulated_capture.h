// EmulatedCapture: what tests see of an emulated device. EmulatedGraph: what a stream capture, as a CUDA graph begins with, is
// on emulated devices. While it captures, work is written down instead of done, and what CUDA forbids then throws: waiting for
// the stream, and asking about or recording an event that outlives the capture. Other streams join it when they follow a point
// of it. replay() does the work as it was written down: pointers as they were, contents as they are.
//
// Thread safety: of a graph, any thread, but for replay(); of what is counted, one thread, that of the runtime it was given to.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace ringspan::cuda {

class EmulatedGraph {
 public:
  void begin() { capturing_ = true; }
  // Throws std::logic_error, as CUDA refuses to end a capture, where nobody waits for the last work of a stream that joined.
  void end();
  bool is_capturing() const { return capturing_; }
  std::size_t works() const;  // pieces of work that were written down: launches and copies

  void add(const void* stream, std::function<void()> work);
  std::uint64_t record(const void* stream);  // a point, from 1
  void follow(const void* stream, std::uint64_t point);
  // Step by step, of a stream that is drawn from those whose next one waits for nothing that is still to come: so that a
  // missing point shows.
  void replay(std::uint64_t seed = 1) const;

 private:
  struct Step {
    const void* stream = nullptr;
    std::function<void()> work{};  // else one of the points
    std::uint64_t recorded = 0;
    std::uint64_t followed = 0;
  };
  std::mutex mutex_;
  std::atomic<bool> capturing_ = false;
  std::vector<Step> steps_;
  std::uint64_t points_ = 0;
};

struct EmulatedCapture {
  EmulatedGraph* graph = nullptr;  // where it outlives the runtime
  // Of the runtime since it was made, whether captured or not.
  std::int64_t waits = 0;
  std::int64_t allocations = 0;
  // Bytes that are allocated now, and the most that were: of the device, and of pinned host memory.
  struct Bytes {
    std::int64_t now = 0, most = 0;
    void add(std::int64_t bytes) { most = std::max(most, now += bytes); }
  };
  Bytes device{}, host{};
  // Copied beside the kernels, from pinned host memory and to it.
  std::int64_t copied_to_device = 0, copied_to_host = 0;
  // Events by which one stream waits for the other: counted from 0. The one of this number is forgotten (a planted bug).
  std::int64_t events = 0;
  std::int64_t forgotten_event = -1;
};

}  // namespace ringspan::cuda
