// What the capture of a CUDA graph needs of passes, on the emulated device: that they wait for nothing, record no event that
// outlives it, allocate nothing but the memory of their task lists, and that a replay computes with what the tensors hold then,
// whatever passes ran in between. Ranks that are threads with devices are captured together, as one graph.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <memory>
#include <string_view>
#include <vector>

#include "comm_testing/decorators.h"
#include "cuda/device_world.h"
#include "cuda/emulated_capture.h"
#include "cuda/gpu_device.h"
#include "exec/executor.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::testing {
namespace {

using cuda::EmulatedCapture;
using cuda::EmulatedGraph;

constexpr const char* kDevice = "cuda-emulated";

// With the tensors on the device, or on the host and streamed.
Case make_case(DType dtype, bool on_host, std::uint64_t seed) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = 40;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 16;
  p.dtype = dtype;
  p.alibi = p.sinks = true;
  p.softcap = 20.0F;
  p.pattern = Pattern::parse("causal");
  test.execute.device = kDevice;
  test.options.host_tensors = on_host;
  if (on_host) test.options.bucket_rows = 12;
  test.options.keep_o_float32 = !on_host;
  test.seed = seed;
  return test;
}

class Passes {
 public:
  Passes(const Plan& plan, Communicator& communicator, EmulatedCapture& capture)
      : executor_(plan, communicator, {}, {}, std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(7, &capture))) {}
  void run(const ForwardTensors& forward, const BackwardTensors& backward) {
    executor_.forward(forward);
    executor_.backward(backward);
  }
  void wait() { executor_.wait(); }

 private:
  internal::Executor executor_;
};

bool is_untouched(const void* data, std::int64_t bytes) {  // RankTensors' outputs begin as bytes 0xff
  const auto* begin = static_cast<const std::byte*>(data);
  return std::all_of(begin, begin + bytes, [](std::byte byte) { return byte == std::byte{0xff}; });
}

constexpr std::size_t kLaunches = 7;  // of a case with tensors on the device: forward 1; delta, dq, dk with dv, 3 for sinks

TEST(Capture, WaitsForNothingAndReplaysWhatItCaptured) {
  struct Captured {
    DType dtype;
    bool on_host;
    const char* kernel;
  };
  for (const auto& [dtype, on_host, kernel] : {Captured{DType::float32, false, ""}, Captured{DType::bfloat16, false, "wgmma"},
                                               Captured{DType::float32, true, ""}, Captured{DType::bfloat16, true, ""}}) {
    SCOPED_TRACE(on_host ? "tensors on the host" : "tensors on the device");
    const auto make = [&](std::uint64_t seed) {
      Case test = make_case(dtype, on_host, seed);
      test.options.attend_kernel = test.options.attend_backward_kernel = kernel;
      if (kernel == std::string_view("wgmma")) test.problem.batch = 2;  // more blocks than are resident, which count themselves
      return test;
    };
    const Case test = make(1), another = make(2);
    const Whole whole(test);
    const auto script = [&](Attention& attention, const RankTensors& rank) {
      const Plan& plan = attention.plan();
      const Problem& problem = plan.problem();
      const auto world = make_thread_world(1);
      EmulatedGraph graph;
      EmulatedCapture capture{.graph = &graph};
      Passes passes(plan, *world[0], capture);
      const RankTensors other(another, Whole(another), 0);
      DeviceTensors warm(kDevice, plan.data());
      const ForwardTensors warm_forward = on_device(warm, problem, other.forward());
      const BackwardTensors warm_backward = on_device(warm, problem, other.backward());
      DeviceTensors fixed(kDevice, plan.data());
      ForwardTensors forward = on_device(fixed, problem, rank.forward());
      BackwardTensors backward = on_device(fixed, problem, rank.backward());
      backward.o = forward.o;  // what the captured forward pass writes
      backward.lse = forward.lse;
      passes.run(warm_forward, warm_backward);
      const std::int64_t allocations = capture.allocations;
      passes.run(warm_forward, warm_backward);
      EXPECT_EQ(capture.allocations, allocations) << "in the second pass";
      fixed.zero_inputs();
      const std::int64_t waits = capture.waits;
      graph.begin();
      passes.run(forward, backward);
      graph.end();
      EXPECT_EQ(capture.waits, waits);
      EXPECT_EQ(capture.allocations, allocations + 2) << "the task lists of both passes, on the host and on the device";
      EXPECT_GT(graph.works(), 0U);
      if (!on_host) {
        EXPECT_EQ(graph.works(), kLaunches) << "task lists were copied when they were captured";
      }
      // Passes with other tensors and task lists come between, and the captured ones have not run.
      for (int pass = 0; pass < 3; ++pass) passes.run(warm_forward, warm_backward);
      passes.wait();
      fixed.copy_back();
      EXPECT_TRUE(is_untouched(rank.forward().o.data, problem.tokens_q * problem.heads * problem.head_dim_v * size_of(dtype)));
      for (std::uint64_t replay = 1; replay < 3; ++replay) {
        fixed.copy_in();
        graph.replay(replay);
      }
      fixed.copy_back();
    };
    const Outputs outputs = run(test, whole, script);
    EXPECT_EQ(judge(test, whole, outputs), "");
    EXPECT_EQ(outputs, run_on_device(test, whole));
  }
}

// Waits for messages on a stream that computes nothing (a planted bug), from plant() on.
class WaitsElsewhere final : public comm_testing::ForwardingCommunicator, private StreamMessages {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  StreamMessages* on_streams() override { return this; }
  void plant() { elsewhere_ = cuda::make_emulated_runtime(1); }

