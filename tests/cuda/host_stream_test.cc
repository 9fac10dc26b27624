// Tensors in pinned host memory that stream through a device in pieces (PlanOptions::host_tensors): the results against the
// float64 oracle, memory of the device against forecast and budget, and the events that order copies and launches. Results are
// those of the emulated device or of RINGSPAN_TEST_DEVICE; memory and events are watched on the emulated one, where copies run
// on a thread of their own and two operations that no event orders may not touch the same memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/emulated_capture.h"
#include "cuda/gpu_device.h"
#include "cuda/host_stream_world.h"
#include "exec/executor.h"
#include "plan/cost.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::testing {
namespace {

using ::testing::HasSubstr;

constexpr const char* kDevice = "cuda-emulated";

TEST(HostStream, EveryPattern) {
  std::int64_t rows = 5;
  for (const char* pattern :
       {"full", "causal", "window:5,3", "causal@top_left", "documents & causal", "prefix:10",
        "block:0-20,0-30;20-61,5-61,causal", "dilated:16x1,32x2,64x4", "dilated:16x1,32x4@head_groups & causal"}) {
    EXPECT_EQ(judge_streamed(make_case(pattern, rows)), "");
    rows = rows * 2 % 41;  // nothing that divides 61
  }
}

TEST(HostStream, EveryDTypeAndOption) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const bool dlse : {false, true}) {
      Case test = make_case("causal", 23);
      test.problem.dtype = dtype;
      test.problem.softcap = 15.0F;
      test.problem.alibi = test.problem.sinks = true;
      test.problem.dropout = 0.2F;
      test.dlse = dlse;
      EXPECT_EQ(judge_streamed(test), "");
    }
  }
}

TEST(HostStream, LengthsAndEmptySides) {
  Case test = make_case("causal", 9);
  test.problem.lengths_q = {61, 30};
  test.problem.lengths_k = {61, 30};
  test.problem.sinks = true;
  EXPECT_EQ(judge_streamed(test), "");
  for (const auto& [queries, keys] :
       {std::pair{13, 0}, std::pair{0, 13}, std::pair{5, 40}, std::pair{40, 5}, std::pair{1, 1}}) {
    Case cross = make_case("full", 6);
    cross.problem.tokens_q = queries;
    cross.problem.tokens_k = keys;
    cross.problem.sinks = true;
    EXPECT_EQ(judge_streamed(cross), "") << queries << " x " << keys;
  }
}

TEST(HostStream, RandomProblems) {
  int run = 0;
  for (std::uint64_t index = 0; run < 12; ++index) {
    std::optional<Case> test = draw(21, index, 10'000'000);
    if (!test) continue;
    stream(*test, most_tokens(test->problem) / 7 + static_cast<std::int64_t>(index % 5));
    EXPECT_EQ(judge_streamed(*test), "") << "case " << index << " of seed 21, pieces of " << test->options.bucket_rows;
    ++run;
  }
}

// One piece of each side is computed as if it had been on the device.
TEST(HostStream, OnePieceHasTheBitsOfTensorsOnTheDevice) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case test = make_case("causal & window:40,-1", 1000);
    test.problem.dtype = dtype;
    test.dlse = true;
    const Whole whole(test);
    const Outputs streamed = stream_on_device(test, whole);
    test.options.host_tensors = false;
    test.options.bucket_rows = PlanOptions::kBucketAuto;
    EXPECT_EQ(stream_on_device(test, whole), streamed) << to_string(dtype);
  }
}

// Delays of both streams are drawn from the seed.
TEST(HostStream, SameBitsRunAfterRun) {
  Case test = make_case("causal", 16, 90);
  test.problem.dtype = DType::float16;
  const Whole whole(test);
  const Outputs first = stream_on_device(test, whole);
  for (const std::uint64_t seed : {2, 3}) {
    test.seed = seed;
    EXPECT_EQ(stream_on_device(test, whole), first);
  }
}

// Passes of one executor on a device that is watched.
void run_watched(const Case& test, cuda::EmulatedCapture& watch, const std::function<void(const Plan&)>& see) {
  const Whole whole(test);
  const RankTensors tensors(test, whole, 0);
  const auto world = make_thread_world(1);
  PlanOptions options = test.options;
  options.device = DeviceKind::cuda;
  const Plan plan = make_plan(test.problem, options, 0);
  DeviceTensors pinned(kDevice, plan.data());
  const ForwardTensors forward = on_device(pinned, test.problem, tensors.forward());
  BackwardTensors backward = on_device(pinned, test.problem, tensors.backward());
  backward.o = forward.o;
  backward.lse = forward.lse;
  internal::Executor executor(plan, *world[0], {}, {},
                              std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(test.seed, &watch)));
  executor.forward(forward);
  if (test.options.backward) executor.backward(backward);
  executor.wait();
  see(plan);
}

