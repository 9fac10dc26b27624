// Messages of the next step travel while this one computes: a message is let through only once the kernels of the stage that
// posted it have shown that they run, so an executor that waited first would meet its deadline.
//
// How a kernel shows it: nothing but kernels (on the host's queue), or waiting for the queue (on a device's), calls progress()
// of the communicator that the executor was given. The reference kernels are slow enough to do so in every stage.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <set>

#include "api_testing/world.h"
#include "comm/rounds.h"
#include "comm_testing/decorators.h"
#include "exec/executor.h"
#include "plan/plan_data.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

using comm_testing::ForwardingCommunicator;
using comm_testing::Gate;
using comm_testing::GatedCommunicator;

using Rounds = std::set<std::uint64_t>;

// The gate of what was posted opens at the next progress(). The first execution is forward, the second backward; `free` holds
// the rounds of each whose stage has nothing to compute.
class OpenedByProgress final : public ForwardingCommunicator {
 public:
  OpenedByProgress(Communicator& inner, std::array<Rounds, 2> free, std::atomic<int>& opened)
      : ForwardingCommunicator(inner), gated_(inner, gate_), free_(std::move(free)), opened_(opened) {}

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    if (round >= kPlanRoundsEnd) return inner().post(round, batch);
    const std::uint64_t execution = round >> internal::kPlanRoundBits;
    if (free_.at(execution - 1).contains(round - (execution << internal::kPlanRoundBits))) return inner().post(round, batch);
    posted_ = round + 1;
    return gated_.post(round, batch);
  }
  void wait(Request request, Seconds deadline) override { gated_.wait(request, deadline); }
  void progress() override {
    if (!gate_.is_open(posted_ - 1)) ++opened_;
    gate_.open_below(posted_);
    inner().progress();
  }

 private:
  Gate gate_{1};
  GatedCommunicator gated_;
  std::array<Rounds, 2> free_;
  std::uint64_t posted_ = 1;
  std::atomic<int>& opened_;
};

Case make_case(Strategy strategy) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = 800;
  p.heads = p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 32;
  p.ranks = 4;
  test.options.strategy = strategy;
  test.options.attend_kernel = "reference";
  test.options.attend_backward_kernel = "reference";
  test.execute.deadline = Communicator::Seconds(20);
  return test;
}

bool computes(const internal::Stage& stage) {
  return std::any_of(stage.compute.begin(), stage.compute.end(), [](const internal::Launch& launch) {
    return launch.kind == internal::LaunchKind::attend || launch.kind == internal::LaunchKind::attend_backward;
  });
}

// Rounds of stages that only move rows: the way home of the last results.
Rounds free_rounds(const internal::Program& program) {
  Rounds rounds;
  for (const internal::Stage& stage : program.stages) {
    for (const internal::Round& round : stage.rounds) {
      if (!computes(stage)) rounds.insert(round.number);
    }
  }
  return rounds;
}

// Gates every round that a stage with kernels posts; `opened` counts the gates that kernels opened, over all ranks.
void gate(Case& test, std::atomic<int>& opened) {
  test.wrap = [&test, &opened](Communicator& inner) {
    const Plan plan = make_plan(test.problem, test.options, inner.rank());
    const std::array<Rounds, 2> free{free_rounds(plan.data().forward), free_rounds(plan.data().backward)};
    return std::make_unique<OpenedByProgress>(inner, free, opened);
  };
}

class Overlap : public ::testing::TestWithParam<Strategy> {};
INSTANTIATE_TEST_SUITE_P(Strategies, Overlap, ::testing::Values(Strategy::exchange, Strategy::ring, Strategy::pass_q),
                         [](const auto& instance) {
                           std::string name(to_string(instance.param));
                           std::erase_if(name, [](char c) { return c == '-'; });
                           return name;
                         });

TEST_P(Overlap, HidesEveryHopButTheLastBehindKernels) {
  for (const bool backward : {false, true}) {
    for (const bool fake_device : {false, true}) {
      Case test = make_case(GetParam());
      test.options.backward = backward;
      test.execute.fake_device = fake_device;
      SCOPED_TRACE(to_string(test));
      const Whole whole(test);
      const Outputs expected = run(test, whole);
      std::atomic<int> opened = 0;
      gate(test, opened);
      EXPECT_TRUE(run(test, whole) == expected);
      const int hops = test.problem.ranks * (test.problem.ranks - 1);
      EXPECT_GE(opened, backward ? 2 * hops : hops);
    }
  }
}

// The same without overlap meets the deadline, so the test above can fail.
TEST_P(Overlap, IsMissedBySynchronousExecution) {
  Case test = make_case(GetParam());
  test.execute.overlap = false;
  test.execute.deadline = Communicator::Seconds(0.3);
  std::atomic<int> opened = 0;
  gate(test, opened);
  try {
    run(test, Whole(test));
    ADD_FAILURE() << "a message arrived whose gate was closed";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("closed at the deadline"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace ringspan::testing
