#include "pattern/lower.h"

#include <algorithm>

#include "base/arithmetic.h"

namespace ringspan {
namespace {

using internal::BlockIndex;
using internal::ceil_div;
using internal::floor_div;

constexpr std::size_t kFewBlocks = 16;  // not worth an index

// Queries [q_begin, q_end) and keys [k_begin, k_end) of some batch items in which a pattern is evaluated.
struct Frame {
  std::int64_t batch_first = 0, batch_count = 1;
  std::int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  std::int64_t diagonal = 0;
};

// A rectangle of pairs cut by a band; what the terms but `dilated` leave of a frame is a list of them.
struct Box {
  std::int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  std::int64_t lo = kNoLow, hi = kNoHigh;

  bool empty() const { return q_begin >= q_end || k_begin >= k_end || lo > hi; }
  void clip_q(std::int64_t begin, std::int64_t end) {
    q_begin = std::max(q_begin, begin);
    q_end = std::min(q_end, end);
  }
  void clip_k(std::int64_t begin, std::int64_t end) {
    k_begin = std::max(k_begin, begin);
    k_end = std::min(k_end, end);
  }
  void clip_band(std::int64_t low, std::int64_t high) {
    lo = std::max(lo, low);
    hi = std::min(hi, high);
  }
};

Frame with_diagonal(Frame frame, Align align) {
  frame.diagonal = align == Align::bottom_right ? frame.k_end - frame.q_end : frame.k_begin - frame.q_begin;
  return frame;
}

Frame whole_frame(const Problem& problem) {
  return with_diagonal({0, problem.batch, 0, problem.tokens_q, 0, problem.tokens_k, 0}, problem.pattern.align);
}

// The documents that may meet [begin, end), as a half-open range of indices.
std::pair<std::size_t, std::size_t> documents_meeting(const std::vector<std::int32_t>& offsets, std::int64_t begin,
                                                      std::int64_t end) {
  const auto first = std::upper_bound(offsets.begin(), offsets.end(), begin);
  const auto last = std::lower_bound(first, offsets.end(), end);
  const std::size_t documents = offsets.size() - 1;
  const auto index = [&](auto it) { return static_cast<std::size_t>(it - offsets.begin()); };
  return {index(first) - (first == offsets.begin() ? 0 : 1), std::min(index(last), documents)};
}

template <typename Visit>
void for_each_document(const Problem& problem, const Restriction& r, Visit&& visit) {
  const auto& offsets_q = problem.cu_seqlens_q;
  const auto& offsets_k = problem.cu_seqlens_k.empty() ? problem.cu_seqlens_q : problem.cu_seqlens_k;
  if (offsets_q.size() < 2) return;
  const auto [q_first, q_last] = documents_meeting(offsets_q, r.q_begin, r.q_end);
  const auto [k_first, k_last] = documents_meeting(offsets_k, r.k_begin, r.k_end);
  for (std::size_t d = std::max(q_first, k_first); d < std::min(q_last, k_last); ++d) {
    visit(with_diagonal({0, problem.batch, offsets_q[d], offsets_q[d + 1], offsets_k[d], offsets_k[d + 1], 0},
                        problem.pattern.align));
  }
}

// What is not padding of one batch item.
Frame frame_of_item(const Problem& problem, std::int64_t batch) {
  const auto item = static_cast<std::size_t>(batch);
  Frame frame = whole_frame(problem);
  if (!problem.starts_k.empty()) frame.k_begin = problem.starts_k[item];
  if (!problem.lengths_q.empty()) frame.q_end = problem.lengths_q[item];
  if (!problem.lengths_k.empty()) frame.k_end = frame.k_begin + problem.lengths_k[item];
  return frame;
}

// Consecutive batch items with the same padding are one frame.
template <typename Visit>
void for_each_item(const Problem& problem, Visit&& visit) {
  const auto same = [](const Frame& a, const Frame& b) {
    return a.q_end == b.q_end && a.k_begin == b.k_begin && a.k_end == b.k_end;
  };
  for (std::int64_t item = 0; item < problem.batch;) {
    Frame frame = frame_of_item(problem, item);
    std::int64_t next = item + 1;
    while (next < problem.batch && same(frame_of_item(problem, next), frame)) ++next;
    frame.batch_first = item;
    frame.batch_count = next - item;
    visit(with_diagonal(frame, problem.pattern.align));
    item = next;
  }
}

template <typename Visit>
void for_each_frame(const Problem& problem, const Restriction& restriction, Visit&& visit) {
  if (problem.pattern.documents) {
    for_each_document(problem, restriction, visit);
  } else if (!problem.lengths_q.empty() || !problem.lengths_k.empty() || !problem.starts_k.empty()) {
    for_each_item(problem, visit);
  } else {
    visit(whole_frame(problem));
  }
}

// The part of a box that one block of the frame allows.
Box inside_block(Box box, const Block& block, const Frame& frame) {
  const std::int64_t shift = frame.k_begin - frame.q_begin;  // the block's positions are relative to the frame
  box.clip_q(frame.q_begin + block.q_begin, frame.q_begin + block.q_end);
  box.clip_k(frame.k_begin + block.k_begin, frame.k_begin + block.k_end);
  switch (block.kind) {
    case BlockKind::full:
      break;
    case BlockKind::causal:
      box.clip_band(kNoLow, shift + block.k_end - block.q_end);
      break;
    case BlockKind::inverse_causal:
      box.clip_band(shift + block.k_begin - block.q_begin, kNoHigh);
      break;
    case BlockKind::band:
      box.clip_band(shift + block.lo, shift + block.hi);
      break;
  }
  return box;
}

// Disjoint boxes that together are every term of the pattern but `dilated`. Returns how many blocks it looked at.
template <typename Visit>
std::int64_t for_each_box(const Pattern& pattern, const BlockIndex* index, const Frame& frame, const Restriction& r,
                          Visit&& visit) {
  std::int64_t looked_at = 0;
  std::vector<std::size_t> found;
  Box whole{frame.q_begin, frame.q_end, frame.k_begin, frame.k_end};
  whole.clip_q(r.q_begin, r.q_end);
  whole.clip_k(r.k_begin, r.k_end);
  if (pattern.causal) whole.clip_band(kNoLow, frame.diagonal);
  if (pattern.window && pattern.window->left >= 0) whole.clip_band(frame.diagonal - pattern.window->left, kNoHigh);
  if (pattern.window && pattern.window->right >= 0) whole.clip_band(kNoLow, frame.diagonal + pattern.window->right);
  const auto cut_by_blocks = [&](const Box& box) {
    if (box.empty()) return;
    if (!pattern.blocks) {
      visit(box);
      return;
    }
    const auto cut = [&](const Block& block) {
      const Box part = inside_block(box, block, frame);
      if (!part.empty()) visit(part);
    };
    if (index == nullptr) {
      looked_at += static_cast<std::int64_t>(pattern.blocks->size());
      for (const Block& block : *pattern.blocks) cut(block);
      return;
    }
    looked_at += index->find(
        {box.q_begin - frame.q_begin, box.q_end - frame.q_begin, box.k_begin - frame.k_begin, box.k_end - frame.k_begin},
        found);
    for (const std::size_t place : found) cut((*pattern.blocks)[place]);
  };
  if (!pattern.prefix || pattern.causal) {  // causal is part of every prefix
    cut_by_blocks(whole);
    return looked_at;
  }
  Box before = whole, after = whole;
  before.clip_k(frame.k_begin, frame.k_begin + *pattern.prefix);
  after.clip_k(frame.k_begin + *pattern.prefix, frame.k_end);
  after.clip_band(kNoLow, frame.diagonal);
  cut_by_blocks(before);
  cut_by_blocks(after);
  return looked_at;
}

// The classes of the heads in [begin, end) that run branch `b`, with the residue at which each looks.
template <typename Visit>
void for_each_head_class(const Problem& problem, std::int64_t b, std::int64_t begin, std::int64_t end, Visit&& visit) {
  const Dilated& dilated = *problem.pattern.dilated;
  const std::int64_t heads = problem.heads;
  const std::int64_t rate = dilated.branches[static_cast<std::size_t>(b)].rate;
  const auto range = [&](std::int64_t first, std::int64_t last) {
    return clip(Progression{first, 1, last - first}, begin, end);
  };
  if (begin >= end) return;
  switch (dilated.dialect) {
    case Dialect::longnet: {
      const auto residues = [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t s = first; s < last; ++s) {
          visit(s, clip(Progression{s, rate, (heads - 1 - s) / rate + 1}, begin, end));
        }
      };
      if (end - begin >= rate) {
        residues(0, rate);
      } else if (begin % rate <= (end - 1) % rate) {
        residues(begin % rate, (end - 1) % rate + 1);
      } else {
        residues(0, (end - 1) % rate + 1);
        residues(begin % rate, rate);
      }
      break;
    }
    case Dialect::torchscale: {
      const std::int64_t block = ceil_div(heads, rate);
      for (std::int64_t s = begin / block; s <= (end - 1) / block; ++s) visit(s, range(s * block, (s + 1) * block));
      break;
    }
    case Dialect::head_groups: {
      const auto groups = static_cast<std::int64_t>(dilated.branches.size());
      const std::int64_t first = b * (heads / groups) + std::min(b, heads % groups);
      const Progression group = range(first, first + heads / groups + (b < heads % groups ? 1 : 0));
      if (!group.empty()) visit(b % rate, group);
      break;
    }
  }
}

// The segments of `segments_of` (the frame, or the whole problem for @global) that meet the box, branch by branch.
template <typename Visit>
void for_each_segment(const Problem& problem, const Frame& segments_of, const Box& box, const Restriction& r, const Slice& base,
                      Visit&& visit) {
  const Dilated& dilated = *problem.pattern.dilated;
  const std::int64_t origin = segments_of.k_begin;
  const std::int64_t diagonal = segments_of.diagonal;  // query i stands at i + diagonal
  for (std::size_t b = 0; b < dilated.branches.size(); ++b) {
    const auto [segment, rate] = dilated.branches[b];
    const std::int64_t first =
        std::max(floor_div(box.k_begin - origin, segment), floor_div(box.q_begin + diagonal - origin, segment));
    const std::int64_t last =
        std::min(floor_div(box.k_end - 1 - origin, segment), floor_div(box.q_end - 1 + diagonal - origin, segment));
    Slice slice = base;
    slice.state = dilated.dialect == Dialect::torchscale ? static_cast<int>(b) : 0;
    for (std::int64_t m = first; m <= last; ++m) {
      for_each_head_class(problem, static_cast<std::int64_t>(b), r.head_begin, r.head_end,
                          [&](std::int64_t residue, const Progression& heads) {
                            if (residue >= segment) return;
                            const Progression keys{origin + m * segment + residue, rate, (segment - 1 - residue) / rate + 1};
                            Progression queries = keys;
                            queries.first -= diagonal;
                            slice.heads = heads;
                            slice.q = clip(queries, box.q_begin, box.q_end);
                            slice.k = clip(keys, box.k_begin, box.k_end);
                            visit(slice);
                          });
    }
  }
}

std::int64_t visit_slices(const Problem& problem, const BlockIndex* index, const Restriction& restriction,
                          FunctionRef<void(const Slice&)> visit) {
  std::int64_t looked_at = 0;
  Restriction r = restriction;
  r.head_begin = std::max(r.head_begin, 0);
  r.head_end = std::min(r.head_end, problem.heads);
  if (r.q_begin >= r.q_end || r.k_begin >= r.k_end || r.head_begin >= r.head_end) return looked_at;
  const Pattern& pattern = problem.pattern;
  const auto emit = [&](const Slice& slice) {
    const Slice normal = normalize(slice);
    if (!normal.q.empty()) visit(normal);
  };
  for_each_frame(problem, r, [&](const Frame& frame) {
    Slice slice;
    slice.batch_first = frame.batch_first;
    slice.batch_count = frame.batch_count;
    slice.heads = {r.head_begin, 1, r.head_end - r.head_begin};
    slice.diagonal = frame.diagonal;
    looked_at += for_each_box(pattern, index, frame, r, [&](const Box& box) {
      slice.lo = box.lo;
      slice.hi = box.hi;
      if (pattern.dilated) {
        // Batch items of unequal length are no documents: @global leaves their frames alone.
        const bool global = pattern.dilated->global && pattern.documents;
        for_each_segment(problem, global ? whole_frame(problem) : frame, box, r, slice, emit);
        return;
      }
      slice.q = {box.q_begin, 1, box.q_end - box.q_begin};
      slice.k = {box.k_begin, 1, box.k_end - box.k_begin};
      emit(slice);
    });
  });
  return looked_at;
}

}  // namespace

