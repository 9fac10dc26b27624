#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "pattern/slice.h"
#include "pattern/validate.h"
#include "ringspan/error.h"
#include "ringspan/pattern.h"

namespace ringspan {
namespace {

using internal::kMaxOffset;

std::string to_text(const Block& block) {
  std::string text = fmt::format("{}-{},{}-{}", block.q_begin, block.q_end, block.k_begin, block.k_end);
  switch (block.kind) {
    case BlockKind::full:
      return text;
    case BlockKind::causal:
      return text + ",causal";
    case BlockKind::inverse_causal:
      return text + ",inverse_causal";
    case BlockKind::band:
      return text + fmt::format(",band({},{})", block.lo, block.hi);
  }
  throw InvalidArgument(fmt::format("pattern.blocks: kind ({}) is none of the known kinds", static_cast<int>(block.kind)));
}

std::string_view to_text(Dialect dialect) {
  switch (dialect) {
    case Dialect::longnet:
      return "longnet";
    case Dialect::torchscale:
      return "torchscale";
    case Dialect::head_groups:
      return "head_groups";
  }
  throw InvalidArgument(fmt::format("pattern.dilated.dialect ({}) is none of the known dialects", static_cast<int>(dialect)));
}

void check_range(const char* field, std::int64_t value, std::int64_t least) {
  if (value < least || value > kMaxOffset) {
    throw InvalidArgument(fmt::format("{} ({}) must be in [{}, {}]", field, value, least, kMaxOffset));
  }
}

void validate_dilated(const Dilated& dilated) {
  to_text(dilated.dialect);
  if (dilated.branches.empty() || dilated.branches.size() > internal::kMaxBranches) {
    throw InvalidArgument(
        fmt::format("pattern.dilated has {} branches, expected 1 to {}", dilated.branches.size(), internal::kMaxBranches));
  }
  for (std::size_t b = 0; b < dilated.branches.size(); ++b) {
    check_range(fmt::format("pattern.dilated.branches[{}].segment", b).c_str(), dilated.branches[b].segment, 1);
    check_range(fmt::format("pattern.dilated.branches[{}].rate", b).c_str(), dilated.branches[b].rate, 1);
  }
}

// The pairs of a block in frame-relative positions.
Slice to_slice(const Block& block) {
  Slice slice;
  slice.heads = {0, 1, 1};
  slice.q = {block.q_begin, 1, block.q_end - block.q_begin};
  slice.k = {block.k_begin, 1, block.k_end - block.k_begin};
  if (block.kind == BlockKind::causal) slice.hi = block.k_end - block.q_end;
  if (block.kind == BlockKind::inverse_causal) slice.lo = block.k_begin - block.q_begin;
  if (block.kind == BlockKind::band) {
    slice.lo = block.lo;
    slice.hi = block.hi;
  }
  return slice;
}

bool share_a_pair(const Block& a, const Block& b) {
  Slice slice = to_slice(a);
  const Slice other = to_slice(b);
  slice.q = intersect(slice.q, other.q);
  slice.k = intersect(slice.k, other.k);
  slice.lo = std::max(slice.lo, other.lo);
  slice.hi = std::min(slice.hi, other.hi);
  return !is_empty(slice);
}

void validate_block(const Block& block, std::size_t index) {
  const std::string text = fmt::format("pattern.blocks[{}] ({})", index, to_text(block));
  const auto bad_range = [](std::int64_t begin, std::int64_t end) { return begin < 0 || end < begin || end > kMaxOffset; };
  if (bad_range(block.q_begin, block.q_end) || bad_range(block.k_begin, block.k_end)) {
    throw InvalidArgument(fmt::format("{}: expected 0 <= begin <= end <= {} on both sides", text, kMaxOffset));
  }
  if (block.kind != BlockKind::band && (block.lo != 0 || block.hi != 0)) {
    throw InvalidArgument(fmt::format("{}: lo ({}) and hi ({}) are for kind band only", text, block.lo, block.hi));
  }
  if (block.lo > block.hi || block.lo < -kMaxOffset || block.hi > kMaxOffset) {
    throw InvalidArgument(fmt::format("{}: expected {} <= lo <= hi <= {}", text, -kMaxOffset, kMaxOffset));
  }
}

// A pair may be in one block only. Sweeps over the queries; the blocks met so far lie in the order of their keys.
void validate_blocks(const std::vector<Block>& blocks) {
  std::int64_t widest = 0;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    validate_block(blocks[i], i);
    widest = std::max(widest, blocks[i].k_end - blocks[i].k_begin);
    order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return blocks[a].q_begin < blocks[b].q_begin; });
  std::multimap<std::int64_t, std::size_t> active;  // by k_begin
  std::multimap<std::int64_t, decltype(active)::iterator> ends;
  for (const std::size_t i : order) {
    const Block& block = blocks[i];
    while (!ends.empty() && ends.begin()->first <= block.q_begin) {
      active.erase(ends.begin()->second);
      ends.erase(ends.begin());
    }
    for (auto it = active.lower_bound(block.k_begin - widest); it != active.end() && it->first < block.k_end; ++it) {
      if (!share_a_pair(block, blocks[it->second])) continue;
      const auto [first, second] = std::minmax(i, it->second);
      throw InvalidArgument(
          fmt::format("pattern.blocks[{}] ({}) and pattern.blocks[{}] ({}) overlap; a pair may be in one only", first,
                      to_text(blocks[first]), second, to_text(blocks[second])));
    }
    if (block.q_begin < block.q_end) ends.emplace(block.q_end, active.emplace(block.k_begin, i));
  }
}

}  // namespace

