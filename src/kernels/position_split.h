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

// Items of work per thread: more even out what disturbs threads, but each range packs its keys again. Two even out a causal
// mask.
inline constexpr std::int64_t kItemsPerThread = 2, kManyItemsPerThread = 4;
inline constexpr std::int64_t kManyPositions = 2048;  // of a range, from which on packing is little of its work
inline constexpr std::int64_t kMinSplitTiles = 2;     // the fewest query tiles of a range

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
    const std::int64_t positions = last - first_ + 1;
    std::int64_t wanted = 1;
    if (threads > 1 && units > 0) {
      wanted = ranges(kManyItemsPerThread, units, threads);
      if (positions / wanted < kManyPositions) wanted = ranges(kItemsPerThread, units, threads);
    }
    count_ = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, positions / least));
    size_ = ceil_div(positions, count_);
  }
  std::int64_t count() const { return count_; }
  // Later positions first: under a causal mask they are the long ones.
  Positions at(std::int64_t index) const {
    const std::int64_t begin = first_ + (count_ - 1 - index) * size_;
    return {begin, begin + size_ - 1};
  }

 private:
  // Of each unit, so that every thread has as many items, `items` at least.
  static std::int64_t ranges(std::int64_t items, std::int64_t units, std::int64_t threads) {
    std::int64_t count = ceil_div(items * threads, units);
    while (units * count % threads != 0) ++count;
    return count;
  }

  std::int64_t first_ = 0, size_ = 0, count_ = 1;
};

}  // namespace ringspan::kernels
