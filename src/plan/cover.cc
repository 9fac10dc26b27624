#include "plan/cover.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "plan/common_parts.h"

namespace ringspan::internal {
namespace {

constexpr std::size_t kMostPlanes = 256;

// Disjoint ranges [first, last]; neighbours that touch are one.
class RangeSet {
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

// Rows in steps that divide `step`, as one set of ranges per remainder.
struct StepRanges {
  std::int64_t step = 1;
  std::map<std::int64_t, RangeSet> by_remainder;
  RangeSet& of(std::int64_t row) { return by_remainder[row % step]; }
  bool overlaps(const Strip& strip) {
    bool found = false;
    for_runs(strip, [&](RangeSet& ranges, std::int64_t first, std::int64_t last) { found |= ranges.overlaps(first, last); });
    return found;
  }
  void add(const Strip& strip) {
    for_runs(strip, [](RangeSet& ranges, std::int64_t first, std::int64_t last) { ranges.add(first, last); });
  }

 private:
  // A strip is as many runs as its own step fits into ours.
  template <typename Visit>
  void for_runs(const Strip& strip, const Visit& visit) {
    const std::int64_t runs = strip.count > 1 ? step / strip.step : 1;
    for (std::int64_t run = 0; run < std::min(runs, strip.count); ++run) {
      const std::int64_t row = strip.row + run * strip.step;
      visit(of(row), row / step, row / step + (strip.count - 1 - run) / runs);
    }
  }
};

// One that the steps of all strips of more than one row divide.
std::optional<std::int64_t> common_step(std::span<const Strip> strips) {
  std::int64_t step = 1;
  for (const Strip& strip : strips) {
    if (strip.count > 1) step = std::lcm(step, strip.step);
    if (step < 1 || step > kMostPeriod) return std::nullopt;
  }
  return step;
}

std::map<Plane, std::vector<std::size_t>> by_plane(std::span<const Strip> strips) {
  std::map<Plane, std::vector<std::size_t>> planes;
  for (std::size_t i = 0; i < strips.size(); ++i) planes[strips[i].plane].push_back(i);
  return planes;
}

void add_batches(RowItem rows, std::int64_t first, std::int64_t count, std::vector<RowItem>& left) {
  if (count == 0) return;
  rows.batch_first = first, rows.batch_count = count;
  left.push_back(rows);
}

// What is left of `rows` in the plane.
void add_gaps(const RowItem& rows, int operand, const Plane& plane, StepRanges& covered, std::vector<RowItem>& left) {
  const std::int64_t begin_row = rows.operands[operand].row, last_row = begin_row + rows.rows - 1, step = covered.step;
  for (std::int64_t first = begin_row; first < begin_row + step && first <= last_row; ++first) {
    const std::int64_t last = first + (last_row - first) / step * step;
    covered.of(first).for_gaps(first / step, last / step, [&](std::int64_t begin, std::int64_t end) {
      RowItem gap = rows;
      gap.batch_first = plane.batch_first, gap.batch_count = plane.batch_count;
      gap.heads = plane.heads;
      gap.rows = end - begin + 1;
      for (RowRef& ref : gap.operands) {
        if (ref.view < 0) continue;
        ref.row += (begin * step + first % step - begin_row) * ref.step;
        ref.step *= step;
      }
      left.push_back(gap);
    });
  }
}

}  // namespace

bool Plane::overlaps(const Plane& other) const {
  return batch_first < other.batch_first + other.batch_count && other.batch_first < batch_first + batch_count &&
         !intersect(heads, other.heads).empty();
}

bool Plane::is_inside(const RowItem& rows) const {
  return batch_first >= rows.batch_first && batch_first + batch_count <= rows.batch_first + rows.batch_count &&
         intersect(heads, rows.heads).count == heads.count;
}

Plane make_plane(std::int64_t batch_first, std::int64_t batch_count, Progression heads) {
  if (heads.count == 1) heads.stride = 1;
  return {batch_first, batch_count, heads};
}

Strip make_strip(const Plane& plane, const RowRef& rows, std::int64_t count) {
  return {plane, rows.row, count > 1 ? rows.step : 1, count};
}

bool Strip::is_inside(const RowItem& rows, int operand) const {
  const RowRef& ref = rows.operands[operand];
  return row >= ref.row && row + (count - 1) * step < ref.row + rows.rows && plane.is_inside(rows);
}

std::optional<std::vector<bool>> last_ones(std::span<const Strip> strips) {
  const auto planes = by_plane(strips);
  if (planes.size() > kMostPlanes) return std::nullopt;
  std::vector<bool> last(strips.size());
  for (auto plane = planes.begin(); plane != planes.end(); ++plane) {
    for (auto other = std::next(plane); other != planes.end(); ++other) {
      if (plane->first.overlaps(other->first)) return std::nullopt;
    }
    std::vector<Strip> own;
    for (const std::size_t index : plane->second) own.push_back(strips[index]);
    const auto step = common_step(own);
    if (!step) return std::nullopt;
    StepRanges later{*step, {}};
    for (std::size_t i = own.size(); i-- > 0;) {
      last[plane->second[i]] = !later.overlaps(own[i]);
      later.add(own[i]);
    }
  }
  return last;
}

std::optional<std::vector<RowItem>> uncovered(const RowItem& rows, int operand, std::span<const Strip> strips) {
  const auto planes = by_plane(strips);
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> heads;  // by batch items
  for (const auto& [plane, members] : planes) heads[{plane.batch_first, plane.batch_count}] += plane.heads.count;
  std::vector<RowItem> left;
  std::int64_t batch = rows.batch_first;
  for (const auto& [range, count] : heads) {  // in order
    if (range.first < batch || count != rows.heads.count) return std::nullopt;
    add_batches(rows, batch, range.first - batch, left);
    batch = range.first + range.second;
  }
  add_batches(rows, batch, rows.batch_first + rows.batch_count - batch, left);
  for (const auto& [plane, members] : planes) {
    std::vector<Strip> own;
    for (const std::size_t index : members) own.push_back(strips[index]);
    const auto step = common_step(own);
    if (!step) return std::nullopt;
    StepRanges covered{*step, {}};
    for (const Strip& strip : own) covered.add(strip);
    add_gaps(rows, operand, plane, covered, left);
  }
  return left;
}

}  // namespace ringspan::internal
