// Attention on a device against the float64 oracle, through the whole executor: plans, messages, arena and kernels are those of
// a GPU; the device is the emulated one unless RINGSPAN_TEST_DEVICE names another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/device_world.h"
#include "oracle/random_problem.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

Case make_case(std::string_view pattern, Strategy strategy, int ranks, std::int64_t tokens = 61) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 12;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  test.options.strategy = strategy;
  if (p.pattern.documents) p.cu_seqlens_q = {0, 7, 7, static_cast<std::int32_t>(tokens / 2), static_cast<std::int32_t>(tokens)};
  return test;
}

constexpr Strategy kStrategies[] = {Strategy::local, Strategy::all_gather, Strategy::exchange,
                                    Strategy::ring,  Strategy::pass_q,     Strategy::ulysses};

TEST(Device, EveryStrategy) {
  for (const Strategy strategy : kStrategies) {
    EXPECT_EQ(judge_on_device(make_case("causal", strategy, 3)), "");
    EXPECT_EQ(judge_on_device(make_case("full", strategy, 1)), "");
  }
}

TEST(Device, EveryPattern) {
  int index = 0;
  for (const char* pattern : {"window:5,3", "causal@top_left", "documents & causal", "prefix:10",
                              "block:0-20,0-30;20-61,5-61,causal", "dilated:16x1,32x2,64x4", "dilated:16x1,32x2@torchscale",
                              "dilated:16x1,32x4@head_groups & causal", "dilated:8x2,16x4 & documents & causal"}) {
    EXPECT_EQ(judge_on_device(make_case(pattern, kStrategies[++index % 6], 2)), "");
  }
}

// Branches whose rows blocks take in together where they overlap: one launch forward and two backward, without a state or
// float32 sums; with several ranks some rows keep a state from stage to stage. Query heads that share kv heads begin with other
// rows.
void expect_overlapping_branches(const char* kernel) {
  struct Shape {
    const char* pattern;
    std::int64_t tokens;
    int heads, kv_heads, ranks;
    const char* sharding = "contiguous";
  };
  for (const auto& [pattern, tokens, heads, kv_heads, ranks, sharding] :
       {Shape{"dilated:512x1,1024x2", 1024, 2, 2, 1},
        {"dilated:512x1,1024x4", 1024, 4, 2, 1},
        {"dilated:512x1,1024x2", 1024, 2, 1, 2},
        {"dilated:512x1,1024x2,2048x4", 2048, 2, 2, 2},  // sums of a quarter of the rows
        {"dilated:384x1,1152x3 & causal", 1152, 3, 3, 1},
        // rows in steps, of which some are left alone
        {"dilated:512x2,1024x2", 1537, 1, 1, 2, "striped"},
        {"dilated:512x1,1024x1 & causal", 1537, 1, 1, 2, "striped"}}) {
    Case test = make_case(pattern, Strategy::exchange, ranks, tokens);
    Problem& p = test.problem;
    p.heads = heads, p.kv_heads = kv_heads;
    p.batch = heads == 4 ? 2 : 1;
    p.sharding_q = p.sharding_k = Sharding::parse(sharding);
    p.dtype = DType::bfloat16;
    p.head_dim = p.head_dim_v = 24;
    p.sinks = heads == 4, p.alibi = heads == 3, p.dropout = ranks == 2 ? 0.1F : 0.0F;
    test.options.attend_kernel = test.options.attend_backward_kernel = kernel;
    EXPECT_EQ(judge_on_device(test), "");
  }
}
TEST(Device, BranchesThatOverlap) { expect_overlapping_branches("mma"); }
TEST(Device, WarpgroupBranchesThatOverlap) { expect_overlapping_branches("wgmma"); }

TEST(Device, EveryDTypeAndOption) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const bool keep : {true, false}) {
      Case test = make_case("causal", Strategy::ring, 3);
      test.problem.dtype = dtype;
      test.options.keep_o_float32 = keep;
      test.problem.softcap = 15.0F;
      test.problem.alibi = test.problem.sinks = true;
      test.problem.dropout = 0.2F;
      test.dlse = true;
      EXPECT_EQ(judge_on_device(test), "");
    }
  }
}

