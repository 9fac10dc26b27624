// What every rank of a plan computes, keeps and sends: `ringspan plan --rank all`.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "plan/plan_data.h"

namespace ringspan::internal {

struct PassCost {
  Int128 pairs = 0;
  double flops = 0;
  std::int64_t memory_bytes = 0, pinned_bytes = 0;
  std::int64_t sent_bytes = 0, received_bytes = 0, sent_messages = 0, received_messages = 0;
};

struct RankCost {
  std::int64_t queries = 0, keys = 0;  // rows that it holds
  std::int64_t nanoseconds = 0;        // both passes by the cost model
  std::array<PassCost, 2> passes;      // forward and, if it is planned, backward
};

class RankCosts {
 public:
  // Plans all ranks, one after the other, and keeps of each only what it costs. `planned` is told how many are done; what it
  // throws goes to the caller, as what make_plan throws does.
  RankCosts(const Problem& problem, const PlanOptions& options, FunctionRef<void(int)> planned);

  const std::vector<RankCost>& ranks() const { return ranks_; }
  std::string to_string() const;  // for people
  std::string to_json() const;    // docs/plan.md describes it

 private:
  Plan first_;  // of rank 0: what is the same for all
  std::vector<RankCost> ranks_;
};

}  // namespace ringspan::internal
