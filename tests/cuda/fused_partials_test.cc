// PlanOptions::partials = storage: passes that a library's fused attention computes although rows take several of its calls. On
// the emulated device; with RINGSPAN_TEST_DEVICE by cuDNN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <mutex>
#include <vector>

#include "cuda/device_world.h"
#include "cuda/emulated_capture.h"
#include "cuda/gpu_device.h"
#include "cuda/partials_bounds.h"
#include "exec/executor.h"
#include "oracle/random_problem.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Case make_case(std::string_view pattern, int ranks, Strategy strategy = Strategy::automatic) {
  Case test;
  Problem& p = test.problem;
  p.batch = 2;
  p.tokens_q = p.tokens_k = 67;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 24;
  p.dtype = DType::bfloat16;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  if (ranks > 1) p.sharding_q = p.sharding_k = Sharding::parse("zigzag");
  if (p.pattern.documents) p.cu_seqlens_q = p.cu_seqlens_k = {0, 7, 7, 40, 67}, p.batch = 1;
  test.options.strategy = strategy;
  test.options.partials = Partials::storage;
  test.options.attend_kernel = test.options.attend_backward_kernel = "cudnn";
  return test;
}

// Whether each pass went to the library on all ranks.
struct Took {
  bool forward = true, backward = true;
};

Took expect_right(Case test) {
  SCOPED_TRACE(to_string(test));
  test.execute.device = test_device();
  const Whole whole(test);
  Took took;
  std::mutex mutex;
  const RankScript script = device_script(test.execute.device);
  const Outputs outputs = run(test, whole, [&](Attention& attention, const RankTensors& tensors) {
    script(attention, tensors);
    const Plan& plan = attention.plan();
    const std::lock_guard lock(mutex);
    took.forward = took.forward && plan.kernel(Pass::forward).name.starts_with("attend_cudnn");
    took.backward =
        took.backward && test.options.backward && plan.kernel(Pass::backward).name.starts_with("attend_backward_cudnn");
  });
  Case judged = test;
  judged.options.keep_o_float32 = test.options.keep_o_float32 && !took.backward;
  judged.widen = partials_bounds(test.problem);
  EXPECT_EQ(judge(judged, whole, outputs), "");
  return took;
}

void expect_fused(const Case& test) {
  const Took took = expect_right(test);
  EXPECT_TRUE(took.forward) << to_string(test);
  EXPECT_TRUE(took.backward || !test.options.backward) << to_string(test);
}

class FusedPartials : public ::testing::Test {
 protected:
  void SetUp() override {
    if (test_device() == "cuda-emulated") return;
    Case test = make_case("causal", 1);
    test.execute.device = test_device();
    try {
      const auto world = make_thread_world(1);
      const Attention attention(test.problem, test.options, *world[0], test.execute);
    } catch (const Unsupported& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

TEST_F(FusedPartials, RanksAndStrategies) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const Strategy strategy : {Strategy::ring, Strategy::exchange, Strategy::all_gather}) {
      for (const char* pattern : {"full", "causal", "documents & causal", "prefix:9"}) {
        Case test = make_case(pattern, ranks, ranks == 1 ? Strategy::local : strategy);
        test.problem.dtype = ranks % 2 == 0 ? DType::bfloat16 : DType::float16;
        test.options.keep_o_float32 = ranks != 3;
        expect_fused(test);
      }
    }
  }
}

// Packed, received and relayed rows in buckets of few rows, which take their turns in the same memory.
TEST_F(FusedPartials, Buckets) {
  for (const Strategy strategy : {Strategy::ring, Strategy::exchange}) {
    Case test = make_case("causal", 3, strategy);
    test.problem.tokens_q = test.problem.tokens_k = 96;
    test.options.bucket_rows = 8;
    expect_fused(test);
    test.problem.sharding_q = test.problem.sharding_k = Sharding::parse("striped");
    test.problem.kv_heads = 4;
    expect_fused(test);
  }
}

TEST_F(FusedPartials, OverlappingBranches) {
  for (const int ranks : {1, 2, 4}) {
    for (const char* pattern : {"dilated:16x1,32x2,64x4", "dilated:16x1,32x2,64x4 & causal"}) {
      for (const int kv_heads : {2, 4}) {
        Case test = make_case(pattern, ranks, ranks == 1 ? Strategy::local : Strategy::exchange);
        test.problem.tokens_q = test.problem.tokens_k = 128;
        test.problem.sharding_q = test.problem.sharding_k = Sharding{};
        test.problem.kv_heads = kv_heads;
        expect_fused(test);
      }
    }
  }
  // Pieces of one query and one key, of which the library has no gradient.
  Case uneven = make_case("dilated:16x1,32x2 & causal", 3);
  uneven.options.attend_backward_kernel = "own";
  EXPECT_TRUE(expect_right(uneven).forward);
}

