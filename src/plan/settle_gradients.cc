#include "plan/settle_gradients.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "plan/common_parts.h"
#include "plan/cover.h"
#include "plan/rewrite_rows.h"

namespace ringspan::internal {
namespace {

constexpr int kSums = 0, kGradient = 1;  // operands of the copy from sums to the caller's gradients

class GradientSettler {
 public:
  GradientSettler(Program& program, int group, bool groups_tasks)
      : program_(program), group_(group), groups_tasks_(groups_tasks) {}

  void run() {
    settle({kDq}, &AttendItem::writes_dq);
    settle({kDk, kDv}, &AttendItem::writes_dk_dv);
  }

 private:
  // What is known of sums that tasks add to.
  struct Sums {
    bool known = true;           // nothing else uses them
    int caller = kSums;          // operand of `rows` that is the caller's gradient
    std::vector<RowItem> rows;   // that become it: copied there, or of float32 filled, where it is the sums
    std::vector<RowItem> fills;  // of the sums
    std::vector<Strip> others;   // rows that something else adds to
  };
  // Tasks of one launch over the same rows.
  struct Group {
    Strip strip;
    std::vector<AttendItem*> items;
  };

  const View& view(const RowRef& ref) const { return program_.views[static_cast<std::size_t>(ref.view)]; }

  // By the sums of the operands, which are one view each.
  void settle(std::vector<int> operands, bool AttendItem::*writes) {
    std::map<std::vector<std::int32_t>, std::vector<Group>> groups;
    if (!collect(operands, groups)) return;
    std::map<std::int32_t, Sums> all;
    for (const auto& [views, members] : groups) {
      for (const std::int32_t index : views)
        all[index].caller = index >= 0 && program_.views[static_cast<std::size_t>(index)].in_arena ? kGradient : kSums;
    }
    find_sums(all);
    for (auto& [views, members] : groups) {
      std::map<std::int32_t, Sums> sums;
      for (const std::int32_t index : views) {
        Sums& own = all.at(index);
        if (own.known && !own.rows.empty()) sums.emplace(index, std::move(own));
      }
      if (sums.size() == views.size()) settle(operands, views, members, sums, writes);
    }
  }

  bool collect(const std::vector<int>& operands, std::map<std::vector<std::int32_t>, std::vector<Group>>& groups) {
    using Rows = std::pair<std::int64_t, decltype(Strip().key())>;
    std::map<std::vector<std::int32_t>, std::map<Rows, std::size_t>> known;
    bool all = true;
    for_launches(program_, [&](const Launch& launch) {
      if (launch.kind != LaunchKind::attend_backward) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count && all; ++index) {
        AttendItem& item = program_.attend_items[static_cast<std::size_t>(index)];
        if (item.operands[operands.front()].view < 0) continue;
        const auto strip = strip_of(item, operands.front());
        all = strip.has_value();
        if (!all) return;
        std::vector<std::int32_t> views;
        for (const int operand : operands) {
          const RowRef& ref = item.operands[operand];
          const RowRef& front = item.operands[operands.front()];
          RINGSPAN_CHECK(ref.row == front.row && ref.step == front.step);  // dk and dv of a key are the same row
          views.push_back(ref.view);
        }
        const auto [place, is_new] =
            known[views].try_emplace({groups_tasks_ ? launch.first : index, strip->key()}, groups[views].size());
        if (is_new) groups[views].push_back({*strip, {}});
        groups[views][place->second].items.push_back(&item);
      }
    });
    return all;
  }

  void settle(const std::vector<int>& operands, const std::vector<std::int32_t>& views, std::vector<Group>& groups,
              std::map<std::int32_t, Sums>& sums, bool AttendItem::*writes) {
    bool whole = true;  // nobody else touches the sums
    for (const std::int32_t view : views) {
      const auto pairs = static_cast<std::int64_t>(groups.size() * (sums.at(view).rows.size() + sums.at(view).fills.size()));
      if (pairs > kMostComparisons || !leave_alone(groups, sums.at(view), whole)) return;
    }
    if (groups.empty()) return;
    for (const std::int32_t view : views) {
      const Sums& own = sums.at(view);
      for (const std::vector<RowItem>* items : {&own.rows, &own.fills}) {
        if (!std::all_of(items->begin(), items->end(), [&](const RowItem& item) { return left_of(item, groups).has_value(); }))
          return;
      }
    }
    for (const Group& group : groups) {
      for (AttendItem* const item : group.items) {
        item->*writes = true;
        for (std::size_t i = 0; i < operands.size(); ++i) {
          const Sums& own = sums.at(views[i]);
          RowRef& ref = item->operands[operands[i]];
          ref = at_same_rows(*place_of(own.rows, group.strip), kSums, ref, own.caller);
        }
      }
    }
    rewrite_rows(program_, [&](RowLaunch&& launch) { return rewritten(std::move(launch), sums, groups, whole); });
  }

  static std::vector<RowItem>::const_iterator place_of(const std::vector<RowItem>& rows, const Strip& strip) {
    return std::find_if(rows.begin(), rows.end(), [&](const RowItem& item) { return strip.is_inside(item, kSums); });
  }

