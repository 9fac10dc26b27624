// What of two lists may meet, by ranges of positions: found without looking at all pairs. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plan/box.h"

namespace ringspan::internal {

// Progressions by the range of their positions. Cost: O(log n) and what is found, where no range holds many others.
class Ranges {
 public:
  explicit Ranges(std::vector<Progression> list);
  // The places in the list of those that have a position in [begin, end) between their ends, ascending.
  void find(std::int64_t begin, std::int64_t end, std::vector<std::size_t>& found) const;

 private:
  struct Range {
    std::int64_t begin = 0, end = 0;
    std::int64_t furthest = 0;  // the largest end so far
    std::size_t place = 0;
  };
  std::vector<Range> ranges_;  // by begin
  bool in_order_ = true;       // of the list, too
};

inline const Box& box_of(const Box& box) { return box; }

// Calls visit(a[i], b[j]) where the boxes may share positions: for each j, each i, both ascending.
template <typename A, typename B, typename Visit>
void for_each_near(std::span<const A> a, std::span<const B> b, Visit visit) {
  constexpr std::size_t kFew = 8;  // not worth an index
  if (a.size() <= kFew || b.size() <= kFew) {
    for (const B& y : b) {
      const std::int64_t begin = box_of(y).positions.first, end = box_of(y).positions.end();
      for (const A& x : a) {
        if (box_of(x).positions.first < end && begin < box_of(x).positions.end()) visit(x, y);
      }
    }
    return;
  }
  std::vector<Progression> positions;
  for (const A& x : a) positions.push_back(box_of(x).positions);
  const Ranges ranges(std::move(positions));
  std::vector<std::size_t> found;
  for (const B& y : b) {
    ranges.find(box_of(y).positions.first, box_of(y).positions.end(), found);
    for (const std::size_t i : found) visit(a[i], y);
  }
}

}  // namespace ringspan::internal