// Where queries travel without their o, backward is our own kernels'; where every rank holds all queries it is not.
TEST_F(FusedPartials, QueriesThatTravel) {
  for (const Strategy strategy : {Strategy::pass_q, Strategy::ulysses}) {
    Case test = make_case("causal", 2, strategy);
    test.options.attend_backward_kernel = "own";
    EXPECT_TRUE(expect_right(test).forward);
    test.options.backward = false;
    expect_fused(test);
  }
  Case replicated = make_case("causal", 3, Strategy::pass_q);
  replicated.problem.replicated_q = true;
  replicated.problem.sharding_q = Sharding{};
  expect_fused(replicated);
}

// What is done to finished states, and not by the calls.
TEST_F(FusedPartials, SinksOutputScaleAndBranchesOfTheirOwn) {
  for (const int ranks : {1, 3}) {
    Case sinks = make_case("causal", ranks);
    sinks.problem.sinks = true;
    expect_fused(sinks);
    for (const char* pattern : {"dilated:16x1,32x2@head_groups", "dilated:16x1,32x2@torchscale"}) {
      Case test = make_case(pattern, ranks);
      test.options.backward = false;
      expect_fused(test);
    }
  }
}

TEST_F(FusedPartials, RandomProblems) {
  const char* wanted = std::getenv("RINGSPAN_TEST_FUSED_CASES");
  const int cases = wanted != nullptr ? std::atoi(wanted) : 40;
  int run = 0, forward = 0, backward = 0;
  for (std::uint64_t index = 0; run < cases; ++index) {
    const oracle::RandomCase drawn = oracle::draw_case(22, index);
    Case test;
    Problem& p = test.problem = drawn.problem;
    p.alibi = false;
    p.softcap = p.dropout = 0.0F;
    p.dtype = index % 2 == 0 ? DType::bfloat16 : DType::float16;
    p.head_dim = (p.head_dim + 7) / 8 * 8;
    p.head_dim_v = (p.head_dim_v + 7) / 8 * 8;
    if (oracle::work_of(p) > 3'000'000 || std::max(p.head_dim, p.head_dim_v) > 128) continue;
    ++run;
    test.options = drawn.options;
    test.options.threads = 1;
    test.options.attend_kernel = test.options.attend_backward_kernel = "";
    test.options.attend_tile = test.options.attend_backward_tile = {};
    test.options.partials = Partials::storage;
    test.gain = drawn.gain;
    test.seed = drawn.data_seed;
    test.execute.deterministic = false;
    SCOPED_TRACE("case " + std::to_string(index) + " of seed 22");
    const Took took = expect_right(test);
    forward += took.forward ? 1 : 0;
    backward += took.backward ? 1 : 0;
  }
  EXPECT_GE(forward, cases / 2);
  EXPECT_GE(backward, cases / 4);
}

