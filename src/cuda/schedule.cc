#include "cuda/schedule.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "kernels/task_view.h"

namespace ringspan::cuda {
namespace {

using kernels::AttendTask;

struct Arithmetic {
  std::int64_t first, step, count;
  std::int64_t last() const { return first + (count - 1) * step; }
};

// Whether two progressions share an element: the first common one at or above both begins, by extended Euclid.
bool intersect(const Arithmetic& a, const Arithmetic& b) {
  const std::int64_t low = std::max(a.first, b.first);
  const std::int64_t high = std::min(a.last(), b.last());
  if (low > high) return false;
  const std::int64_t step_a = std::max<std::int64_t>(a.step, 1);
  const std::int64_t step_b = std::max<std::int64_t>(b.step, 1);
  const std::int64_t divisor = std::gcd(step_a, step_b);
  if ((b.first - a.first) % divisor != 0) return false;
  // Elements of a at or above low; one in step_b / divisor of them is in b.
  const kernels::IndexRange range = kernels::indices_between(a.first, step_a, a.count, low, high);
  const std::int64_t period = step_b / divisor;
  for (std::int64_t index = range.begin; index < range.end && index < range.begin + period; ++index) {
    if ((a.first + index * step_a - b.first) % step_b == 0) return true;
  }
  return false;
}

Arithmetic rows_of(const AttendTask& task, Owner owner) {
  return owner == Owner::key_gradients ? Arithmetic{task.k_first, task.k_step, task.k_count}
                                       : Arithmetic{task.q_first, task.q_step, task.q_count};
}

// Heads of the rows that are written: query heads, or the hull of the kv heads.
Arithmetic heads_of(const AttendTask& task, Owner owner, int group) {
  if (owner != Owner::key_gradients) return {task.head_first, task.head_step, task.head_count};
  const std::int64_t first = task.head_first / group;
  return {first, 1, (task.head_first + (task.head_count - 1) * task.head_step) / group - first + 1};
}

bool conflict(const AttendTask& a, const AttendTask& b, Owner owner, int group) {
  return intersect({a.batch_first, 1, a.batch_count}, {b.batch_first, 1, b.batch_count}) &&
         intersect(heads_of(a, owner, group), heads_of(b, owner, group)) && intersect(rows_of(a, owner), rows_of(b, owner));
}

using View = std::tuple<const void*, std::int64_t, std::int64_t, std::int64_t>;
template <typename Rows>
View view_of(const Rows& rows) {
  return {rows.data, rows.batch_stride, rows.row_stride, rows.head_stride};
}

// What must agree within a group: the rows, and the memory they are in.
auto key_of(const AttendTask& task, Owner owner) {
  const Arithmetic rows = rows_of(task, owner);
  const bool keys = owner == Owner::key_gradients;
  return std::make_tuple(task.batch_first, task.batch_count, task.head_first, task.head_step, task.head_count, rows.first,
                         rows.step, rows.count, keys ? task.kv_head_first : 0, keys ? task.kv_head_step : 0,
                         owner == Owner::state             ? view_of(task.acc)
                         : owner == Owner::query_gradients ? view_of(task.dq)
                                                           : view_of(task.dk),
                         owner == Owner::state ? view_of(task.m)
                         : keys                ? view_of(task.dv)
                                               : View{});
}

bool has_work(const AttendTask& task) {
  return task.batch_count > 0 && task.head_count > 0 && task.q_count > 0 && task.k_count > 0 && task.lo <= task.hi;
}

// Later owners of pairs whose intervals overlap: edges[later] lists the earlier ones. The intervals need not be sorted.
template <typename Interval, typename Visit>
void for_overlaps(std::vector<Interval>& intervals, Visit&& visit) {
  std::sort(intervals.begin(), intervals.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::vector<std::size_t> active;
  for (std::size_t index = 0; index < intervals.size(); ++index) {
    std::erase_if(active, [&](std::size_t other) { return intervals[other].end <= intervals[index].begin; });
    for (const std::size_t other : active) visit(intervals[other], intervals[index]);
    active.push_back(index);
  }
}

std::vector<std::int64_t> waves_of_edges(const std::vector<std::vector<std::int64_t>>& earlier) {
  std::vector<std::int64_t> waves(earlier.size(), 0);
  for (std::size_t index = 0; index < earlier.size(); ++index) {
    for (const std::int64_t other : earlier[index]) {
      waves[index] = std::max(waves[index], waves[static_cast<std::size_t>(other)] + 1);
    }
  }
  return waves;
}

struct Hull {
  std::int64_t owner, begin, end;
};

std::vector<std::int64_t> waves_of_groups(std::span<const AttendTask> heads, Owner owner, int group) {
  std::vector<Hull> hulls;
  for (std::size_t index = 0; index < heads.size(); ++index) {
    const Arithmetic rows = rows_of(heads[index], owner);
    hulls.push_back({static_cast<std::int64_t>(index), rows.first, rows.last() + 1});
  }
  std::vector<std::vector<std::int64_t>> earlier(heads.size());
  for_overlaps(hulls, [&](const Hull& a, const Hull& b) {
    const auto [low, high] = std::minmax(a.owner, b.owner);
    const auto at = [&](std::int64_t index) -> const AttendTask& { return heads[static_cast<std::size_t>(index)]; };
    if (conflict(at(low), at(high), owner, group)) earlier[static_cast<std::size_t>(high)].push_back(low);
  });
  return waves_of_edges(earlier);
}

}  // namespace

Schedule schedule_attend(std::span<const AttendTask> tasks, Owner owner, int group, int tile_rows) {
  std::map<decltype(key_of(tasks[0], owner)), std::size_t> known;
  std::vector<std::vector<std::int64_t>> members;
  std::vector<AttendTask> heads;  // the first task of each group
  for (std::size_t index = 0; index < tasks.size(); ++index) {
    if (!has_work(tasks[index])) continue;
    const auto [place, is_new] = known.try_emplace(key_of(tasks[index], owner), members.size());
    if (is_new) {
      members.emplace_back();
      heads.push_back(tasks[index]);
    }
    members[place->second].push_back(static_cast<std::int64_t>(index));
  }
  const std::vector<std::int64_t> waves = waves_of_groups(heads, owner, group);
  std::vector<std::size_t> by_wave(heads.size());
  std::iota(by_wave.begin(), by_wave.end(), std::size_t{0});
  std::stable_sort(by_wave.begin(), by_wave.end(), [&](std::size_t a, std::size_t b) { return waves[a] < waves[b]; });

  Schedule schedule;
  for (const std::size_t index : by_wave) {
    const auto wave = static_cast<std::size_t>(waves[index]);
    if (wave == schedule.waves.size()) schedule.waves.push_back({static_cast<std::int64_t>(schedule.groups.size()), 0, 0});
    Wave& current = schedule.waves[wave];
    Group result;
    result.first_block = current.blocks;
    result.tiles = (rows_of(heads[index], owner).count + tile_rows - 1) / tile_rows;
    result.heads = heads_of(heads[index], owner, group).count;
    result.first_task = static_cast<std::int64_t>(schedule.order.size());
    result.task_count = static_cast<std::int64_t>(members[index].size());
    schedule.order.insert(schedule.order.end(), members[index].begin(), members[index].end());
    current.blocks += result.tiles * result.heads * heads[index].batch_count;
    ++current.count;
    schedule.groups.push_back(result);
  }
  return schedule;
}

std::vector<std::int64_t> waves_of(std::vector<Access> accesses, std::int64_t count) {
  std::vector<std::vector<std::int64_t>> earlier(static_cast<std::size_t>(count));
  for_overlaps(accesses, [&](const Access& a, const Access& b) {
    if (a.owner == b.owner || !(a.writes || b.writes)) return;
    const auto [low, high] = std::minmax(a.owner, b.owner);
    earlier[static_cast<std::size_t>(high)].push_back(low);
  });
  return waves_of_edges(earlier);
}

RowOperands operands_of(RowOp op, int width) {
  switch (op) {
    case RowOp::fill:
      return {{width}, 0b1};
    case RowOp::copy:
    case RowOp::add:
      return {{width, width}, 0b10};
    case RowOp::merge:
      return {{width, 1, 1, 1, width}, 0b11100};
    case RowOp::merge_states:
      return {{1, 1, width, 1, 1, width}, 0b111000};
    case RowOp::finalize:
      return {{1, 1, width, width, 1, width}, 0b111000};
    case RowOp::delta:
      return {{width, width, 1, 1}, 0b100};
  }
  return {};
}

void add_accesses(const kernels::RowTask& task, std::int64_t index, unsigned written, std::span<const int> widths,
                  std::vector<Access>& accesses) {
  for (std::size_t operand = 0; operand < widths.size(); ++operand) {
    const kernels::Operand& view = task.operands[operand];
    if (view.data == nullptr || task.batch_count * task.row_count * task.head_count == 0) continue;
    std::int64_t low = 0;
    std::int64_t high = widths[operand];
    for (const auto& [stride, extent] :
         {std::pair{view.batch_stride, task.batch_count}, std::pair{view.row_stride, task.row_count},
          std::pair{view.head_stride, task.head_count}}) {
      (stride < 0 ? low : high) += stride * (extent - 1);
    }
    const auto base = reinterpret_cast<std::uintptr_t>(view.data);
    const auto size = size_of(view.dtype);
    accesses.push_back({index, base + static_cast<std::uintptr_t>(low * size), base + static_cast<std::uintptr_t>(high * size),
                        (written >> operand & 1U) != 0});
  }
}

}  // namespace ringspan::cuda