 private:
  using ForwardingCommunicator::post;
  using ForwardingCommunicator::wait;
  Request post(void* stream, std::uint64_t round, std::span<const Message> batch) override {
    return inner().on_streams()->post(stream, round, batch);
  }
  void wait(void* stream, Request request, Seconds deadline) override {
    inner().on_streams()->wait(elsewhere_ == nullptr ? stream : elsewhere_->stream(), request, deadline);
  }
  std::unique_ptr<cuda::Runtime> elsewhere_;
};

// What a replay of a graph of all ranks computes, its steps in an order that is drawn from `seed`.
Outputs replay_ranks(const Case& test, const Whole& whole, std::uint64_t seed, bool planted_bug) {
  const int ranks = test.problem.ranks;
  EmulatedGraph graph;
  const auto world = make_thread_world(std::vector<std::string>(static_cast<std::size_t>(ranks), kDevice));
  std::barrier together(ranks);
  const auto script = [&](Attention& attention, const RankTensors& rank) {
    const Plan& plan = attention.plan();
    Communicator& communicator = *world[static_cast<std::size_t>(plan.rank())];
    WaitsElsewhere bug(communicator);
    EmulatedCapture capture{.graph = &graph};
    Passes passes(plan, planted_bug ? static_cast<Communicator&>(bug) : communicator, capture);
    DeviceTensors tensors(kDevice, plan.data());
    const ForwardTensors forward = on_device(tensors, plan.problem(), rank.forward());
    BackwardTensors backward = on_device(tensors, plan.problem(), rank.backward());
    backward.o = forward.o;
    backward.lse = forward.lse;
    tensors.zero_inputs();
    passes.run(forward, backward);  // the first one fills the pools
    passes.wait();
    bug.plant();
    const std::int64_t waits = capture.waits;
    const auto on_rank_zero = [&](const auto& action) {
      together.arrive_and_wait();
      if (plan.rank() == 0) action();
      together.arrive_and_wait();
    };
    on_rank_zero([&] { graph.begin(); });
    passes.run(forward, backward);
    on_rank_zero([&] {
      if (planted_bug) {
        EXPECT_THROW(graph.end(), std::logic_error);
      } else {
        graph.end();
      }
    });
    EXPECT_EQ(capture.waits, waits);
    tensors.copy_in();
    on_rank_zero([&] { graph.replay(seed); });
    tensors.copy_back();
  };
  return run(test, whole, script);
}

Case ranks_case(Strategy strategy, DType dtype) {
  Case test = make_case(dtype, false, 3);
  test.problem.ranks = 3;
  test.problem.sharding_q = test.problem.sharding_k = Sharding::parse("zigzag");
  test.options.strategy = strategy;
  if (strategy == Strategy::ring || strategy == Strategy::exchange) test.options.bucket_rows = 6;
  test.devices.assign(3, kDevice);
  test.peer_copies = true;
  return test;
}

TEST(Capture, RanksAreOneGraph) {
  for (const Strategy strategy : {Strategy::all_gather, Strategy::ring, Strategy::exchange, Strategy::ulysses}) {
    const Case test = ranks_case(strategy, strategy == Strategy::exchange ? DType::float32 : DType::bfloat16);
    SCOPED_TRACE(to_string(test));
    const Whole whole(test);
    const Outputs expected = run_on_device(test, whole);
    for (std::uint64_t seed = 1; seed <= 2; ++seed)
      EXPECT_EQ(replay_ranks(test, whole, seed, false), expected) << "seed " << seed;
  }
}

TEST(Capture, AGraphWithoutAnOrderShows) {
  Case test = ranks_case(Strategy::ring, DType::bfloat16);
  test.problem.sinks = false;  // of which all ranks must have one gradient
  const Whole whole(test);
  const Outputs expected = run_on_device(test, whole);
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) wrong += replay_ranks(test, whole, seed, true) != expected ? 1 : 0;
  EXPECT_EQ(wrong, 3);
}

// The tests above could not fail if the emulated device let everything pass.
TEST(Capture, RefusesWhatCudaRefuses) {
  EmulatedGraph graph;
  EmulatedCapture capture{.graph = &graph};
  const auto runtime = cuda::make_emulated_runtime(1, &capture);
  const auto other = cuda::make_emulated_runtime(2);
  const Event event = runtime->record();
  const auto before = runtime->make_point();
  runtime->record(*before, runtime->stream());
  graph.begin();
  EXPECT_TRUE(runtime->is_capturing());
  EXPECT_THROW(runtime->record(), DeviceError);
  EXPECT_THROW(runtime->is_complete(event), DeviceError);
  EXPECT_THROW(runtime->wait(event, [] {}), DeviceError);
  EXPECT_THROW(runtime->follow(*before, runtime->stream()), DeviceError);
  const auto inside = runtime->make_point();
  runtime->record(*inside, runtime->stream());
  other->follow(*inside, other->stream());
  EXPECT_TRUE(other->is_capturing());
  EXPECT_THROW(graph.end(), std::logic_error);  // nobody waits for the other stream
  EXPECT_FALSE(other->is_capturing());
  EXPECT_THROW(other->follow(*inside, other->stream()), DeviceError);
  runtime->wait(event, [] {});
  EXPECT_EQ(capture.waits, 1);
}

}  // namespace
}  // namespace ringspan::testing
