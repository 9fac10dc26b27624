// Bad input to Attention, one test per message; over several ranks all are told, and the communicator stays usable.
#include <gtest/gtest.h>

#include <array>
#include <exception>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>

#include "api_testing/world.h"
#include "comm_testing/decorators.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

Case make_case(int ranks) {
  Case test;
  test.problem.tokens_q = test.problem.tokens_k = 12;
  test.problem.heads = test.problem.kv_heads = 2;
  test.problem.head_dim = test.problem.head_dim_v = 8;
  test.problem.ranks = ranks;
  return test;
}

template <typename Expected, typename Function>
void expect_throw(Function&& function, const std::string& text) {
  try {
    function();
    ADD_FAILURE() << "nothing thrown; expected: " << text;
  } catch (const Expected& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// What backward says about tensors that are right but for one thing.
template <typename Spoil>
void expect_backward_refuses(const Case& test, Spoil&& spoil, const std::string& text) {
  const Whole whole(test);
  run(test, whole, [&](Attention& attention, const RankTensors& tensors) {
    attention.forward(tensors.forward());
    BackwardTensors backward = tensors.backward();
    spoil(backward);
    expect_throw<InvalidArgument>([&] { attention.backward(backward); }, text);
    attention.backward(tensors.backward());  // still usable
  });
}

TEST(AttentionErrors, BackwardTensors) {
  const Case test = make_case(1);
  const auto null = [](const char* name) {
    return std::string(name) + ".data is null, but rank 0 holds 1 x 12 x 2 rows of it";
  };
  expect_backward_refuses(test, [](BackwardTensors& t) { t.q.data = nullptr; }, null("q"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.k.data = nullptr; }, null("k"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.v.data = nullptr; }, null("v"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.o.data = nullptr; }, null("o"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.lse.data = nullptr; }, null("lse"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.d_out.data = nullptr; }, null("do"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.dq.data = nullptr; }, null("dq"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.dk.data = nullptr; }, null("dk"));
  expect_backward_refuses(test, [](BackwardTensors& t) { t.dv.data = nullptr; }, null("dv"));
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.dq.head_stride = 0; },
      "dq is written and must not overlap itself: its head stride (0) must be at least 8");
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.dk.data = t.dv.data; }, "dk is written and must not share memory with dv");
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.dlse = t.lse, t.dlse.data = static_cast<const std::byte*>(t.lse.data) + 1; },
      "dlse.data (");
}

TEST(AttentionErrors, GradientOfSinks) {
  Case test = make_case(1);
  test.problem.sinks = true;
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.dsinks = nullptr; }, "dsinks is null, but the problem has sinks = true");
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.sinks = nullptr; }, "sinks is null, but the problem has sinks = true");
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.dsinks = const_cast<float*>(t.sinks); },
      "dsinks is written and must not share memory with sinks");
  expect_backward_refuses(
      test, [](BackwardTensors& t) { t.dsinks = static_cast<float*>(t.dv.data); },
      "dv is written and must not share memory with dsinks");
  static float dsinks[2];
  expect_backward_refuses(
      make_case(1), [](BackwardTensors& t) { t.dsinks = dsinks; }, "dsinks is given, but the problem has sinks = false");
}

// In 16 bits backward reads the float32 o that forward kept, so it needs a forward, and no o.
constexpr const char* kNoForward =
    "backward() reads what forward() keeps in the arena, but the latest forward() was given memory for it, or none has run";

TEST(AttentionErrors, BackwardWithoutForward) {
  Case test = make_case(2);
  test.problem.dtype = DType::bfloat16;
  const Whole whole(test);
  run(test, whole, [](Attention& attention, const RankTensors& tensors) {
    expect_throw<InvalidArgument>([&] { attention.backward(tensors.backward()); }, kNoForward);
    const SharedMemory memory(attention.saved().size());
    expect_throw<InvalidArgument>([&] { attention.copy_saved(memory.bytes()); }, "there is nothing to copy");
    attention.forward(tensors.forward());
    attention.copy_saved(memory.bytes());
    BackwardTensors backward = tensors.backward();
    backward.o = {};
    attention.backward(backward);
  });
}

