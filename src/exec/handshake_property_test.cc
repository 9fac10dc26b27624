// Ranks that compute on different things, with other kernels, threads and budgets, agree on options with which each of them,
// planning alone, comes to the same steps. RINGSPAN_SEED and RINGSPAN_CASES choose the first seed and the number of cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "exec/handshake.h"
#include "plan/cost.h"
#include "plan/strategy.h"
#include "plan_testing/check_plan.h"
#include "plan_testing/random_problem.h"
#include "ringspan/transports.h"

namespace ringspan::internal {
namespace {

constexpr Communicator::Seconds kDeadline{60};
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kCases = 10;
#else
constexpr std::int64_t kCases = 60;
#endif

std::int64_t setting(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

// What a rank of a mixed world may be given. The names of kernels are those of every machine.
PlanOptions own_options(testing::RandomProblem& random, PlanOptions options, const Problem& problem, bool all_devices) {
  options.device = all_devices || random.chance(2) ? DeviceKind::cuda : DeviceKind::cpu;
  if (options.device == DeviceKind::cuda) {
    if (problem.dtype != DType::float32 && random.chance(2)) options.partials = Partials::storage;
    options.device_messages = random.chance(2);
  } else {
    options.threads = static_cast<int>(random.draw(1, 9));
    if (random.chance(3)) options.attend_kernel = random.chance(2) ? "reference" : "portable";
    if (random.chance(3)) options.attend_backward_kernel = random.chance(2) ? "reference" : "portable";
  }
  if (random.chance(3)) options.tuned.bucket_rows = random.draw(1, 600);
  return options;
}

// About what a rank's plan takes with buckets of some rows: there choices differ, if anything that they depend on does.
std::int64_t a_budget(testing::RandomProblem& random, const Problem& problem, const std::vector<PlanOptions>& given) {
  const int rank = static_cast<int>(random.draw(0, problem.ranks - 1));
  PlanOptions options = given[static_cast<std::size_t>(rank)];
  if (options.strategy == Strategy::automatic) options.strategy = random.chance(2) ? Strategy::exchange : Strategy::ring;
  const bool has_buckets = strategy_row(options.strategy).buckets;
  if (has_buckets && options.bucket_rows == PlanOptions::kBucketAuto)
    options.bucket_rows = std::int64_t{1} << random.draw(4, 9);
  const std::int64_t bytes = peak_bytes_of_any(make_plan(problem, options, rank).data());
  return std::max<std::int64_t>(1, bytes + random.draw(-64, 64) * (random.chance(2) ? 1 : 1000));
}

// The plans of all ranks as an Attention makes them; or what all of them are told instead.
struct Outcome {
  std::vector<std::string> errors;
  std::vector<Plan> plans;
};
Outcome plan_together(const Problem& problem, const std::vector<PlanOptions>& given) {
  Outcome outcome;
  outcome.errors.resize(given.size());
  std::vector<std::optional<Plan>> plans(given.size());
  run_thread_ranks(problem.ranks, [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    try {
      const PlanOptions agreed = agree_on_problem(communicator, problem, given[rank], kDeadline);
      std::exception_ptr error;
      try {
        plans[rank] = make_plan(problem, agreed, communicator.rank());
      } catch (const Error&) {
        error = std::current_exception();
      }
      agree_on_plan(communicator, plans[rank] ? &*plans[rank] : nullptr, error, kDeadline);
      if (error != nullptr) std::rethrow_exception(error);
    } catch (const OutOfBudget& error) {
      outcome.errors[rank] = error.what();
    }
  });
  for (const auto& plan : plans) {
    if (plan) outcome.plans.push_back(*plan);
  }
  return outcome;
}

TEST(HandshakeProperty, RanksThatDifferPlanTheSameSteps) {
  const std::int64_t first = setting("RINGSPAN_SEED", 1), cases = setting("RINGSPAN_CASES", kCases);
  for (std::int64_t seed = first; seed < first + cases; ++seed) {
    testing::RandomProblem random(static_cast<std::uint64_t>(seed));
    const Problem problem = random.problem(static_cast<int>(random.draw(2, 5)), 700);
    const auto strategy = static_cast<Strategy>(random.draw(0, static_cast<int>(Strategy::ulysses)));
    PlanOptions common = random.options(problem, random.chance(2) ? Strategy::automatic : strategy);
    if (!random.chance(8)) common.bucket_rows = PlanOptions::kBucketAuto;  // few rows make many stages
    std::vector<PlanOptions> given;
    const bool all_devices = random.chance(2);
    for (int rank = 0; rank < problem.ranks; ++rank) given.push_back(own_options(random, common, problem, all_devices));
    SCOPED_TRACE(testing::describe(problem, common, static_cast<std::uint64_t>(seed)));
    if (!random.chance(3)) {
      const std::int64_t budget = a_budget(random, problem, given);
      for (PlanOptions& options : given) options.memory_budget = random.chance(3) ? 0 : budget;
    }
    const Outcome outcome = plan_together(problem, given);
    if (outcome.plans.empty()) {
      for (const std::string& error : outcome.errors)
        EXPECT_NE(error.find("no plan fits memory_budget"), std::string::npos) << error;
      continue;
    }
    ASSERT_EQ(outcome.plans.size(), given.size());
    for (const bool backward : {false, true}) {
      if (!backward || common.backward) ASSERT_EQ(testing::check_messages(outcome.plans, backward), "");
    }
  }
}

}  // namespace
}  // namespace ringspan::internal
