// PositionSplit: few units and many queries. The positions of all queries of a list of tasks are cut into ranges, which threads
// compute apart; a row's result does not depend on where. Pure integer arithmetic; no allocation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/attend.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {

// Ranges per thread where units alone do not fill the threads, and the fewest query tiles of one.
inline constexpr std::int64_t kItemsPerThread = 4;
inline constexpr std::int64_t kMinSplitTiles = 2;

struct Positions {
  std::int64_t first, last;
  static Positions all() {
    return {std::numeric_limits<std::int64_t>::min() / 4, std::numeric_limits<std::int64_t>::max() / 4};
  }
};

class PositionSplit {
 public:
  // `least`: positions of a range, unless there is only one.
  PositionSplit(std::span<const AttendTask> tasks, std::int64_t units, int threads, std::int64_t least) {
    first_ = std::numeric_limits<std::int64_t>::max();
    std::int64_t last = std::numeric_limits<std::int64_t>::min();
    for (const AttendTask& task : tasks) {
      if (task.q_count <= 0) continue;
      first_ = std::min(first_, task.q_first);
      last = std::max(last, task.q_first + (task.q_count - 1) * task.q_step);
    }
    if (last < first_) return;
    const std::int64_t wanted = threads == 1 || units <= 0 ? 1 : ceil_div(kItemsPerThread * threads, units);
    count_ = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, (last - first_ + 1) / least));
    size_ = ceil_div(last - first_ + 1, count_);
  }
  std::int64_t count() const { return count_; }
  // Later positions first: under a causal mask they are the long ones.
  Positions at(std::int64_t index) const {
    const std::int64_t begin = first_ + (count_ - 1 - index) * size_;
    return {begin, begin + size_ - 1};
  }

 private:
  std::int64_t first_ = 0, size_ = 0, count_ = 1;
};

}  // namespace ringspan::kernels