TEST(AttentionErrors, SavedOfAnotherPlan) {
  const Case test = make_case(2);
  run(test, Whole(test), [](Attention& attention, const RankTensors&) {
    std::vector<std::byte> saved(attention.saved().size() + 1);
    const std::string expected =
        "saved has " + std::to_string(saved.size()) + " bytes, but the plan keeps " + std::to_string(saved.size() - 1);
    expect_throw<InvalidArgument>([&] { attention.restore_saved(saved); }, expected);
    expect_throw<InvalidArgument>([&] { attention.copy_saved(saved); }, expected);
  });
  Case half = make_case(2);
  half.problem.dtype = DType::bfloat16;  // keeps o in float32
  run(half, Whole(half), [](Attention& attention, const RankTensors& tensors) {
    const std::size_t bytes = attention.saved().size();
    const SharedMemory memory(bytes + 64);
    ForwardTensors forward = tensors.forward();
    forward.saved = memory.bytes().first(bytes + 1);
    expect_throw<InvalidArgument>(
        [&] { attention.forward(forward); },
        "saved has " + std::to_string(bytes + 1) + " bytes, but the plan keeps " + std::to_string(bytes));
    forward.saved = memory.bytes().subspan(4, bytes);
    expect_throw<InvalidArgument>([&] { attention.forward(forward); }, "is not aligned to 64 bytes");
    forward.saved = memory.bytes().first(bytes);
    ForwardTensors over = forward;
    over.o.data = memory.bytes().data();
    expect_throw<InvalidArgument>([&] { attention.forward(over); }, "o is written and must not share memory with saved");
    attention.forward(tensors.forward());
    attention.forward(forward);  // what the one before kept is not this one's
    expect_throw<InvalidArgument>([&] { attention.backward(tensors.backward()); }, kNoForward);
    BackwardTensors backward = tensors.backward();
    backward.saved = forward.saved;
    BackwardTensors spoiled = backward;
    spoiled.dk.data = memory.bytes().data();
    expect_throw<InvalidArgument>([&] { attention.backward(spoiled); }, "dk is written and must not share memory with saved");
    attention.backward(backward);
  });
}

TEST(AttentionErrors, BackwardOfAForwardOnlyPlan) {
  Case test = make_case(1);
  test.options.backward = false;
  run(test, Whole(test), [](Attention& attention, const RankTensors& tensors) {
    expect_throw<InvalidArgument>([&] { attention.backward(tensors.backward()); }, "the plan has no backward pass");
  });
}

// The other rank, at forward, is told too, and counts the call.
TEST(AttentionErrors, BackwardOfAForwardOnlyPlanOnOneRank) {
  Case test = make_case(2);
  test.options.backward = false;
  run(test, Whole(test), [](Attention& attention, const RankTensors& tensors) {
    const auto next = [&] {
      attention.plan().rank() == 0 ? attention.forward(tensors.forward()) : attention.backward(tensors.backward());
    };
    expect_throw<InvalidArgument>(next, "the plan has no backward pass");
    attention.forward(tensors.forward());
  });
}

