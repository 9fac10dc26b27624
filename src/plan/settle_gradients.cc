#include "plan/settle_gradients.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "plan/common_parts.h"
#include "plan/cover.h"
#include "plan/rewrite_rows.h"

namespace ringspan::internal {
namespace {

constexpr std::int64_t kMostComparisons = std::int64_t{1} << 24;
constexpr int kSums = 0, kGradient = 1;  // operands of the copy from sums to the caller's gradients

class GradientSettler {
 public:
  GradientSettler(Program& program, int group) : program_(program), group_(group) {}

  void run() {
    settle({kDq}, &AttendItem::writes_dq);
    settle({kDk, kDv}, &AttendItem::writes_dk_dv);
  }

 private:
  // What is known of one operand: rows of the caller's gradient, as operand `caller` of items whose operand kSums is what tasks
  // have.
  struct Target {
    int caller = kSums;
    std::vector<RowItem> rows, gaps;
  };

  const View& view(const RowRef& ref) const { return program_.views[static_cast<std::size_t>(ref.view)]; }

  void settle(std::initializer_list<int> operands, bool AttendItem::*writes) {
    std::map<std::int32_t, Target> targets;
    const auto first = std::find_if(program_.attend_items.begin(), program_.attend_items.end(),
                                    [&](const AttendItem& item) { return item.operands[*operands.begin()].view >= 0; });
    if (first == program_.attend_items.end()) return;
    for (const int operand : operands) {
      const std::int32_t sums = first->operands[operand].view;
      auto target = find_target(sums);
      if (!target || !cover(operand, sums, *target)) return;
      targets.emplace(sums, std::move(*target));
    }
    for (AttendItem& item : program_.attend_items) {
      if (item.operands[*operands.begin()].view < 0) continue;
      item.*writes = true;
      for (const int operand : operands) {
        const Target& target = targets.at(item.operands[operand].view);
        const auto rows = std::find_if(target.rows.begin(), target.rows.end(),
                                       [&](const RowItem& r) { return strip_of(item, operand)->is_inside(r, kSums); });
        item.operands[operand] = at_same_rows(*rows, kSums, item.operands[operand], target.caller);
      }
    }
    rewrite_rows(program_, [&](RowLaunch&& launch) { return without_sums(std::move(launch), targets); });
  }

  // Of float32 the caller's rows that are filled, else what is copied to them; nothing where something else touches them.
  std::optional<Target> find_target(std::int32_t sums) const {
    if (sums < 0) return std::nullopt;
    Target target;
    const bool in_arena = program_.views[static_cast<std::size_t>(sums)].in_arena;
    target.caller = in_arena ? kGradient : kSums;
    bool known = true;
    for_launches(program_, [&](const Launch& launch) {
      if (is_attention(launch.kind) || launch.kind == LaunchKind::sum_sinks) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        const RowItem& item = program_.row_items[static_cast<std::size_t>(index)];
        const bool touches = std::any_of(std::begin(item.operands), std::end(item.operands),
                                         [&](const RowRef& ref) { return ref.view == sums; });
        if (!touches) continue;
        const bool fills = launch.kind == LaunchKind::fill;
        const bool casts = launch.kind == LaunchKind::copy && item.operands[kSums].view == sums;
        known = known && (fills || (in_arena && casts && !view(item.operands[kGradient]).in_arena)) &&
                item.operands[kSums].step == 1;
        if (in_arena ? casts : fills) target.rows.push_back(item);
      }
    });
    return known && !target.rows.empty() ? std::optional(std::move(target)) : std::nullopt;
  }

  // Nothing where a kernel would write heads of a gradient of keys that are none of the task's.
  std::optional<Strip> strip_of(const AttendItem& item, int operand) const {
    const Slice& slice = item.slice;
    const RowRef& ref = item.operands[operand];
    if (operand == kDq)
      return Strip{make_plane(slice.batch_first, slice.batch_count, slice.heads), ref.row, ref.step, slice.q.count};
    const auto heads = written_kv_heads(slice.heads, group_);
    if (!heads) return std::nullopt;
    return Strip{make_plane(slice.batch_first, slice.batch_count, *heads), ref.row, ref.step, slice.k.count};
  }

  // Whether each row has one task at most, or tasks of one launch over the same rows, each task rows of one item, and what none
  // has. `sums`: the view that all tasks have.
  bool cover(int operand, std::int32_t sums, Target& target) const {
    const auto items = static_cast<std::int64_t>(program_.attend_items.size() * target.rows.size());
    if (items > kMostComparisons) return false;
    std::vector<Strip> strips;
    std::set<std::tuple<std::int64_t, Plane, std::int64_t, std::int64_t, std::int64_t>> known;
    bool all = true;
    for_launches(program_, [&](const Launch& launch) {
      if (launch.kind != LaunchKind::attend_backward) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        const AttendItem& item = program_.attend_items[static_cast<std::size_t>(index)];
        if (item.operands[operand].view < 0) continue;
        const auto strip = strip_of(item, operand);
        all = all && strip && item.operands[operand].view == sums;
        if (!all) return;
        if (known.emplace(launch.first, strip->plane, strip->row, strip->step, strip->count).second) strips.push_back(*strip);
      }
    });
    if (!all) return false;
    const auto last = last_ones(strips);
    if (!last || std::find(last->begin(), last->end(), false) != last->end()) return false;
    std::size_t placed = 0;
    for (const RowItem& rows : target.rows) {
      std::vector<Strip> inside;
      std::copy_if(strips.begin(), strips.end(), std::back_inserter(inside),
                   [&](const Strip& strip) { return strip.is_inside(rows, kSums); });
      placed += inside.size();
      const auto gaps = uncovered(rows, kSums, inside);
      if (!gaps) return false;
      target.gaps.insert(target.gaps.end(), gaps->begin(), gaps->end());
    }
    return placed == strips.size();
  }

  // Sums are neither filled nor copied; the caller's rows that no task has are zeros, once.
  static std::vector<RowLaunch> without_sums(RowLaunch&& launch, std::map<std::int32_t, Target>& targets) {
    std::vector<RowLaunch> result;
    const int width = launch.launch.width;
    std::erase_if(launch.items, [&](const RowItem& rows) {
      const auto found = targets.find(rows.operands[kSums].view);
      if (found == targets.end()) return false;
      Target& target = found->second;
      if (!target.gaps.empty()) result.push_back(fill_of(target.gaps, target.caller, width, 0.0F));
      target.gaps.clear();
      return true;
    });
    result.push_back(std::move(launch));
    return result;
  }

  Program& program_;
  int group_;
};

}  // namespace

void settle_gradients(Program* program, int group) { GradientSettler(*program, group).run(); }

}  // namespace ringspan::internal
