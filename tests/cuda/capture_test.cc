// What the capture of a CUDA graph needs of one rank's passes, on the emulated device: that they wait for nothing, record no
// event and allocate nothing but the memory of their task lists, and that a replay computes with what the tensors hold then,
// whatever passes ran in between. Capture itself has not run on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/device_world.h"
#include "cuda/emulated_capture.h"
#include "cuda/gpu_device.h"
#include "exec/executor.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::testing {
namespace {

using cuda::EmulatedCapture;

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
  Passes(const Plan& plan, EmulatedCapture& capture)
      : world_(make_thread_world(1)),
        executor_(plan, *world_[0], {}, {}, std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(7, &capture))) {}
  void run(const ForwardTensors& forward, const BackwardTensors& backward) {
    executor_.forward(forward);
    executor_.backward(backward);
  }
  void wait() { executor_.wait(); }

 private:
  std::vector<std::unique_ptr<Communicator>> world_;
  internal::Executor executor_;
};

bool is_untouched(const void* data, std::int64_t bytes) {  // RankTensors' outputs begin as bytes 0xff
  const auto* begin = static_cast<const std::byte*>(data);
  return std::all_of(begin, begin + bytes, [](std::byte byte) { return byte == std::byte{0xff}; });
}

TEST(Capture, WaitsForNothingAndReplaysWhatItCaptured) {
  for (const auto& [dtype, on_host] : {std::pair{DType::float32, false}, std::pair{DType::bfloat16, false},
                                       std::pair{DType::float32, true}, std::pair{DType::bfloat16, true}}) {
    SCOPED_TRACE(on_host ? "tensors on the host" : "tensors on the device");
    const Case test = make_case(dtype, on_host, 1);
    const Case another = make_case(dtype, on_host, 2);
    const Whole whole(test);
    const auto script = [&](Attention& attention, const RankTensors& rank) {
      const Plan& plan = attention.plan();
      const Problem& problem = plan.problem();
      EmulatedCapture capture;
      Passes passes(plan, capture);
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
      capture.active = true;
      passes.run(forward, backward);
      capture.active = false;
      EXPECT_EQ(capture.waits, waits);
      EXPECT_EQ(capture.allocations, allocations + 4) << "the task lists of two passes, on the host and on the device";
      EXPECT_FALSE(capture.work.empty());
      // Passes with other tensors and task lists come between, and the captured ones have not run.
      for (int pass = 0; pass < 3; ++pass) passes.run(warm_forward, warm_backward);
      passes.wait();
      fixed.copy_back();
      EXPECT_TRUE(is_untouched(rank.forward().o.data, problem.tokens_q * problem.heads * problem.head_dim_v * size_of(dtype)));
      for (int replay = 0; replay < 2; ++replay) {
        fixed.copy_in();
        capture.replay();
      }
      fixed.copy_back();
    };
    const Outputs outputs = run(test, whole, script);
    EXPECT_EQ(judge(test, whole, outputs), "");
    EXPECT_EQ(outputs, run_on_device(test, whole));
  }
}

// The test above could not fail if the emulated device let everything pass.
TEST(Capture, RefusesWhatCudaRefuses) {
  EmulatedCapture capture;
  const auto runtime = cuda::make_emulated_runtime(1, &capture);
  const Event event = runtime->record();
  capture.active = true;
  EXPECT_TRUE(runtime->is_capturing());
  EXPECT_THROW(runtime->record(), DeviceError);
  EXPECT_THROW(runtime->is_complete(event), DeviceError);
  EXPECT_THROW(runtime->wait(event, [] {}), DeviceError);
  capture.active = false;
  runtime->wait(event, [] {});
  EXPECT_EQ(capture.waits, 1);
}

}  // namespace
}  // namespace ringspan::testing