TEST(HostStream, MemoryIsAsForecastAndBelowTheBudget) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    std::int64_t arena = 0;
    for (const std::int64_t tokens : {100, 200}) {
      Case test = make_case("causal", 32, tokens);
      test.problem.dtype = dtype;
      cuda::EmulatedCapture watch;
      run_watched(test, watch, [&](const Plan& plan) {
        EXPECT_EQ(watch.device.most, internal::peak_bytes(plan.data()));
        EXPECT_TRUE(arena == 0 || plan.arena_bytes() == arena) << "it must not grow with the tokens";
        arena = plan.arena_bytes();
        std::int64_t on_host = 0;
        for (const MemoryLine& line : plan.memory(Pass::backward))
          on_host += line.pinned && !line.beside_arena ? line.bytes : 0;
        EXPECT_EQ(plan.pinned_bytes(Pass::backward), on_host + watch.host.most);
      });
    }
  }
  Case test = make_case("causal", PlanOptions::kBucketAuto, 400);
  test.problem.head_dim = test.problem.head_dim_v = 64;
  test.options.memory_budget = 2'500'000;
  cuda::EmulatedCapture watch;
  run_watched(test, watch, [&](const Plan& plan) {
    EXPECT_LE(watch.device.most, test.options.memory_budget);
    EXPECT_EQ(plan.bucket_source(), SizeSource::budget);
    EXPECT_LE(plan.bucket_rows(), 100);
    std::int64_t tensors = 0;
    for (const MemoryLine& line : plan.memory(Pass::backward)) tensors += line.beside_arena || line.in_arena ? 0 : line.bytes;
    EXPECT_GT(tensors, 3 * test.options.memory_budget / 2);
  });
  EXPECT_EQ(judge_streamed(test), "");
}

// An event that is forgotten is noticed, whichever it is, but for those that nobody could miss: the copies of the first stage
// have nothing to wait for, those of the second one in each pass go to slots that were not used yet, and the last copies are
// waited for by the host alone.
TEST(HostStream, EveryMissingEventIsNoticed) {
  Case test = make_case("full", 16, 48);
  test.problem.batch = 1;
  test.dlse = true;
  cuda::EmulatedCapture forward, whole;
  test.options.backward = false;
  run_watched(test, forward, [](const Plan&) {});
  test.options.backward = true;
  run_watched(test, whole, [](const Plan&) {});
  ASSERT_GT(forward.events, 15);
  ASSERT_GT(whole.events, forward.events + 30);
  std::vector<std::int64_t> unnoticed;
  for (std::int64_t event = 0; event < whole.events; ++event) {
    cuda::EmulatedCapture watch;
    watch.forgotten_event = event;
    try {
      run_watched(test, watch, [](const Plan&) {});
      unnoticed.push_back(event);
    } catch (const DeviceError& error) {
      EXPECT_THAT(error.what(), HasSubstr("no event says which comes first"));
    }
  }
  EXPECT_THAT(unnoticed, ::testing::ElementsAre(0, 2, forward.events + 2, whole.events - 1));
}

// So is a plan that copies a stage too late, while the launches of that piece run, or too early, while the slot is in use.
TEST(HostStream, CopiesInTheWrongStageAreNoticed) {
  for (const int shift : {1, -1}) {
    for (const std::size_t stage : {4, 5, 6}) {
      Case test = make_case("full", 16, 64);
      test.problem.batch = 1;
      test.options.device = DeviceKind::cuda;
      test.execute.device = kDevice;
      test.spoil = [&](internal::PlanData& data) {
        std::vector<internal::Stage>& stages = data.forward.stages;
        std::vector<internal::Launch>& from = stages.at(stage).copies;
        std::vector<internal::Launch>& to = stages.at(stage + static_cast<std::size_t>(shift)).copies;
        ASSERT_FALSE(from.empty());
        to.insert(to.end(), from.begin(), from.end());
        from.clear();
      };
      const Whole whole(test);
      try {
        run(test, whole, device_script(kDevice));
        ADD_FAILURE() << "stage " << stage << " by " << shift;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("no event says which comes first"));
      }
    }
  }
}

