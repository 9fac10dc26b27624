// Measuring sizes for `ringspan tune`: candidates run in turn on the same tensors in the same memory, and one that looks best
// must beat the default by more than the noise, in runs of its own.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "rank_work.h"

namespace ringspan::cli {

// Seconds of each pass, of the slowest rank.
struct PassSeconds {
  double forward = 0, backward = 0;
};

// Runs `options` one after the other, `rounds` times, over problem.ranks threads of one thread each; every other round in the
// opposite order. [candidate][round]. `step` is called by the first rank before each run. A run before the first warms up.
std::vector<std::vector<PassSeconds>> run_in_turns(const Problem& problem, const std::vector<PlanOptions>& options,
                                                   const Inputs& inputs, int rounds, const std::function<void()>& step);

// What became of one size.
struct Finding {
  std::vector<double> seconds;  // of each candidate, the best of its runs
  std::size_t best = 0;         // candidate; 0 is the default
  double default_seconds = 0;   // medians of the last stage
  double best_seconds = 0;
  double gain = 0;    // of the best: median over rounds of default / best, less 1
  double spread = 0;  // between the quartiles of these ratios
  bool used = false;
};

// How many runs each stage of a search takes.
struct Stages {
  int screening_rounds = 2;  // all candidates
  int finalists = 4;
  int final_rounds = 3;
  int duel_rounds = 7;  // default and winner
  int runs(std::size_t candidates) const;
};

inline constexpr double kLeastGain = 0.01;

// The best of `count` candidates, of which the first is the default. measure(candidates, rounds)[i][round] are seconds of
// candidates[i]. A best one that gains less than the spread or kLeastGain is not used.
using Measure = std::function<std::vector<std::vector<double>>(const std::vector<std::size_t>& candidates, int rounds)>;
Finding search(std::size_t count, const Stages& stages, const Measure& measure);

}  // namespace ringspan::cli
