// The line of a verify case.
#include <fmt/format.h>

#include <cmath>
#include <map>

#include "io/problem_line.h"
#include "ringspan/error.h"
#include "verify_case.h"

namespace ringspan::cli {
namespace {

using Set = void (*)(VerifyCase&, std::string_view key, std::string_view value);

[[noreturn]] void fail(std::string_view key, std::string_view value, std::string_view expected) {
  throw InvalidArgument(fmt::format("{}={}: expected {}", key, value, expected));
}

std::int64_t at_least(std::int64_t least, std::string_view key, std::string_view value) {
  const std::int64_t number = io::parse_integer(key, value);
  if (number < least) fail(key, value, fmt::format("a whole number from {} up", least));
  return number;
}

int small(std::int64_t least, std::string_view key, std::string_view value) {
  const std::int64_t number = at_least(least, key, value);
  if (number > 65536) fail(key, value, "a number up to 65536");
  return static_cast<int>(number);
}

void set_strategy(VerifyCase& test, std::string_view key, std::string_view value) {
  try {
    test.options.strategy = parse_strategy(value);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", key, error.what()));
  }
}

void set_bucket(VerifyCase& test, std::string_view key, std::string_view value) {
  if (value == "auto") {
    test.options.bucket_rows = PlanOptions::kBucketAuto;
  } else if (value == "none") {
    test.options.bucket_rows = PlanOptions::kBucketNone;
  } else {
    test.options.bucket_rows = at_least(1, key, value);
  }
}

void set_gain(VerifyCase& test, std::string_view key, std::string_view value) {
  test.gain = io::parse_float(key, value);
  if (!std::isfinite(test.gain)) fail(key, value, "a finite number");
}

void set_device(VerifyCase& test, std::string_view key, std::string_view value) {
  if (value != "cpu" && value != "fake") fail(key, value, "cpu or fake");
  test.fake_device = value == "fake";
}

void set_kernel(VerifyCase& test, std::string_view key, std::string_view value) {
  if (value.empty()) fail(key, value, "the name of a kernel, such as reference");
  test.options.attend_kernel = test.options.attend_backward_kernel = value;
}

const std::map<std::string_view, Set>& setters() {
  using View = std::string_view;
  static const std::map<View, Set> table = {
      {"strategy", set_strategy},
      {"bucket", set_bucket},
      {"computing", [](VerifyCase& t, View key, View value) { t.options.computing_ranks = small(0, key, value); }},
      {"threads", [](VerifyCase& t, View key, View value) { t.options.threads = small(1, key, value); }},
      {"keep_o", [](VerifyCase& t, View key, View value) { t.options.keep_o_float32 = io::parse_flag(key, value); }},
      {"backward", [](VerifyCase& t, View key, View value) { t.options.backward = io::parse_flag(key, value); }},
      {"dlse", [](VerifyCase& t, View key, View value) { t.dlse = io::parse_flag(key, value); }},
      {"gain", set_gain},
      {"data", [](VerifyCase& t, View key, View value) { t.data_seed = static_cast<std::uint64_t>(at_least(0, key, value)); }},
      {"device", set_device},
      {"kernel", set_kernel},
  };
  return table;
}

}  // namespace

std::string print_case(const VerifyCase& test) {
  const VerifyCase plain;
  const PlanOptions& options = test.options;
  std::string line = io::print_problem(test.problem);
  const auto word = [&](std::string_view key, const auto& value) { line += fmt::format(" {}={}", key, value); };
  if (options.strategy != plain.options.strategy) word("strategy", to_string(options.strategy));
  if (options.bucket_rows == PlanOptions::kBucketNone) word("bucket", "none");
  if (options.bucket_rows > 0) word("bucket", options.bucket_rows);
  if (options.computing_ranks != plain.options.computing_ranks) word("computing", options.computing_ranks);
  if (options.threads != plain.options.threads) word("threads", options.threads);
  if (!options.keep_o_float32) word("keep_o", 0);
  if (!options.backward) word("backward", 0);
  if (test.dlse) word("dlse", 1);
  if (test.gain != plain.gain) word("gain", test.gain);
  if (test.data_seed != plain.data_seed) word("data", test.data_seed);
  if (test.fake_device) word("device", "fake");
  if (!options.attend_kernel.empty()) word("kernel", options.attend_kernel);
  return line;
}

VerifyCase parse_case(std::string_view line) {
  VerifyCase test;
  std::vector<io::Word> others;
  test.problem = io::parse_problem(line, others);
  for (const auto& [key, value] : others) {
    const auto setter = setters().find(key);
    if (setter == setters().end()) throw InvalidArgument(fmt::format("unknown word {}={}", key, value));
    setter->second(test, key, value);
  }
  if (test.problem.seed != 0 && test.problem.dropout == 0) {
    throw InvalidArgument(fmt::format("seed={} is for dropout, but dropout is 0", test.problem.seed));
  }
  if (test.dlse && !test.options.backward) throw InvalidArgument("dlse=1 is for the backward pass, but backward is 0");
  return test;
}

VerifyCase without_idle_words(VerifyCase test) {
  if (test.problem.dropout == 0) test.problem.seed = 0;
  if (!test.options.backward) test.dlse = false;
  return test;
}

}  // namespace ringspan::cli