std::string refusal_of(const Case& test) {
  try {
    run_thread_ranks(test.problem.ranks, [&](Communicator& communicator) {
      ExecuteOptions execute = test.execute;
      if (execute.device == "cpu" && test.devices.empty()) execute.device = test_device();
      if (!test.devices.empty()) execute.device = test.devices.front();
      const Attention attention(test.problem, test.options, communicator, execute);
    });
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(FusedPartials, WhatCannotBeIsRefusedByName) {
  const auto with = [&](const std::function<void(Case&)>& change) {
    Case changed = make_case("causal", 2, Strategy::ring);
    change(changed);
    return refusal_of(changed);
  };
  EXPECT_EQ(with([](Case&) {}), "");
  EXPECT_THAT(with([](Case& c) { c.options.partials = Partials::float32; }), HasSubstr("come from other ranks"));
  EXPECT_THAT(with([](Case& c) { c.devices = {"cpu"}; }), AllOf(HasSubstr("partials 'storage'"), HasSubstr("on the CPU")));
  EXPECT_THAT(with([](Case& c) { c.problem.dtype = DType::float32; }), AllOf(HasSubstr("partials"), HasSubstr("float32")));
  EXPECT_THAT(with([](Case& c) { c.options.attend_kernel = c.options.attend_backward_kernel = "own"; }),
              AllOf(HasSubstr("partials 'storage'"), HasSubstr("none may compute")));
  EXPECT_THAT(with([](Case& c) { c.options.attend_kernel = c.options.attend_backward_kernel = ""; }),
              HasSubstr("deterministic = false"));
  EXPECT_THAT(with([](Case& c) { c.problem.softcap = 3.0F; }), HasSubstr("softcap"));
  EXPECT_THAT(with([](Case& c) { c.problem.alibi = true; }), HasSubstr("ALiBi"));
  EXPECT_THAT(with([](Case& c) { c.problem.dropout = 0.5F; }), HasSubstr("dropout"));
  EXPECT_THAT(with([](Case& c) { c.options.strategy = Strategy::pass_q; }), HasSubstr("without the o"));
  EXPECT_THAT(with([](Case& c) { c.problem.pattern = Pattern::parse("dilated:16x1,32x2@torchscale"); }),
              HasSubstr("delta of their own"));
  EXPECT_THAT(with([](Case& c) { c.problem.pattern = Pattern::parse("dilated:16x1,32x2@head_groups"); }),
              HasSubstr("head_groups"));
  EXPECT_THAT(with([](Case& c) { c.problem.sharding_k = Sharding::parse("striped"); }), HasSubstr("different steps"));
  EXPECT_THAT(with([](Case& c) { c.problem.head_dim = 12; }), HasSubstr("stride of"));
  EXPECT_THAT(with([](Case& c) {
                c.options.host_tensors = true;
                c.options.keep_o_float32 = false;
                c.options.strategy = Strategy::automatic;
              }),
              HasSubstr("host_tensors"));
}

std::int64_t line(const Plan& plan, Pass pass, std::string_view component) {
  for (const MemoryLine& l : plan.memory(pass)) {
    if (l.component == component) return l.bytes;
  }
  return -1;
}

// The partials of the largest call lie in the arena; what is forecast is what is allocated.
TEST_F(FusedPartials, PartialsAreBookedAndAllocated) {
  if (test_device() != "cuda-emulated") GTEST_SKIP() << "counts the memory of the emulated device";
  const Case test = make_case("full", 2, Strategy::ring);
  run_thread_ranks(2, [&](Communicator& communicator) {
    PlanOptions options = test.options;
    options.device = DeviceKind::cuda;
    const Plan own = make_plan(test.problem, options, communicator.rank());
    cuda::EmulatedCapture counters;
    auto device = std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(1, &counters));
    internal::Executor executor(own, communicator, test.execute, {}, std::move(device));
    const Plan& plan = executor.plan();
    EXPECT_EQ(plan.fingerprint(), own.fingerprint());
    std::int64_t largest = 0;  // o in 16 bits and lse in 32 of a task
    for (const internal::AttendItem& item : own.data().forward.attend_items) {
      const std::int64_t rows = item.slice.batch_count * item.slice.heads.count * item.slice.q.count;
      largest = std::max(largest, (rows * 24 * 2 + 63) / 64 * 64 + (rows * 4 + 63) / 64 * 64);
    }
    EXPECT_GT(largest, 0);
    EXPECT_EQ(line(plan, Pass::forward, "staging") - line(own, Pass::forward, "staging"), largest);
    EXPECT_EQ(line(plan, Pass::forward, "state"), line(own, Pass::forward, "state"));
    EXPECT_EQ(line(plan, Pass::forward, "scratch"), 256);
    EXPECT_GT(line(plan, Pass::backward, "staging"), line(own, Pass::backward, "staging"));
    EXPECT_GT(line(plan, Pass::backward, "scratch"), 0);
    EXPECT_EQ(counters.device.most, plan.arena_bytes() + line(plan, Pass::backward, "task lists"));
    EXPECT_THAT(plan.to_string(), HasSubstr("attend_cudnn"));
    EXPECT_THAT(plan.to_json(), HasSubstr(R"("partials":"storage")"));
  });
}

// The one call that gives final rows is left as it is: no state, nothing to merge.
TEST_F(FusedPartials, PassesOfOneCallPerRowStayThat) {
  Case test = make_case("causal", 1);
  test.execute.device = test_device();
  const auto world = make_thread_world(1);
  const Plan plan = Attention(test.problem, test.options, *world[0], test.execute).plan();
  EXPECT_EQ(line(plan, Pass::forward, "state"), 0);
  EXPECT_EQ(line(plan, Pass::forward, "staging"), 0);
  EXPECT_EQ(line(plan, Pass::backward, "gradients"), 0);
  // Forward of one call per row, backward of keys that two calls read.
  Case blocks = make_case("block:0-20,0-30;20-67,5-67,causal", 1);
  expect_fused(blocks);
  // Backward alone: the o that it reads is the caller's, in 16 bits.
  test.problem.pattern = Pattern::parse("dilated:16x1,32x2");
  test.problem.tokens_q = test.problem.tokens_k = 64;
  test.options.attend_kernel = "own";
  const Took took = expect_right(test);
  EXPECT_TRUE(!took.forward && took.backward);
}

}  // namespace
}  // namespace ringspan::testing
