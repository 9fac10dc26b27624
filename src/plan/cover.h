// Cover: which rows of a view tasks have, and which are left. Pure.
//
// Cost: O(strips log strips + planes^2); allocates.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "plan/plan_data.h"

namespace ringspan::internal {

// The batch items and heads of a task: tasks over different rows of the same ones share a plane.
struct Plane {
  std::int64_t batch_first = 0, batch_count = 0;
  Progression heads;  // the step of a single one is 1

  auto key() const { return std::tuple(batch_first, batch_count, heads.first, heads.stride, heads.count); }
  bool operator<(const Plane& other) const { return key() < other.key(); }
  bool operator==(const Plane& other) const { return key() == other.key(); }
  bool overlaps(const Plane& other) const;
  bool is_inside(const RowItem& rows) const;
};
Plane make_plane(std::int64_t batch_first, std::int64_t batch_count, Progression heads);

// Rows row, row + step, ... of a view in one plane; the step of a single one is 1.
struct Strip {
  Plane plane;
  std::int64_t row = 0, step = 1, count = 0;
  bool is_inside(const RowItem& rows, int operand) const;  // whose rows are neighbours in the operand's view
  auto key() const { return std::tuple(plane, row, step, count); }
};

Strip make_strip(const Plane& plane, const RowRef& rows, std::int64_t count);

// Of strips of one view, for each whether no strip after it has one of its rows. Nothing where that does not show at a glance:
// too many planes, some that overlap, or rows in steps that come together too seldom.
std::optional<std::vector<bool>> last_ones(std::span<const Strip> strips);

// The rows that no strip has; the strips share none, and lie inside. Nothing where they have some heads of a batch item only.
std::optional<std::vector<RowItem>> uncovered(const RowItem& rows, int operand, std::span<const Strip> strips);

}  // namespace ringspan::internal
