#include "plan/settle.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "plan/cover.h"
#include "plan/rewrite_rows.h"

namespace ringspan::internal {
namespace {

constexpr std::int32_t kNoView = -1;

// Operands of a finalize item.
enum : int { kStateM, kStateL, kStateAcc, kResultO, kResultLseRow, kResultO32 };

class Settler {
 public:
  Settler(Program& program, bool sinks, std::int64_t keys_without_state, bool groups_tasks)
      : program_(program), sinks_(sinks), keys_without_state_(keys_without_state), groups_tasks_(groups_tasks) {}

  void run() {
    collect();
    for (const auto& [view, items] : tasks_) find_last(view, items);
    if (lasts_.empty()) return;
    rewrite_rows(program_, [this](RowLaunch&& launch) {
      if (launch.launch.kind == LaunchKind::finalize) settle_rows(launch);
      return std::vector{std::move(launch)};
    });
    for (const auto& [view, items] : tasks_) {
      if (is_needless(view, items)) drop_state(view, items);
    }
  }

 private:
  // Tasks over the same rows that a kernel takes in together; or one task.
  struct Last {
    Strip strip;
    std::int32_t view = kNoView;
    std::vector<std::int64_t> items;
    std::size_t place = 0;  // of the last one among the tasks of the view
    bool settled = false;
  };

  AttendItem& item(std::int64_t index) { return program_.attend_items[static_cast<std::size_t>(index)]; }
  const View& view(const RowRef& ref) const { return program_.views[static_cast<std::size_t>(ref.view)]; }

  // Which tasks touch which states, in order, and which states something else writes.
  void collect() {
    launch_of_.resize(program_.attend_items.size());
    for_launches(program_, [&](const Launch& launch) {
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        if (launch.kind == LaunchKind::attend) {
          tasks_[item(index).operands[kM].view].push_back(index);
          launch_of_[static_cast<std::size_t>(index)] = launch.first;
        } else if (launch.kind == LaunchKind::merge || launch.kind == LaunchKind::merge_states) {
          const int m = launch.kind == LaunchKind::merge ? 2 : 3;
          merged_[program_.row_items[static_cast<std::size_t>(index)].operands[m].view] = true;
        }
      }
    });
  }

  // The tasks that nobody comes after.
  void find_last(std::int32_t state, const std::vector<std::int64_t>& items) {
    if (merged_.contains(state)) return;
    std::vector<Last> groups = groups_of(state, items);
    std::vector<Strip> strips;
    for (const Last& group : groups) strips.push_back(group.strip);
    const auto last = last_ones(strips);
    if (!last) return;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if ((*last)[i]) lasts_.push_back(std::move(groups[i]));
    }
  }

  // In the order in which the last task of each runs.
  std::vector<Last> groups_of(std::int32_t state, const std::vector<std::int64_t>& items) {
    std::vector<Last> groups;
    std::map<std::pair<std::int64_t, decltype(Strip().key())>, std::size_t> known;
    for (std::size_t place = 0; place < items.size(); ++place) {
      const std::int64_t index = items[place];
      const Slice& slice = item(index).slice;
      const Plane plane = make_plane(slice.batch_first, slice.batch_count, slice.heads);
      const Strip strip = make_strip(plane, item(index).operands[kM], slice.q.count);
      const std::int64_t together = groups_tasks_ ? launch_of_[static_cast<std::size_t>(index)] : index;
      const auto [found, is_new] = known.try_emplace({together, strip.key()}, groups.size());
      if (is_new) groups.push_back({strip, state, {}});
      Last& group = groups[found->second];
      group.items.push_back(index);
      group.place = place;
    }
    std::sort(groups.begin(), groups.end(), [](const Last& a, const Last& b) { return a.place < b.place; });
    return groups;
  }