std::string Pattern::to_string() const {
  std::vector<std::string> terms;
  if (causal) terms.emplace_back("causal");
  if (window) terms.push_back(fmt::format("window:{},{}", window->left, window->right));
  if (documents) terms.emplace_back("documents");
  if (prefix) terms.push_back(fmt::format("prefix:{}", *prefix));
  if (blocks) {
    std::string text = "block:";
    for (std::size_t i = 0; i < blocks->size(); ++i) text += fmt::format("{}{}", i > 0 ? ";" : "", to_text((*blocks)[i]));
    terms.push_back(std::move(text));
  }
  if (dilated) {
    std::string text = "dilated:";
    for (std::size_t i = 0; i < dilated->branches.size(); ++i) {
      text += fmt::format("{}{}x{}", i > 0 ? "," : "", dilated->branches[i].segment, dilated->branches[i].rate);
    }
    terms.push_back(fmt::format("{}@{}{}", text, to_text(dilated->dialect), dilated->global ? "@global" : ""));
  }
  if (terms.empty()) terms.emplace_back("full");
  if (align == Align::top_left) terms.front() += "@top_left";
  return fmt::format("{}", fmt::join(terms, "&"));
}

int Pattern::states() const {
  return dilated && dilated->dialect == Dialect::torchscale ? static_cast<int>(dilated->branches.size()) : 1;
}

float Pattern::output_scale() const {
  if (!dilated || dilated->dialect != Dialect::head_groups || dilated->branches.empty()) return 1.0F;
  return 1.0F / static_cast<float>(dilated->branches.size());
}

namespace internal {

void validate(const Pattern& pattern) {
  if (pattern.align != Align::bottom_right && pattern.align != Align::top_left) {
    throw InvalidArgument(fmt::format("pattern.align ({}) is none of the known alignments", static_cast<int>(pattern.align)));
  }
  if (pattern.window) {
    check_range("pattern.window.left", pattern.window->left, -1);
    check_range("pattern.window.right", pattern.window->right, -1);
  }
  if (pattern.prefix) check_range("pattern.prefix", *pattern.prefix, 0);
  if (pattern.dilated) validate_dilated(*pattern.dilated);
  if (pattern.blocks) validate_blocks(*pattern.blocks);
}

}  // namespace internal
}  // namespace ringspan
