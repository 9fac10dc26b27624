// Strategies: which rank computes what, and how the rows get there. One row of the table per strategy.
//
// Adding a strategy: an assignment function, a staging (a new one, or stream / gather) and its row in kStrategies
// (docs/strategies.md walks through it).
#pragma once

#include <span>
#include <string_view>

#include "plan/reads.h"
#include "ringspan/plan.h"

namespace ringspan::internal {

class PassBuilder;
struct Setting;

// A rank computes the queries of `query_owners` against the keys of `key_owners` (ranks), for `heads`.
struct Assignment {
  Progression query_owners;
  Progression key_owners;
  HeadRange heads;
  bool computes() const { return !query_owners.empty() && !key_owners.empty() && heads.begin < heads.end; }
};

struct StrategyRow {
  Strategy strategy;
  std::string_view name;
  Assignment (*assign)(const Setting&, int rank);
  void (*stage)(PassBuilder&);  // writes the pass's transfers and tasks
  bool buckets;                 // rows travel in buckets
  std::string_view summary;
};

std::span<const StrategyRow> strategies();
const StrategyRow& strategy_row(Strategy strategy);

// Staging: rows of one side visit the ranks bucket by bucket (exchange, ring, pass-Q) ...
void stage_exchange(PassBuilder& pass);
void stage_ring(PassBuilder& pass);
void stage_pass_q(PassBuilder& pass);
// ... or everything that a rank reads is there before it computes the rest (all-gather, Ulysses, local).
void stage_gather(PassBuilder& pass);
// With PlanOptions::host_tensors, whatever the strategy.
void stage_from_host(PassBuilder& pass);

}  // namespace ringspan::internal