  // The rows of a finalize launch that no last task has; those tasks get their results.
  void settle_rows(RowLaunch& launch) {
    std::vector<RowItem> left;
    for (const RowItem& rows : launch.items) {
      const bool is_result = launch.launch.with_sinks == sinks_ && !view(rows.operands[kResultO]).in_arena &&
                             !view(rows.operands[kResultLseRow]).in_arena && rows.operands[kStateM].step == 1;
      if (!is_result || !take(rows, left)) left.push_back(rows);
    }
    launch.items = std::move(left);
  }

  bool take(const RowItem& rows, std::vector<RowItem>& left) {
    compared_ += static_cast<std::int64_t>(lasts_.size());
    if (compared_ > kMostComparisons) return false;
    std::vector<Last*> inside;
    std::vector<Strip> strips;
    for (Last& last : lasts_) {
      if (last.settled || last.view != rows.operands[kStateM].view || !last.strip.is_inside(rows, kStateM)) continue;
      inside.push_back(&last);
      strips.push_back(last.strip);
    }
    const auto rest = uncovered(rows, kStateM, strips);
    if (inside.empty() || !rest) return false;
    left.insert(left.end(), rest->begin(), rest->end());
    for (Last* last : inside) {
      for (const std::int64_t index : last->items) {
        RowRef* const operands = item(index).operands;
        operands[kResult] = at_same_rows(rows, kStateM, operands[kM], kResultO);
        operands[kResultLse] = at_same_rows(rows, kStateM, operands[kM], kResultLseRow);
        operands[kResult32] = at_same_rows(rows, kStateM, operands[kM], kResultO32);
      }
      last->settled = true;
    }
    return true;
  }

  // Whether no task needs the state: all are settled, so that none comes before another, and have no more keys than the kernel
  // takes without; and rows that no task has end as zeros.
  bool is_needless(std::int32_t state, const std::vector<std::int64_t>& items) {
    for (const std::int64_t index : items) {
      if (item(index).operands[kResult].view == kNoView || item(index).slice.k.count > keys_without_state_) return false;
    }
    bool zeros = true;
    for_launches(program_, [&](const Launch& launch) {
      if (launch.kind != LaunchKind::finalize || !launch.with_sinks) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        zeros = zeros && program_.row_items[static_cast<std::size_t>(index)].operands[kStateM].view != state;
      }
    });
    return zeros;
  }

  void drop_state(std::int32_t state, const std::vector<std::int64_t>& items) {
    for (const std::int64_t index : items) {
      for (const int operand : {kM, kL, kAcc}) item(index).operands[operand] = RowRef{};
    }
    rewrite_rows(program_, [state](RowLaunch&& launch) {
      std::vector<RowLaunch> result;
      const LaunchKind kind = launch.launch.kind;
      if (kind == LaunchKind::fill || kind == LaunchKind::finalize) {
        std::vector<RowItem> empty;
        std::erase_if(launch.items, [&](const RowItem& rows) {
          if (rows.operands[kStateM].view != state) return false;
          empty.push_back(rows);
          return true;
        });
        if (kind == LaunchKind::finalize) {
          result.push_back(fill_of(empty, kResultO, launch.launch.width, 0.0F));
          result.push_back(fill_of(empty, kResultLseRow, 1, -std::numeric_limits<float>::infinity()));
          result.push_back(fill_of(empty, kResultO32, launch.launch.width, 0.0F));
        }
      }
      result.push_back(std::move(launch));
      return result;
    });
  }

  Program& program_;
  bool sinks_;
  std::int64_t keys_without_state_;
  bool groups_tasks_;
  std::map<std::int32_t, std::vector<std::int64_t>> tasks_;  // by view of m
  std::vector<std::int64_t> launch_of_;                      // of a task, by its first task
  std::map<std::int32_t, bool> merged_;
  std::vector<Last> lasts_;
  std::int64_t compared_ = 0;
};

}  // namespace

void settle(Program* program, bool sinks, std::int64_t keys_without_state, bool groups_tasks) {
  Settler(*program, sinks, keys_without_state, groups_tasks).run();
}

}  // namespace ringspan::internal
