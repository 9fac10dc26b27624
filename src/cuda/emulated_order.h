// StreamOrder: notices when two streams of the emulated device touch the same memory and nothing says which comes first,
// whatever the order in which they happen to run.
//
// Every operation has a place in its stream and knows how far the other stream had come when an event last said so. Two
// operations are in order if one of them knows the other; else they must not touch the same bytes, unless both read. The check
// happens when the second of them runs, so that a missing event is noticed in every run, not now and then.
//
// Memory of devices that nothing copies to beside launches is not watched: start() begins it. Thread safety: any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda/schedule.h"

namespace ringspan::cuda {

class StreamOrder {
 public:
  enum Stream : int { kCompute, kCopies };
  struct Point {
    Stream stream = kCompute;
    std::uint64_t index = 0;  // in its stream, from 1
    std::uint64_t known = 0;  // of the other stream
  };

  void start();
  // An operation is enqueued.
  Point issue(Stream stream);
  // An event: what is enqueued on `later` from now on knows all that is on `earlier`. Returns how much that is.
  std::uint64_t signal(Stream earlier, Stream later);
  // The event is over: operations up to `known` are known to all that still runs on the other stream.
  void forget(Stream stream, std::uint64_t known);
  // The operation runs. Throws std::logic_error where it is out of order.
  void note(const Point& point, const std::vector<Access>& accesses);

 private:
  struct Ran {
    Point point;
    std::vector<Access> accesses;
  };
  std::mutex mutex_;
  bool started_ = false;
  std::uint64_t issued_[2] = {0, 0};
  std::uint64_t known_[2] = {0, 0};  // by each stream, of the other
  std::vector<Ran> ran_[2];
};

}  // namespace ringspan::cuda