Restriction unrestricted(const Problem& problem) { return {0, problem.tokens_q, 0, problem.tokens_k, 0, problem.heads}; }

void for_each_slice(const Problem& problem, const Restriction& restriction, FunctionRef<void(const Slice&)> visit) {
  visit_slices(problem, nullptr, restriction, visit);
}

Lowering::Lowering(const Problem& problem) : problem_(problem) {
  const auto& blocks = problem.pattern.blocks;
  if (blocks && blocks->size() > kFewBlocks) blocks_.emplace(*blocks);
}

std::int64_t Lowering::for_each_slice(const Restriction& restriction, FunctionRef<void(const Slice&)> visit) const {
  return visit_slices(problem_, blocks_ ? &*blocks_ : nullptr, restriction, visit);
}

std::vector<Slice> lower(const Problem& problem, const Restriction& restriction) {
  std::vector<Slice> slices;
  for_each_slice(problem, restriction, [&](const Slice& slice) { slices.push_back(slice); });
  return slices;
}

std::vector<Slice> lower(const Problem& problem) { return lower(problem, unrestricted(problem)); }

Int128 pair_count(const Problem& problem) {
  Int128 pairs = 0;
  for_each_slice(problem, unrestricted(problem), [&](const Slice& slice) { pairs += pair_count(slice); });
  return pairs;
}

}  // namespace ringspan
