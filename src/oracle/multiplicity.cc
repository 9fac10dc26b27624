#include "oracle/multiplicity.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/check.h"

namespace ringspan::oracle {
namespace {

// Rounds towards minus infinity, so that positions before the frame fall into segments of their own.
std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The index of the document that holds the position; empty documents hold none.
std::int64_t document_of(const std::vector<std::int32_t>& offsets, std::int64_t position) {
  return std::upper_bound(offsets.begin(), offsets.end(), position) - offsets.begin() - 1;
}

const std::vector<std::int32_t>& key_offsets(const Problem& problem) {
  return problem.cu_seqlens_k.empty() ? problem.cu_seqlens_q : problem.cu_seqlens_k;
}

Frame with_diagonal(Frame frame, Align align) {
  frame.diagonal = align == Align::bottom_right ? frame.k_end - frame.q_end : frame.k_begin - frame.q_begin;
  return frame;
}

// The batch item as one frame.
Frame whole_frame(const Problem& problem, std::int64_t batch) {
  Frame frame;
  frame.q_end = problem.lengths_q.empty() ? problem.tokens_q : problem.lengths_q[static_cast<std::size_t>(batch)];
  frame.k_begin = problem.starts_k.empty() ? 0 : problem.starts_k[static_cast<std::size_t>(batch)];
  frame.k_end =
      problem.lengths_k.empty() ? problem.tokens_k : frame.k_begin + problem.lengths_k[static_cast<std::size_t>(batch)];
  return with_diagonal(frame, problem.pattern.align);
}

Frame document_frame(const Problem& problem, std::int64_t document) {
  const auto d = static_cast<std::size_t>(document);
  Frame frame;
  frame.q_begin = problem.cu_seqlens_q[d];
  frame.q_end = problem.cu_seqlens_q[d + 1];
  frame.k_begin = key_offsets(problem)[d];
  frame.k_end = key_offsets(problem)[d + 1];
  return with_diagonal(frame, problem.pattern.align);
}

Frame frame_of_key(const Problem& problem, std::int64_t batch, std::int64_t j) {
  if (problem.pattern.documents) return document_frame(problem, document_of(key_offsets(problem), j));
  const Frame frame = whole_frame(problem, batch);
  return j >= frame.k_begin && j < frame.k_end ? frame : Frame{};
}

// i and j relative to the frame.
bool in_block(const Block& block, std::int64_t i, std::int64_t j) {
  if (i < block.q_begin || i >= block.q_end || j < block.k_begin || j >= block.k_end) return false;
  switch (block.kind) {
    case BlockKind::full:
      return true;
    case BlockKind::causal:
      return j - i <= block.k_end - block.q_end;
    case BlockKind::inverse_causal:
      return j - i >= block.k_begin - block.q_begin;
    case BlockKind::band:
      return block.lo <= j - i && j - i <= block.hi;
  }
  return false;
}

// The branch that a head runs in the head_groups dialect: contiguous groups, the first heads % branches one head larger.
std::int64_t head_group(std::int64_t heads, std::int64_t branches, std::int64_t head) {
  std::int64_t first = 0;
  for (std::int64_t group = 0; group < branches; ++group) {
    const std::int64_t size = heads / branches + (group < heads % branches ? 1 : 0);
    if (head < first + size) return group;
    first += size;
  }
  return branches;
}

// The residue at which a head looks in a branch, or nothing where it does not run the branch.
std::optional<std::int64_t> residue_of(const Problem& problem, std::int64_t head, std::int64_t branch) {
  const Dilated& dilated = *problem.pattern.dilated;
  const std::int64_t rate = dilated.branches[static_cast<std::size_t>(branch)].rate;
  switch (dilated.dialect) {
    case Dialect::longnet:
      return head % rate;
    case Dialect::torchscale:
      return head / ceil_div(problem.heads, rate);
    case Dialect::head_groups:
      if (head_group(problem.heads, static_cast<std::int64_t>(dilated.branches.size()), head) != branch) return std::nullopt;
      return branch % rate;
  }
  return std::nullopt;
}

// What does not change along a row of keys, worked out once.
struct RowPredicate {
  const Pattern& pattern;
  Frame frame;    // for all terms
  Frame dilated;  // for the dilated term
  std::int64_t i = 0;
  struct Branch {
    std::int64_t segment_index, segment, rate, residue;
  };
  std::vector<Branch> branches;  // those in which query i attends to anything

  RowPredicate(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t query, int state)
      : pattern(problem.pattern), frame(frame_of(problem, batch, query)), dilated(frame), i(query) {
    if (!pattern.dilated) return;
    if (pattern.dilated->global) dilated = whole_frame(problem, batch);
    const std::int64_t place = i + dilated.diagonal - dilated.k_begin;
    for (std::size_t b = 0; b < pattern.dilated->branches.size(); ++b) {
      if (pattern.dilated->dialect == Dialect::torchscale && state >= 0 && static_cast<int>(b) != state) continue;
      const auto residue = residue_of(problem, head, static_cast<std::int64_t>(b));
      if (!residue) continue;
      const DilatedBranch& branch = pattern.dilated->branches[b];
      const std::int64_t index = floor_div(place, branch.segment);
      if ((place - index * branch.segment) % branch.rate != *residue) continue;
      branches.push_back({index, branch.segment, branch.rate, *residue});
    }
  }

