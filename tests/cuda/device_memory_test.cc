// Forecast = measured for a device: what the emulated runtime counts as allocated, on the device and as pinned host memory, is
// what the plan says, to the byte, and a budget holds for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device_world.h"
#include "cuda/emulated_capture.h"
#include "cuda/gpu_device.h"
#include "exec/executor.h"
#include "plan/cost.h"
#include "plan/device_memory.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::testing {
namespace {

constexpr const char* kDevice = "cuda-emulated";

// What is booked of the lines that `chosen` takes.
template <typename Chosen>
std::int64_t booked(const Plan& plan, Pass pass, const Chosen& chosen) {
  std::int64_t bytes = 0;
  for (const MemoryLine& line : plan.memory(pass)) bytes += chosen(line) ? line.bytes : 0;
  return bytes;
}

// Runs every rank's passes on a device whose allocations are counted.
void run_counted(const Case& test, const Whole& whole,
                 const std::function<void(const Plan&, const cuda::EmulatedCapture&)>& see) {
  const auto world = test.peer_copies
                         ? make_thread_world(std::vector<std::string>(static_cast<std::size_t>(test.problem.ranks), kDevice))
                         : make_thread_world(test.problem.ranks);
  run_thread_ranks(make_thread_world(test.problem.ranks), [&](Communicator& starter) {
    Communicator& communicator = *world[static_cast<std::size_t>(starter.rank())];
    const Plan plan = make_plan(test.problem, test.options, communicator.rank());
    cuda::EmulatedCapture counters;
    const RankTensors tensors(test, whole, communicator.rank());
    internal::Executor executor(plan, communicator, {}, {},
                                std::make_unique<cuda::GpuDevice>(cuda::make_emulated_runtime(7, &counters)));
    DeviceTensors device(kDevice, plan.data());
    const ForwardTensors forward = on_device(device, test.problem, tensors.forward());
    executor.forward(forward);
    if (test.options.backward) {
      BackwardTensors backward = on_device(device, test.problem, tensors.backward());
      backward.o = forward.o;
      backward.lse = forward.lse;
      executor.backward(backward);
    }
    executor.wait();
    see(executor.plan(), counters);
  });
}

void expect_forecast(const Case& test) {
  SCOPED_TRACE(to_string(test));
  run_counted(test, Whole(test), [&](const Plan& plan, const cuda::EmulatedCapture& counters) {
    SCOPED_TRACE("rank " + std::to_string(plan.rank()));
    EXPECT_EQ(plan.options().device, DeviceKind::cuda);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (pass == Pass::backward && !test.options.backward) continue;
      const auto beside = [](const MemoryLine& line) { return line.beside_arena && !line.pinned; };
      EXPECT_EQ(counters.device.most, plan.arena_bytes() + booked(plan, pass, beside));
      EXPECT_EQ(counters.device.now, counters.device.most);
      EXPECT_EQ(counters.host.most, plan.pinned_bytes(pass));
      EXPECT_EQ(booked(plan, pass, [](const MemoryLine& line) { return line.component == "scratch"; }), 0);
      const std::int64_t caller = booked(plan, pass, [](const MemoryLine& l) { return !l.in_arena && !l.beside_arena; });
      EXPECT_EQ(plan.memory_bytes(pass),
                caller + booked(plan, pass, [](const MemoryLine& l) { return l.in_arena; }) + booked(plan, pass, beside));
      EXPECT_EQ(booked(plan, pass, [](const MemoryLine& l) { return l.in_arena; }), plan.arena_bytes());
    }
  });
}

Case make_case(const char* pattern, Strategy strategy, int ranks) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = 61;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 12;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  test.options.strategy = strategy;
  return test;
}

TEST(DeviceMemory, ForecastIsWhatIsAllocated) {
  for (const Strategy strategy :
       {Strategy::local, Strategy::all_gather, Strategy::exchange, Strategy::ring, Strategy::pass_q, Strategy::ulysses}) {
    for (const int ranks : {1, 3}) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        Case test = make_case("causal", strategy, ranks);
        test.problem.dtype = dtype;
        test.problem.sinks = ranks == 3;
        expect_forecast(test);
        test.dlse = true;
        expect_forecast(test);
        if (ranks == 1) continue;
        test.peer_copies = true;
        expect_forecast(test);
      }
    }
  }
  expect_forecast(make_case("dilated:16x1,32x2,64x4", Strategy::ring, 2));
  expect_forecast(make_case("dilated:16x1,32x2@torchscale", Strategy::exchange, 2));
}

