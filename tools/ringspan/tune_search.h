// Looking for the fastest of several sizes where times are noisy: all take turns, then the fastest few, and the one that looks
// best must beat the default by more than the noise in runs of its own. Pure but for what it is given to measure with.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace ringspan::cli {

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
  int screening_rounds = 3;  // all candidates
  int finalists = 4;
  int final_rounds = 5;
  int duel_rounds = 15;  // default and winner
  int runs(std::size_t candidates) const;
};

inline constexpr double kLeastGain = 0.01;

// The best of `count` candidates, of which the first is the default. measure(candidates, rounds)[i][round] are seconds of
// candidates[i]. A best one that gains less than the spread or kLeastGain is not used.
using Measure = std::function<std::vector<std::vector<double>>(const std::vector<std::size_t>& candidates, int rounds)>;
Finding search(std::size_t count, const Stages& stages, const Measure& measure);

}  // namespace ringspan::cli
