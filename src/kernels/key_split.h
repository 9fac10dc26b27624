// KeySplit: few queries and many keys. The keys of a task are cut into parts that threads compute apart, each into a partial
// state of its own; the states are then merged into the rows in the order of the parts.
//
// What is cut, and where, depends on the task alone: the same bits for any number of threads. A thread computes one part of
// several neighbouring units before it merges them (an item): where their heads lie side by side in the rows of keys, tile by
// tile of all of them, so that pages and lines are read once. Partial states lie in scratch, of one item per thread, so that
// scratch does not depend on the number of rows or parts.
// Thread safety: everything is const. No allocation.
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
  // `multiple`: parts, and the tiles of an item, begin at multiples of it, in keys of the task.
  KeySplit(const AttendTask& task, const AttendShape& shape, std::int64_t multiple, int threads);

  static std::int64_t state_bytes(const AttendShape& shape);  // partial states of one item, a multiple of 64

  bool cuts() const { return part_keys_ > 0; }   // otherwise the task is to be computed as it is
  std::int64_t parts() const { return parts_; }  // per unit
  std::int64_t items() const { return ceil_div(units_.kv_heads.size(), together_) * units_.batch.size() * parts_; }

  // A part of neighbouring units. Items of the same units follow each other in the order of their parts.
  struct Item {
    std::int64_t part = 0;
    Unit first;
    std::int64_t units = 0, steps = 0;
  };
  Item item(std::int64_t index) const;

  // What is computed at a time: keys of a part as a task of one unit, with the unit's partial state in `states` and without
  // results. Of each unit the keys in order.
  struct Step {
    Unit unit;
    AttendTask task;
  };
  Step step(const Item& item, std::int64_t index, std::byte* states) const;

  // Makes the states of an item ones that have seen nothing.
  void clear(const Item& item, std::byte* states) const;
  // The rows take in the states of an item.
  void merge(const Item& item, std::byte* states) const;

 private:
  AttendTask part(const Item& item, std::int64_t unit, IndexRange keys, std::byte* states) const;
  IndexRange keys_of(const Item& item) const;

  const AttendTask& task_;
  const AttendShape& shape_;
  Units units_;
  IndexRange keys_;  // that the queries see
  std::int64_t parts_ = 1, part_keys_ = 0;
  std::int64_t together_ = 1;  // units of an item
  std::int64_t step_keys_ = 0;
  std::int64_t rows_ = 0, state_floats_ = 0;  // of a unit
};

}  // namespace ringspan::kernels