// The random problems of `ringspan verify`, from the first one on.
TEST(Device, RandomProblems) {
  const char* wanted = std::getenv("RINGSPAN_TEST_DEVICE_CASES");
  const int cases = wanted != nullptr ? std::atoi(wanted) : 12;
  int run = 0;
  for (std::uint64_t index = 0; run < cases; ++index) {
    const oracle::RandomCase drawn = oracle::draw_case(20, index);
    if (wanted == nullptr && oracle::work_of(drawn.problem) > 20'000'000) continue;
    Case test;
    test.problem = drawn.problem;
    test.options = drawn.options;
    test.dlse = drawn.dlse;
    test.gain = drawn.gain;
    test.seed = drawn.data_seed;
    EXPECT_EQ(judge_on_device(test), "") << "case " << index << " of seed 20";
    ++run;
  }
}

TEST(Device, SameBitsRunAfterRun) {
  Case test = make_case("causal & window:40,-1", Strategy::ring, 3, 150);
  test.problem.dtype = DType::bfloat16;
  test.options.bucket_rows = 16;
  const Whole whole(test);
  const Outputs first = run_on_device(test, whole);
  for (const std::uint64_t seed : {2, 3}) {
    test.seed = seed;  // of the delays; the tensors are those of `whole`
    EXPECT_EQ(run_on_device(test, whole), first);
  }
}

TEST(Device, TensorsInTheWrongMemoryAreRefusedByName) {
  Case test = make_case("full", Strategy::exchange, 2);
  test.execute.device = test_device();
  const Whole whole(test);
  const auto script = [&](Attention& attention, const RankTensors& rank) {
    const internal::PlanData& plan = attention.plan().data();
    DeviceTensors device(test_device(), plan);
    ForwardTensors tensors = on_device(device, plan.problem, rank.forward());
    if (plan.rank == 1) tensors.k = rank.forward().k;
    attention.forward(tensors);
  };
  try {
    run(test, whole, script);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("k.data"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("not memory of cuda"), std::string::npos) << error.what();
  }
}

// What a device cannot take into account is refused, never ignored.
TEST(Device, OptionsOfTheCpuAreRefusedByName) {
  const auto refusal = [](const auto& change) -> std::string {
    Case test = make_case("full", Strategy::exchange, 2);
    test.execute.device = test_device();
    change(test);
    const Whole whole(test);
    try {
      run(test, whole, [](Attention&, const RankTensors&) {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal([](Case& c) { c.options.attend_kernel = "reference"; }), HasSubstr("attend_kernel ('reference')"));
  EXPECT_THAT(refusal([](Case& c) { c.options.attend_backward_kernel = "portable"; }),
              HasSubstr("attend_backward_kernel ('portable')"));
  EXPECT_THAT(refusal([](Case& c) { c.execute.fake_device = true; }), HasSubstr("fake_device"));
  int here = 0;
  EXPECT_THAT(refusal([&](Case& c) { c.execute.device = "cuda-emulated", c.execute.stream = &here; }), HasSubstr("stream"));
  EXPECT_THAT(refusal([&](Case& c) { c.execute.device = "cpu", c.execute.stream = &here; }), HasSubstr("stream"));
}

// Kernels that are named, through the whole executor.
TEST(Device, WarpgroupKernelsByName) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const int head_dim : {64, 72}) {
      Case test = make_case("causal", Strategy::ring, 2, 300);
      test.problem.dtype = dtype;
      test.problem.head_dim = test.problem.head_dim_v = head_dim;
      test.options.attend_kernel = test.options.attend_backward_kernel = "wgmma";
      EXPECT_EQ(judge_on_device(test), "") << head_dim;
      test.problem.softcap = 15.0F;
      test.problem.alibi = true;
      test.problem.dropout = 0.2F;
      EXPECT_EQ(judge_on_device(test), "") << head_dim << " with options";
    }
  }
}

