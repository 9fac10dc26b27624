#include "tune_search.h"

#include <algorithm>
#include <numeric>

namespace ringspan::cli {
namespace {

double quantile(std::vector<double> values, double at) {
  std::sort(values.begin(), values.end());
  const double place = at * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (place - static_cast<double>(below));
}

}  // namespace

int Stages::runs(std::size_t candidates) const {
  const int count = static_cast<int>(candidates);
  return screening_rounds * count + final_rounds * std::min(finalists, count) + 2 * duel_rounds + 3;  // 3 to warm up
}

Finding search(std::size_t count, const Stages& stages, const Measure& measure) {
  Finding finding;
  std::vector<std::size_t> all(count);
  std::iota(all.begin(), all.end(), std::size_t{0});
  for (const std::vector<double>& runs : measure(all, stages.screening_rounds)) {
    finding.seconds.push_back(*std::min_element(runs.begin(), runs.end()));
  }
  const auto faster = [&](std::size_t a, std::size_t b) { return finding.seconds[a] < finding.seconds[b]; };
  std::stable_sort(all.begin(), all.end(), faster);
  all.resize(std::min(count, static_cast<std::size_t>(stages.finalists)));
  const std::vector<std::vector<double>> finals = measure(all, stages.final_rounds);
  std::size_t first = 0;
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (quantile(finals[i], 0.5) < quantile(finals[first], 0.5)) first = i;
  }
  finding.best = all[first];
  if (finding.best == 0) {
    finding.default_seconds = finding.best_seconds = quantile(finals[first], 0.5);
    return finding;
  }
  const std::vector<std::vector<double>> duel = measure({0, finding.best}, stages.duel_rounds);
  std::vector<double> ratios;
  for (std::size_t round = 0; round < duel[0].size(); ++round) ratios.push_back(duel[0][round] / duel[1][round]);
  finding.default_seconds = quantile(duel[0], 0.5);
  finding.best_seconds = quantile(duel[1], 0.5);
  finding.gain = quantile(ratios, 0.5) - 1;
  finding.spread = quantile(ratios, 0.75) - quantile(ratios, 0.25);
  finding.used = finding.gain >= kLeastGain && finding.gain > finding.spread;
  return finding;
}

}  // namespace ringspan::cli
