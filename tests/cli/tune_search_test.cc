// The search of `ringspan tune` on times that are made up.
#include "tune_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace ringspan::cli {
namespace {

// Candidate i takes means[i], times 1 + noise: of a round (a busy machine), and of a run.
class Machine {
 public:
  Machine(std::vector<double> means, double of_round, double of_run, unsigned seed = 1)
      : means_(std::move(means)), of_round_(of_round), of_run_(of_run), random_(seed) {}

  Finding search(const Stages& stages = {}) {
    runs_ = 0;
    return cli::search(means_.size(), stages, [this](const std::vector<std::size_t>& candidates, int rounds) {
      std::vector<std::vector<double>> seconds(candidates.size());
      ++runs_;  // to warm up
      for (int round = 0; round < rounds; ++round) {
        const double busy = 1 + of_round_ * std::abs(normal_(random_));
        for (std::size_t i = 0; i < candidates.size(); ++i) {
          ++runs_;
          seconds[i].push_back(means_[candidates[i]] * busy * (1 + of_run_ * normal_(random_)));
        }
      }
      return seconds;
    });
  }
  int runs() const { return runs_; }

 private:
  std::vector<double> means_;
  double of_round_, of_run_;
  std::mt19937 random_;
  std::normal_distribution<double> normal_;
  int runs_ = 0;
};

TEST(TuneSearch, FindsTheFastest) {
  Machine machine({1.0, 1.2, 0.9, 1.1, 0.95, 2.0}, 0, 0);
  const Finding finding = machine.search();
  EXPECT_EQ(finding.best, 2U);
  EXPECT_TRUE(finding.used);
  EXPECT_NEAR(finding.gain, 1 / 0.9 - 1, 1e-12);
  EXPECT_EQ(finding.spread, 0.0);
  EXPECT_EQ(finding.seconds, (std::vector<double>{1.0, 1.2, 0.9, 1.1, 0.95, 2.0}));
}

TEST(TuneSearch, KeepsTheDefaultWhereItIsBestOrNearlyBest) {
  EXPECT_EQ(Machine({1.0, 1.2, 1.1}, 0, 0).search().best, 0U);
  EXPECT_FALSE(Machine({1.0, 1.2, 1.1}, 0, 0).search().used);
  const Finding nearly = Machine({1.0, 0.995}, 0, 0).search();
  EXPECT_EQ(nearly.best, 1U);
  EXPECT_FALSE(nearly.used) << "less than kLeastGain";
  const Finding alone = Machine({1.0}, 0, 0).search();
  EXPECT_EQ(alone.best, 0U);
  EXPECT_EQ(alone.default_seconds, 1.0);
}

// Runs of one round share what disturbs them, so that ratios are steadier than times.
TEST(TuneSearch, SeesAGainOnABusyMachine) {
  int used = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    const Finding finding = Machine({1.0, 1.3, 0.8, 1.5}, 0.3, 0.01, seed).search();
    used += finding.best == 2 && finding.used ? 1 : 0;
  }
  EXPECT_GE(used, 19);
}

// 30 equal candidates: one always looks best, but not in runs of its own.
TEST(TuneSearch, IsRarelyFooledByNoise) {
  int used = 0;
  for (unsigned seed = 1; seed <= 100; ++seed)
    used += Machine(std::vector<double>(30, 1.0), 0, 0.05, seed).search().used ? 1 : 0;
  EXPECT_LE(used, 12);
}

TEST(TuneSearch, TakesAsManyRunsAsItSays) {
  const Stages stages{2, 3, 2, 5};
  Machine many({1.0, 0.9, 0.8, 0.7, 0.6}, 0, 0), few({1.0, 0.9}, 0, 0);
  many.search(stages), few.search(stages);
  EXPECT_EQ(many.runs(), stages.runs(5));
  EXPECT_EQ(few.runs(), stages.runs(2));
}

}  // namespace
}  // namespace ringspan::cli
