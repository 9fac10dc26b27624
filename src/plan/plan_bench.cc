// Planning time of one rank. The aim: a plan of 1,048,576 tokens of LongNet for one of 64 ranks in under 10 ms.
#include <benchmark/benchmark.h>

#include "plan/plan_data.h"
#include "ringspan/plan.h"

namespace ringspan {
namespace {

Problem problem(std::int64_t tokens, int ranks, const char* pattern, const char* sharding = "contiguous") {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = p.kv_heads = 8;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  p.sharding_q = p.sharding_k = Sharding::parse(sharding);
  return p;
}

void plan(benchmark::State& state, const Problem& p, Strategy strategy, std::int64_t bucket = PlanOptions::kBucketAuto) {
  PlanOptions options;
  options.strategy = strategy;
  options.bucket_rows = bucket;
  const int rank = p.ranks / 2;
  std::size_t tasks = 0, stages = 0;
  for (auto _ : state) {
    const Plan made = make_plan(p, options, rank);
    tasks = made.data().forward.attend_items.size() + made.data().backward.attend_items.size();
    stages = made.data().forward.stages.size() + made.data().backward.stages.size();
  }
  state.counters["tasks"] = static_cast<double>(tasks);
  state.counters["stages"] = static_cast<double>(stages);
}

constexpr std::int64_t kMillion = 1'048'576;
constexpr const char* kLongNet = "dilated:geometric(2048,4,5)";
constexpr const char* kCausalLongNet = "dilated:geometric(2048,4,5) & causal";

void LongNet(benchmark::State& state, Strategy strategy) { plan(state, problem(kMillion, 64, kLongNet), strategy); }
void CausalLongNet(benchmark::State& state, Strategy strategy) { plan(state, problem(kMillion, 64, kCausalLongNet), strategy); }
void Zigzag(benchmark::State& state, Strategy strategy) { plan(state, problem(kMillion, 64, "causal", "zigzag"), strategy); }
void SmallBlocks(benchmark::State& state, Strategy strategy) {
  plan(state, problem(kMillion, 64, "window:1023,0", "block_striped:64"), strategy);
}
void Thousand(benchmark::State& state, Strategy strategy) { plan(state, problem(1'000'000'000, 1024, kLongNet), strategy); }

BENCHMARK_CAPTURE(LongNet, exchange, Strategy::exchange)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(LongNet, all_gather, Strategy::all_gather)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(LongNet, ring, Strategy::ring)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(LongNet, pass_q, Strategy::pass_q)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(CausalLongNet, exchange, Strategy::exchange)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(CausalLongNet, all_gather, Strategy::all_gather)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(LongNet, automatic, Strategy::automatic)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Zigzag, exchange, Strategy::exchange)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Zigzag, ring, Strategy::ring)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(SmallBlocks, exchange, Strategy::exchange)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(SmallBlocks, automatic, Strategy::automatic)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Thousand, exchange, Strategy::exchange)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Thousand, ring, Strategy::ring)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Thousand, automatic, Strategy::automatic)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ringspan
