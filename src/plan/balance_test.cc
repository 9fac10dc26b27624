// Whether ranks wait for each other: a rank is at most one stage ahead of its neighbours, so that a stage lasts as long as the
// slowest rank takes.
#include <gtest/gtest.h>

#include <algorithm>
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

// The pairs of the slowest rank of each stage, of the pairs of the rank that has most.
double waiting(const Problem& p, const PlanOptions& options, Pass pass) {
  std::vector<Int128> slowest;
  Int128 most = 0;
  for (int rank = 0; rank < p.ranks; ++rank) {
    const Plan plan = make_plan(p, options, rank);
    const std::vector<Int128> pairs = pairs_of_stages(pass == Pass::forward ? plan.data().forward : plan.data().backward);
    slowest.resize(std::max(slowest.size(), pairs.size()), 0);
    Int128 all = 0;
    for (std::size_t s = 0; s < pairs.size(); ++s) {
      slowest[s] = std::max(slowest[s], pairs[s]);
      all += pairs[s];
    }
    most = std::max(most, all);
  }
  Int128 sum = 0;
  for (const Int128 pairs : slowest) sum += pairs;
  return static_cast<double>(sum) / static_cast<double>(most);
}

TEST(Balance, CausalStagesTakeAllRanksEquallyLong) {
  for (const char* sharding : {"zigzag", "striped", "block_striped:512"}) {
    for (const int ranks : {2, 4, 8}) {
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
