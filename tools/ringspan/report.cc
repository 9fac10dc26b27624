#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/processor.h"
#include "text.h"

namespace ringspan::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kListedRanks = 6;  // beyond these, the smallest and largest are shown instead of all

Pass last_pass(const Plan& plan) { return plan.options().backward ? Pass::backward : Pass::forward; }

double waiting_share(const RankReport& rank) {
  const double seconds = rank.forward_seconds + rank.backward_seconds;
  return seconds > 0 ? (rank.forward_waiting + rank.backward_waiting) / seconds : 0.0;
}

std::string line(const char* name, const std::string& value) { return fmt::format("{:<12}{}\n", name, printable(value)); }

std::string shape_text(const Problem& p) {
  std::string text = fmt::format("{} x {} tokens", p.batch, count_text(p.tokens_q));
  if (p.tokens_k != p.tokens_q) text += fmt::format(" ({} keys)", count_text(p.tokens_k));
  text += fmt::format(", {}", counted(p.heads, "head"));
  if (p.kv_heads != p.heads) text += fmt::format(" ({} of k, v)", p.kv_heads);
  text += fmt::format(" x {}", p.head_dim);
  if (p.head_dim_v != p.head_dim) text += fmt::format(" (v: {})", p.head_dim_v);
  return text + fmt::format(", {}", to_string(p.dtype));
}

std::string plan_text(const RunReport& report) {
  const Plan& plan = report.plan;
  const Problem& problem = plan.problem();
  std::string text =
      fmt::format("{}{}, {} ({}), {} sharding", to_string(plan.strategy()), report.chosen ? " (the cheapest by the model)" : "",
                  counted(problem.ranks, "rank"), report.transport, problem.sharding_q.to_string());
  if (!(problem.sharding_k == problem.sharding_q)) text += fmt::format(" (keys: {})", problem.sharding_k.to_string());
  if (problem.replicated_q) text += ", queries on every rank";
  if (plan.bucket_rows() > 0) text += fmt::format(", buckets of {}", counted(plan.bucket_rows(), "row"));
  return text + fmt::format(", {} each on {}", counted(plan.options().threads, "thread"), counted(usable_processors(), "core"));
}

// Columns: rank 0, 1, ... or smallest and largest; rows: components of memory.
std::string memory_table(const RunReport& report) {
  const auto ranks = static_cast<int>(report.plans.size());
  const Pass pass = last_pass(report.plan);
  std::vector<std::vector<MemoryLine>> columns;
  for (const Plan& plan : report.plans) columns.push_back(memory_lines(plan, report.dlse));
  const bool all = ranks <= kListedRanks;
  std::string text = fmt::format("{:<22}", fmt::format("memory ({} pass)", pass == Pass::forward ? "forward" : "backward"));
  if (all) {
    for (int r = 0; r < ranks; ++r) text += fmt::format("{:>12}", fmt::format("rank {}", r));
  } else {
    text += fmt::format("{:>12}{:>12}", "smallest", "largest");
  }
  text += "\n";
  const auto row = [&](const std::string& name, const std::vector<std::int64_t>& bytes) {
    if (std::all_of(bytes.begin(), bytes.end(), [](std::int64_t b) { return b == 0; })) return;
    text += fmt::format("  {:<20}", name);
    if (all) {
      for (const std::int64_t b : bytes) text += fmt::format("{:>12}", bytes_text(static_cast<double>(b)));
    } else {
      const auto [low, high] = std::minmax_element(bytes.begin(), bytes.end());
      text += fmt::format("{:>12}{:>12}", bytes_text(static_cast<double>(*low)), bytes_text(static_cast<double>(*high)));
    }
    text += "\n";
  };
  std::vector<std::int64_t> totals(static_cast<std::size_t>(ranks), 0);
  for (std::size_t i = 0; i < columns.front().size(); ++i) {
    std::vector<std::int64_t> bytes;
    for (std::size_t r = 0; r < columns.size(); ++r) {
      bytes.push_back(columns[r][i].bytes);
      totals[r] += columns[r][i].bytes;
    }
    row(columns.front()[i].component, bytes);
  }
  row("all", totals);
  return text;
}