// Tensors on the host are the caller's: what is allocated besides them is booked, on the device and as pinned memory for
// messages. So is what is copied, with the gradient of lse.
TEST(DeviceMemory, ForecastOfTensorsOnTheHost) {
  for (const int ranks : {1, 3}) {
    for (const auto& [dtype, dlse] :
         {std::pair{DType::float32, false}, {DType::float32, true}, {DType::bfloat16, false}, {DType::bfloat16, true}}) {
      Case test = make_case("causal", ranks == 1 ? Strategy::local : Strategy::exchange, ranks);
      test.problem.dtype = dtype;
      test.problem.sinks = true;
      test.dlse = dlse;
      test.problem.sharding_q = test.problem.sharding_k = Sharding::parse("zigzag");
      test.options.device = DeviceKind::cuda;
      test.options.host_tensors = true;
      test.options.keep_o_float32 = false;
      test.options.bucket_rows = 8;
      SCOPED_TRACE(to_string(test));
      run_counted(test, Whole(test), [&](const Plan& plan, const cuda::EmulatedCapture& counters) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          EXPECT_EQ(counters.device.most, plan.memory_bytes(pass) - booked(plan, pass, [](const MemoryLine& l) {
                                            return l.in_arena;
                                          }) + plan.arena_bytes());
          const std::int64_t callers = booked(plan, pass, [](const MemoryLine& l) { return l.pinned && !l.beside_arena; });
          EXPECT_GT(callers, 0);
          EXPECT_EQ(counters.host.most, plan.pinned_bytes(pass) - callers);
        }
        const Plan::HostBytes forward = plan.host_bytes(Pass::forward), backward = plan.host_bytes(Pass::backward);
        EXPECT_EQ(counters.copied_to_host, forward.to_host + backward.to_host);
        const std::int64_t forecast = forward.to_device + backward.to_device;
        EXPECT_LE(counters.copied_to_device, forecast);
        EXPECT_EQ(counters.copied_to_device == forecast, dlse);  // counted even where none is given
        const std::int64_t messages =
            booked(plan, Pass::forward, [](const MemoryLine& l) { return l.component == "pinned messages"; });
        EXPECT_EQ(messages > 0, ranks > 1);
      });
    }
  }
}

// A plan for the device, and one for the CPU that is taken over, take the same memory, and have the same steps but for
// gradients, which are settled for devices only.
TEST(DeviceMemory, PlansForTheCpuAreBookedAnew) {
  const Case test = make_case("causal", Strategy::ring, 2);
  PlanOptions options = test.options;
  const Plan cpu = make_plan(test.problem, options, 1);
  options.device = DeviceKind::cuda;
  const Plan device = make_plan(test.problem, options, 1);
  EXPECT_GT(cpu.arena_bytes(), device.arena_bytes());
  EXPECT_EQ(cpu.fingerprint(), device.fingerprint());
  const Plan taken_over(std::make_shared<internal::PlanData>(internal::plan_for_device(cpu.data(), false)));
  EXPECT_EQ(taken_over.arena_bytes(), device.arena_bytes());
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    EXPECT_EQ(taken_over.pinned_bytes(pass), device.pinned_bytes(pass));
  }
  auto steps = nlohmann::json::parse(taken_over.to_json()), steps_of_device = nlohmann::json::parse(device.to_json());
  steps.erase("backward"), steps_of_device.erase("backward");
  EXPECT_EQ(steps, steps_of_device);
  EXPECT_EQ(cpu.pinned_bytes(Pass::backward), 0);
  EXPECT_THAT(device.to_string(), ::testing::HasSubstr("pinned task lists"));
  const auto world = make_thread_world(1);
  EXPECT_THROW(Attention(make_plan(make_case("full", Strategy::ring, 1).problem, options, 0), *world[0]), InvalidArgument);
  options.attend_kernel = "reference";
  EXPECT_THROW(make_plan(test.problem, options, 1), Unsupported);
}

