// Whether ranks wait for each other: what arrives in a stage has left when the sender began that stage, so that nobody is more
// than a stage ahead of those it receives from.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "pattern/lower.h"
#include "plan/plan_data.h"
#include "ringspan/plan.h"

namespace ringspan {
namespace {

std::vector<Int128> pairs_of_stages(const internal::Program& program) {
  std::vector<Int128> pairs;
  for (const internal::Stage& stage : program.stages) {
    pairs.push_back(0);
    for (const internal::Launch& launch : stage.compute) {
      if (launch.kind != internal::LaunchKind::attend && launch.kind != internal::LaunchKind::attend_backward) continue;
      for (std::int64_t i = launch.first; i < launch.first + launch.count; ++i)
        pairs.back() += pair_count(program.attend_items[static_cast<std::size_t>(i)].slice);
    }
  }
  return pairs;
}

// When the last rank ends, if a pair takes one unit of time and messages none, of the pairs of the rank that has most.
double waiting(const Problem& p, const PlanOptions& options, Pass pass) {
  const auto ranks = static_cast<std::size_t>(p.ranks);
  std::vector<Plan> plans;
  for (int rank = 0; rank < p.ranks; ++rank) plans.push_back(make_plan(p, options, rank));
  const auto program = [&](std::size_t rank) -> const internal::Program& {
    return pass == Pass::forward ? plans[rank].data().forward : plans[rank].data().backward;
  };
  std::vector<std::vector<Int128>> pairs;
  std::size_t stages = 0;
  Int128 most = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    pairs.push_back(pairs_of_stages(program(rank)));
    stages = std::max(stages, pairs.back().size());
    most = std::max(most, std::accumulate(pairs.back().begin(), pairs.back().end(), Int128{0}));
  }
  std::vector<Int128> begin(ranks, 0);  // of the stage
  for (std::size_t s = 0; s < stages; ++s) {
    std::vector<Int128> end = begin;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (s >= pairs[rank].size()) continue;
      end[rank] += pairs[rank][s];
      for (const internal::Round& round : program(rank).stages[s].rounds) {
        for (const internal::Transfer& transfer : round.transfers)
          end[rank] = std::max(end[rank], begin[static_cast<std::size_t>(transfer.peer)]);
      }
    }
    begin = end;
  }
  return static_cast<double>(*std::max_element(begin.begin(), begin.end())) / static_cast<double>(most);
}

TEST(Balance, CausalRanksDoNotWaitForEachOther) {
  for (const char* sharding : {"zigzag", "striped", "block_striped:512"}) {
    for (const int ranks : {2, 3, 4, 8}) {
      Problem p;
      p.tokens_q = p.tokens_k = 4096 * ranks;
      p.heads = p.kv_heads = 2;
      p.ranks = ranks;
      p.sharding_q = p.sharding_k = Sharding::parse(sharding);
      p.pattern = Pattern::parse("causal");
      for (const Strategy strategy : {Strategy::ring, Strategy::exchange, Strategy::pass_q}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          PlanOptions options;
          options.strategy = strategy;
          EXPECT_LE(waiting(p, options, pass), 1.05) << sharding << " " << ranks << " ranks, " << to_string(strategy);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringspan
