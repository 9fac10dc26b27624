// BlockIndex: which blocks of a list meet a rectangle, found without looking at all of them. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ringspan/pattern.h"

namespace ringspan::internal {

// Queries [q_begin, q_end) against keys [k_begin, k_end).
struct Rectangle {
  std::int64_t q_begin = 0, q_end = 0;
  std::int64_t k_begin = 0, k_end = 0;
};

// An R-tree. Cost of find(), for n blocks in a grid: O(log n) and what is found, for a rectangle over all of one side
// O(sqrt n) and what is found. Of making it: O(n log n).
class BlockIndex {
 public:
  explicit BlockIndex(std::span<const Block> blocks);

  // The places in the list of the blocks whose rectangles meet this one, ascending. Returns how many rectangles it looked at.
  std::int64_t find(const Rectangle& rectangle, std::vector<std::size_t>& found) const;

 private:
  std::int64_t find_below(std::size_t level, std::size_t node, const Rectangle& rectangle,
                          std::vector<std::size_t>& found) const;

  std::vector<std::size_t> places_;             // in the list, those of near blocks together
  std::vector<std::vector<Rectangle>> levels_;  // first those of the blocks; then each bounds several of the level before it
};

}  // namespace ringspan::internal