// Tensors of any strides are copied right: heads before tokens, gaps between rows, one batch item for all, rows in reverse.
TEST(HostStream, AnyStrides) {
  Case test = make_case("causal", 10, 37);
  test.options.backward = false;
  const Problem& p = test.problem;
  const Whole whole(test);
  const std::int64_t n = p.tokens_q;
  const auto world = make_thread_world(1);
  ExecuteOptions execute;
  execute.device = kDevice;
  Attention attention(p, test.options, *world[0], execute);
  const auto values = [](const DeviceBuffer& buffer) { return reinterpret_cast<float*>(buffer.data()); };
  const auto pinned = [](std::int64_t elements) {
    return DeviceBuffer(kDevice, elements * 4, DeviceBuffer::Place::pinned_host);
  };
  struct Strides {
    std::int64_t batch, token, head, first;
  };
  // The same numbers, laid out twice.
  const auto run = [&](const Strides& q, const Strides& k, const Strides& v, const Strides& o) {
    const DeviceBuffer at[] = {pinned(20'000), pinned(20'000), pinned(20'000), pinned(20'000), pinned(20'000)};
    const auto fill = [&](const DeviceBuffer& buffer, const Strides& s, int heads, int width, std::int64_t batch_items) {
      for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t i = 0; i < n; ++i) {
          for (int h = 0; h < heads; ++h) {
            for (int x = 0; x < width; ++x) {
              const std::int64_t number = (((b % batch_items) * n + i) * heads + h) * width + x;
              values(buffer)[s.first + b * s.batch + i * s.token + h * s.head + x] =
                  static_cast<float>(number * 7919 % 1009) / 1009.0F;
            }
          }
        }
      }
    };
    fill(at[0], q, p.heads, p.head_dim, 2);
    fill(at[1], k, p.kv_heads, p.head_dim, 1);
    fill(at[2], v, p.kv_heads, p.head_dim_v, 2);
    const auto tensor = [&](int index, const Strides& s) {
      return Tensor{values(at[index]) + s.first, s.batch, s.token, s.head};
    };
    ForwardTensors tensors;
    tensors.q = tensor(0, q), tensors.k = tensor(1, k), tensors.v = tensor(2, v), tensors.o = tensor(3, o);
    tensors.lse = {values(at[4]), p.heads * n, 1, n};
    attention.forward(tensors);
    attention.wait();
    std::vector<float> result;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (int h = 0; h < p.heads; ++h) {
          const float* const row = values(at[3]) + o.first + b * o.batch + i * o.token + h * o.head;
          result.insert(result.end(), row, row + p.head_dim_v);
        }
      }
    }
    return result;
  };
  const auto dense = [&](std::int64_t heads, std::int64_t width) {
    return Strides{n * heads * width, heads * width, width, 0};
  };
  const auto plain = run(dense(4, 16), dense(2, 16), dense(2, 12), dense(4, 12));
  const Strides heads_first{n * 4 * 16, 16, n * 16, 0}, one_item{0, 2 * 16, 16, 0}, gaps{n * 30 + 5, 30, 12, 3};
  EXPECT_EQ(run(heads_first, one_item, gaps, {n * 4 * 12, 12, n * 12, 0}), plain);
  const Strides reversed{n * 2 * 16, -2 * 16, 16, (n - 1) * 2 * 16};
  EXPECT_EQ(run(dense(4, 16), reversed, dense(2, 12), {n * 50, 50, 12, 1}), plain);
  EXPECT_FALSE(std::all_of(plain.begin(), plain.end(), [](float x) { return x == 0.0F; }));
}

