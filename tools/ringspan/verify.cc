// ringspan verify: results against a float64 reference, on given problems or on random ones.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"
#include "problem_options.h"
#include "ringspan/error.h"
#include "text.h"
#include "verify_case.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

// From so many random problems on every value of every choice is sure to come up.
constexpr std::int64_t kEnough = 300;

struct VerifyOptions {
  std::vector<std::string> lines;
  std::int64_t random = 0;
  std::uint64_t seed = 1;
  std::int64_t first = 0;
  VerifySetting setting;
  bool json = false, verbose = false;
};

// Words that the shell split are one problem.
std::vector<std::string> problems_of(const std::vector<std::string>& arguments) {
  const bool split =
      std::none_of(arguments.begin(), arguments.end(), [](const std::string& a) { return a.find(' ') != std::string::npos; });
  if (!split) return arguments;
  std::string joined;
  for (const std::string& word : arguments) joined += (joined.empty() ? "" : " ") + word;
  return {joined};
}

std::string command_of(const std::string& line, const VerifyOptions& options) {
  std::string command = fmt::format("ringspan verify \"{}\"", line);
  if (options.setting.processes) command += " --transport processes";
  if (options.setting.memory_budget > 0) command += fmt::format(" --memory {}", options.setting.memory_budget);
  return command;
}

nlohmann::ordered_json to_json(const std::string& line, const Verification& verification) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  const auto number = [](double value) {
    return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
  };
  for (const oracle::Comparison& c : verification.comparisons) {
    tensors.push_back({{"name", c.name},
                       {"passed", c.passed},
                       {"elements", c.elements},
                       {"failures", c.failures},
                       {"both_nan", c.both_nan},
                       {"max_error", number(c.max_error)},
                       {"max_naive_error", number(c.max_naive_error)},
                       {"worst_element", c.worst},
                       {"worst_error", number(c.error)},
                       {"worst_tolerance", number(c.tolerance)}});
  }
  nlohmann::ordered_json json{{"problem", line},
                              {"passed", verification.passed},
                              {"sampled", verification.sampled},
                              {"reference_seconds", verification.seconds},
                              {"tensors", std::move(tensors)}};
  if (!verification.from_outputs.empty()) json["from_outputs"] = verification.from_outputs;
  if (!verification.ranks_without_keys.empty()) json["ranks_without_keys"] = verification.ranks_without_keys;
  return json;
}

int verify_given(const VerifyOptions& options) {
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  bool passed = true;
  std::vector<VerifyCase> cases;
  for (const std::string& line : problems_of(options.lines)) {  // all that are wrong before the first is run
    cases.push_back(parse_case(line));
    cases.back().problem.validate();
  }
  for (const VerifyCase& test : cases) {
    const Verification verification = run_case(test, options.setting);
    passed = passed && verification.passed;
    if (options.json) {
      results.push_back(to_json(print_case(test), verification));
    } else {
      fmt::print("{}\n{}", print_case(test), to_text(verification));
    }
  }
  if (options.json) {
    fmt::print("{}\n", json_text(nlohmann::ordered_json{{"version", 1}, {"passed", passed}, {"problems", std::move(results)}}));
  }
  return passed ? kOk : kVerificationFailed;
}

class RandomRun {
 public:
  explicit RandomRun(const VerifyOptions& options) : options_(options), line_(true) {}

  int run() {
    const double begin = now();
    for (std::int64_t n = 0; n < options_.random; ++n) {
      line_.show(fmt::format("{} of {} problems, {} failed", n, options_.random, failed_),
                 static_cast<double>(n) / static_cast<double>(options_.random), now() - begin);
      one(without_idle_words(oracle::draw_case(options_.seed, static_cast<std::uint64_t>(options_.first + n))),
          options_.first + n);
    }
    line_.clear();
    return report(now() - begin);
  }

 private:
  void one(const VerifyCase& test, std::int64_t index) {
    throw_if_interrupted();
    tally_.add(test);
    const std::string line = print_case(test);
    std::string failure;
    try {
      const Verification verification = run_case(parse_case(line), options_.setting);  // the line is what is run
      if (options_.verbose) print(fmt::format("{} {}\n{}", index, line, to_text(verification)));
      if (verification.passed) return;
      failure = to_text(verification);
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      throw_if_interrupted();
      failure = fmt::format("  error: {}\n", error.what());
    }
    ++failed_;
    print(fmt::format("FAILED, number {} of seed {}:\n  {}\n{}", index, options_.seed, command_of(line, options_), failure));
    failures_.push_back({{"problem", line}, {"index", index}, {"what", failure}});
  }

