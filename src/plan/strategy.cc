#include "plan/strategy.h"

#include <array>
#include <numeric>

#include "base/check.h"
#include "plan/pass.h"
#include "ringspan/error.h"

namespace ringspan {
namespace internal {
namespace {

std::vector<int> all_ranks(const Setting& setting) {
  std::vector<int> ranks(static_cast<std::size_t>(setting.ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Assignment owner_of_query(const Setting& setting, int rank) {
  return {{rank}, all_ranks(setting), {0, setting.problem->heads}};
}

Assignment owner_of_key(const Setting& setting, int rank) {
  return {all_ranks(setting), {rank}, {0, setting.problem->heads}};
}

Assignment owner_of_head(const Setting& setting, int rank) {
  const int heads = setting.problem->heads;
  const int ranks = setting.ranks();
  return {all_ranks(setting), all_ranks(setting), {heads * rank / ranks, heads * (rank + 1) / ranks}};
}

// Of p ranks c compute: rank floor(g p / c) the queries of group g.
Assignment few_ranks(const Setting& setting, int rank) {
  const int ranks = setting.ranks();
  const int computing = setting.options.computing_ranks;
  Assignment assignment;
  for (int group = 0; group < computing; ++group) {
    const int begin = group * ranks / computing;
    if (begin != rank) continue;
    for (int owner = begin; owner < (group + 1) * ranks / computing; ++owner) assignment.query_owners.push_back(owner);
  }
  if (assignment.query_owners.empty()) return assignment;
  assignment.key_owners = all_ranks(setting);
  assignment.heads = {0, setting.problem->heads};
  return assignment;
}

constexpr std::array kStrategies{
    StrategyRow{Strategy::local, "local", few_ranks, stage_gather, false,
                "few ranks compute, the others only send and receive their rows"},
    StrategyRow{Strategy::all_gather, "all-gather", owner_of_query, stage_gather, false,
                "the owner of the query computes; all keys that it reads arrive at once"},
    StrategyRow{Strategy::exchange, "exchange", owner_of_query, stage_exchange, true,
                "the owner of the query computes; keys come straight from their owners, bucket by bucket"},
    StrategyRow{Strategy::ring, "ring", owner_of_query, stage_ring, true,
                "the owner of the query computes; keys are relayed round the ring, bucket by bucket"},
    StrategyRow{Strategy::pass_q, "pass-q", owner_of_key, stage_pass_q, true,
                "the owner of the key computes; queries travel, partial results return"},
    StrategyRow{Strategy::ulysses, "ulysses", owner_of_head, stage_gather, false,
                "the owner of the head computes; all-to-all before and after"},
};

}  // namespace

std::span<const StrategyRow> strategies() { return kStrategies; }

const StrategyRow& strategy_row(Strategy strategy) {
  for (const StrategyRow& row : kStrategies) {
    if (row.strategy == strategy) return row;
  }
  RINGSPAN_CHECK(false);
  return kStrategies.front();
}

}  // namespace internal

std::string_view to_string(Strategy strategy) {
  return strategy == Strategy::automatic ? "auto" : internal::strategy_row(strategy).name;
}

Strategy parse_strategy(std::string_view name) {
  if (name == "auto") return Strategy::automatic;
  std::string known = "auto";
  for (const internal::StrategyRow& row : internal::strategies()) {
    if (row.name == name) return row.strategy;
    known += ", " + std::string(row.name);
  }
  throw InvalidArgument("unknown strategy '" + std::string(name) + "': expected one of " + known);
}

}  // namespace ringspan
