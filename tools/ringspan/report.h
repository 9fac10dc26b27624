// What `run` tells at the end: a page for people, or JSON (docs/cli.md lists its fields).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rank_work.h"
#include "sequential.h"
#include "verification.h"

namespace ringspan::cli {

struct RunReport {
  explicit RunReport(const Plan& first_plan) : plan(first_plan) {}

  Plan plan;                // of rank 0
  std::vector<Plan> plans;  // of all ranks
  std::string input, output;
  std::string transport;  // threads, processes or sequential
  bool chosen = false;    // the strategy, by automatic
  std::string problem_line;
  std::vector<std::string> notes;
  bool dlse = false;                // is given
  std::int64_t one_rank_bytes = 0;  // that one rank would need for the same problem
  WorldReport world;
  std::optional<SequentialReport> sequential;
  int compared_ranks = 0;
  std::optional<WorldReport> compared;  // the same on `compared_ranks` ranks
  std::optional<Verification> verification;

  double flops() const;  // of all ranks, both passes
};

std::string to_text(const RunReport& report);
std::string to_json(const RunReport& report);

}  // namespace ringspan::cli
