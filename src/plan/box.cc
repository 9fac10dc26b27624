#include "plan/box.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/check.h"

namespace ringspan::internal {
namespace {

// p without its sub-progression `hole`: what lies before, after, and the other residues between.
void subtract(const Progression& p, const Progression& hole, std::vector<Progression>& out) {
  const std::int64_t before = (hole.first - p.first) / p.stride;
  if (before > 0) out.push_back({p.first, p.stride, before});
  if (hole.count > 1) {
    for (std::int64_t offset = p.stride; offset < hole.stride; offset += p.stride) {
      out.push_back({hole.first + offset, hole.stride, hole.count - 1});
    }
  }
  const std::int64_t after = (p.last() - hole.last()) / p.stride;
  if (after > 0) out.push_back({hole.last() + p.stride, p.stride, after});
}

// How many pieces that makes, for a hole inside p.
std::int64_t pieces_without(const Progression& p, const Progression& hole) {
  const std::int64_t between = hole.count > 1 ? hole.stride / p.stride - 1 : 0;
  return between + (hole.first > p.first ? 1 : 0) + (hole.last() < p.last() ? 1 : 0);
}

// The same of boxes, for a hole that is not empty.
std::int64_t pieces_without(const Box& box, const Box& hole) {
  const std::int64_t batches = (hole.batch_first > box.batch_first ? 1 : 0) +
                               (hole.batch_first + hole.batch_count < box.batch_first + box.batch_count ? 1 : 0);
  return batches + pieces_without(box.heads, hole.heads) + pieces_without(box.positions, hole.positions);
}

// Joins b to a where a followed by b is one progression.
bool join(Progression& a, const Progression& b) {
  const std::int64_t step = b.first - a.last();
  if (step <= 0) return false;
  if (a.count > 1 && a.stride != step) return false;
  if (b.count > 1 && b.stride != step) return false;
  if (a.count == 1 && b.count == 1 && step != std::max(a.stride, b.stride)) return false;
  a = {a.first, step, a.count + b.count};
  return true;
}

bool same_set(const Progression& a, const Progression& b) {
  return a.first == b.first && a.count == b.count && (a.count <= 1 || a.stride == b.stride);
}

// Whether two boxes differ in one dimension at most, as those must that join.
bool alike(const Box& a, const Box& b) { return same_set(a.heads, b.heads) || same_set(a.positions, b.positions); }

bool join(Box& a, const Box& b) {
  if (a.batch_first != b.batch_first || a.batch_count != b.batch_count) return false;
  if (same_set(a.heads, b.heads)) return join(a.positions, b.positions);
  if (same_set(a.positions, b.positions)) return join(a.heads, b.heads);
  return false;
}

// Whether two progressions may share a position; in doubt, yes.
bool may_meet(const Progression& a, const Progression& b) {
  if (a.first > b.last() || b.first > a.last()) return false;
  return a.stride != b.stride || a.stride == 1 || (a.first - b.first) % a.stride == 0;
}

// The same of boxes: cheap, since most pairs of a set do not meet.
bool may_meet(const Box& a, const Box& b) { return may_meet(a.heads, b.heads) && may_meet(a.positions, b.positions); }

// Cuts `existing` out of the pieces; `next` is scratch.
void cut_out(const Box& existing, std::vector<Box>& pieces, std::vector<Box>& next) {
  if (std::none_of(pieces.begin(), pieces.end(), [&](const Box& piece) { return may_meet(piece, existing); })) return;
  next.clear();
  for (const Box& piece : pieces) subtract(piece, existing, next);
  pieces.swap(next);
}

Progression cover(const Progression& a, const Progression& b) {
  const std::int64_t first = std::min(a.first, b.first);
  std::int64_t stride = std::gcd(a.first - first, b.first - first);
  if (a.count > 1) stride = std::gcd(stride, a.stride);
  if (b.count > 1) stride = std::gcd(stride, b.stride);
  if (stride == 0) stride = std::max(a.stride, std::int64_t{1});
  return {first, stride, (std::max(a.last(), b.last()) - first) / stride + 1};
}

}  // namespace

Box intersect(const Box& a, const Box& b) {
  const std::int64_t first = std::max(a.batch_first, b.batch_first);
  const std::int64_t end = std::min(a.batch_first + a.batch_count, b.batch_first + b.batch_count);
  if (end <= first) return {};
  Box box{first, end - first, ringspan::intersect(a.heads, b.heads), {}};
  if (box.heads.empty()) return {};
  box.positions = ringspan::intersect(a.positions, b.positions);
  return is_empty(box) ? Box{} : box;
}

std::int64_t row_count(std::span<const Box> boxes) {
  std::int64_t rows = 0;
  for (const Box& box : boxes) rows += box.rows();
  return rows;
}

void subtract(const Box& box, const Box& hole, std::vector<Box>& out) {
  const Box common = intersect(box, hole);
  if (is_empty(common)) {
    out.push_back(box);
    return;
  }
  const std::int64_t common_end = common.batch_first + common.batch_count;
  const std::int64_t box_end = box.batch_first + box.batch_count;
  if (common.batch_first > box.batch_first) {
    out.push_back({box.batch_first, common.batch_first - box.batch_first, box.heads, box.positions});
  }
  if (box_end > common_end) out.push_back({common_end, box_end - common_end, box.heads, box.positions});
  std::vector<Progression> rest;
  subtract(box.heads, common.heads, rest);
  for (const Progression& heads : rest) out.push_back({common.batch_first, common.batch_count, heads, box.positions});
  rest.clear();
  subtract(box.positions, common.positions, rest);
  for (const Progression& positions : rest) out.push_back({common.batch_first, common.batch_count, common.heads, positions});
}

void BoxSet::append(Box box) {
  for (bool joined = true; joined;) {
    joined = false;
    for (std::size_t i = boxes_.size(); i-- > 0;) {
      if (!alike(boxes_[i], box)) continue;
      Box candidate = boxes_[i];
      if (!join(candidate, box)) {
        candidate = box;
        if (!join(candidate, boxes_[i])) continue;
      }
      box = candidate;
      boxes_.erase(boxes_.begin() + static_cast<std::ptrdiff_t>(i));
      joined = true;
      break;
    }
  }
  boxes_.push_back(box);
}

void BoxSet::cover(std::span<const Box> more, std::int64_t more_rows) {
  const std::int64_t rows = row_count(boxes_) + more_rows;
  boxes_.insert(boxes_.end(), more.begin(), more.end());
  Box all = boxes_.front();
  for (const Box& box : boxes_) {
    const std::int64_t end = std::max(all.batch_first + all.batch_count, box.batch_first + box.batch_count);
    all.batch_first = std::min(all.batch_first, box.batch_first);
    all.batch_count = end - all.batch_first;
    all.heads = internal::cover(all.heads, box.heads);
    all.positions = internal::cover(all.positions, box.positions);
  }
  excess_ += all.rows() - rows;
  boxes_.assign(1, all);
  covered_ = true;
}

bool BoxSet::contains(const Box& box) const {
  if (is_empty(box)) return true;
  std::vector<Box> pending{box};
  std::vector<Box> next;
  for (const Box& existing : boxes_) {
    cut_out(existing, pending, next);
    if (pending.empty()) return true;
  }
  return pending.empty();
}

void BoxSet::add(const Box& box) {
  if (is_empty(box)) return;
  const auto common_with = [&](const Box& existing) { return may_meet(existing, box) ? intersect(existing, box) : Box{}; };
  std::int64_t rows = box.rows();  // that the set has not
  for (const Box& existing : boxes_) rows -= common_with(existing).rows();
  if (rows == 0) return;
  if (covered_) return cover({&box, 1}, rows);
  // Of two that meet, the one that falls into fewer pieces is cut: not a dense box where a sparse one lies in it.
  constexpr auto kMost = static_cast<std::int64_t>(kMaxBoxes);
  std::vector<Box> kept;
  std::vector<Box> holes;
  for (const Box& existing : boxes_) {
    const Box common = common_with(existing);
    if (is_empty(common)) {
      kept.push_back(existing);
      continue;
    }
    const std::int64_t own = pieces_without(box, common);
    const std::int64_t theirs = pieces_without(existing, common);
    if (std::min(own, theirs) > kMost) return cover({&box, 1}, rows);
    if (theirs < own) {
      subtract(existing, common, kept);
    } else {
      kept.push_back(existing);
      holes.push_back(common);
    }
  }
  std::vector<Box> pending{box};
  std::vector<Box> next;
  for (const Box& hole : holes) {
    cut_out(hole, pending, next);
    if (pending.size() > kMaxBoxes) return cover({&box, 1}, rows);
  }
  boxes_.swap(kept);
  for (const Box& piece : pending) append(piece);
  if (boxes_.size() > kMaxBoxes) cover({}, 0);
}

std::vector<Box> BoxSet::boxes() const {
  std::vector<Box> sorted = boxes_;
  std::sort(sorted.begin(), sorted.end(), [](const Box& a, const Box& b) {
    return std::tuple(a.positions.first, a.heads.first, a.batch_first, a.positions.stride, a.heads.stride) <
           std::tuple(b.positions.first, b.heads.first, b.batch_first, b.positions.stride, b.heads.stride);
  });
  return sorted;
}

}  // namespace ringspan::internal
