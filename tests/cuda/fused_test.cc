// Passes that a library's fused attention computes: which they are, what they need, and that their results are right. On the
// emulated device the library is an emulation that checks its arguments as cuDNN does; with RINGSPAN_TEST_DEVICE it is cuDNN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "cuda/device_world.h"
#include "cuda/emulated_capture.h"
#include "cuda/gpu_device.h"
#include "cuda/provided_fused.h"
#include "exec/executor.h"
#include "oracle/random_problem.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Case make_case(std::string_view pattern, std::int64_t tokens = 61) {
  Case test;
  Problem& p = test.problem;
  p.batch = 2;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 24;
  p.dtype = DType::bfloat16;
  p.pattern = Pattern::parse(pattern);
  if (p.pattern.documents)
    p.cu_seqlens_q = p.cu_seqlens_k = {0, 7, 7, static_cast<std::int32_t>(tokens / 2), static_cast<std::int32_t>(tokens)};
  if (p.pattern.documents) p.batch = 1;
  test.execute.device = test_device();
  test.execute.deterministic = false;
  return test;
}

// What the passes of one rank run with, and why.
struct Chosen {
  KernelChoice forward, backward;
};
Chosen chosen_for(const Case& test) {
  const auto world = make_thread_world(1);
  const Attention attention(test.problem, test.options, *world[0], test.execute);
  const Plan& plan = attention.plan();
  return {plan.kernel(Pass::forward), test.options.backward ? plan.kernel(Pass::backward) : KernelChoice{}};
}

class Fused : public ::testing::Test {
 protected:
  void SetUp() override {
    const KernelChoice choice = chosen_for(make_case("causal")).forward;
    if (test_device() != "cuda-emulated" && !choice.reason.empty()) GTEST_SKIP() << choice.reason;
  }
};

// Runs a case whose passes must all be fused, or as it says.
void expect_right(const Case& test, bool forward = true, bool backward = true) {
  SCOPED_TRACE(to_string(test));
  const Chosen chosen = chosen_for(test);
  EXPECT_EQ(chosen.forward.name.find("cudnn") != std::string::npos, forward)
      << chosen.forward.name << ": " << chosen.forward.reason;
  if (test.options.backward) {
    EXPECT_EQ(chosen.backward.name.find("cudnn") != std::string::npos, backward) << chosen.backward.reason;
  }
  const Whole whole(test);
  Case judged = test;
  judged.options.keep_o_float32 = test.options.keep_o_float32 && !backward;  // delta comes from o as it was rounded
  EXPECT_EQ(judge(judged, whole, run_on_device(test, whole)), "");
}

TEST_F(Fused, EveryPatternThatTakesOneCall) {
  for (const char* pattern : {"full", "causal", "causal@top_left", "window:5,3", "causal & window:9,-1", "window:-1,4",
                              "documents", "documents & causal", "dilated:16x1", "dilated:16x1 & causal"}) {
    expect_right(make_case(pattern));
  }
}

TEST_F(Fused, DilatedSegmentsAreStridedViews) {
  for (const char* pattern : {"dilated:16x2", "dilated:32x4 & causal", "dilated:64x3"}) {
    Case test = make_case(pattern);
    test.problem.kv_heads = test.problem.heads;
    expect_right(test);
    test.problem.kv_heads = 2;
    expect_right(test);
  }
  Case blocks = make_case("block:0-20,0-30;20-61,5-61,causal");
  blocks.options.keep_o_float32 = false;
  expect_right(blocks, true, false);  // gradients of keys that two calls read are added
}

// The keys are fewer, or more, than the queries: rows that see nothing, bands that begin elsewhere.
TEST_F(Fused, CrossAttention) {
  for (const std::int64_t keys : {2, 20, 61, 90}) {
    for (const char* pattern : {"full", "causal", "causal@top_left", "causal & window:9,-1"}) {
      Case test = make_case(pattern);
      test.problem.tokens_k = keys;
      const bool cut = std::string_view(pattern).find("window") != std::string_view::npos;
      if (cut && keys < 61) continue;
      expect_right(test);
    }
  }
}

