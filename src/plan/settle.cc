#include "plan/settle.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

namespace ringspan::internal {
namespace {

// Beyond these, rows stay with the launch: planning must not take longer than what it saves.
constexpr std::size_t kMostPlanes = 256;
constexpr std::int64_t kMostComparisons = std::int64_t{1} << 24;
constexpr std::int64_t kMostSteps = 16;

// Operands of a finalize item.
enum : int { kStateM, kStateL, kStateAcc, kResultO, kResultLseRow, kResultO32 };

// The batch items and heads of a task: tasks over different rows of the same ones.
struct Plane {
  std::int64_t batch_first = 0, batch_count = 0;
  Progression heads;
  auto key() const { return std::tuple(batch_first, batch_count, heads.first, heads.stride, heads.count); }
  bool operator<(const Plane& other) const { return key() < other.key(); }
  bool overlaps(const Plane& other) const {
    return batch_first < other.batch_first + other.batch_count && other.batch_first < batch_first + batch_count &&
           !intersect(heads, other.heads).empty();
  }
  bool is_inside(const RowItem& item) const {
    return batch_first >= item.batch_first && batch_first + batch_count <= item.batch_first + item.batch_count &&
           intersect(heads, item.heads).count == heads.count;
  }
};

// Disjoint ranges [first, last]; neighbours that touch are one.
class Ranges {
 public:
  bool overlaps(std::int64_t first, std::int64_t last) const {
    const auto after = ends_.upper_bound(last);
    return after != ends_.begin() && std::prev(after)->second >= first;
  }
  void add(std::int64_t first, std::int64_t last) {
    auto at = ends_.upper_bound(last + 1);
    while (at != ends_.begin() && std::prev(at)->second >= first - 1) {
      --at;
      first = std::min(first, at->first);
      last = std::max(last, at->second);
      at = ends_.erase(at);
    }
    ends_.emplace(first, last);
  }
  // What of [first, last] is in none.
  template <typename Visit>
  void for_gaps(std::int64_t first, std::int64_t last, const Visit& visit) const {
    for (const auto& [begin, end] : ends_) {
      if (end < first || begin > last) continue;
      if (begin > first) visit(first, begin - 1);
      first = end + 1;
    }
    if (first <= last) visit(first, last);
  }

 private:
  std::map<std::int64_t, std::int64_t> ends_;
};

// Rows in steps, as one set of ranges per remainder.
struct StepRanges {
  std::int64_t step = 1;
  std::map<std::int64_t, Ranges> by_remainder;
  Ranges& of(std::int64_t row) { return by_remainder[row % step]; }
  bool overlaps(std::int64_t row, std::int64_t count) { return of(row).overlaps(row / step, row / step + count - 1); }
  void add(std::int64_t row, std::int64_t count) { of(row).add(row / step, row / step + count - 1); }
};

class Settler {
 public:
  Settler(Program& program, bool sinks, std::int64_t keys_without_state)
      : program_(program), sinks_(sinks), keys_without_state_(keys_without_state) {}

  void run() {
    collect();
    for (auto& [view, planes] : tasks_) {
      if (planes.size() > kMostPlanes || std::count(merged_.begin(), merged_.end(), view) > 0) continue;
      for (auto plane = planes.begin(); plane != planes.end(); ++plane) {
        const bool alone = std::none_of(planes.begin(), planes.end(), [&](const auto& other) {
          return &other != &*plane && other.first.overlaps(plane->first);
        });
        if (alone) find_last(plane->first, plane->second);
      }
    }
    if (lasts_.empty()) return;
    rewrite();
    for (const auto& [view, planes] : tasks_) {
      if (is_needless(view, planes)) drop_state(view);
    }
  }

 private:
  using Items = std::vector<std::int64_t>;  // of attend_items
  struct Last {
    Plane plane;
    std::int64_t item = 0;
    std::int64_t step = 1;
    bool settled = false;
  };
  static constexpr std::int32_t kNoView = -1;

  AttendItem& item(std::int64_t index) { return program_.attend_items[static_cast<std::size_t>(index)]; }
  const View& view(const RowRef& ref) const { return program_.views[static_cast<std::size_t>(ref.view)]; }

  template <typename Visit>
  void for_launches(const Visit& visit) {
    for (Stage& stage : program_.stages) {
      for (std::vector<Launch>* launches : {&stage.before, &stage.copies, &stage.compute}) visit(*launches);
    }
  }

  // Which tasks touch which states, in order.
  void collect() {
    for_launches([&](const std::vector<Launch>& launches) {
      for (const Launch& launch : launches) {
        for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
          if (launch.kind == LaunchKind::attend) {
            const Slice& slice = item(index).slice;
            Plane plane{slice.batch_first, slice.batch_count, slice.heads};
            if (plane.heads.count == 1) plane.heads.stride = 1;
            tasks_[item(index).operands[kM].view][plane].push_back(index);
          } else if (launch.kind == LaunchKind::merge || launch.kind == LaunchKind::merge_states) {
            const int m = launch.kind == LaunchKind::merge ? 2 : 3;
            merged_.push_back(program_.row_items[static_cast<std::size_t>(index)].operands[m].view);
          }
        }
      }
    });
    std::sort(merged_.begin(), merged_.end());
    merged_.erase(std::unique(merged_.begin(), merged_.end()), merged_.end());
  }

