// SharedPoint: a point of one rank's stream that others wait for, from a pool of that rank. It may be recorded anew when all
// that had to wait for it have been told to.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <utility>

#include "comm/device_stream.h"

namespace ringspan {

struct SharedPoint {
  std::unique_ptr<StreamPoint> point;
  std::atomic<int> followers{0};  // that are still to come; by any thread
};

// One thread takes; points outlive the stream that made them. Cost: allocates until as many exist as are in use at a time.
class SharedPoints {
 public:
  SharedPoint& take(DeviceStream& stream, int followers) {
    for (SharedPoint& point : points_) {
      if (point.followers.load(std::memory_order_acquire) == 0) return reserve(point, followers);
    }
    std::unique_ptr<StreamPoint> made = stream.make_point();
    SharedPoint& point = points_.emplace_back();
    point.point = std::move(made);
    return reserve(point, followers);
  }

 private:
  static SharedPoint& reserve(SharedPoint& point, int followers) {
    point.followers.store(followers, std::memory_order_relaxed);
    return point;
  }
  std::deque<SharedPoint> points_;  // stable addresses
};

}  // namespace ringspan
