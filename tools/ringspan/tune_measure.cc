#include "tune_measure.h"

#include <algorithm>
#include <memory>

#include "ringspan/transports.h"

namespace ringspan::cli {
namespace {

constexpr std::size_t kAlignment = 64;

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
  PassSeconds run(std::size_t candidate, int repeats) {
    PassSeconds best;
    for (int i = 0; i < repeats; ++i) {
      const RankReport report = work_->run(*attentions_[candidate], *watched_);
      best.forward = i == 0 ? report.forward_seconds : std::min(best.forward, report.forward_seconds);
      best.backward = i == 0 ? report.backward_seconds : std::min(best.backward, report.backward_seconds);
    }
    return best;
  }

 private:
  Pages arena_;
  std::unique_ptr<RankWork> work_;
  std::unique_ptr<WatchedCommunicator> watched_;
  std::vector<std::unique_ptr<Attention>> attentions_;
};

}  // namespace

std::vector<std::vector<PassSeconds>> run_in_turns(const Problem& problem, const std::vector<PlanOptions>& options,
                                                   const Inputs& inputs, int rounds, int repeats,
                                                   const std::function<void()>& step) {
  const std::size_t count = options.size();
  const auto ranks = static_cast<std::size_t>(problem.ranks);
  std::vector<PassSeconds> all(ranks * count * static_cast<std::size_t>(rounds));
  run_thread_ranks(problem.ranks, [&](Communicator& communicator) {
    Rank rank(problem, options, inputs, communicator);
    const auto own = static_cast<std::size_t>(communicator.rank());
    rank.run(0, 1);
    for (std::size_t round = 0; round < static_cast<std::size_t>(rounds); ++round) {
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t candidate = round % 2 == 0 ? i : count - 1 - i;
        if (own == 0) step();
        all[(own * count + candidate) * static_cast<std::size_t>(rounds) + round] = rank.run(candidate, repeats);
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

}  // namespace ringspan::cli