// The smallest budget that a refusal names is one that will do, and what is then allocated stays below it.
TEST(DeviceMemory, BudgetsCountWhatLiesBesideTheArena) {
  Case test = make_case("causal", Strategy::ring, 3);
  test.problem.tokens_q = test.problem.tokens_k = 300;
  test.options.device = DeviceKind::cuda;
  const auto peak = [&](const PlanOptions& options) {
    std::int64_t bytes = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const Plan plan = make_plan(test.problem, options, rank);
      bytes = std::max(bytes, internal::peak_bytes(plan.data()));
    }
    return bytes;
  };
  const std::int64_t free = peak(test.options);
  test.options.memory_budget = free;
  EXPECT_EQ(peak(test.options), free);
  test.options.memory_budget = 1;
  std::string refusal;
  try {
    make_plan(test.problem, test.options, 0);
  } catch (const OutOfBudget& error) {
    refusal = error.what();
  }
  ASSERT_THAT(refusal, ::testing::HasSubstr("the smallest possible is "));
  test.options.memory_budget = std::stoll(refusal.substr(refusal.find("possible is ") + 12));
  EXPECT_LE(peak(test.options), test.options.memory_budget);
  run_counted(test, Whole(test), [&](const Plan& plan, const cuda::EmulatedCapture& counters) {
    const std::int64_t callers =
        booked(plan, Pass::backward, [](const MemoryLine& l) { return !l.in_arena && !l.beside_arena; });
    EXPECT_LE(callers + counters.device.most, test.options.memory_budget);
  });
}

// Under a budget, a rank of the CPU (scratch of its kernels, as many as threads) and one of a device (lists of tasks) would
// choose different buckets, each by its own books.
class RanksThatDiffer : public ::testing::Test {
 protected:
  RanksThatDiffer() {
    test_.problem.tokens_q = test_.problem.tokens_k = 800;
    test_.options.bucket_rows = PlanOptions::kBucketAuto;
  }
  // 0: nothing fits.
  std::int64_t rows_of_lone(const PlanOptions& own, std::int64_t budget, int rank) const {
    PlanOptions options = own;
    options.memory_budget = budget;
    try {
      return make_plan(test_.problem, options, rank).bucket_rows();
    } catch (const OutOfBudget&) {
      return 0;
    }
  }
  // Under which the options of both ranks have plans, with different buckets.
  void find_budget(const PlanOptions& first, const PlanOptions& second) {
    const auto peak = [&](const PlanOptions& options) {
      return internal::peak_bytes(make_plan(test_.problem, options, 0).data());
    };
    const std::int64_t most = std::max(peak(first), peak(second));
    for (std::int64_t budget = most / 400; budget < most; budget += most / 400) {
      const std::int64_t rows = rows_of_lone(first, budget, 0), others = rows_of_lone(second, budget, 1);
      if (rows == 0 || others == 0 || rows == others) continue;
      test_.options.memory_budget = budget;
      return;
    }
    FAIL() << "no budget makes them differ";
  }
  Case test_ = make_case("causal", Strategy::ring, 2);
};

TEST_F(RanksThatDiffer, InTheirKindOfDevice) {
  PlanOptions device = test_.options;
  device.device = DeviceKind::cuda;
  ASSERT_NO_FATAL_FAILURE(find_budget(test_.options, device));
  test_.devices = {"cpu", kDevice};
  const Whole whole(test_);
  std::array<std::int64_t, 2> rows{};
  const Outputs outputs = run(test_, whole, [&](Attention& attention, const RankTensors& tensors) {
    const Plan& plan = attention.plan();
    rows[static_cast<std::size_t>(plan.rank())] = plan.bucket_rows();
    EXPECT_LE(internal::peak_bytes(plan.data()), test_.options.memory_budget) << "rank " << plan.rank();
    plan.rank() == 0 ? forward_and_backward(attention, tensors) : device_script(kDevice)(attention, tensors);
  });
  EXPECT_EQ(judge(test_, whole, outputs), "");
  EXPECT_EQ(rows[0], rows[1]);
  EXPECT_LT(rows[0], 256) << "the budget left the bucket alone";
}