std::string memory_text(const RunReport& report) {
  std::int64_t most = 0;
  for (const Plan& plan : report.plans) most = std::max(most, memory_bytes(plan, report.dlse));
  const auto bytes = static_cast<double>(most);
  if (report.plan.problem().ranks == 1) return line("memory", bytes_text(bytes));
  const auto one = static_cast<double>(report.one_rank_bytes);
  std::string text = line("memory", fmt::format("{} on the rank that needs most, {} of the {} that one rank alone would need",
                                                bytes_text(bytes), percent_text(one > 0 ? bytes / one : 0), bytes_text(one)));
  std::int64_t plans = 0;
  for (const Plan& plan : report.plans) plans += plan_bytes(plan);
  if (plans > most)
    text += line("plans", fmt::format("{} of all ranks, in one process", bytes_text(static_cast<double>(plans))));
  return text;
}

std::string traffic_table(const RunReport& report) {
  const auto ranks = static_cast<int>(report.plans.size());
  const std::vector<std::int64_t>& sent = report.world.sent;
  const std::int64_t total = std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
  if (ranks == 1) return {};
  if (ranks > kListedRanks) {
    std::vector<std::int64_t> by_rank;
    for (int r = 0; r < ranks; ++r)
      by_rank.push_back(std::accumulate(sent.begin() + r * ranks, sent.begin() + (r + 1) * ranks, std::int64_t{0}));
    const auto [low, high] = std::minmax_element(by_rank.begin(), by_rank.end());
    return line("sent", fmt::format("{} in all; by a rank {} to {}", bytes_text(static_cast<double>(total)),
                                    bytes_text(static_cast<double>(*low)), bytes_text(static_cast<double>(*high))));
  }
  std::string text = fmt::format("{:<22}", "sent");
  for (int peer = 0; peer < ranks; ++peer) text += fmt::format("{:>12}", fmt::format("to {}", peer));
  text += "\n";
  for (int r = 0; r < ranks; ++r) {
    text += fmt::format("  {:<20}", fmt::format("by rank {}", r));
    for (int peer = 0; peer < ranks; ++peer) {
      const auto bytes = static_cast<double>(*(sent.begin() + r * ranks + peer));
      text += fmt::format("{:>12}", peer == r ? "-" : bytes_text(bytes));
    }
    text += "\n";
  }
  return text;
}

std::string time_text(const RunReport& report) {
  const WorldReport& world = report.world;
  const Problem& problem = report.plan.problem();
  std::string text = seconds_text(world.seconds);
  if (report.plan.options().backward) {
    text +=
        fmt::format(" (forward {}, backward {})", seconds_text(world.forward_seconds), seconds_text(world.backward_seconds));
  }
  text = line("time", text);
  if (world.seconds <= 0) return text;
  const double tokens = static_cast<double>(problem.batch) * static_cast<double>(problem.tokens_q);
  text += line("speed", fmt::format("{}, {}", rate_text(tokens / world.seconds, "tokens"),
                                    rate_text(report.flops() / world.seconds, "flop")));
  if (problem.ranks == 1 || report.sequential) return text;
  double sum = 0;
  double most = 0;
  for (const RankReport& rank : world.ranks) {
    sum += waiting_share(rank);
    most = std::max(most, waiting_share(rank));
  }
  return text + line("waiting", fmt::format("{} of the time on average, {} on the rank that waits most",
                                            percent_text(sum / static_cast<double>(world.ranks.size())), percent_text(most)));
}

Json json_of(const Verification& verification) {
  Json json{{"passed", verification.passed}, {"sampled", verification.sampled}, {"seconds", verification.seconds}};
  if (verification.sampled) {
    json["query_rows"] = verification.query_rows;
    json["key_rows"] = verification.key_rows;
  }
  for (const oracle::Comparison& c : verification.comparisons) {
    json["tensors"].push_back(Json{{"name", c.name},
                                   {"passed", c.passed},
                                   {"elements", c.elements},
                                   {"failures", c.failures},
                                   {"both_nan", c.both_nan},
                                   {"max_error", c.max_error},
                                   {"max_naive_error", c.max_naive_error}});
  }
  if (!verification.from_outputs.empty()) json["from_outputs"] = verification.from_outputs;
  if (!verification.ranks_without_keys.empty()) json["ranks_without_keys"] = verification.ranks_without_keys;
  return json;
}

