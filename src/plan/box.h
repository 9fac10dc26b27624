// Boxes and sets of rows. A box is heads x positions (x batch items); a BoxSet keeps a union of boxes as disjoint boxes, so
// that every row is in it once. Pure; the result depends only on the boxes added and their order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan_data.h"

namespace ringspan::internal {

Box intersect(const Box& a, const Box& b);
inline bool is_empty(const Box& box) { return box.batch_count <= 0 || box.heads.empty() || box.positions.empty(); }
std::int64_t row_count(std::span<const Box> boxes);

// Appends `box` without `hole` to `out` as disjoint boxes.
void subtract(const Box& box, const Box& hole, std::vector<Box>& out);

class BoxSet {
 public:
  // At most this many boxes are kept apart; a set that needs more becomes one covering box (the excess is counted).
  static constexpr std::size_t kMaxBoxes = 256;

  void add(const Box& box);
  // Disjoint boxes in a canonical order (first position, head, batch).
  std::vector<Box> boxes() const;
  // Rows of boxes() beyond those added; at most, where a box was added after others had been covered.
  std::int64_t excess_rows() const { return excess_; }
  bool contains(const Box& box) const;

 private:
  void append(Box box);
  // Of all boxes and `more`, which has so many rows that the set has not.
  void cover(std::span<const Box> more, std::int64_t more_rows);

  std::vector<Box> boxes_;
  bool covered_ = false;
  std::int64_t excess_ = 0;
};

}  // namespace ringspan::internal