// More blocks than a device runs at a time, with results and with states that are merged: its residents take one after the
// other.
TEST(Device, MoreBlocksThanResidents) {
  const bool emulated = test_device() == "cuda-emulated";
  for (const char* pattern : {"causal", "dilated:128x1,512x3"}) {
    Case test = make_case(pattern, Strategy::local, 1, emulated ? 520 : 2048);
    test.problem.dtype = DType::bfloat16;
    test.problem.heads = emulated ? 2 : 20;
    test.problem.kv_heads = emulated ? 1 : 10;
    test.options.attend_kernel = "wgmma";
    EXPECT_EQ(judge_on_device(test), "") << pattern;
  }
}

TEST(Device, WarpgroupKernelsAreRefusedByName) {
  const auto refusal = [](const auto& change) -> std::string {
    Case test = make_case("full", Strategy::exchange, 2);
    test.execute.device = test_device();
    test.problem.dtype = DType::bfloat16;
    test.options.attend_kernel = "wgmma";
    change(test.problem);
    const Whole whole(test);
    try {
      run(test, whole, [](Attention&, const RankTensors&) {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(refusal([](Problem&) {}), "");
  EXPECT_EQ(refusal([](Problem& p) { p.softcap = 30.0F, p.alibi = true, p.dropout = 0.1F; }), "");
  EXPECT_THAT(refusal([](Problem& p) { p.dtype = DType::float32; }), HasSubstr("'wgmma' are for 16-bit tensors"));
  EXPECT_THAT(refusal([](Problem& p) { p.head_dim = 136; }), HasSubstr("head_dim 136"));
}

TEST(Device, SavedGoesAwayAndComesBack) {
  Case test = make_case("causal", Strategy::ring, 2);
  test.problem.dtype = DType::float16;  // o is kept in float32
  test.problem.kv_heads = test.problem.heads;
  test.execute.device = test_device();
  const auto interleaved = [&](bool given, Attention& attention, const RankTensors& rank) {
    const internal::PlanData& plan = attention.plan().data();
    ASSERT_FALSE(attention.saved().empty());
    DeviceBuffer memory(test_device(), static_cast<std::int64_t>(attention.saved().size()));
    const std::span<std::byte> kept(memory.data(), attention.saved().size());
    DeviceTensors forward(test_device(), plan);
    ForwardTensors first = on_device(forward, plan.problem, rank.forward());
    if (given) first.saved = kept;
    attention.forward(first);
    attention.wait();
    forward.copy_back();
    if (!given) attention.copy_saved(kept);
    DeviceTensors other(test_device(), plan);
    ForwardTensors again = on_device(other, plan.problem, rank.forward());
    again.q = again.k;  // another forward pass that keeps something else
    attention.forward(again);
    if (!given) attention.restore_saved(kept);
    attention.wait();
    DeviceTensors backward(test_device(), plan);
    BackwardTensors last = on_device(backward, plan.problem, rank.backward());
    if (given) last.saved = kept;
    attention.backward(last);
    attention.wait();
    backward.copy_back();
  };
  const Whole whole(test);
  const Outputs expected = run_on_device(test, whole);
  for (const bool given : {false, true}) {
    const auto script = [&](Attention& attention, const RankTensors& rank) { interleaved(given, attention, rank); };
    EXPECT_EQ(run(test, whole, script), expected) << (given ? "given" : "copied");
  }
}

TEST(Device, Names) {
  EXPECT_THROW(DeviceBuffer("gpu", 1), InvalidArgument);
  EXPECT_THROW(DeviceBuffer("cuda:x", 1), InvalidArgument);
  EXPECT_THROW(DeviceBuffer("cpu", 1), InvalidArgument);
  EXPECT_THROW(DeviceBuffer("cuda-emulated", -1), InvalidArgument);
  EXPECT_FALSE(device_report().empty());
}

}  // namespace
}  // namespace ringspan::testing