  int operator()(std::int64_t j) const {
    if (i < frame.q_begin || i >= frame.q_end || j < frame.k_begin || j >= frame.k_end) return 0;
    const std::int64_t distance = j - i - frame.diagonal;
    if (pattern.causal && distance > 0) return 0;
    if (pattern.window) {
      if (pattern.window->left >= 0 && distance < -pattern.window->left) return 0;
      if (pattern.window->right >= 0 && distance > pattern.window->right) return 0;
    }
    if (pattern.prefix && !(j - frame.k_begin < *pattern.prefix || distance <= 0)) return 0;
    if (pattern.blocks) {
      const bool inside = std::any_of(pattern.blocks->begin(), pattern.blocks->end(), [&](const Block& block) {
        return in_block(block, i - frame.q_begin, j - frame.k_begin);
      });
      if (!inside) return 0;
    }
    if (!pattern.dilated) return 1;
    const std::int64_t key = j - dilated.k_begin;
    int count = 0;
    for (const Branch& branch : branches) {
      const bool same_segment = floor_div(key, branch.segment) == branch.segment_index;
      if (same_segment && (key % branch.segment) % branch.rate == branch.residue) ++count;
    }
    return count;
  }
};

}  // namespace

int states(const Problem& problem) {
  const auto& dilated = problem.pattern.dilated;
  return dilated && dilated->dialect == Dialect::torchscale ? static_cast<int>(dilated->branches.size()) : 1;
}

Frame frame_of(const Problem& problem, std::int64_t batch, std::int64_t i) {
  if (problem.pattern.documents) return document_frame(problem, document_of(problem.cu_seqlens_q, i));
  const Frame frame = whole_frame(problem, batch);
  return i < frame.q_end ? frame : Frame{};
}

int multiplicity(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j, int state) {
  RINGSPAN_CHECK(state >= -1 && state < states(problem));
  return RowPredicate(problem, batch, head, i, state)(j);
}

std::int64_t diagonal(const Problem& problem, std::int64_t batch, std::int64_t i) {
  return frame_of(problem, batch, i).diagonal;
}

Range key_bounds(const Problem& problem, std::int64_t batch, std::int64_t i) {
  const Pattern& pattern = problem.pattern;
  const Frame frame = frame_of(problem, batch, i);
  Range range{frame.k_begin, frame.k_end};
  const std::int64_t center = i + frame.diagonal;
  if (pattern.causal) range.end = std::min(range.end, center + 1);
  if (pattern.window && pattern.window->left >= 0) range.begin = std::max(range.begin, center - pattern.window->left);
  if (pattern.window && pattern.window->right >= 0) range.end = std::min(range.end, center + pattern.window->right + 1);
  if (pattern.dilated) {
    const Frame dilated = pattern.dilated->global ? whole_frame(problem, batch) : frame;
    Range hull{range.end, range.begin};
    for (const DilatedBranch& branch : pattern.dilated->branches) {
      const std::int64_t index = floor_div(i + dilated.diagonal - dilated.k_begin, branch.segment);
      hull.begin = std::min(hull.begin, dilated.k_begin + index * branch.segment);
      hull.end = std::max(hull.end, dilated.k_begin + (index + 1) * branch.segment);
    }
    range = {std::max(range.begin, hull.begin), std::min(range.end, hull.end)};
  }
  return {range.begin, std::max(range.begin, range.end)};
}

Range query_bounds(const Problem& problem, std::int64_t batch, std::int64_t j) {
  const Pattern& pattern = problem.pattern;
  const Frame frame = frame_of_key(problem, batch, j);
  Range range{frame.q_begin, frame.q_end};
  const std::int64_t center = j - frame.diagonal;
  if (pattern.causal) range.begin = std::max(range.begin, center);
  if (pattern.window && pattern.window->left >= 0) range.end = std::min(range.end, center + pattern.window->left + 1);
  if (pattern.window && pattern.window->right >= 0) range.begin = std::max(range.begin, center - pattern.window->right);
  if (pattern.dilated) {
    const Frame dilated = pattern.dilated->global ? whole_frame(problem, batch) : frame;
    Range hull{range.end, range.begin};
    for (const DilatedBranch& branch : pattern.dilated->branches) {
      const std::int64_t first = floor_div(j - dilated.k_begin, branch.segment) * branch.segment;
      hull.begin = std::min(hull.begin, dilated.k_begin + first - dilated.diagonal);
      hull.end = std::max(hull.end, dilated.k_begin + first + branch.segment - dilated.diagonal);
    }
    range = {std::max(range.begin, hull.begin), std::min(range.end, hull.end)};
  }
  return {range.begin, std::max(range.begin, range.end)};
}

void multiplicity_row(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, int state, Range keys,
                      std::span<std::uint8_t> out) {
  RINGSPAN_CHECK(static_cast<std::int64_t>(out.size()) == keys.end - keys.begin);
  RINGSPAN_CHECK(!problem.pattern.dilated || problem.pattern.dilated->branches.size() < 256);
  const RowPredicate row(problem, batch, head, i, state);
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    out[static_cast<std::size_t>(j - keys.begin)] = static_cast<std::uint8_t>(row(j));
  }
}

int head_class(const Problem& problem, std::int64_t head) {
  if (!problem.pattern.dilated) return 0;
  const auto residues = [&](std::int64_t h) {
    std::vector<std::int64_t> key;
    for (std::size_t b = 0; b < problem.pattern.dilated->branches.size(); ++b) {
      key.push_back(residue_of(problem, h, static_cast<std::int64_t>(b)).value_or(-1));
    }
    return key;
  };
  std::vector<std::vector<std::int64_t>> classes;
  for (std::int64_t h = 0; h <= head; ++h) {
    const auto key = residues(h);
    const auto found = std::find(classes.begin(), classes.end(), key);
    if (h == head) return static_cast<int>(found - classes.begin());
    if (found == classes.end()) classes.push_back(key);
  }
  return 0;
}

}  // namespace ringspan::oracle
