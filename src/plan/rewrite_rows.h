// For passes over a complete program: its row launches anew, with other items. Pure; cost: one copy of all row items.
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "plan/plan_data.h"

namespace ringspan::internal {

// Planning must not take longer than what it saves: beyond these, rows stay with the launch.
inline constexpr std::int64_t kMostComparisons = std::int64_t{1} << 24;

struct RowLaunch {
  Launch launch;  // but first and count
  std::vector<RowItem> items;
};

// In the order in which they run.
template <typename Visit>
void for_launches(const Program& program, const Visit& visit) {
  for (const Stage& stage : program.stages) {
    for (const std::vector<Launch>* launches : {&stage.before, &stage.copies, &stage.compute}) {
      for (const Launch& launch : *launches) visit(launch);
    }
  }
}

// change(RowLaunch&&) returns the launches that take its place; those without items go.
template <typename Change>
void rewrite_rows(Program& program, const Change& change) {
  std::vector<RowItem> kept;
  for (Stage& stage : program.stages) {
    for (std::vector<Launch>* launches : {&stage.before, &stage.copies, &stage.compute}) {
      std::vector<Launch> result;
      for (const Launch& launch : *launches) {
        if (is_attention(launch.kind) || launch.kind == LaunchKind::sum_sinks) {
          result.push_back(launch);
          continue;
        }
        const auto first = program.row_items.begin() + launch.first;
        for (RowLaunch& changed : change(RowLaunch{launch, {first, first + launch.count}})) {
          if (changed.items.empty()) continue;
          changed.launch.first = static_cast<std::int64_t>(kept.size());
          changed.launch.count = static_cast<std::int64_t>(changed.items.size());
          kept.insert(kept.end(), changed.items.begin(), changed.items.end());
          result.push_back(changed.launch);
        }
      }
      *launches = std::move(result);
    }
  }
  program.row_items = std::move(kept);
}

// The rows of `operand` that an item, whose rows are neighbours in operand `base`, has beside rows `own` of that.
inline RowRef at_same_rows(const RowItem& rows, int base, const RowRef& own, int operand) {
  const RowRef& ref = rows.operands[operand];
  if (ref.view < 0) return {};
  return {ref.view, ref.row + (own.row - rows.operands[base].row) * ref.step, own.step * ref.step};
}

// Fills one operand of the items, where it is.
inline RowLaunch fill_of(std::span<const RowItem> rows, int operand, int width, float value) {
  RowLaunch fill;
  fill.launch.kind = LaunchKind::fill;
  fill.launch.width = width;
  fill.launch.value = value;
  for (const RowItem& item : rows) {
    if (item.operands[operand].view < 0) continue;
    fill.items.push_back(item);
    std::fill(std::begin(fill.items.back().operands), std::end(fill.items.back().operands), RowRef{});
    fill.items.back().operands[0] = item.operands[operand];
  }
  return fill;
}

}  // namespace ringspan::internal
