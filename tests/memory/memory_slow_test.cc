// The benefit in memory as it is measured, on a real length: 65,536 tokens of a dilated pattern on 1, 2, 4 and 8 ranks.
#include <gtest/gtest.h>

#include <utility>

#include "memory/measure.h"

namespace ringspan::testing {
namespace {

// The larger of both passes: the caller's tensors and what was touched of the arena.
std::int64_t measured_bytes(const RankTensors& tensors, const RankMeasure& rank) {
  std::int64_t bytes[] = {tensors.forward_bytes(), tensors.bytes()};
  for (int pass = 0; pass < 2; ++pass) {
    for (const auto& [component, high] : rank.passes[pass].components) bytes[pass] += high;
  }
  return std::max(bytes[0], bytes[1]);
}

// Tensors and arena of the most loaded rank, as measured.
std::vector<std::int64_t> measure_worlds(Case test) {
  std::vector<std::int64_t> bytes;
  const Whole whole(test);
  for (const int ranks : {1, 2, 4, 8}) {
    test.problem.ranks = ranks;
    const std::vector<RankMeasure> measured = measure(test, whole);
    bytes.push_back(0);
    for (int rank = 0; rank < ranks; ++rank) {
      const RankTensors tensors(test, whole, rank);
      const std::int64_t own = measured_bytes(tensors, measured[static_cast<std::size_t>(rank)]);
      const Plan plan = make_plan(test.problem, test.options, rank);
      EXPECT_LE(own, std::max(plan.memory_bytes(Pass::forward), plan.memory_bytes(Pass::backward)));
      bytes.back() = std::max(bytes.back(), own);
    }
  }
  return bytes;
}

TEST(MemorySlow, MeasuredPerRankFallsWithTheRanks) {
  for (const auto& [strategy, dtype] :
       {std::pair{Strategy::ring, DType::float32}, std::pair{Strategy::exchange, DType::bfloat16}}) {
    Case test;
    test.problem.tokens_q = test.problem.tokens_k = 65536;
    test.problem.heads = test.problem.kv_heads = 8;
    test.problem.head_dim = test.problem.head_dim_v = 64;
    test.problem.dtype = dtype;
    test.problem.pattern = Pattern::parse("dilated:64x4,16384x2048");
    test.options.strategy = strategy;
    const std::vector<std::int64_t> bytes = measure_worlds(test);
    SCOPED_TRACE(to_string(test) + ": " + ::testing::PrintToString(bytes));
    const auto ratio = [&](std::size_t i, std::size_t j) {
      return static_cast<double>(bytes[i]) / static_cast<double>(bytes[j]);
    };
    if (dtype == DType::float32) {
      EXPECT_LE(ratio(1, 0), 0.54);
    } else {
      EXPECT_LE(ratio(3, 0), 0.22);
    }
    EXPECT_LE(ratio(2, 1), 0.54);
    EXPECT_LE(ratio(3, 2), 0.54);
  }
}

}  // namespace
}  // namespace ringspan::testing