Json json_of(const RunReport& report, int rank) {
  const Plan& plan = report.plans[static_cast<std::size_t>(rank)];
  const RankReport& measured = report.world.ranks[static_cast<std::size_t>(rank)];
  Json json{{"rank", rank},
            {"forward_seconds", measured.forward_seconds},
            {"backward_seconds", measured.backward_seconds},
            {"waiting_share", waiting_share(measured)},
            {"sent_bytes", measured.sent_bytes},
            {"received_bytes", measured.received_bytes},
            {"pairs", plan.pairs()}};
  for (const MemoryLine& memory : memory_lines(plan, report.dlse)) json["memory_bytes"][memory.component] = memory.bytes;
  json["memory_bytes"]["all"] = memory_bytes(plan, report.dlse);
  const auto begin =
      report.world.sent.begin() + static_cast<std::ptrdiff_t>(rank) * static_cast<std::ptrdiff_t>(report.plans.size());
  json["sent_bytes_to"] = std::vector<std::int64_t>(begin, begin + static_cast<std::ptrdiff_t>(report.plans.size()));
  return json;
}

}  // namespace

double RunReport::flops() const {
  double sum = 0;
  for (const Plan& p : plans) {
    sum += p.flops(Pass::forward);
    if (p.options().backward) sum += p.flops(Pass::backward);
  }
  return sum;
}

std::string to_text(const RunReport& report) {
  const Problem& problem = report.plan.problem();
  std::string text = line("input", report.input + ": " + shape_text(problem));
  text += line("pattern", problem.pattern.to_string());
  text += line("plan", plan_text(report));
  text += time_text(report);
  if (report.compared && report.world.seconds > 0) {
    const double speed_up = report.compared->seconds / report.world.seconds;
    text += line("compared", fmt::format("{} on {}: speed-up {:.2f}, efficiency {}", seconds_text(report.compared->seconds),
                                         counted(report.compared_ranks, "rank"), speed_up,
                                         percent_text(speed_up * report.compared_ranks / problem.ranks)));
  }
  text += memory_text(report);
  if (report.sequential) {
    text += line("resident", fmt::format("{} at the peak; forecast for one rank {}",
                                         bytes_text(static_cast<double>(report.sequential->peak_bytes)),
                                         bytes_text(static_cast<double>(report.sequential->forecast_bytes))));
  }
  if (report.verification) text += fmt::format("{:<12}{}", "verified", to_text(*report.verification));
  for (const std::string& note : report.notes) text += line("note", note);
  text += fmt::format("\n{}", memory_table(report));
  const std::string traffic = traffic_table(report);
  if (!traffic.empty()) text += fmt::format("\n{}", traffic);
  if (!report.output.empty()) text += fmt::format("\n{}", line("output", report.output));
  return text;
}

std::string to_json(const RunReport& report) {
  const Plan& plan = report.plan;
  const Problem& problem = plan.problem();
  const double tokens = static_cast<double>(problem.batch) * static_cast<double>(problem.tokens_q);
  const double seconds = report.world.seconds;
  Json json{{"version", 1},
            {"problem", report.problem_line},
            {"input", report.input},
            {"output", report.output.empty() ? Json() : Json(report.output)},
            {"ranks", problem.ranks},
            {"transport", report.transport},
            {"strategy", to_string(plan.strategy())},
            {"bucket_rows", plan.bucket_rows()},
            {"threads", plan.options().threads},
            {"seconds", seconds},
            {"forward_seconds", report.world.forward_seconds},
            {"backward_seconds", report.world.backward_seconds},
            {"tokens_per_second", seconds > 0 ? tokens / seconds : 0.0},
            {"flops", report.flops()},
            {"gigaflops_per_second", seconds > 0 ? report.flops() / seconds / 1e9 : 0.0},
            {"one_rank_memory_bytes", report.one_rank_bytes},
            {"notes", report.notes}};
  for (int rank = 0; rank < problem.ranks; ++rank) json["by_rank"].push_back(json_of(report, rank));
  if (report.compared) {
    const double speed_up = seconds > 0 ? report.compared->seconds / seconds : 0.0;
    json["compared"] = Json{{"ranks", report.compared_ranks},
                            {"seconds", report.compared->seconds},
                            {"speed_up", speed_up},
                            {"efficiency", speed_up * report.compared_ranks / problem.ranks}};
  }
  if (report.sequential) {
    json["sequential"] =
        Json{{"peak_resident_bytes", report.sequential->peak_bytes}, {"forecast_bytes", report.sequential->forecast_bytes}};
  }
  if (report.verification) json["verification"] = json_of(*report.verification);
  for (const Rejected& rejected : plan.rejected()) {
    json["rejected"].push_back(Json{{"candidate", rejected.candidate},
                                    {"reason", rejected.reason},
                                    {"nanoseconds", rejected.nanoseconds},
                                    {"at_least", rejected.at_least}});
  }
  return json_text(json);
}

}  // namespace ringspan::cli
