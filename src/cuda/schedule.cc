#include "cuda/schedule.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

#include "base/check.h"
#include "cuda/row_layout.h"
#include "kernels/task_view.h"

namespace ringspan::cuda {
namespace {

using kernels::AttendTask;

struct Arithmetic {
  std::int64_t first, step, count;
  std::int64_t last() const { return first + (count - 1) * step; }
};

// An element that two progressions share: the first common one at or above both begins, by extended Euclid.
std::optional<std::int64_t> intersect(const Arithmetic& a, const Arithmetic& b) {
  const std::int64_t low = std::max(a.first, b.first);
  const std::int64_t high = std::min(a.last(), b.last());
  if (low > high) return {};
  const std::int64_t step_a = std::max<std::int64_t>(a.step, 1);
  const std::int64_t step_b = std::max<std::int64_t>(b.step, 1);
  const std::int64_t divisor = std::gcd(step_a, step_b);
  if ((b.first - a.first) % divisor != 0) return {};
  // Elements of a at or above low; one in step_b / divisor of them is in b.
  const kernels::IndexRange range = kernels::indices_between(a.first, step_a, a.count, low, high);
  const std::int64_t period = step_b / divisor;
  for (std::int64_t index = range.begin; index < range.end && index < range.begin + period; ++index) {
    const std::int64_t element = a.first + index * step_a;
    if ((element - b.first) % step_b == 0) return element;
  }
  return {};
}

Arithmetic rows_of(const AttendTask& task, Owner owner) {
  return owner == Owner::key_gradients ? Arithmetic{task.k_first, task.k_step, task.k_count}
                                       : Arithmetic{task.q_first, task.q_step, task.q_count};
}

// Heads of the rows that are written: query heads, or kv heads, with those between them where their steps are none.
Arithmetic heads_of(const AttendTask& task, Owner owner, int group) {
  if (owner != Owner::key_gradients) return {task.head_first, task.head_step, task.head_count};
  const std::int64_t first = task.head_first / group;
  if (task.head_count > 1 && task.head_step > group && task.head_step % group == 0)
    return {first, task.head_step / group, task.head_count};
  return {first, 1, (task.head_first + (task.head_count - 1) * task.head_step) / group - first + 1};
}

struct Cell {
  std::int64_t batch, head, row;
};

// A row that both tasks write, if there is one.
std::optional<Cell> conflict(const AttendTask& a, const AttendTask& b, Owner owner, int group) {
  const auto batch = intersect({a.batch_first, 1, a.batch_count}, {b.batch_first, 1, b.batch_count});
  if (!batch) return {};
  const auto head = intersect(heads_of(a, owner, group), heads_of(b, owner, group));
  if (!head) return {};
  const auto row = intersect(rows_of(a, owner), rows_of(b, owner));
  if (!row) return {};
  return Cell{*batch, *head, *row};
}

const float* state_of(const AttendTask& task, const Cell& cell) {
  return static_cast<const float*>(task.m.data) + (cell.batch - task.batch_first) * task.m.batch_stride +
         (cell.head - task.head_first) / std::max<std::int64_t>(task.head_step, 1) * task.m.head_stride +
         (cell.row - task.q_first) / std::max<std::int64_t>(task.q_step, 1) * task.m.row_stride;
}

using View = std::tuple<const void*, std::int64_t, std::int64_t, std::int64_t>;
template <typename Rows>
View view_of(const Rows& rows, std::int64_t count) {  // of one row the stride is free
  return {rows.data, rows.batch_stride, count > 1 ? rows.row_stride : 0, rows.head_stride};
}

// What must agree within a group: the rows, and the memory they are in.
auto key_of(const AttendTask& task, Owner owner, int group) {
  const Arithmetic rows = rows_of(task, owner);
  const Arithmetic heads = heads_of(task, owner, group);
  const bool keys = owner == Owner::key_gradients;
  const auto view = [&](const auto& operand) { return view_of(operand, rows.count); };
  return std::make_tuple(task.batch_first, task.batch_count, heads.first, heads.step, heads.count, rows.first,
                         rows.count > 1 ? rows.step : 1, rows.count, keys ? task.kv_head_first : 0,
                         keys ? task.kv_head_step : 0,
                         owner == Owner::state             ? view(task.acc)
                         : owner == Owner::query_gradients ? view(task.dq)
                                                           : view(task.dk),
                         owner == Owner::state ? view(task.m)
                         : keys                ? view(task.dv)
                                               : View{},
                         owner == Owner::state ? view(task.o) : View{});
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

// Tasks over the same rows.
struct Members {
  AttendTask head;  // the first of them
  std::vector<std::int64_t> tasks;
  bool finish = false;  // they leave results
  bool writes = false;  // gradients, which no other group touches
  std::int64_t place() const { return finish ? tasks.back() : tasks.front(); }
};

std::vector<Members> members_of(std::span<const AttendTask> tasks, Owner owner, int group) {
  std::map<decltype(key_of(tasks[0], owner, group)), std::size_t> known;
  std::vector<Members> groups;
  for (std::size_t index = 0; index < tasks.size(); ++index) {
    if (!has_work(tasks[index])) continue;
    const auto [place, is_new] = known.try_emplace(key_of(tasks[index], owner, group), groups.size());
    if (is_new) groups.push_back({tasks[index], {}});
    Members& members = groups[place->second];
    members.tasks.push_back(static_cast<std::int64_t>(index));
    members.finish = owner == Owner::state && tasks[index].o.data != nullptr;
    members.writes = (owner == Owner::query_gradients && tasks[index].writes_dq) ||
                     (owner == Owner::key_gradients && tasks[index].writes_dk_dv);
  }
  std::sort(groups.begin(), groups.end(), [](const Members& a, const Members& b) { return a.place() < b.place(); });
  return groups;
}

// States of the same rows may be several (one per branch); those that one of them has finished nobody touches later. Gradients
// that a group writes nobody else touches.
void check_order(const Members& a, const Members& b, const Cell& shared) {
  RINGSPAN_CHECK(!a.writes && !b.writes);
  if (!(a.finish || b.finish) || state_of(a.head, shared) != state_of(b.head, shared)) return;
  const Members& later = a.tasks.back() > b.tasks.back() ? a : b;
  const Members& earlier = &later == &a ? b : a;
  RINGSPAN_CHECK(later.finish && !earlier.finish);
}

// How many of a group's columns run side by side: as many as read 64 Ki rows of the other side, some 32 MB of keys and values
// with 128 elements of 16 bits, which the caches of large GPUs hold; in even shares.
std::int64_t columns_together(const Members& group, std::span<const AttendTask> tasks, Owner owner, int heads_per_kv_head,
                              std::int64_t columns) {
  constexpr std::int64_t kRows = std::int64_t{1} << 16;
  std::int64_t rows = 0;
  for (const std::int64_t index : group.tasks) {
    const AttendTask& task = tasks[static_cast<std::size_t>(index)];
    rows += owner == Owner::key_gradients ? task.q_count * heads_per_kv_head : task.k_count;
  }
  const std::int64_t readers = owner == Owner::key_gradients ? 1 : heads_per_kv_head;
  const std::int64_t most = std::max<std::int64_t>(kRows / std::max<std::int64_t>(rows, 1), 1) * readers;
  const std::int64_t shares = (columns + most - 1) / most;
  return (columns + shares - 1) / shares;
}

struct Hull {
  std::int64_t owner, begin, end;
};

std::vector<std::int64_t> waves_of_groups(std::span<const Members> groups, Owner owner, int group) {
  std::vector<Hull> hulls;
  for (std::size_t index = 0; index < groups.size(); ++index) {
    const Arithmetic rows = rows_of(groups[index].head, owner);
    hulls.push_back({static_cast<std::int64_t>(index), rows.first, rows.last() + 1});
  }
  std::vector<std::vector<std::int64_t>> earlier(groups.size());
  for_overlaps(hulls, [&](const Hull& a, const Hull& b) {
    const auto [low, high] = std::minmax(a.owner, b.owner);
    const auto at = [&](std::int64_t index) -> const Members& { return groups[static_cast<std::size_t>(index)]; };
    const auto shared = conflict(at(low).head, at(high).head, owner, group);
    if (!shared) return;
    check_order(at(low), at(high), *shared);
    earlier[static_cast<std::size_t>(high)].push_back(low);
  });
  return waves_of_edges(earlier);
}

// How many rows of the other side a block of the group takes in at most.
std::int64_t work_of(const Members& group, std::span<const AttendTask> tasks, Owner owner) {
  std::int64_t rows = 0;
  for (const std::int64_t index : group.tasks) {
    const AttendTask& task = tasks[static_cast<std::size_t>(index)];
    const bool keys = owner == Owner::key_gradients;
    const std::int64_t step = std::max<std::int64_t>(keys ? task.q_step : task.k_step, 1);
    rows += std::min(keys ? task.q_count : task.k_count, (task.hi - task.lo) / step + 1);
  }
  return rows;
}

// The order of the groups of a wave, which is free: along their rows, so that what runs at one time reads the same ones of the
// other side, and of some blocks that run at one time those with most work first, so that the last of a launch are small.
void order_wave(std::span<std::size_t> wave, std::span<const Members> groups, std::span<const Group> sizes,
                std::span<const AttendTask> tasks, Owner owner) {
  constexpr std::int64_t kTogether = 512;  // blocks: some more than a large GPU runs
  const auto rows_begin = [&](std::size_t index) {
    return std::tuple(groups[index].head.batch_first, rows_of(groups[index].head, owner).first);
  };
  std::stable_sort(wave.begin(), wave.end(), [&](std::size_t a, std::size_t b) { return rows_begin(a) < rows_begin(b); });
  for (std::size_t begin = 0, end = 0; begin < wave.size(); begin = end) {
    for (std::int64_t blocks = 0; end < wave.size() && blocks < kTogether; ++end) {
      blocks += std::int64_t{sizes[wave[end]].tiles} * sizes[wave[end]].columns;
    }
    std::stable_sort(
        wave.begin() + static_cast<std::ptrdiff_t>(begin), wave.begin() + static_cast<std::ptrdiff_t>(end),
        [&](std::size_t a, std::size_t b) { return work_of(groups[a], tasks, owner) > work_of(groups[b], tasks, owner); });
  }
}

// Two accesses by their dimensions, those with the largest steps first.
class Nested {
 public:
  Nested(const Access& a, const Access& b) : run_a_(a.run_bytes), run_b_(b.run_bytes) {
    for (std::size_t dimension = 0; dimension < order_.size(); ++dimension) {
      order_[dimension] = {a.steps[dimension], b.steps[dimension]};
    }
    const auto largest = [](const Pair& pair) { return std::max(pair.a.bytes, pair.b.bytes); };
    std::stable_sort(order_.begin(), order_.end(), [&](const Pair& x, const Pair& y) { return largest(x) > largest(y); });
  }

  // Whether runs meet where those of b begin `distance` bytes behind those of a, by the dimensions from `dimension` on.
  bool meet(std::size_t dimension, std::int64_t distance) const {
    if (dimension == order_.size()) return -run_b_ < distance && distance < run_a_;
    const Pair& steps = order_[dimension];
    const std::int64_t unit = std::gcd(moves(steps.a) ? steps.a.bytes : 0, moves(steps.b) ? steps.b.bytes : 0);
    if (unit == 0) return meet(dimension + 1, distance);
    // Steps of b less steps of a, a multiple of the unit, may bring the rest as near as it is long.
    std::int64_t before = run_b_, behind = run_a_;
    for (std::size_t inner = dimension + 1; inner < order_.size(); ++inner) {
      before += order_[inner].b.bytes * (order_[inner].b.count - 1);
      behind += order_[inner].a.bytes * (order_[inner].a.count - 1);
    }
    const auto floor = [&](std::int64_t value) { return (value - ((value % unit) + unit) % unit) / unit; };
    const std::int64_t first = floor(-before - distance) + 1, last = floor(behind - 1 - distance);
    if (last - first > kMost) return true;
    for (std::int64_t index = first; index <= last; ++index) {
      const std::int64_t moved = index * unit;
      const auto progression = [](const Access::Steps& of, std::int64_t from) {
        return Arithmetic{from, of.bytes, moves(of) ? of.count : 1};
      };
      if (intersect(progression(steps.b, 0), progression(steps.a, moved)) && meet(dimension + 1, distance + moved)) return true;
    }
    return false;
  }

 private:
  static constexpr std::int64_t kMost = 64;  // where more are possible, dimensions are nested in different ways
  struct Pair {
    Access::Steps a, b;
  };
  static bool moves(const Access::Steps& steps) { return steps.count > 1 && steps.bytes > 0; }
  std::int64_t run_a_, run_b_;
  std::array<Pair, 3> order_;
};

Group size_of(const Members& members, std::span<const AttendTask> tasks, Owner owner, int group, int tile_rows) {
  const AttendTask& head = members.head;
  const Arithmetic heads = heads_of(head, owner, group);
  Group result;
  result.tiles = static_cast<std::int32_t>((rows_of(head, owner).count + tile_rows - 1) / tile_rows);
  result.heads = static_cast<std::int32_t>(heads.count);
  if (owner == Owner::key_gradients) {
    result.head_first = static_cast<std::int32_t>(heads.first);
    result.head_step = static_cast<std::int32_t>(heads.step);
  }
  result.task_count = static_cast<std::int32_t>(members.tasks.size());
  const std::int64_t columns = result.heads * head.batch_count;
  result.columns = static_cast<std::int32_t>(columns);
  result.together = static_cast<std::int32_t>(columns_together(members, tasks, owner, group, columns));
  return result;
}

}  // namespace

Schedule schedule_attend(std::span<const AttendTask> tasks, Owner owner, int group, int tile_rows) {
  const std::vector<Members> groups = members_of(tasks, owner, group);
  const std::vector<std::int64_t> waves = waves_of_groups(groups, owner, group);
  std::vector<Group> sizes;
  std::vector<std::vector<std::size_t>> by_wave;
  for (std::size_t index = 0; index < groups.size(); ++index) {
    sizes.push_back(size_of(groups[index], tasks, owner, group, tile_rows));
    by_wave.resize(std::max(by_wave.size(), static_cast<std::size_t>(waves[index]) + 1));
    by_wave[static_cast<std::size_t>(waves[index])].push_back(index);
  }
  Schedule schedule;
  for (std::vector<std::size_t>& members : by_wave) {
    order_wave(members, groups, sizes, tasks, owner);
    Wave wave{static_cast<std::int64_t>(schedule.groups.size()), static_cast<std::int64_t>(members.size()), 0};
    for (const std::size_t index : members) {
      Group& size = sizes[index];
      size.first_block = wave.blocks;
      size.first_task = static_cast<std::int64_t>(schedule.order.size());
      wave.blocks += std::int64_t{size.tiles} * size.columns;
      schedule.order.insert(schedule.order.end(), groups[index].tasks.begin(), groups[index].tasks.end());
      schedule.groups.push_back(size);
    }
    schedule.waves.push_back(wave);
  }
  return schedule;
}

bool have_common_bytes(const Access& a, const Access& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  if (a.run_bytes == 0 || b.run_bytes == 0) return true;
  return Nested(a, b).meet(0, static_cast<std::int64_t>(b.begin - a.begin));
}

std::vector<std::int64_t> waves_of(std::vector<Access> accesses, std::int64_t count) {
  std::vector<std::vector<std::int64_t>> earlier(static_cast<std::size_t>(count));
  for_overlaps(accesses, [&](const Access& a, const Access& b) {
    if (a.owner == b.owner || !(a.writes || b.writes) || !have_common_bytes(a, b)) return;
    const auto [low, high] = std::minmax(a.owner, b.owner);
    earlier[static_cast<std::size_t>(high)].push_back(low);
  });
  return waves_of_edges(earlier);
}

RowOperands operands_of(RowOp op, int width) {
  const auto [count, written] = [op]() -> std::pair<int, unsigned> {
    switch (op) {
      case RowOp::fill:
        return {1, 0b1};
      case RowOp::copy:
        return {2, 0b10};
      case RowOp::add:
        return {6, 0b10};
      case RowOp::merge:
        return {5, 0b11100};
      case RowOp::merge_states:
      case RowOp::finalize:
        return {6, 0b111000};
      case RowOp::delta:
        return {4, 0b100};
    }
    return {};
  }();
  RowOperands operands{{}, written};
  for (int operand = 0; operand < count; ++operand) {
    operands.widths.push_back((wide_operands(op) >> operand & 1U) != 0 ? width : 1);
  }
  return operands;
}

void add_accesses(const kernels::RowTask& task, std::int64_t index, unsigned written, std::span<const int> widths,
                  std::vector<Access>& accesses) {
  for (std::size_t operand = 0; operand < widths.size(); ++operand) {
    const kernels::Operand& view = task.operands[operand];
    if (view.data == nullptr || task.batch_count * task.row_count * task.head_count == 0) continue;
    const std::int64_t size = size_of(view.dtype);
    Access access{index, 0, 0, (written >> operand & 1U) != 0, widths[operand] * size};
    std::int64_t low = 0;
    std::int64_t high = access.run_bytes;
    std::size_t dimension = 0;
    for (const auto& [stride, extent] :
         {std::pair{view.batch_stride, task.batch_count}, std::pair{view.row_stride, task.row_count},
          std::pair{view.head_stride, task.head_count}}) {
      const std::int64_t step = stride * size;
      (step < 0 ? low : high) += step * (extent - 1);
      access.steps[dimension++] = {std::abs(step), extent};  // backwards from the last one is forwards from the first
    }
    const auto base = reinterpret_cast<std::uintptr_t>(view.data);
    access.begin = base + static_cast<std::uintptr_t>(low);
    access.end = base + static_cast<std::uintptr_t>(high);
    accesses.push_back(access);
  }
}

}  // namespace ringspan::cuda
