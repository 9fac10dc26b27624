// Memory per rank falls with the number of ranks, from the plans alone: the caller's tensors and the arena.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "plan/device_memory.h"
#include "plan/plan_data.h"
#include "ringspan/error.h"
#include "ringspan/plan.h"

namespace ringspan {
namespace {

std::int64_t bytes_of(const Plan& plan, Pass pass) {
  std::int64_t bytes = plan.arena_bytes();
  for (const MemoryLine& line : plan.memory(pass)) bytes += line.in_arena ? 0 : line.bytes;
  return bytes;
}

std::int64_t largest_rank(const Problem& p, const PlanOptions& options) {
  std::int64_t bytes = 0;
  for (int rank = 0; rank < p.ranks; ++rank) {
    bytes = std::max(bytes, bytes_of(make_plan(p, options, rank), options.backward ? Pass::backward : Pass::forward));
  }
  return bytes;
}

TEST(Memory, HalvesWithTwiceTheRanks) {
  std::printf("bytes on the largest rank, 65,536 tokens, 8 heads of 64\n%-36s %-10s %-9s %-9s %12s %6s %6s %6s\n", "pattern",
              "strategy", "dtype", "passes", "p = 1", "1->2", "2->4", "4->8");
  for (const char* pattern : {"full", "causal", "dilated:2048x1,4096x2,8192x4"}) {
    for (const Strategy strategy : {Strategy::ring, Strategy::exchange}) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
        for (const bool backward : {false, true}) {
          Problem p;
          p.tokens_q = p.tokens_k = 65'536;
          p.heads = p.kv_heads = 8;
          p.dtype = dtype;
          p.pattern = Pattern::parse(pattern);
          PlanOptions options;
          options.strategy = strategy;
          options.backward = backward;
          double bytes[4];
          for (int i = 0; i < 4; ++i) {
            p.ranks = 1 << i;
            bytes[i] = static_cast<double>(largest_rank(p, options));
          }
          std::printf("%-36s %-10s %-9s %-9s %12.0f %6.3f %6.3f %6.3f\n", pattern, to_string(strategy).data(),
                      to_string(dtype).data(), backward ? "both" : "forward", bytes[0], bytes[1] / bytes[0],
                      bytes[2] / bytes[1], bytes[3] / bytes[2]);
          // In 16 bits one rank needs no float32 copies that several ranks do.
          for (int i = dtype == DType::float32 ? 1 : 2; i < 4; ++i) EXPECT_LE(bytes[i], 0.54 * bytes[i - 1]) << pattern;
          if (dtype != DType::float32) {
            EXPECT_LE(bytes[3], 0.22 * bytes[0]) << pattern;
          }
        }
      }
    }
  }
}

// Made for the CPU, its task lists come on top on a device, where it has no scratch. Nothing is known then of other ranks'
// arenas.
TEST(Memory, OfAPlanThatADeviceTakes) {
  Problem p;
  p.tokens_q = p.tokens_k = 65'536;
  p.heads = p.kv_heads = 1;
  p.head_dim = p.head_dim_v = 16;
  p.ranks = 2;
  p.pattern = Pattern::parse("dilated:16x1");
  PlanOptions options;
  const Plan plan = make_plan(p, options, 0);
  options.memory_budget = std::max(bytes_of(plan, Pass::forward), bytes_of(plan, Pass::backward));
  const Plan fits = make_plan(p, options, 0);
  const Plan taken(std::make_shared<const internal::PlanData>(internal::plan_for_device(plan.data(), false)));
  const std::int64_t needed = std::max(taken.memory_bytes(Pass::forward), taken.memory_bytes(Pass::backward));
  ASSERT_GT(needed, options.memory_budget);
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "taken";
  };
  EXPECT_EQ(message([&] { internal::plan_for_device(fits.data(), false); }),
            "the plan was made for the CPU; on a device it needs " + std::to_string(needed) + " bytes, memory_budget is " +
                std::to_string(options.memory_budget));
  EXPECT_EQ(message([&] { EXPECT_GT(plan.arena_bytes(1), 0); }), "taken");
  EXPECT_NE(message([&] { taken.arena_bytes(1); }).find("laid out for the device of rank 0"), std::string::npos);
}

// The components of a pass sum up to what it needs, those of the arena to the whole arena, and what is needed fits itself.
TEST(Memory, ComponentsSumUp) {
  Problem p;
  p.tokens_q = p.tokens_k = 10'007;
  p.heads = 8;
  p.kv_heads = 2;
  p.ranks = 4;
  p.dtype = DType::bfloat16;
  p.pattern = Pattern::parse("causal");
  for (const Strategy strategy : {Strategy::ring, Strategy::pass_q, Strategy::ulysses, Strategy::local}) {
    PlanOptions options;
    options.strategy = strategy;
    const Plan plan = make_plan(p, options, 3);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      std::int64_t ours = 0, all = 0;
      for (const MemoryLine& line : plan.memory(pass)) {
        EXPECT_GE(line.bytes, 0);
        all += line.bytes;
        if (line.in_arena) ours += line.bytes;
      }
      EXPECT_EQ(all, plan.memory_bytes(pass));
      EXPECT_EQ(ours, plan.arena_bytes());
    }
    for (const bool backward : {false, true}) {
      PlanOptions budget = options;
      budget.backward = backward;
      budget.bucket_rows = strategy == Strategy::ring || strategy == Strategy::pass_q ? 100 : PlanOptions::kBucketAuto;
      const Pass pass = backward ? Pass::backward : Pass::forward;
      const auto most = [&] {
        std::int64_t bytes = 0;
        for (int rank = 0; rank < 4; ++rank) bytes = std::max(bytes, make_plan(p, budget, rank).memory_bytes(pass));
        return bytes;
      };
      budget.memory_budget = most();
      EXPECT_EQ(most(), budget.memory_budget) << to_string(strategy);
      --budget.memory_budget;
      EXPECT_THROW(make_plan(p, budget, 0), OutOfBudget) << to_string(strategy);
    }
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(plan.arena_bytes(rank), make_plan(p, options, rank).arena_bytes());
  }
}

// The largest problems there are: sums of their bytes stay in 64 bits.
TEST(Memory, OfTheLargestProblems) {
  Problem p;
  p.tokens_q = p.tokens_k = std::int64_t{1} << 40;
  p.heads = p.kv_heads = 64;
  p.head_dim = p.head_dim_v = 256;
  for (const int ranks : {1, 1000}) {
    p.ranks = ranks;
    PlanOptions options;
    options.strategy = Strategy::local;
    const Plan plan = make_plan(p, options, 0);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const MemoryLine& line : plan.memory(pass)) EXPECT_GE(line.bytes, 0) << line.component;
      EXPECT_GT(plan.memory_bytes(pass), std::int64_t{1} << 56);
    }
  }
}

}  // namespace
}  // namespace ringspan