// A rank that has no tensors says so in place of the pass, with an error of any kind.
TEST(AttentionErrors, APassThatOneRankRefuses) {
  const Case test = make_case(3);
  const Whole whole(test);
  const Outputs outputs = run(test, whole, [](Attention& attention, const RankTensors& tensors) {
    const bool refuses = attention.plan().rank() == 1;
    const auto forward = [&](const std::exception_ptr& error) {
      refuses ? attention.refuse(Pass::forward, error) : attention.forward(tensors.forward());
    };
    expect_throw<Unsupported>([&] { forward(std::make_exception_ptr(Unsupported("out of ink"))); }, "out of ink");
    expect_throw<Error>([&] { forward(std::make_exception_ptr(std::runtime_error("out of paper"))); }, "out of paper");
    expect_throw<InvalidArgument>([&] { forward(nullptr); }, "refused without an error");
    attention.forward(tensors.forward());
    expect_throw<InvalidArgument>(
        [&] {
          refuses ? attention.refuse(Pass::backward, std::make_exception_ptr(InvalidArgument("out of toner")))
                  : attention.backward(tensors.backward());
        },
        "out of toner");
    forward_and_backward(attention, tensors);
  });
  EXPECT_EQ(judge(test, whole, outputs), "");
}

TEST(AttentionErrors, ThreadsBeyondAnyMachine) {
  run_thread_ranks(2, [](Communicator& communicator) {
    Case test = make_case(2);
    if (communicator.rank() == 1) test.options.threads = 1'000'000'000;
    expect_throw<InvalidArgument>([&] { Attention(test.problem, test.options, communicator); },
                                  "threads (1000000000) must be in [1, 4096]");
  });
}

// Whatever an embedder's communicator throws while the attention is made reaches the others, too.
TEST(AttentionErrors, WhateverACommunicatorThrowsWhileAnAttentionIsMade) {
  class Throwing final : public comm_testing::ForwardingCommunicator {
   public:
    using ForwardingCommunicator::ForwardingCommunicator;
    bool takes_device_memory(const void*) const override { throw 42; }
  };
  run_thread_ranks(2, [](Communicator& communicator) {
    const Case test = make_case(2);
    Throwing throwing(communicator);
    const bool throws = communicator.rank() == 1;
    expect_throw<Error>(
        [&] { Attention(test.problem, test.options, throws ? throwing : communicator, {.device = "cuda-emulated"}); },
        "unknown exception");
    const Attention attention(test.problem, test.options, communicator);  // which is as good as new
  });
}

// A rank that plans for longer than the others wait at most is not taken for a dead one.
TEST(AttentionErrors, ARankThatPlansShowsThatItLives) {
  class Counting final : public comm_testing::ForwardingCommunicator {
   public:
    using ForwardingCommunicator::ForwardingCommunicator;
    void progress() override {
      ++signs;
      ForwardingCommunicator::progress();
    }
    int signs = 0;
  };
  run_thread_ranks(2, [](Communicator& communicator) {
    Case test = make_case(2);
    test.problem.tokens_q = test.problem.tokens_k = 40'000;
    test.options.strategy = Strategy::ring;
    test.options.bucket_rows = 1;  // a stage per row
    Counting counting(communicator);
    const Attention attention(test.problem, test.options, counting);
    EXPECT_GT(counting.signs, 0);
  });
}

TEST(PlanErrors, QueriesOfABackwardPassThatIsNotPlanned) {
  const Plan plan = make_plan(make_case(1).problem, {.backward = false}, 0);
  const std::function<void()> queries[] = {
      [&] { plan.memory(Pass::backward); },       [&] { plan.memory_bytes(Pass::backward); },
      [&] { plan.pinned_bytes(Pass::backward); }, [&] { plan.traffic(Pass::backward); },
      [&] { plan.host_bytes(Pass::backward); },   [&] { plan.host_nanoseconds(Pass::backward); },
      [&] { plan.flops(Pass::backward); },        [&] { plan.kernel(Pass::backward); }};
  for (const auto& query : queries) expect_throw<InvalidArgument>(query, "the plan has no backward pass");
}

TEST(PlanErrors, AStrategyThatIsNone) {
  const PlanOptions options{.strategy = static_cast<Strategy>(77)};
  expect_throw<InvalidArgument>([&] { make_plan(make_case(2).problem, options, 0); }, "strategy (77) is none of");
}

