#include "plan/rank_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/quantity.h"
#include "plan/plan_text.h"

namespace ringspan::internal {
namespace {

constexpr std::size_t kListedRanks = 64;  // of more, only the least, the mean and the most are shown

PassCost cost_of(const Plan& plan, Pass pass) {
  const Program& program = pass == Pass::forward ? plan.data().forward : plan.data().backward;
  PassCost cost;
  cost.pairs = program.pairs;
  cost.flops = plan.flops(pass);
  cost.memory_bytes = plan.memory_bytes(pass);
  cost.pinned_bytes = plan.pinned_bytes(pass);
  for (const Stage& stage : program.stages) {
    for (const Round& round : stage.rounds) {
      for (const Transfer& transfer : round.transfers) {
        (transfer.send ? cost.sent_bytes : cost.received_bytes) += transfer.bytes;
        ++(transfer.send ? cost.sent_messages : cost.received_messages);
      }
    }
  }
  return cost;
}

// A column of the table: an amount of each rank, both passes together.
struct Column {
  const char* name;
  double (*amount)(const RankCost& rank);
  std::string (*text)(double amount);
  bool adds_up;  // over ranks
};

std::string count_text(double count) { return fmt::format("{:.0f}", count); }
std::string time_text(double nanoseconds) { return duration_text(static_cast<Int128>(nanoseconds)); }

template <typename Member>
double sum(const RankCost& rank, Member member) {
  return static_cast<double>(rank.passes[0].*member) + static_cast<double>(rank.passes[1].*member);
}

template <typename Member>
double most(const RankCost& rank, Member member) {
  return static_cast<double>(std::max(rank.passes[0].*member, rank.passes[1].*member));
}

constexpr Column kColumns[] = {
    {"queries", [](const RankCost& r) { return static_cast<double>(r.queries); }, count_text, true},
    {"keys", [](const RankCost& r) { return static_cast<double>(r.keys); }, count_text, true},
    {"work", [](const RankCost& r) { return sum(r, &PassCost::flops); }, flops_text, true},
    {"time", [](const RankCost& r) { return static_cast<double>(r.nanoseconds); }, time_text, false},
    {"memory", [](const RankCost& r) { return most(r, &PassCost::memory_bytes); }, bytes_text, true},
    {"pinned", [](const RankCost& r) { return most(r, &PassCost::pinned_bytes); }, bytes_text, true},
    {"sent", [](const RankCost& r) { return sum(r, &PassCost::sent_bytes); }, bytes_text, true},
    {"received", [](const RankCost& r) { return sum(r, &PassCost::received_bytes); }, bytes_text, true},
};

}  // namespace

RankCosts::RankCosts(const Problem& problem, const PlanOptions& options, FunctionRef<void(int)> planned)
    : first_(make_plan(problem, options, 0)) {
  for (int rank = 0; rank < problem.ranks; ++rank) {
    const Plan plan = rank == 0 ? first_ : make_plan(problem, options, rank);
    RankCost cost;
    cost.queries = plan.data().shard_q.rows;
    cost.keys = plan.data().shard_k.rows;
    cost.nanoseconds = plan.modelled_nanoseconds();
    cost.passes[0] = cost_of(plan, Pass::forward);
    if (options.backward) cost.passes[1] = cost_of(plan, Pass::backward);
    ranks_.push_back(cost);
    planned(rank + 1);
  }
}

std::string RankCosts::to_string() const {
  const Problem& p = first_.problem();
  std::string out = fmt::format("plans of {} rank{}\n", ranks_.size(), ranks_.size() == 1 ? "" : "s");
  auto to = std::back_inserter(out);
  append_problem(out, p);
  fmt::format_to(to, "  sharding  queries {}{}; keys {}\n", p.sharding_q.to_string(), p.replicated_q ? " (replicated)" : "",
                 p.sharding_k.to_string());
  Int128 total = 0;
  const auto slowest = std::max_element(ranks_.begin(), ranks_.end(),
                                        [](const RankCost& a, const RankCost& b) { return a.nanoseconds < b.nanoseconds; });
  for (const RankCost& rank : ranks_) total += rank.nanoseconds;
  append_strategy(out, first_.data(),
                  fmt::format("{} on the slowest rank ({}), {} on average by the model", duration_text(slowest->nanoseconds),
                              slowest - ranks_.begin(), duration_text(total / static_cast<int>(ranks_.size()))));
  out += first_.options().backward ? "\n  both passes; of memory the larger\n" : "\n";
  const auto is_shown = [&](const Column& column) {
    return std::any_of(ranks_.begin(), ranks_.end(), [&](const RankCost& rank) { return column.amount(rank) > 0; });
  };
  const auto line = [&](const std::string& name, auto&& text) {
    fmt::format_to(to, "  {:10}", name);
    for (const Column& column : kColumns) {
      if (is_shown(column)) fmt::format_to(to, "{:>14}", text(column));
    }
    out += "\n";
  };
  line("rank", [](const Column& column) { return std::string(column.name); });
  if (ranks_.size() <= kListedRanks) {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      line(std::to_string(i), [&](const Column& column) { return column.text(column.amount(ranks_[i])); });
    }
  }
  if (ranks_.size() == 1) return out;
  const auto of_all = [&](const Column& column, auto&& combine) {
    double result = column.amount(ranks_.front());
    for (std::size_t i = 1; i < ranks_.size(); ++i) result = combine(result, column.amount(ranks_[i]));
    return result;
  };
  const auto plus = [](double a, double b) { return a + b; };
  line("least",
       [&](const Column& column) { return column.text(of_all(column, [](double a, double b) { return std::min(a, b); })); });
  line("mean", [&](const Column& column) { return column.text(of_all(column, plus) / static_cast<double>(ranks_.size())); });
  line("most",
       [&](const Column& column) { return column.text(of_all(column, [](double a, double b) { return std::max(a, b); })); });
  line("all", [&](const Column& column) { return column.adds_up ? column.text(of_all(column, plus)) : std::string(); });
  return out;
}

}  // namespace ringspan::internal
