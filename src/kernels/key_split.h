// KeySplit: few queries and many keys. The keys of a task are cut into parts that threads compute apart, each into a partial
// state of its own; the states are then merged into the rows in the order of the parts.
//
// What is cut, and where, depends on the task alone: the same bits for any number of threads. Partial states lie in scratch,
// one per thread, so that scratch does not depend on the number of rows or parts: a thread merges a part before it begins
// another. Thread safety: compute() may be called for different slots at a time. No allocation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {

inline constexpr std::int64_t kSplitRows = 192;      // a task with more rows per kv head is not cut
inline constexpr std::int64_t kSplitParts = 64;      // of all units of a task together, at most
inline constexpr std::int64_t kSplitMinKeys = 2048;  // of a part, at least

class KeySplit {
 public:
  // `multiple`: parts begin at multiples of it, in keys of the task.
  KeySplit(const AttendTask& task, const AttendShape& shape, std::int64_t multiple);

  static std::int64_t state_bytes(const AttendShape& shape);  // of one partial state, a multiple of 64

  // Parts per unit; 1: the task is not to be cut.
  std::int64_t parts() const { return parts_; }
  // All parts of all units, those of a unit one after the other.
  std::int64_t count() const { return parts_ * units_.count(); }
  Unit unit(std::int64_t index) const { return units_.at(index / parts_); }

  // Part `index` as a task of one unit, with the partial state at `state` and without results.
  AttendTask part(std::int64_t index, std::byte* state) const;
  // Makes the state of a part one that has seen nothing.
  void clear(const AttendTask& part) const;
  // The rows of part `index` take in its state.
  void merge(std::int64_t index, const AttendTask& part) const;

 private:
  const AttendTask& task_;
  const AttendShape& shape_;
  Units units_;
  IndexRange keys_;  // that the queries see
  std::int64_t parts_ = 1, part_keys_ = 0;
};

}  // namespace ringspan::kernels