// A tensor that is wrong on one rank is reported on all, with that rank's number; then all go on.
TEST(AttentionErrors, TensorsOfOneRank) {
  const Case test = make_case(3);
  const Whole whole(test);
  const Outputs outputs = run(test, whole, [](Attention& attention, const RankTensors& tensors) {
    ForwardTensors forward = tensors.forward();
    if (attention.plan().rank() == 1) forward.v.data = nullptr;
    expect_throw<InvalidArgument>([&] { attention.forward(forward); }, "v.data is null, but rank 1 holds 1 x 4 x 2 rows");
    forward_and_backward(attention, tensors);
  });
  EXPECT_EQ(judge(test, whole, outputs), "");
}

TEST(AttentionErrors, ARefusedPassLeavesTheStats) {
  Case test = make_case(2);
  test.execute.trace = true;
  run(test, Whole(test), [](Attention& attention, const RankTensors& tensors) {
    forward_and_backward(attention, tensors);
    const std::string trace = attention.trace_json();
    const PassStats before = attention.stats(Pass::backward);
    BackwardTensors backward = tensors.backward();
    backward.dq.data = nullptr;
    expect_throw<InvalidArgument>([&] { attention.backward(backward); }, "dq.data is null");
    const PassStats after = attention.stats(Pass::backward);
    EXPECT_GT(before.seconds, 0);
    EXPECT_EQ(after.seconds, before.seconds);
    EXPECT_EQ(after.waiting_seconds, before.waiting_seconds);
    EXPECT_EQ(after.sent_bytes, before.sent_bytes);
    EXPECT_EQ(after.received_bytes, before.received_bytes);
    EXPECT_EQ(attention.trace_json(), trace);
  });
}

// An attention runs on what ExecuteOptions name.
TEST(AttentionErrors, ADeviceOfThePlanOptionsSaysNothing) {
  Case test = make_case(2);
  test.options.device = DeviceKind::cuda;
  run(test, Whole(test), [](Attention& attention, const RankTensors& tensors) {
    EXPECT_EQ(attention.plan().options().device, DeviceKind::cpu);
    forward_and_backward(attention, tensors);
  });
}

// One rank is at forward, the other at backward.
TEST(AttentionErrors, DifferentPasses) {
  const Case test = make_case(2);
  run(test, Whole(test), [](Attention& attention, const RankTensors& tensors) {
    attention.forward(tensors.forward());
    const auto next = [&] {
      attention.plan().rank() == 0 ? attention.forward(tensors.forward()) : attention.backward(tensors.backward());
    };
    expect_throw<CommError>(next, "ranks disagree on the pass: forward on rank 0, backward on rank 1");
    forward_and_backward(attention, tensors);
  });
}

// Equal plans, so that nothing but their number tells the attentions from each other.
TEST(AttentionErrors, AttentionsInAnotherOrder) {
  Case test = make_case(2);
  std::array<Communicator*, 2> communicators{};
  test.wrap = [&](Communicator& communicator) {
    communicators[static_cast<std::size_t>(communicator.rank())] = &communicator;
    return nullptr;
  };
  const Whole whole(test);
  const Outputs outputs = run(test, whole, [&](Attention& attention, const RankTensors& tensors) {
    const int rank = attention.plan().rank();
    Attention other(attention.plan(), *communicators[static_cast<std::size_t>(rank)]);
    Attention& first = rank == 0 ? attention : other;
    expect_throw<CommError>([&] { first.forward(tensors.forward()); },
                            "ranks disagree on which attention is called (its number): ");
    forward_and_backward(other, tensors);
    forward_and_backward(attention, tensors);
  });
  EXPECT_EQ(judge(test, whole, outputs), "");
}

