#include "kernels/task_view.h"

#include <algorithm>

namespace ringspan::kernels {
namespace {

bool has_work(const AttendTask& task) {
  return task.batch_count > 0 && task.head_count > 0 && task.q_count > 0 && task.k_count > 0 && task.lo <= task.hi;
}

}  // namespace

Units::Units(std::span<const AttendTask> tasks, int group) {
  bool first = true;
  for (const AttendTask& task : tasks) {
    if (!has_work(task)) continue;
    const std::int64_t last_head = task.head_first + (task.head_count - 1) * task.head_step;
    const IndexRange task_batch{task.batch_first, task.batch_first + task.batch_count};
    const IndexRange task_heads{task.head_first / group, last_head / group + 1};
    if (first) {
      batch = task_batch;
      kv_heads = task_heads;
      first = false;
      continue;
    }
    batch = {std::min(batch.begin, task_batch.begin), std::max(batch.end, task_batch.end)};
    kv_heads = {std::min(kv_heads.begin, task_heads.begin), std::max(kv_heads.end, task_heads.end)};
  }
}

IndexRange heads_of_unit(const AttendTask& task, const Unit& unit, int group) {
  if (!has_work(task) || unit.batch < task.batch_first || unit.batch >= task.batch_first + task.batch_count) return {};
  return indices_between(task.head_first, task.head_step, task.head_count, unit.kv_head * group,
                         unit.kv_head * group + group - 1);
}

}  // namespace ringspan::kernels
