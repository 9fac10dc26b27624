// What the drivers of all kernels share: which keys a row sees, and how a list of tasks is cut into units of work.
//
// A unit is one (batch item, kv head): all the tasks that touch it, in list order, with all the query heads that read it.
// Rows of state, dq, dk and dv of different units are never the same memory, so units may run in any order on any thread.
// Pure integer arithmetic; no allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/arithmetic.h"
#include "kernels/attend.h"

namespace ringspan::kernels {

struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  constexpr bool empty() const { return begin >= end; }
  constexpr std::int64_t size() const { return end - begin; }
};

using internal::ceil_div;

// Indices c in [0, count) with low <= first + c * step <= high.
constexpr IndexRange indices_between(std::int64_t first, std::int64_t step, std::int64_t count, std::int64_t low,
                                     std::int64_t high) {
  if (step < 1) step = 1;  // of a progression with one element at most
  IndexRange range{low - first, high - first + 1};
  if (range.begin < 0) range.begin = 0;
  if (step != 1) {  // divisions take long on a GPU, most of all of negative or large numbers
    if (range.begin != 0) range.begin = ceil_div(range.begin, step);
    range.end = range.end <= 0 ? 0 : range.end > (count - 1) * step ? count : ceil_div(range.end, step);
  }
  if (range.end > count) range.end = count;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

// The keys (indices into k) that query index `row` sees. Its ends never decrease as row grows, while it is not empty.
constexpr IndexRange keys_of_row(const AttendTask& task, std::int64_t row) {
  const std::int64_t i = task.q_first + row * task.q_step;
  return indices_between(task.k_first, task.k_step, task.k_count, i + task.lo, i + task.hi);
}

// The queries (indices into q) that may see key index `key`.
constexpr IndexRange queries_of_key(const AttendTask& task, std::int64_t key) {
  const std::int64_t j = task.k_first + key * task.k_step;
  return indices_between(task.q_first, task.q_step, task.q_count, j - task.hi, j - task.lo);
}

// The queries (indices into q) of positions [first, last] that may see a key of [keys.begin, keys.end).
constexpr IndexRange rows_of_keys(const AttendTask& task, IndexRange keys, std::int64_t first, std::int64_t last) {
  const std::int64_t low = task.k_first + keys.begin * task.k_step - task.hi;
  const std::int64_t high = task.k_first + (keys.end - 1) * task.k_step - task.lo;
  return indices_between(task.q_first, task.q_step, task.q_count, low > first ? low : first, high < last ? high : last);
}

struct Unit {
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
};

// The smallest box of (batch item, kv head) that holds all tasks, numbered batch-major.
struct Units {
  IndexRange batch;
  IndexRange kv_heads;
  Units(std::span<const AttendTask> tasks, int group);
  std::int64_t count() const { return batch.size() * kv_heads.size(); }
  Unit at(std::int64_t index) const {
    return {batch.begin + index / kv_heads.size(), kv_heads.begin + index % kv_heads.size()};
  }
};

// The heads t of a task (query head head_first + t * head_step) that belong to the unit; empty where it has none.
IndexRange heads_of_unit(const AttendTask& task, const Unit& unit, int group);

// Row `row` of head t of the task's batch item; strides in elements.
template <typename T>
T* row_of(const Rows& rows, std::int64_t batch, std::int64_t t, std::int64_t row = 0) {
  return static_cast<T*>(rows.data) + batch * rows.batch_stride + t * rows.head_stride + row * rows.row_stride;
}
template <typename T>
T* row_of(const KeyRows& rows, std::int64_t batch, std::int64_t head_index, std::int64_t row = 0) {
  return static_cast<T*>(rows.data) + batch * rows.batch_stride + head_index * rows.head_stride + row * rows.row_stride;
}
constexpr std::int64_t kv_index(const AttendTask& task, std::int64_t kv_head) {
  const std::int64_t step = task.kv_head_step < 1 ? 1 : task.kv_head_step;
  return (kv_head - task.kv_head_first) / step;
}

}  // namespace ringspan::kernels