  // The tasks of a plane that nobody comes after.
  void find_last(const Plane& plane, const Items& items) {
    std::int64_t step = 1;
    for (const std::int64_t index : items) {
      if (item(index).slice.q.count > 1) step = std::max(step, item(index).operands[kM].step);
    }
    if (step > kMostSteps) return;
    for (const std::int64_t index : items) {
      const RowRef& m = item(index).operands[kM];
      if (item(index).slice.q.count > 1 && m.step != step) return;
    }
    StepRanges later{step, {}};
    for (auto index = items.rbegin(); index != items.rend(); ++index) {
      const std::int64_t row = item(*index).operands[kM].row, count = item(*index).slice.q.count;
      if (!later.overlaps(row, count)) {
        lasts_.push_back({plane, *index, step});
      } else {
        shared_.push_back(item(*index).operands[kM].view);
      }
      later.add(row, count);
    }
  }

  bool is_result(const Launch& launch, const RowItem& rows) const {
    return launch.kind == LaunchKind::finalize && launch.with_sinks == sinks_ && !view(rows.operands[kResultO]).in_arena &&
           !view(rows.operands[kResultLseRow]).in_arena && rows.operands[kStateM].step == 1;
  }

  // All row items anew, in the order of the launches, as those of finalize launches become fewer or more.
  void rewrite() {
    std::vector<RowItem> kept;
    for_launches([&](std::vector<Launch>& launches) {
      for (Launch& launch : launches) {
        if (is_attention(launch.kind)) continue;
        const std::int64_t first = launch.first;
        launch.first = static_cast<std::int64_t>(kept.size());
        for (std::int64_t index = first; index < first + launch.count; ++index) {
          const RowItem& rows = program_.row_items[static_cast<std::size_t>(index)];
          if (!is_result(launch, rows) || !take(rows, kept)) kept.push_back(rows);
        }
        launch.count = static_cast<std::int64_t>(kept.size()) - launch.first;
      }
      std::erase_if(launches, [](const Launch& launch) { return launch.kind == LaunchKind::finalize && launch.count == 0; });
    });
    program_.row_items = std::move(kept);
  }

  // Gives the last tasks over `rows` their results; what no task has goes to `left`. False: nothing was done.
  bool take(const RowItem& rows, std::vector<RowItem>& left) {
    compared_ += static_cast<std::int64_t>(lasts_.size());
    if (compared_ > kMostComparisons) return false;
    const RowRef& m = rows.operands[kStateM];
    std::map<Plane, std::vector<Last*>> planes;
    for (Last& last : lasts_) {
      const RowRef& own = item(last.item).operands[kM];
      const std::int64_t end = own.row + (item(last.item).slice.q.count - 1) * own.step;
      if (own.view != m.view || last.settled || own.row < m.row || end >= m.row + rows.rows) continue;
      if (last.plane.is_inside(rows)) planes[last.plane].push_back(&last);
    }
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> heads;  // by batch items
    for (const auto& [plane, lasts] : planes) heads[{plane.batch_first, plane.batch_count}] += plane.heads.count;
    std::int64_t batch = rows.batch_first;
    std::vector<RowItem> rest;
    for (const auto& [range, count] : heads) {  // in order
      if (range.first < batch || count != rows.heads.count) return false;
      add_batches(rows, batch, range.first - batch, rest);
      batch = range.first + range.second;
    }
    if (planes.empty()) return false;
    add_batches(rows, batch, rows.batch_first + rows.batch_count - batch, rest);
    left.insert(left.end(), rest.begin(), rest.end());
    for (const auto& [plane, lasts] : planes) settle_plane(rows, plane, lasts, left);
    return true;
  }

  static void add_batches(RowItem rows, std::int64_t first, std::int64_t count, std::vector<RowItem>& left) {
    if (count == 0) return;
    rows.batch_first = first, rows.batch_count = count;
    left.push_back(rows);
  }

