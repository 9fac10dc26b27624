#include "plan/near.h"

#include <algorithm>

namespace ringspan::internal {

Ranges::Ranges(std::vector<Progression> list) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].empty()) ranges_.push_back({list[i].first, list[i].end(), 0, i});
  }
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  in_order_ = std::is_sorted(ranges_.begin(), ranges_.end(), before);
  if (!in_order_) std::stable_sort(ranges_.begin(), ranges_.end(), before);
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    ranges_[i].furthest = i == 0 ? ranges_[i].end : std::max(ranges_[i - 1].furthest, ranges_[i].end);
  }
}

void Ranges::find(std::int64_t begin, std::int64_t end, std::vector<std::size_t>& found) const {
  found.clear();
  const auto first = std::partition_point(ranges_.begin(), ranges_.end(), [&](const Range& r) { return r.furthest <= begin; });
  for (auto range = first; range != ranges_.end() && range->begin < end; ++range) {
    if (range->end > begin) found.push_back(range->place);
  }
  if (!in_order_) std::sort(found.begin(), found.end());
}

}  // namespace ringspan::internal