TEST_F(Fused, TypesGroupsAndSingleRows) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const int kv_heads : {1, 2, 4}) {
      Case test = make_case("causal", 33);
      test.problem.dtype = dtype;
      test.problem.kv_heads = kv_heads;
      test.problem.scale = 0.3F;
      expect_right(test);
    }
  }
  Case single = make_case("full", 1);
  expect_right(single, false, false);  // cuDNN has no backward pass of one query and one key
  single.options.backward = false;
  expect_right(single);
  Case one_query = make_case("full", 1);
  one_query.problem.tokens_k = 20;
  expect_right(one_query);
  Case empty = make_case("full", 1);
  empty.problem.tokens_q = 5, empty.problem.tokens_k = 0;
  EXPECT_EQ(judge_on_device(empty), "");
}

// The random problems of `ringspan verify`, without what cuDNN has not: patterns, lengths, documents, batches and groups are
// theirs.
TEST_F(Fused, RandomProblems) {
  const char* wanted = std::getenv("RINGSPAN_TEST_FUSED_CASES");
  const int cases = wanted != nullptr ? std::atoi(wanted) : 40;
  int run = 0, forward = 0, backward = 0;
  for (std::uint64_t index = 0; run < cases; ++index) {
    const oracle::RandomCase drawn = oracle::draw_case(21, index);
    Case test;
    Problem& p = test.problem = drawn.problem;
    p.ranks = 1;
    p.sharding_q = p.sharding_k = Sharding{};
    p.replicated_q = p.alibi = p.sinks = false;
    p.softcap = p.dropout = 0.0F;
    p.dtype = index % 2 == 0 ? DType::bfloat16 : DType::float16;
    p.head_dim = (p.head_dim + 7) / 8 * 8;
    p.head_dim_v = (p.head_dim_v + 7) / 8 * 8;
    if (oracle::work_of(p) > 3'000'000 || std::max(p.head_dim, p.head_dim_v) > 128) continue;
    test.options.keep_o_float32 = drawn.options.keep_o_float32;
    test.gain = drawn.gain;
    test.seed = drawn.data_seed;
    test.execute.device = test_device();
    test.execute.deterministic = false;
    const Chosen chosen = chosen_for(test);
    const bool takes_forward = chosen.forward.reason.empty(), takes_backward = chosen.backward.reason.empty();
    run += takes_forward || takes_backward ? 1 : 0;  // others are our own kernels'
    forward += takes_forward ? 1 : 0;
    backward += takes_backward ? 1 : 0;
    SCOPED_TRACE("case " + std::to_string(index) + " of seed 21");
    expect_right(test, takes_forward, takes_backward);
  }
  EXPECT_GE(forward, cases / 2);
  EXPECT_GE(backward, cases / 2);
}

TEST_F(Fused, SameBitsRunAfterRunOnOneDevice) {
  if (test_device() != "cuda-emulated") GTEST_SKIP() << "deterministic = false gives no such promise";
  const Case test = make_case("causal");
  const Whole whole(test);
  EXPECT_EQ(run_on_device(test, whole), run_on_device(test, whole));
}

// By default every kernel is our own; a name is taken at its word.
TEST_F(Fused, NamesAndDeterminism) {
  Case test = make_case("causal");
  test.execute.deterministic = true;
  EXPECT_THAT(chosen_for(test).forward.name, ::testing::AnyOf("attend_mma", "attend_wgmma"));
  EXPECT_THAT(chosen_for(test).backward.reason, HasSubstr("deterministic is true"));
  test.options.attend_kernel = test.options.attend_backward_kernel = "cudnn";
  EXPECT_THAT(chosen_for(test).forward.name, StartsWith("attend_cudnn"));
  EXPECT_THAT(chosen_for(test).backward.name, StartsWith("attend_backward_cudnn"));
  EXPECT_EQ(chosen_for(test).forward.reason, "");
  expect_right(test);
  test.execute.deterministic = false;
  test.options.attend_kernel = "own";
  EXPECT_THAT(chosen_for(test).forward.name, ::testing::AnyOf("attend_mma", "attend_wgmma"));
  EXPECT_THAT(chosen_for(test).forward.reason, HasSubstr("'own'"));
  expect_right(test, false, true);  // backward by the library, from the global o and lse
}

