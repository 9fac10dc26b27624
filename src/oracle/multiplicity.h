// Multiplicity: how often query i of a head attends to key j, written straight from the definitions in ringspan/pattern.h.
//
// It shares nothing with the lowering but the parameters, so that the two check each other. Positions are global tokens of one
// batch item. Pure; O(branches + blocks + log documents) per pair. Thread safe. `problem` must be valid.
#pragma once

#include <cstdint>
#include <span>

#include "ringspan/problem.h"

namespace ringspan::oracle {

// Queries [q_begin, q_end) and keys [k_begin, k_end) in which a pattern is evaluated.
struct Frame {
  std::int64_t q_begin = 0, q_end = 0;
  std::int64_t k_begin = 0, k_end = 0;
  std::int64_t diagonal = 0;  // j - i of the diagonal: k_end - q_end, or k_begin - q_begin (top_left)
};

// The frame of query i: its document, or what is not padding of the batch item. Empty when i is padding.
Frame frame_of(const Problem& problem, std::int64_t batch, std::int64_t i);

// Softmax states: one per branch in the torchscale dialect, otherwise 1.
int states(const Problem& problem);

// How often query i of query head `head` attends to key j within one softmax state (0 <= state < states), or in all
// of them together (-1). More than 1 only for a dilated pattern with several branches.
int multiplicity(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j, int state = -1);

// The diagonal of the frame of query i (0 for padding): ALiBi adds -slope |j - i - diagonal|.
std::int64_t diagonal(const Problem& problem, std::int64_t batch, std::int64_t i);

// Half-open bounds outside which multiplicity() is 0 for every key j of query i (every query i of key j), whatever the head.
struct Range {
  std::int64_t begin = 0, end = 0;
};
Range key_bounds(const Problem& problem, std::int64_t batch, std::int64_t i);
Range query_bounds(const Problem& problem, std::int64_t batch, std::int64_t j);

// A whole row: out[x] = multiplicity(problem, batch, head, i, keys.begin + x, state) for the keys of `keys`.
void multiplicity_row(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, int state, Range keys,
                      std::span<std::uint8_t> out);

// Heads of the same class have the same multiplicities everywhere; classes are numbered from 0 in order of first appearance.
int head_class(const Problem& problem, std::int64_t head);

}  // namespace ringspan::oracle
