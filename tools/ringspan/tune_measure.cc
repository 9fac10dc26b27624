#include "tune_measure.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "ringspan/transports.h"

namespace ringspan::cli {
namespace {

constexpr std::size_t kAlignment = 64;

double quantile(std::vector<double> values, double at) {
  std::sort(values.begin(), values.end());
  const double place = at * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (place - static_cast<double>(below));
}

// One rank: an attention per candidate, all in one arena and on the same tensors.
class Rank {
 public:
  Rank(const Problem& problem, const std::vector<PlanOptions>& options, const Inputs& inputs, Communicator& communicator) {
    std::vector<Plan> plans;
    for (const PlanOptions& candidate : options) plans.push_back(make_plan(problem, candidate, communicator.rank()));
    std::int64_t bytes = 0;
    for (const Plan& plan : plans) bytes = std::max(bytes, plan.arena_bytes());
    arena_ = Pages(bytes + static_cast<std::int64_t>(kAlignment));  // pages are aligned to more than that
    work_ = std::make_unique<RankWork>(plans.front(), inputs, Layout::bshd);
    watched_ = std::make_unique<WatchedCommunicator>(communicator, plans.front(), nullptr);
    for (const Plan& plan : plans) {
      const std::span<std::byte> arena(arena_.data(), static_cast<std::size_t>(plan.arena_bytes()));
      attentions_.push_back(std::make_unique<Attention>(plan, *watched_, ExecuteOptions{}, arena));
    }
  }
  PassSeconds run(std::size_t candidate) {
    const RankReport report = work_->run(*attentions_[candidate], *watched_);
    return {report.forward_seconds, report.backward_seconds};
  }

 private:
  Pages arena_;
  std::unique_ptr<RankWork> work_;
  std::unique_ptr<WatchedCommunicator> watched_;
  std::vector<std::unique_ptr<Attention>> attentions_;
};

}  // namespace

std::vector<std::vector<PassSeconds>> run_in_turns(const Problem& problem, const std::vector<PlanOptions>& options,
                                                   const Inputs& inputs, int rounds, const std::function<void()>& step) {
  const std::size_t count = options.size();
  const auto ranks = static_cast<std::size_t>(problem.ranks);
  std::vector<PassSeconds> all(ranks * count * static_cast<std::size_t>(rounds));
  run_thread_ranks(problem.ranks, [&](Communicator& communicator) {
    Rank rank(problem, options, inputs, communicator);
    const auto own = static_cast<std::size_t>(communicator.rank());
    rank.run(0);
    for (std::size_t round = 0; round < static_cast<std::size_t>(rounds); ++round) {
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t candidate = round % 2 == 0 ? i : count - 1 - i;
        if (own == 0) step();
        all[(own * count + candidate) * static_cast<std::size_t>(rounds) + round] = rank.run(candidate);
      }
    }
  });
  std::vector<std::vector<PassSeconds>> slowest(count, std::vector<PassSeconds>(static_cast<std::size_t>(rounds)));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t candidate = 0; candidate < count; ++candidate) {
      for (std::size_t round = 0; round < static_cast<std::size_t>(rounds); ++round) {
        const PassSeconds& seconds = all[(rank * count + candidate) * static_cast<std::size_t>(rounds) + round];
        PassSeconds& most = slowest[candidate][round];
        most = {std::max(most.forward, seconds.forward), std::max(most.backward, seconds.backward)};
      }
    }
  }
  return slowest;
}

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