  void print(const std::string& text) {
    line_.clear();
    if (options_.json) return;
    fmt::print("{}", text);
    std::fflush(stdout);
  }

  int report(double seconds) {
    const std::vector<std::string> missing = tally_.missing();
    const bool enough = options_.random >= kEnough;
    const bool passed = failed_ == 0 && (missing.empty() || !enough);
    if (options_.json) {
      nlohmann::ordered_json drawn;
      for (const auto& count : tally_.counts()) drawn[count.choice][count.value] = count.count;
      fmt::print("{}\n", json_text(nlohmann::ordered_json{{"version", 1},
                                                          {"passed", passed},
                                                          {"problems", options_.random},
                                                          {"failed", failed_},
                                                          {"seed", options_.seed},
                                                          {"seconds", seconds},
                                                          {"drawn", drawn},
                                                          {"missing", missing},
                                                          {"failures", failures_}}));
      return passed ? kOk : kVerificationFailed;
    }
    fmt::print("drawn\n");
    std::string tally = "  " + tally_.to_string();
    for (std::size_t at = tally.find('\n'); at != std::string::npos; at = tally.find('\n', at + 1)) tally.insert(at + 1, "  ");
    fmt::print("{}\n", tally);
    for (const std::string& value : missing) {
      fmt::print("{} {}\n", enough ? "FAILED: never drawn:" : "never drawn in so few problems:", value);
    }
    fmt::print("{} of {} random problems passed, seed {}, {}, {}\n", options_.random - failed_, options_.random, options_.seed,
               options_.setting.processes ? "processes" : "threads", seconds_text(seconds));
    return passed ? kOk : kVerificationFailed;
  }

  const VerifyOptions& options_;
  ProgressLine line_;
  oracle::Tally tally_;
  std::int64_t failed_ = 0;
  nlohmann::ordered_json failures_ = nlohmann::ordered_json::array();
};

int run(VerifyOptions& options) {
  if (options.lines.empty() == (options.random == 0)) throw InvalidArgument("verify takes problems or --random N");
  options.setting.show_progress = options.random == 0 && !options.json;
  return options.random > 0 ? RandomRun(options).run() : verify_given(options);
}

}  // namespace

Body setup_verify(CLI::App& app) {
  auto options = std::make_shared<VerifyOptions>();
  app.footer(
      R"(A problem is one line of words key=value; docs/cli.md lists them. Tensors are drawn from `data`.
All elements are compared with float64 on small problems, sampled rows with all that they depend on
on large ones. Exits with 1 when anything disagrees; every failure prints the command that repeats
it.

examples
  ringspan verify "nq=1000 h=8 hkv=2 d=64 pattern=causal p=4 shard_q=zigzag shard_k=zigzag \
    strategy=ring bucket=64"
  ringspan verify "nq=300 h=4 d=32 dtype=bfloat16 pattern=dilated:64x1,128x2@longnet&causal p=3" \
    --transport processes
  ringspan verify --random 500 --seed 1)");
  app.add_option("problem", options->lines, "problems, each one line of words")->type_name("\"WORDS\"");
  CLI::Option* random =
      add_integer(app, "--random", 1, [options](std::int64_t n) { options->random = n; }, "draw so many problems");
  add_parsed(app, "--seed", "N", "of the random problems (default 1)", [options](const std::string& text) {
    options->seed = parse_seed("--seed", text);
  })->needs(random);
  add_integer(
      app, "--first", 0, [options](std::int64_t n) { options->first = n; }, "number of the first random problem (default 0)")
      ->needs(random);
  add_transport(app, [options](bool processes) { options->setting.processes = processes; });
  add_parsed(app, "--memory", "BYTES", "budget of each rank, its tensors included: 8GiB, 512MiB, 1e9",
             [options](const std::string& text) { options->setting.memory_budget = parse_budget(text); });
  add_deadline(app, options->setting.deadline);
  CLI::Option* json = app.add_flag("--json", options->json, "print JSON");
  app.add_flag("--verbose", options->verbose, "print every random problem")->needs(random)->excludes(json);
  return [options] { return run(*options); };
}

}  // namespace ringspan::cli