// Devices alone would take larger buckets.
TEST_F(RanksThatDiffer, InTheirKindOfDeviceForwardOnly) {
  test_.problem.tokens_q = test_.problem.tokens_k = 1040;  // more rows to a rank than a bucket of the CPU's
  test_.options.backward = false;
  PlanOptions device = test_.options;
  device.device = DeviceKind::cuda;
  ASSERT_NE(make_plan(test_.problem, test_.options, 0).bucket_rows(), make_plan(test_.problem, device, 0).bucket_rows());
  test_.devices = {"cpu", kDevice};
  const Whole whole(test_);
  const Outputs outputs = run(test_, whole, [&](Attention& attention, const RankTensors& tensors) {
    attention.plan().rank() == 0 ? attention.forward(tensors.forward()) : device_script(kDevice)(attention, tensors);
  });
  EXPECT_EQ(judge(test_, whole, outputs), "");
}

TEST_F(RanksThatDiffer, InTheirThreads) {
  PlanOptions threads = test_.options;
  threads.threads = 7;
  ASSERT_NO_FATAL_FAILURE(find_budget(test_.options, threads));
  std::array<std::int64_t, 2> rows{};
  run_thread_ranks(make_thread_world(2), [&](Communicator& communicator) {
    PlanOptions own = test_.options;
    if (communicator.rank() == 1) own.threads = 7;
    const Attention attention(test_.problem, own, communicator);
    rows[static_cast<std::size_t>(communicator.rank())] = attention.plan().bucket_rows();
    EXPECT_LE(internal::peak_bytes(attention.plan().data()), own.memory_budget);
  });
  EXPECT_GT(rows[0], 0);
  EXPECT_EQ(rows[0], rows[1]);
}

// The kernel of rank 0 needs no state of rows that one task has, that of rank 1 does where a task has many keys.
TEST_F(RanksThatDiffer, InTheirKernels) {
  test_.problem.pattern = Pattern::parse("block:0-800,0-700");
  test_.problem.tokens_k = 800;
  test_.options.backward = false;
  test_.options.strategy = Strategy::automatic;
  int different = 0;
  for (std::int64_t budget = 300'000; budget < 2'000'000; budget += 50'000) {
    std::array<std::string, 2> chosen{};
    std::array<std::string, 2> alone{};
    run_thread_ranks(make_thread_world(2), [&](Communicator& communicator) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      PlanOptions own = test_.options;
      own.attend_kernel = rank == 0 ? "reference" : "portable";
      own.memory_budget = budget;
      const auto told = [](const auto& make) {
        try {
          const Plan plan = make();
          return std::string(to_string(plan.strategy())) + " " + std::to_string(plan.bucket_rows());
        } catch (const OutOfBudget&) {
          return std::string("out of budget");
        }
      };
      alone[rank] = told([&] { return make_plan(test_.problem, own, communicator.rank()); });
      chosen[rank] = told([&] { return Attention(test_.problem, own, communicator).plan(); });
    });
    EXPECT_EQ(chosen[0], chosen[1]) << "a budget of " << budget << " bytes";
    different += alone[0] == alone[1] ? 0 : 1;
  }
  EXPECT_GT(different, 0) << "no budget makes them differ";
}

// Nobody can agree where plans are made apart: the refusal says what to give.
TEST_F(RanksThatDiffer, PlansMadeApart) {
  PlanOptions device = test_.options;
  device.device = DeviceKind::cuda;
  ASSERT_NO_FATAL_FAILURE(find_budget(test_.options, device));
  device.memory_budget = test_.options.memory_budget;
  run_thread_ranks(make_thread_world(2), [&](Communicator& communicator) {
    const bool on_device = communicator.rank() == 1;
    const Plan plan = make_plan(test_.problem, on_device ? device : test_.options, communicator.rank());
    ExecuteOptions execute;
    if (on_device) execute.device = kDevice;
    EXPECT_THAT([&] { Attention(plan, communicator, execute); },
                ::testing::ThrowsMessage<CommError>(
                    ::testing::AllOf(::testing::HasSubstr("ranks disagree on bucket_rows of plans made apart"),
                                     ::testing::HasSubstr("give bucket_rows, or let the attention plan"))));
  });
}

}  // namespace
}  // namespace ringspan::testing