  void settle_plane(const RowItem& rows, const Plane& plane, const std::vector<Last*>& lasts, std::vector<RowItem>& left) {
    const RowRef& m = rows.operands[kStateM];
    StepRanges done{lasts.front()->step, {}};
    for (Last* last : lasts) {
      AttendItem& task = item(last->item);
      const RowRef own = task.operands[kM];
      const auto result = [&](int operand) {
        const RowRef& ref = rows.operands[operand];
        return ref.view < 0 ? RowRef{} : RowRef{ref.view, ref.row + (own.row - m.row) * ref.step, own.step * ref.step};
      };
      task.operands[kResult] = result(kResultO);
      task.operands[kResultLse] = result(kResultLseRow);
      task.operands[kResult32] = result(kResultO32);
      last->settled = true;
      done.add(own.row, task.slice.q.count);
    }
    for (std::int64_t remainder = 0; remainder < done.step; ++remainder) {
      const std::int64_t first = m.row + ((remainder - m.row) % done.step + done.step) % done.step;
      const std::int64_t last = m.row + rows.rows - 1;
      if (first > last) continue;
      done.of(first).for_gaps(first / done.step, (last - first) / done.step + first / done.step,
                              [&](std::int64_t begin, std::int64_t end) {
                                RowItem gap = rows;
                                gap.batch_first = plane.batch_first, gap.batch_count = plane.batch_count;
                                gap.heads = plane.heads;
                                gap.rows = end - begin + 1;
                                for (RowRef& ref : gap.operands) {
                                  if (ref.view < 0) continue;
                                  ref.row += (begin * done.step + first % done.step - m.row) * ref.step;
                                  ref.step *= done.step;
                                }
                                left.push_back(gap);
                              });
    }
  }

  // Whether no task needs the state: all are settled, so that none comes before another, and few keys or many are one to the
  // kernel; and rows that no task has end as zeros.
  bool is_needless(std::int32_t view, const std::map<Plane, Items>& planes) {
    if (std::count(merged_.begin(), merged_.end(), view) > 0 || std::count(shared_.begin(), shared_.end(), view) > 0)
      return false;
    for (const auto& [plane, items] : planes) {
      for (const std::int64_t index : items) {
        if (item(index).operands[kResult].view == kNoView || item(index).slice.k.count > keys_without_state_) return false;
      }
    }
    bool zeros = true;
    for_launches([&](const std::vector<Launch>& launches) {
      for (const Launch& launch : launches) {
        if (launch.kind != LaunchKind::finalize) continue;
        for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
          zeros = zeros && (!has_state(index, view) || !launch.with_sinks);
        }
      }
    });
    return zeros;
  }

  // Whether operand 0 of a row item, m of a finalize and what a fill writes, is the view.
  bool has_state(std::int64_t index, std::int32_t view) const {
    return program_.row_items[static_cast<std::size_t>(index)].operands[kStateM].view == view;
  }

  void drop_state(std::int32_t view) {
    for (const auto& [plane, items] : tasks_[view]) {
      for (const std::int64_t index : items) {
        for (const int operand : {kM, kL, kAcc}) item(index).operands[operand] = RowRef{};
      }
    }
    std::vector<RowItem> kept;
    for_launches([&](std::vector<Launch>& launches) {
      std::vector<Launch> left;
      for (const Launch& launch : launches) {
        if (is_attention(launch.kind)) {
          left.push_back(launch);
          continue;
        }
        const bool drops = launch.kind == LaunchKind::fill || launch.kind == LaunchKind::finalize;
        std::vector<RowItem> empty;
        Launch rest = launch;
        rest.first = static_cast<std::int64_t>(kept.size());
        for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
          const bool goes = drops && has_state(index, view);
          (goes ? empty : kept).push_back(program_.row_items[static_cast<std::size_t>(index)]);
        }
        rest.count = static_cast<std::int64_t>(kept.size()) - rest.first;
        if (rest.count > 0 || launch.kind == LaunchKind::sum_sinks) left.push_back(rest);
        if (launch.kind == LaunchKind::finalize && !empty.empty()) fill_results(empty, launch.width, left, kept);
      }
      launches = std::move(left);
    });
    program_.row_items = std::move(kept);
  }

  // o = 0, lse = -inf.
  static void fill_results(const std::vector<RowItem>& rows, int width, std::vector<Launch>& launches,
                           std::vector<RowItem>& kept) {
    for (const int operand : {kResultO, kResultLseRow, kResultO32}) {
      Launch fill;
      fill.kind = LaunchKind::fill;
      fill.first = static_cast<std::int64_t>(kept.size());
      fill.width = operand == kResultLseRow ? 1 : width;
      fill.value = operand == kResultLseRow ? -std::numeric_limits<float>::infinity() : 0.0F;
      for (const RowItem& item : rows) {
        if (item.operands[operand].view == kNoView) continue;
        kept.push_back(item);
        std::fill(std::begin(kept.back().operands), std::end(kept.back().operands), RowRef{});
        kept.back().operands[0] = item.operands[operand];
      }
      fill.count = static_cast<std::int64_t>(kept.size()) - fill.first;
      if (fill.count > 0) launches.push_back(fill);
    }
  }

  Program& program_;
  bool sinks_;
  std::int64_t keys_without_state_;
  std::map<std::int32_t, std::map<Plane, Items>> tasks_;  // by view of m
  std::vector<std::int32_t> merged_, shared_;             // views of m that something else writes; that tasks share rows of
  std::vector<Last> lasts_;
  std::int64_t compared_ = 0;
};

}  // namespace

void settle(Program* program, bool sinks, std::int64_t keys_without_state) {
  Settler(*program, sinks, keys_without_state).run();
}

}  // namespace ringspan::internal
