#include "plan/strategy.h"

#include <array>
#include <string>

#include "plan/pass.h"
#include "ringspan/error.h"

namespace ringspan {
namespace internal {
namespace {

Progression all_ranks(const Setting& setting) { return {0, 1, setting.ranks()}; }
Progression one_rank(int rank) { return {rank, 1, 1}; }

Assignment owner_of_query(const Setting& setting, int rank) {
  return {one_rank(rank), all_ranks(setting), {0, setting.problem->heads}};
}

Assignment owner_of_key(const Setting& setting, int rank) {
  return {all_ranks(setting), one_rank(rank), {0, setting.problem->heads}};
}

Assignment owner_of_head(const Setting& setting, int rank) {
  const std::int64_t heads = setting.problem->heads;
  const auto first = [&](std::int64_t r) { return static_cast<int>(heads * r / setting.ranks()); };
  return {all_ranks(setting), all_ranks(setting), {first(rank), first(rank + 1)}};
}

// Of p ranks c compute: rank floor(g p / c) the queries of group g.
Assignment few_ranks(const Setting& setting, int rank) {
  const std::int64_t ranks = setting.ranks();
  const std::int64_t computing = setting.options.computing_ranks;
  const std::int64_t group = (rank * computing + ranks - 1) / ranks;  // the first that begins at this rank or after it
  if (group == computing || group * ranks / computing != rank) return {};
  return {{rank, 1, (group + 1) * ranks / computing - rank}, all_ranks(setting), {0, setting.problem->heads}};
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
  throw InvalidArgument("strategy (" + std::to_string(static_cast<int>(strategy)) + ") is none of enum Strategy's");
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