  // The groups whose rows nobody else touches, and that lie inside of one item each; the others go, and `whole` becomes false.
  // Returns whether that can be told.
  static bool leave_alone(std::vector<Group>& groups, const Sums& sums, bool& whole) {
    std::vector<Strip> strips;
    for (const Group& group : groups) strips.push_back(group.strip);
    strips.insert(strips.end(), sums.others.begin(), sums.others.end());
    const auto last = last_ones(strips);
    std::reverse(strips.begin(), strips.end());
    auto first = last_ones(strips);
    if (!last || !first) return false;
    std::reverse(first->begin(), first->end());
    std::vector<Group> alone;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const bool is_inside = place_of(sums.rows, groups[i].strip) != sums.rows.end() &&
                             (sums.fills.empty() || place_of(sums.fills, groups[i].strip) != sums.fills.end());
      if ((*last)[i] && (*first)[i] && is_inside) alone.push_back(std::move(groups[i]));
    }
    whole = whole && alone.size() == groups.size() && sums.others.empty();
    groups = std::move(alone);
    return true;
  }

  // The rows of an item that no group has; nothing where that cannot be told.
  static std::optional<std::vector<RowItem>> left_of(const RowItem& item, const std::vector<Group>& groups) {
    std::vector<Strip> inside;
    for (const Group& group : groups) {
      if (group.strip.is_inside(item, kSums)) inside.push_back(group.strip);
    }
    return inside.empty() ? std::optional(std::vector{item}) : uncovered(item, kSums, inside);
  }

  // Of float32 the caller's rows that are filled, else what is copied to them; not known where they are used otherwise.
  void find_sums(std::map<std::int32_t, Sums>& all) const {
    for_launches(program_, [&](const Launch& launch) {
      if (is_attention(launch.kind) || launch.kind == LaunchKind::sum_sinks) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        const RowItem& item = program_.row_items[static_cast<std::size_t>(index)];
        for (const RowRef& ref : item.operands) {
          const auto found = ref.view < 0 ? all.end() : all.find(ref.view);
          if (found != all.end()) add_use(launch.kind, item, ref, found->second);
        }
      }
    });
  }

  void add_use(LaunchKind kind, const RowItem& item, const RowRef& ref, Sums& sums) const {
    const bool in_arena = sums.caller == kGradient, is_sums = &ref == &item.operands[kSums];
    const bool casts = is_sums && kind == LaunchKind::copy && !view(item.operands[kGradient]).in_arena;
    const bool fills = is_sums && kind == LaunchKind::fill;
    const bool adds = kind == LaunchKind::add && !is_sums;
    sums.known = sums.known && (fills || adds || (in_arena && casts)) && (adds || ref.step == 1);
    if (in_arena ? casts : fills) sums.rows.push_back(item);
    if (fills && in_arena) sums.fills.push_back(item);
    if (adds) sums.others.push_back(make_strip(make_plane(item.batch_first, item.batch_count, item.heads), ref, item.rows));
  }

  // Nothing where a kernel would write heads of a gradient of keys that are none of the task's.
  std::optional<Strip> strip_of(const AttendItem& item, int operand) const {
    const Slice& slice = item.slice;
    const RowRef& ref = item.operands[operand];
    if (operand == kDq) return make_strip(make_plane(slice.batch_first, slice.batch_count, slice.heads), ref, slice.q.count);
    const auto heads = written_kv_heads(slice.heads, group_);
    if (!heads) return std::nullopt;
    return make_strip(make_plane(slice.batch_first, slice.batch_count, *heads), ref, slice.k.count);
  }

  // Rows that tasks write are neither filled nor copied. Where that is all of them the sums go, and the caller's rows that no
  // task has are zeros.
  static std::vector<RowLaunch> rewritten(RowLaunch&& launch, const std::map<std::int32_t, Sums>& sums,
                                          const std::vector<Group>& groups, bool whole) {
    std::vector<RowLaunch> result;
    std::vector<RowItem> kept, zeros;
    int caller = kSums;
    const bool copies = launch.launch.kind == LaunchKind::copy;
    for (const RowItem& item : launch.items) {
      const auto found = sums.find(item.operands[kSums].view);
      if (found == sums.end() || !(copies || launch.launch.kind == LaunchKind::fill)) {
        kept.push_back(item);
        continue;
      }
      const std::vector<RowItem> rest = *left_of(item, groups);
      if (!whole) kept.insert(kept.end(), rest.begin(), rest.end());
      if (!whole || found->second.caller != (copies ? kGradient : kSums)) continue;
      caller = found->second.caller;
      zeros.insert(zeros.end(), rest.begin(), rest.end());
    }
    if (!zeros.empty()) result.push_back(fill_of(zeros, caller, launch.launch.width, 0.0F));
    launch.items = std::move(kept);
    result.push_back(std::move(launch));
    return result;
  }

  Program& program_;
  int group_;
  bool groups_tasks_;
};

}  // namespace

void settle_gradients(Program* program, int group, bool groups_tasks) { GradientSettler(*program, group, groups_tasks).run(); }

}  // namespace ringspan::internal
