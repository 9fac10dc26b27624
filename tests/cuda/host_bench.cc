// What a pass on a device costs the host: through the executor, on a runtime that does nothing and counts what it is asked for.
//     host_bench HEADS HEAD_DIM TOKENS PATTERN TENSORS REPEATS
// One rank, bfloat16. Passes go over TENSORS sets of tensors in turns, as the layers of a model do; each turn is a forward and
// a backward pass. Prints one JSON object: of each pass the median of microseconds and, in the last turn, how many launches,
// copies and events there were.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/counting_runtime.h"
#include "cuda/gpu_device.h"
#include "exec/executor.h"
#include "ringspan/error.h"
#include "ringspan/plan.h"
#include "ringspan/transports.h"

namespace ringspan::testing {
namespace {

struct PassCost {
  std::vector<double> microseconds;
  RuntimeCounts counts;
  std::string json() {
    std::sort(microseconds.begin(), microseconds.end());
    return fmt::format(R"({{"microseconds": {:.4}, "launches": {}, "copies": {}, "events": {}}})",
                       microseconds[microseconds.size() / 2], counts.launches, counts.copies, counts.events);
  }
};

void run(char** arguments) {
  Problem problem;
  problem.heads = problem.kv_heads = std::atoi(arguments[1]);
  problem.head_dim = problem.head_dim_v = std::atoi(arguments[2]);
  problem.tokens_q = problem.tokens_k = std::atoll(arguments[3]);
  problem.pattern = Pattern::parse(arguments[4]);
  problem.dtype = DType::bfloat16;
  PlanOptions options;
  options.backward = true;
  options.device = DeviceKind::cuda;
  const int sets = std::max(std::atoi(arguments[5]), 1);
  const int repeats = std::max(std::atoi(arguments[6]), 1);

  RuntimeCounts counts;
  const auto world = make_thread_world(1);
  internal::Executor executor(make_plan(problem, options, 0), *world.front(), {}, {},
                              std::make_unique<cuda::GpuDevice>(std::make_unique<CountingRuntime>(counts)));
  const std::int64_t row = std::int64_t{problem.heads} * problem.head_dim;
  const std::int64_t bytes = row * problem.tokens_q * 2;
  std::byte* next = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);  // never read
  const auto tensor = [&] {
    next += bytes;
    return Tensor{next, row * problem.tokens_q, row, problem.head_dim};
  };
  const auto statistics = [&] {
    next += bytes;
    return Tensor{next, problem.heads * problem.tokens_q, 1, problem.tokens_q};
  };
  const auto read = [](const Tensor& t) { return ConstTensor{t.data, t.batch_stride, t.token_stride, t.head_stride}; };
  std::vector<ForwardTensors> forward;
  std::vector<BackwardTensors> backward;
  for (int set = 0; set < sets; ++set) {
    ForwardTensors f{.q = read(tensor()), .k = read(tensor()), .v = read(tensor()), .o = tensor(), .lse = statistics()};
    BackwardTensors b{.q = f.q, .k = f.k, .v = f.v, .o = read(f.o), .lse = read(f.lse), .d_out = read(tensor())};
    b.dq = tensor(), b.dk = tensor(), b.dv = tensor();
    forward.push_back(f);
    backward.push_back(b);
  }

  PassCost costs[2];
  const auto time = [&](PassCost& cost, auto&& pass) {
    const RuntimeCounts before = counts;
    const auto begin = std::chrono::steady_clock::now();
    pass();
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    cost.microseconds.push_back(taken.count());
    cost.counts = counts - before;
  };
  for (int turn = 0; turn < repeats; ++turn) {
    for (int set = 0; set < sets; ++set) {
      time(costs[0], [&] { executor.forward(forward[static_cast<std::size_t>(set)]); });
      time(costs[1], [&] { executor.backward(backward[static_cast<std::size_t>(set)]); });
    }
  }
  fmt::print(
      R"({{"heads": {}, "head_dim": {}, "tokens": {}, "pattern": "{}", "tensors": {}, "repeats": {}, "forward": {}, "backward": {}}})"
      "\n",
      problem.heads, problem.head_dim, problem.tokens_q, arguments[4], sets, repeats, costs[0].json(), costs[1].json());
}

}  // namespace
}  // namespace ringspan::testing

int main(int count, char** arguments) {
  if (count != 7) {
    fmt::print(stderr, "usage: host_bench HEADS HEAD_DIM TOKENS PATTERN TENSORS REPEATS\n");
    return 2;
  }
  try {
    ringspan::testing::run(arguments);
  } catch (const ringspan::Error& error) {
    fmt::print(stderr, "host_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
