// Drawing: who attends whom, and which rank computes it. For small problems, as text or as a picture.
//
// Drawn from the tasks of every rank's plan (forward pass), so that what is drawn is what is computed. Batch items and heads
// that look alike share one drawing. Throws InvalidArgument beyond kMaxDrawnTokens and kMaxDrawnRanks, otherwise as make_plan
// does. Pure; O(drawings x tokens_q x tokens_k) memory.
#pragma once

#include <cstdint>
#include <string>

#include "ringspan/plan.h"

namespace ringspan {

inline constexpr std::int64_t kMaxDrawnTokens = 512;  // on either side
inline constexpr int kMaxDrawnRanks = 1024;

// One line per query, one character per key: '.' does not attend; a letter (A = rank 0, ... Z, a ... z, then '*') attends and
// is computed by that rank, with one rank '1'; a digit attends that many times (dilated branches; '+' from 10 on). The owners
// of the queries stand on the left, those of the keys on top.
std::string draw_text(const Problem& problem, const PlanOptions& options);

// The same as a stand-alone SVG: cells coloured by the computing rank (darker where attended more often), owners along the
// axes.
std::string draw_svg(const Problem& problem, const PlanOptions& options);

}  // namespace ringspan