TEST(HostStream, RefusalsNameTheReason) {
  const auto refusal = [](const auto& change, const char* device = kDevice) -> std::string {
    Case test = make_case("causal", 16);
    test.execute.device = device;
    change(test);
    const Whole whole(test);
    try {
      run(test, whole, device_script(kDevice));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal([](Case&) {}), "");
  EXPECT_THAT(refusal([](Case&) {}, "cpu"), HasSubstr("this rank computes on the CPU"));
  EXPECT_THAT(refusal([](Case& c) { c.problem.ranks = 2, c.problem.replicated_q = true; }), HasSubstr("replicated_q"));
  EXPECT_THAT(refusal([](Case& c) { c.problem.ranks = 2, c.options.strategy = Strategy::ring; }),
              HasSubstr("host_tensors stream by strategy exchange on several ranks: strategy (ring) must be auto or exchange"));
  EXPECT_THAT(refusal([](Case& c) { c.options.strategy = Strategy::ring; }),
              HasSubstr("strategy (ring) must be auto or local"));
  EXPECT_THAT(refusal([](Case& c) { c.problem.pattern = Pattern::parse("dilated:16x1@torchscale"); }), HasSubstr("torchscale"));
  EXPECT_THAT(refusal([](Case& c) { c.problem.dtype = DType::float16, c.options.keep_o_float32 = true; }),
              HasSubstr("keep_o_float32 = false"));
  EXPECT_THAT(refusal([](Case& c) { c.options.bucket_rows = 0, c.options.memory_budget = 1000; }),
              HasSubstr("the smallest possible is"));
  Case many = make_case("causal", 16, 100'000);
  many.options.device = DeviceKind::cuda;
  EXPECT_THAT([&] { make_plan(many.problem, many.options, 0); },
              ::testing::ThrowsMessage<Unsupported>(HasSubstr("use larger buckets")));
  // Memory that the copies could not be fast with, or not reach.
  const auto tensors_at = [](bool on_device) -> std::string {
    Case test = make_case("causal", 16);
    test.execute.device = kDevice;
    const Whole whole(test);
    try {
      run(test, whole, [&](Attention& attention, const RankTensors& rank) {
        internal::PlanData resident = attention.plan().data();
        resident.options.host_tensors = false;
        DeviceTensors device(kDevice, resident);
        attention.forward(on_device ? testing::on_device(device, test.problem, rank.forward()) : rank.forward());
      });
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  for (const bool on_device : {false, true}) EXPECT_THAT(tensors_at(on_device), HasSubstr("q.data"));
  EXPECT_THAT(tensors_at(true), HasSubstr("is not pinned host memory"));
}

// The smallest budget that a refusal names will do.
TEST(HostStream, TheSmallestBudgetThatIsNamedWillDo) {
  Case test = make_case("causal", PlanOptions::kBucketAuto, 500);
  PlanOptions options = test.options;
  options.device = DeviceKind::cuda;
  options.memory_budget = 1;
  std::string refusal;
  try {
    make_plan(test.problem, options, 0);
  } catch (const OutOfBudget& error) {
    refusal = error.what();
  }
  ASSERT_THAT(refusal, HasSubstr("the smallest possible is "));
  options.memory_budget = std::stoll(refusal.substr(refusal.find("possible is ") + 12));
  EXPECT_LE(internal::peak_bytes(make_plan(test.problem, options, 0).data()), options.memory_budget);
}

TEST(HostStream, PlansSayWhatIsCopied) {
  const Case test = make_case("full", 16, 64);
  PlanOptions options = test.options;
  options.device = DeviceKind::cuda;
  const Plan plan = make_plan(test.problem, options, 0);
  // Queries once; keys for each of four pieces of queries, less what is still in a slot: two pieces of the four at each turn.
  const std::int64_t q = 2 * 64 * 4 * 16 * 4, kv = 2 * 64 * 2 * (16 + 12) * 4, o = 2 * 64 * 4 * (12 * 4 + 4);
  EXPECT_EQ(plan.host_bytes(Pass::forward).to_host, o);
  EXPECT_GE(plan.host_bytes(Pass::forward).to_device, q + kv);
  EXPECT_LE(plan.host_bytes(Pass::forward).to_device, q + 4 * kv);
  EXPECT_EQ(plan.host_bytes(Pass::backward).to_host, q + kv);
  EXPECT_THAT(plan.to_string(), HasSubstr("stream through the device"));
  EXPECT_THAT(plan.to_string(), HasSubstr("copy in "));
  EXPECT_THAT(plan.to_json(), HasSubstr("\"host_bytes\""));
  EXPECT_THAT(plan.to_json(), HasSubstr("\"host_nanoseconds\""));
  EXPECT_THAT(plan.to_string(), HasSubstr("of it not hidden"));
  Case resident = test;
  resident.options.host_tensors = false;
  resident.options.bucket_rows = PlanOptions::kBucketAuto;
  const Plan other = make_plan(resident.problem, resident.options, 0);
  EXPECT_EQ(plan.pairs(), other.pairs());
  EXPECT_EQ(plan.flops(Pass::backward), other.flops(Pass::backward));
}

}  // namespace
}  // namespace ringspan::testing
