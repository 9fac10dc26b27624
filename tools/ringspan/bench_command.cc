// ringspan bench: times a problem over ranks against the same on one rank, in the same process, one after the other in turn.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "comm/rounds.h"
#include "command.h"
#include "io/problem_line.h"
#include "problem_options.h"
#include "random_inputs.h"
#include "rank_work.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"
#include "text.h"
#include "verification.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

constexpr Communicator::Seconds kPatience{3600};  // of ranks that wait for their turn

struct BenchOptions {
  ProblemOptions problem;
  int repetitions = 5;
  bool processes = false, forward_only = false, json = false;
};

// Whole results in memory that forked ranks share.
class MemoryTarget final : public Target {
 public:
  MemoryTarget(const Problem& problem, bool backward) {
    const OutputShapes shapes(problem, Layout::bshd);
    add("o", shapes.o.bytes());
    add("lse", shapes.lse.bytes());
    if (!backward) return;
    add("dq", shapes.dq.bytes());
    add("dk", shapes.dk.bytes());
    add("dv", shapes.dv.bytes());
    add("dsinks", problem.heads * std::int64_t{4});
  }
  void write(std::string_view name, std::int64_t offset, const void* data, std::int64_t bytes) override {
    std::memcpy(memory_.at(std::string(name))->bytes().data() + offset, data, static_cast<std::size_t>(bytes));
  }
  Outputs outputs() const {
    const auto data = [&](const char* name) -> const std::byte* {
      const auto found = memory_.find(name);
      return found == memory_.end() ? nullptr : found->second->bytes().data();
    };
    return {data("o"), data("lse"), data("dq"), data("dk"), data("dv"), data("dsinks")};
  }

 private:
  void add(const char* name, std::int64_t bytes) {
    memory_[name] = std::make_unique<SharedMemory>(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)));
  }
  std::map<std::string, std::unique_ptr<SharedMemory>> memory_;
};

// All ranks have come this far: by dissemination, in ceil(log2 p) rounds.
class Barrier {
 public:
  explicit Barrier(Communicator& communicator) : communicator_(communicator.duplicate()) {}
  void wait() {
    const int size = communicator_->size();
    for (int distance = 1; distance < size; distance *= 2) {
      std::array<std::byte, 2> data{};
      const std::array batch{
          Message{Message::Direction::send, (communicator_->rank() + distance) % size, data.data(), 1},
          Message{Message::Direction::receive, (communicator_->rank() + size - distance) % size, data.data() + 1, 1}};
      communicator_->wait(communicator_->post(kUserRounds + round_++, batch), kPatience);
    }
  }

 private:
  std::unique_ptr<Communicator> communicator_;
  std::uint64_t round_ = 0;
};

// One rank of a world with its tensors, ready to be run again and again.
struct Station {
  Station(const Plan& plan, const Inputs& inputs, Communicator& communicator)
      : work(plan, inputs, Layout::bshd), watched(communicator, plan, nullptr), attention(plan, watched) {}
  RankReport run() { return work.run(attention, watched); }

  RankWork work;
  WatchedCommunicator watched;
  Attention attention;
};

PlanOptions for_one_rank(const PlanOptions& options) {
  PlanOptions one;
  one.backward = options.backward;
  one.threads = options.threads;
  one.attend_kernel = options.attend_kernel;
  one.attend_backward_kernel = options.attend_backward_kernel;
  one.attend_tile = options.attend_tile;
  one.attend_backward_tile = options.attend_backward_tile;
  one.tuned = options.tuned;
  return one;
}

Problem on_one_rank(Problem problem) {
  problem.ranks = 1;
  problem.replicated_q = false;
  problem.sharding_q = problem.sharding_k = {};
  return problem;
}

struct Samples {
  std::vector<double> forward, backward, total;
  void add(double f, double b) {
    forward.push_back(f);
    backward.push_back(b);
    total.push_back(f + b);
  }
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

struct BenchResult {
  Samples ranks, one;
  Verification verification;
  double flops = 0;
};

// Turn and turn about: all ranks, then the first alone with the whole problem. The first turn of each warms up.
void time_in_turns(const BenchOptions& options, std::span<const Plan> plans, const Inputs& inputs, BenchResult& result) {
  const Problem& problem = options.problem.problem;
  const auto ranks = static_cast<std::size_t>(problem.ranks);
  const auto turns = static_cast<std::size_t>(options.repetitions);
  const SharedMemory memory((ranks + 1) * turns * sizeof(RankReport));
  auto* reports = reinterpret_cast<RankReport*>(memory.bytes().data());
  const RankBody body = [&](Communicator& communicator) {
    const Plan& plan = plans[static_cast<std::size_t>(communicator.rank())];
    Station station(plan, inputs, communicator);
    Barrier barrier(communicator);
    std::vector<std::unique_ptr<Communicator>> alone;
    std::unique_ptr<Station> single;
    if (communicator.rank() == 0) {
      alone = make_thread_world(1);
      single =
          std::make_unique<Station>(make_plan(on_one_rank(problem), for_one_rank(plan.options()), 0), inputs, *alone.front());
    }
    for (std::size_t turn = 0; turn <= turns; ++turn) {
      barrier.wait();
      const RankReport report = station.run();
      barrier.wait();
      const RankReport other = single ? single->run() : RankReport{};
      if (turn == 0) continue;
      reports[(turn - 1) * (ranks + 1) + static_cast<std::size_t>(communicator.rank())] = report;
      if (single) reports[(turn - 1) * (ranks + 1) + ranks] = other;
    }
    barrier.wait();
  };
  options.processes ? run_forked_ranks(problem.ranks, body) : run_thread_ranks(problem.ranks, body);
  for (std::size_t turn = 0; turn < turns; ++turn) {
    const RankReport* row = reports + turn * (ranks + 1);
    double forward = 0;
    double backward = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      forward = std::max(forward, row[rank].forward_seconds);
      backward = std::max(backward, row[rank].backward_seconds);
    }
    result.ranks.add(forward, backward);
    result.one.add(row[ranks].forward_seconds, row[ranks].backward_seconds);
  }
}