TEST(AttentionErrors, SeedOfOneRank) {
  Case test = make_case(3);
  const auto pass_with_seeds = [](Attention& attention, const RankTensors& tensors) {
    attention.set_seed(attention.plan().rank() == 1 ? 6 : 5);
    attention.forward(tensors.forward());
  };
  run(test, Whole(test), pass_with_seeds);  // nothing is dropped: no seed counts
  test.problem.dropout = 0.5F;
  run(test, Whole(test), [&](Attention& attention, const RankTensors& tensors) {
    expect_throw<CommError>(
        [&] { pass_with_seeds(attention, tensors); },
        "ranks disagree on the seed of dropout: 0x0000000000000005 on rank 0, 0x0000000000000006 on rank 1");
  });
}

TEST(AttentionErrors, PlansThatDoNotFit) {
  run_thread_ranks(2, [](Communicator& communicator) {
    const Case test = make_case(2);
    const Plan own = make_plan(test.problem, test.options, communicator.rank());
    expect_throw<InvalidArgument>([&] { Attention(make_plan(test.problem, test.options, 0), communicator); },
                                  "the communicator is rank 1's, but the plan was made for rank 0");
    expect_throw<InvalidArgument>([&] { Attention(make_plan(make_case(3).problem, {}, 0), communicator); },
                                  "the communicator has 2 ranks, but the plan was made for 3");
    Case other = test;
    other.problem.pattern.causal = communicator.rank() == 1;
    expect_throw<CommError>([&] { Attention(make_plan(other.problem, other.options, communicator.rank()), communicator); },
                            "ranks disagree on pattern (hash)");
    const Attention attention(own, communicator);  // the communicator is as good as new
  });
}

TEST(AttentionErrors, ArenaOfOneRank) {
  run_thread_ranks(2, [](Communicator& communicator) {
    const Case test = make_case(2);
    const Plan plan = make_plan(test.problem, test.options, communicator.rank());
    alignas(64) std::array<std::byte, 64> small;
    const std::span<std::byte> arena = communicator.rank() == 0 ? std::span<std::byte>() : std::span<std::byte>(small);
    expect_throw<InvalidArgument>([&] { Attention(plan, communicator, {}, arena); }, "arena has 64 bytes, but the plan needs");
    const Attention attention(plan, communicator);
  });
}

TEST(AttentionErrors, KernelNameOfOneRank) {
  run_thread_ranks(2, [](Communicator& communicator) {
    Case test = make_case(2);
    if (communicator.rank() == 1) test.options.attend_kernel = "attend_f32_abacus";
    expect_throw<InvalidArgument>([&] { Attention(test.problem, test.options, communicator); }, "attend_f32_abacus");
    test.options.attend_kernel = "reference";
    const Attention attention(test.problem, test.options, communicator);
  });
}

TEST(AttentionErrors, BudgetOfOneRank) {
  run_thread_ranks(2, [](Communicator& communicator) {
    Case test = make_case(2);
    if (communicator.rank() == 0) test.options.memory_budget = 1000;
    expect_throw<OutOfBudget>([&] { Attention(test.problem, test.options, communicator); },
                              "no plan fits memory_budget (1000 bytes)");
  });
}

// Rank 1 does not come: rank 0 waits as long as it was told latest.
TEST(AttentionErrors, DeadlineOfLaterPasses) {
  std::promise<void> over;
  run_thread_ranks(make_thread_world(2), [&](Communicator& communicator) {
    Case test = make_case(2);
    test.execute.deadline = Communicator::Seconds(1e6);
    const Whole whole(test);
    RankTensors tensors(test, whole, communicator.rank());
    Attention attention(test.problem, test.options, communicator, test.execute);
    attention.forward(tensors.forward());
    expect_throw<InvalidArgument>([&] { attention.set_deadline(Communicator::Seconds(0)); }, "deadline (0 s) must be positive");
    if (communicator.rank() == 1) return over.get_future().wait();
    attention.set_deadline(Communicator::Seconds(0.2));
    expect_throw<CommError>([&] { attention.forward(tensors.forward()); }, "deadline 0.2 s");
    over.set_value();
  });
}

}  // namespace
}  // namespace ringspan::testing
