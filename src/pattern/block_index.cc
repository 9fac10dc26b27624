#include "pattern/block_index.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/arithmetic.h"

namespace ringspan::internal {
namespace {

constexpr std::size_t kChildren = 8;  // of a node

bool meet(const Rectangle& a, const Rectangle& b) {
  return a.q_begin < b.q_end && b.q_begin < a.q_end && a.k_begin < b.k_end && b.k_begin < a.k_end;
}

void extend(Rectangle& bounds, const Rectangle& by) {
  bounds.q_begin = std::min(bounds.q_begin, by.q_begin);
  bounds.q_end = std::max(bounds.q_end, by.q_end);
  bounds.k_begin = std::min(bounds.k_begin, by.k_begin);
  bounds.k_end = std::max(bounds.k_end, by.k_end);
}

// Puts near blocks together: halves by where their queries begin, then by where their keys do, and so on.
void cluster(std::span<const Block> blocks, std::span<std::size_t> places, bool by_queries) {
  if (places.size() <= kChildren) return;
  const std::size_t middle = round_up(places.size() / 2, kChildren);
  const auto begin = [&](std::size_t place) { return by_queries ? blocks[place].q_begin : blocks[place].k_begin; };
  std::nth_element(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(middle), places.end(),
                   [&](std::size_t a, std::size_t b) { return begin(a) < begin(b); });
  cluster(blocks, places.first(middle), !by_queries);
  cluster(blocks, places.subspan(middle), !by_queries);
}

}  // namespace

BlockIndex::BlockIndex(std::span<const Block> blocks) : places_(blocks.size()), levels_(1) {
  std::iota(places_.begin(), places_.end(), std::size_t{0});
  cluster(blocks, places_, true);
  for (const std::size_t place : places_) {
    const Block& block = blocks[place];
    levels_.front().push_back({block.q_begin, block.q_end, block.k_begin, block.k_end});
  }
  while (levels_.back().size() > kChildren) {
    const std::vector<Rectangle>& below = levels_.back();
    std::vector<Rectangle> level;
    for (std::size_t i = 0; i < below.size(); ++i) {
      if (i % kChildren == 0) level.push_back(below[i]);
      extend(level.back(), below[i]);
    }
    levels_.push_back(std::move(level));
  }
}

std::int64_t BlockIndex::find(const Rectangle& rectangle, std::vector<std::size_t>& found) const {
  found.clear();
  std::int64_t looked_at = 0;
  const std::size_t top = levels_.size() - 1;
  for (std::size_t i = 0; i < levels_[top].size(); ++i) looked_at += find_below(top, i, rectangle, found);
  std::sort(found.begin(), found.end());
  return looked_at;
}

std::int64_t BlockIndex::find_below(std::size_t level, std::size_t node, const Rectangle& rectangle,
                                    std::vector<std::size_t>& found) const {
  std::int64_t looked_at = 1;
  if (!meet(levels_[level][node], rectangle)) return looked_at;
  if (level == 0) {
    found.push_back(places_[node]);
    return looked_at;
  }
  const std::size_t end = std::min((node + 1) * kChildren, levels_[level - 1].size());
  for (std::size_t child = node * kChildren; child < end; ++child) {
    looked_at += find_below(level - 1, child, rectangle, found);
  }
  return looked_at;
}

}  // namespace ringspan::internal