int print(const BenchOptions& options, const Plan& plan, const BenchResult& result) {
  const Problem& problem = options.problem.problem;
  const double seconds = median(result.ranks.total);
  const double one = median(result.one.total);
  const double speed_up = seconds > 0 ? one / seconds : 0;
  const bool good = result.verification.passed;
  if (options.json) {
    const auto samples = [](const Samples& s) {
      return nlohmann::ordered_json{{"median_seconds", median(s.total)},
                                    {"median_forward_seconds", median(s.forward)},
                                    {"median_backward_seconds", median(s.backward)},
                                    {"seconds", s.total}};
    };
    const nlohmann::ordered_json json{{"version", 1},
                                      {"problem", io::print_problem(problem)},
                                      {"strategy", to_string(plan.strategy())},
                                      {"transport", options.processes ? "processes" : "threads"},
                                      {"threads", plan.options().threads},
                                      {"repetitions", options.repetitions},
                                      {"verified", good},
                                      {"ranks", samples(result.ranks)},
                                      {"one_rank", samples(result.one)},
                                      {"flops", result.flops},
                                      {"speed_up", speed_up},
                                      {"efficiency", speed_up / problem.ranks}};
    fmt::print("{}\n", json_text(json));
    return good ? kOk : kVerificationFailed;
  }
  fmt::print("{:<12}{}\n", "problem", io::print_problem(problem));
  fmt::print("{:<12}{}, ranks are {} with {} each\n", "plan", to_string(plan.strategy()),
             options.processes ? "processes" : "threads", counted(plan.options().threads, "thread"));
  fmt::print("{:<12}{}", "verified", to_text(result.verification));
  if (!good) return kVerificationFailed;
  const auto row = [&](const std::string& name, const Samples& s) {
    fmt::print("{:<12}{:>12}{:>12}{:>12}{:>16}\n", name, seconds_text(median(s.forward)),
               options.forward_only ? "-" : seconds_text(median(s.backward)), seconds_text(median(s.total)),
               median(s.total) > 0 ? rate_text(result.flops / median(s.total), "flop") : "-");
  };
  fmt::print("\n{:<12}{:>12}{:>12}{:>12}{:>16}\n", fmt::format("median of {}", options.repetitions), "forward", "backward",
             "both", "speed");
  row(counted(problem.ranks, "rank"), result.ranks);
  row("1 rank", result.one);
  fmt::print("{:<12}{:.2f} times one rank, efficiency {}\n", "speed-up", speed_up, percent_text(speed_up / problem.ranks));
  return kOk;
}

int run(BenchOptions& options) {
  options.problem.plan.backward = !options.forward_only;
  complete(options.problem);
  const Problem& problem = options.problem.problem;
  const Plan plan = [&] {
    const EndAtSignal interruptible;  // choosing does not ask, and nothing has to be cleaned up
    return make_plan(problem, options.problem.plan, 0);
  }();
  PlanOptions resolved = plan.options();
  resolved.memory_budget = options.problem.plan.memory_budget;  // which each rank has to hold, looked at or not
  const RandomInputs random(problem);
  Inputs inputs = random.inputs();
  if (options.forward_only) inputs.gradient = {};
  BenchResult result;
  MemoryTarget target(problem, !options.forward_only);
  WorldOptions world;
  world.processes = options.processes;
  const std::vector<Plan> plans = plan_all(problem, resolved);
  run_world(plans, inputs, Layout::bshd, world, &target);
  result.verification = verify_outputs(problem, inputs, Layout::bshd, target.outputs(), 1);
  for (const Plan& p : plans) {
    result.flops += p.flops(Pass::forward) + (options.forward_only ? 0.0 : p.flops(Pass::backward));
  }
  if (result.verification.passed) time_in_turns(options, plans, inputs, result);
  return print(options, plan, result);
}

}  // namespace

Body setup_bench(CLI::App& app) {
  auto options = std::make_shared<BenchOptions>();
  app.footer(
      "The results are checked against float64 first; then the ranks, and one rank with the whole\nproblem, take turns. "
      "Without --tokens there are 4096.\n\n"
      "example\n  ringspan bench --tokens 4096 --heads 8 --ranks 2 --pattern causal --sharding zigzag");
  options->problem.problem.tokens_q = 4096;
  add_integer(
      app, "--repetitions", 1, [options](std::int64_t n) { options->repetitions = static_cast<int>(n); },
      "turns of each, after one to warm up (default 5)");
  app.add_flag("--forward-only", options->forward_only, "leave the backward pass out");
  add_transport(app, [options](bool processes) { options->processes = processes; });
  app.add_flag("--json", options->json, "print JSON");
  add_shape_options(app, options->problem);
  add_problem_options(app, options->problem);
  return [options] { return run(*options); };
}

}  // namespace ringspan::cli