TEST_F(Fused, ForwardAloneKeepsNothingForABackwardPassOfOurOwn) {
  Case test = make_case("causal");
  test.options.attend_backward_kernel = "own";
  EXPECT_THAT(chosen_for(test).forward.reason, HasSubstr("keep_o_float32"));
  expect_right(test, false, false);
  test.options.keep_o_float32 = false;
  expect_right(test, true, false);
}

std::string refusal_of(const Case& test) {
  try {
    chosen_for(test);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(Fused, WhatANameCannotBeHonouredForIsRefused) {
  Case test = make_case("causal");
  test.options.attend_kernel = test.options.attend_backward_kernel = "cudnn";
  const auto with = [&](const std::function<void(Case&)>& change) {
    Case changed = test;
    change(changed);
    return refusal_of(changed);
  };
  EXPECT_EQ(refusal_of(test), "");
  EXPECT_THAT(with([](Case& c) { c.problem.dtype = DType::float32; }), AllOf(HasSubstr("'cudnn' cannot"), HasSubstr("16-bit")));
  EXPECT_THAT(with([](Case& c) { c.problem.softcap = 3.0F; }), HasSubstr("softcap"));
  EXPECT_THAT(with([](Case& c) { c.problem.dropout = 0.5F; }), HasSubstr("dropout"));
  EXPECT_THAT(with([](Case& c) { c.problem.sinks = true; }), HasSubstr("sinks"));
  EXPECT_THAT(with([](Case& c) { c.problem.alibi = true; }), HasSubstr("ALiBi"));
  EXPECT_THAT(with([](Case& c) { c.problem.pattern = Pattern::parse("dilated:16x1,32x2"); }), HasSubstr("more than one call"));
  EXPECT_THAT(with([](Case& c) { c.problem.head_dim = 12; }), HasSubstr("stride of"));  // 24 bytes from head to head
  EXPECT_THAT(with([](Case& c) { c.options.memory_budget = 1 << 20; }), "");
  EXPECT_THAT(with([](Case& c) { c.options.attend_kernel = "wonder"; }), HasSubstr("'wonder'"));
  EXPECT_THAT(with([](Case& c) { c.execute.device = "cpu"; }), HasSubstr("cudnn"));
  // The same without a name: our own kernels, and the reason in the plan.
  Case quiet = make_case("causal");
  quiet.problem.softcap = 3.0F;
  EXPECT_THAT(chosen_for(quiet).forward.reason, HasSubstr("softcap"));
  expect_right(quiet, false, false);
}

// What the program brings under a name: here the emulation, with memory of its own.
TEST_F(Fused, WhatTheProgramBrings) {
  if (test_device() != "cuda-emulated") GTEST_SKIP() << "what is brought here follows memory of the host";
  static int asked = 0, calls = 0;
  static bool broken = false;
  Case test = make_case("causal & window:9,-1");
  test.execute.deterministic = true;
  test.options.attend_kernel = test.options.attend_backward_kernel = "flash_attn_3";
  EXPECT_THAT(refusal_of(test), AllOf(HasSubstr("'flash_attn_3' cannot"), HasSubstr("this program brings none")));
  const auto run = [](const cuda::FusedCall& call, const cuda::FusedPlace& place) {
    EXPECT_TRUE(place.on_host && call.shape.deterministic);
    if (broken) throw DeviceError("no kernel image");
    std::vector<std::byte> own(static_cast<std::size_t>(cuda::emulated_workspace_bytes(call.shape)));
    cuda::FusedCall with = call;
    with.workspace = own.data();
    ++calls;
    cuda::emulate_fused(with);
  };
  cuda::provide_fused("flash_attn_3", {[](const cuda::FusedShape& shape, const cuda::FusedPlace&) {
                                         ++asked;
                                         return cuda::emulated_refusal(shape);
                                       },
                                       run});
  EXPECT_EQ(chosen_for(test).forward.name, "attend_flash_attn_3");
  EXPECT_EQ(chosen_for(test).backward.name, "attend_backward_flash_attn_3");
  const Whole whole(test);
  Case judged = test;
  judged.options.keep_o_float32 = false;
  asked = 0;
  EXPECT_EQ(judge(judged, whole, run_on_device(test, whole)), "");
  EXPECT_EQ(asked, 2);  // once for each pass, although passes ask again
  EXPECT_EQ(calls, 2);
  Case mixed = test;
  mixed.options.attend_kernel = "cudnn";
  EXPECT_EQ(judge(judged, whole, run_on_device(mixed, whole)), "");
  EXPECT_EQ(calls, 3);
  Case limited = test;
  limited.options.memory_budget = 1 << 30;
  EXPECT_THAT(refusal_of(limited), HasSubstr("takes memory that is in no plan"));
  limited = test;
  limited.problem.head_dim = 20;
  limited.problem.heads = limited.problem.kv_heads = 2;
  EXPECT_THAT(refusal_of(limited), HasSubstr("stride of"));
  broken = true;
  EXPECT_THROW(run_on_device(test, whole), DeviceError);
}

// A rank's own choice: the rows of several ranks are merged, by our own kernels.
TEST_F(Fused, RowsOfSeveralRanksAreMerged) {
  Case test = make_case("causal");
  test.problem.ranks = 3;
  test.options.strategy = Strategy::ring;
  EXPECT_EQ(judge_on_device(test), "");
}

// Tensors that it cannot load from are refused before anything runs, and the attention goes on.
TEST_F(Fused, MisalignedTensorsAreRefusedByName) {
  const Case test = make_case("causal", 16);
  const auto world = make_thread_world(1);
  Attention attention(test.problem, test.options, *world[0], test.execute);
  const Whole whole(test);
  const RankTensors rank(test, whole, 0);
  const internal::PlanData& plan = attention.plan().data();
  DeviceTensors forward(test_device(), plan);
  ForwardTensors tensors = on_device(forward, plan.problem, rank.forward());
  const auto refusal = [&](const ForwardTensors& given) -> std::string {
    try {
      attention.forward(given);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  ForwardTensors shifted = tensors;
  shifted.k.data = static_cast<const std::byte*>(shifted.k.data) + 2;
  EXPECT_THAT(refusal(shifted), AllOf(HasSubstr("rows of k begin at"), HasSubstr("attend_kernel = \"own\"")));
  ForwardTensors strided = tensors;
  strided.q.token_stride += 1;
  EXPECT_THAT(refusal(strided), HasSubstr("the token stride of q is 65"));
  ForwardTensors expanded = tensors;
  expanded.v.token_stride = 0;
  EXPECT_THAT(refusal(expanded), HasSubstr("the token stride of v is 0"));
  EXPECT_EQ(refusal(tensors), "");
  DeviceTensors backward(test_device(), plan);
  BackwardTensors gradients = on_device(backward, plan.problem, rank.backward());
  gradients.dlse = gradients.lse;
  EXPECT_THROW(attention.backward(gradients), InvalidArgument);
  attention.wait();
}

// The arena has the workspace and no state; the forecast is what is allocated.
TEST_F(Fused, WorkspaceIsBookedAndAllocated) {
  const Case test = make_case("causal");
  const auto world = make_thread_world(1);
  PlanOptions options = test.options;
  options.device = DeviceKind::cuda;
  const Plan own = make_plan(test.problem, options, 0);
  cuda::EmulatedCapture counters;
  auto device = std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(1, &counters));
  const internal::Executor executor(own, *world[0], test.execute, {}, std::move(device));
  const Plan& plan = executor.plan();
  EXPECT_EQ(plan.fingerprint(), own.fingerprint());
  const auto line = [](const Plan& of, Pass pass, std::string_view component) {
    for (const MemoryLine& l : of.memory(pass)) {
      if (l.component == component) return l.bytes;
    }
    return std::int64_t{-1};
  };
  EXPECT_EQ(line(own, Pass::forward, "state"), 0);  // each row takes one task: our own kernels need none either
  EXPECT_EQ(line(plan, Pass::forward, "state"), 0);
  EXPECT_EQ(line(plan, Pass::forward, "scratch"), 256);
  EXPECT_EQ(line(plan, Pass::forward, "saved"), 0);
  EXPECT_EQ(line(own, Pass::backward, "gradients"), 0);
  EXPECT_EQ(line(plan, Pass::backward, "gradients"), 0);
  EXPECT_EQ(line(plan, Pass::backward, "scratch"), 2 * 2 * 61 * (16 + 24) * 4);
  EXPECT_EQ(counters.device.most, plan.arena_bytes() + line(plan, Pass::backward, "task lists"));
  EXPECT_THAT(plan.to_string(), HasSubstr("attend_cudnn"));
}

TEST_F(Fused, AWorkspaceBeyondTheBudgetIsNotTaken) {
  Case test = make_case("causal");
  const auto world = make_thread_world(1);
  const Plan free = Attention(test.problem, test.options, *world[0], test.execute).plan();
  test.problem.kv_heads = test.problem.heads;
  PlanOptions options = test.options;
  options.device = DeviceKind::cuda;
  options.attend_backward_kernel = "own";
  const std::int64_t own = make_plan(test.problem, options, 0).memory_bytes(Pass::backward);
  const std::int64_t fused = free.memory_bytes(Pass::backward);
  EXPECT_LT(fused, own);  // no float32 gradients beside it; a budget below it refuses the plan as before
  test.options.memory_budget = 1;
  EXPECT_THROW(chosen_for(test), OutOfBudget);
}

// A plan that an attention made serves another one, if that may use the library too.
TEST_F(Fused, PlansAreTakenOver) {
  const Case test = make_case("causal");
  const auto world = make_thread_world(1);
  const Plan plan = Attention(test.problem, test.options, *world[0], test.execute).plan();
  EXPECT_THAT(Attention(plan, *world[0], test.execute).plan().kernel(Pass::backward).name, HasSubstr("cudnn"));
  ExecuteOptions strict = test.execute;
  strict.deterministic = true;
  EXPECT_THROW(Attention(plan, *world[0], strict), Unsupported);
}

// Captured passes wait for nothing and allocate nothing; a replay computes on what the tensors hold then.
TEST_F(Fused, PassesCanBeCaptured) {
  const Case test = make_case("causal");
  const auto world = make_thread_world(1);
  cuda::EmulatedGraph graph;
  cuda::EmulatedCapture capture{.graph = &graph};
  PlanOptions options = test.options;
  options.device = DeviceKind::cuda;
  internal::Executor executor(make_plan(test.problem, options, 0), *world[0], test.execute, {},
                              std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(1, &capture)));
  const Whole whole(test);
  const RankTensors rank(test, whole, 0);
  DeviceTensors device("cuda-emulated", executor.plan().data());
  const ForwardTensors tensors = on_device(device, test.problem, rank.forward());
  graph.begin();
  const std::int64_t waits = capture.waits, allocations = capture.allocations;
  executor.forward(tensors);
  EXPECT_EQ(capture.waits, waits);
  EXPECT_EQ(capture.allocations, allocations) << "it has no task lists";
  graph.end();
  EXPECT_EQ(graph.works(), 1U) << "the call of the library";
  graph.replay();
  device.copy_back();
  DeviceTensors again("cuda-emulated", executor.plan().data());
  const RankTensors other(test, whole, 0);
  executor.forward(on_device(again, test.problem, other.forward()));
  executor.wait();
  again.copy_back();
  const auto bytes = static_cast<std::size_t>(test.problem.batch * 61 * test.problem.heads * 24 * 2);
  EXPECT_EQ(std::memcmp(rank.forward().o.data, other.forward().o.data, bytes), 0);
}

}  // namespace
}  // namespace ringspan::testing
