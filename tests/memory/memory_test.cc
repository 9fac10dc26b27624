// Forecast = measured, to the byte: arena by component, the caller's tensors, payload per peer.
#include <gtest/gtest.h>

#include "memory/measure.h"

namespace ringspan::testing {
namespace {

constexpr std::int64_t kTokens = 600;  // of a rank: more than a tile of any kernel

Case make_case(Strategy strategy, const char* pattern = "full", int ranks = 3) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = kTokens * ranks;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 24;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  test.options.strategy = strategy;
  return test;
}

// But what nobody touches: the space between its parts, and what is there for the other pass.
std::map<std::string, std::int64_t> forecast_arena(const Plan& plan, Pass pass) {
  std::map<std::string, std::int64_t> components;
  for (const MemoryLine& line : plan.memory(pass)) {
    const bool touched = line.component != "alignment" && line.component != "other pass";
    if (line.in_arena && line.bytes > 0 && touched) components[line.component] = line.bytes;
  }
  return components;
}

// Scratch is booked for whole tiles of a kernel, and states for all rows: only patterns with enough keys per task fill them.
enum class Tiles : std::uint8_t { whole, partial };

void expect_forecast(const Case& test, Tiles tiles) {
  SCOPED_TRACE(to_string(test));
  const std::vector<RankMeasure> ranks = measure(test, Whole(test));
  for (int rank = 0; rank < test.problem.ranks; ++rank) {
    const Plan plan = make_plan(test.problem, test.options, rank);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (pass == Pass::backward && !test.options.backward) continue;
      SCOPED_TRACE("rank " + std::to_string(rank) + (pass == Pass::forward ? " forward" : " backward"));
      PassMeasure measured = ranks[static_cast<std::size_t>(rank)].passes[static_cast<int>(pass)];
      std::erase_if(measured.components, [](const auto& component) { return component.second == 0; });
      std::map<std::string, std::int64_t> booked = forecast_arena(plan, pass);
      if (tiles == Tiles::partial) {
        for (const char* component : {"scratch", "state"}) {
          EXPECT_LE(measured.components[component], booked[component]) << component;
          measured.components.erase(component);
          booked.erase(component);
        }
      }
      EXPECT_EQ(measured.components, booked);
      EXPECT_EQ(measured.outside, std::vector<std::int64_t>{});
      const std::vector<PeerBytes> handshake = handshake_traffic(test.problem.ranks, rank);
      const std::vector<PeerBytes> forecast = plan.traffic(pass);
      for (std::size_t peer = 0; peer < forecast.size(); ++peer) {
        EXPECT_EQ(measured.traffic[peer].sent_bytes - handshake[peer].sent_bytes, forecast[peer].sent_bytes) << "to " << peer;
        EXPECT_EQ(measured.traffic[peer].received_bytes - handshake[peer].received_bytes, forecast[peer].received_bytes);
        EXPECT_EQ(measured.traffic[peer].sent_messages - handshake[peer].sent_messages, forecast[peer].sent_messages);
        EXPECT_EQ(measured.traffic[peer].received_messages - handshake[peer].received_messages,
                  forecast[peer].received_messages);
      }
    }
  }
}

class Memory : public ::testing::TestWithParam<Strategy> {};
INSTANTIATE_TEST_SUITE_P(Strategies, Memory,
                         ::testing::Values(Strategy::local, Strategy::all_gather, Strategy::exchange, Strategy::ring,
                                           Strategy::pass_q, Strategy::ulysses),
                         [](const auto& instance) {
                           std::string name(to_string(instance.param));
                           std::erase_if(name, [](char c) { return c == '-'; });
                           return name;
                         });

TEST_P(Memory, IsTheForecastByComponentToTheByte) {
  expect_forecast(make_case(GetParam(), "full"), Tiles::whole);
  expect_forecast(make_case(GetParam(), "causal"), Tiles::partial);
  expect_forecast(make_case(GetParam(), "dilated:64x1,128x2"), Tiles::partial);
}

TEST_P(Memory, IsTheForecastIn16Bits) {
  for (const bool keep : {true, false}) {
    Case test = make_case(GetParam(), "full", 2);
    test.problem.dtype = DType::bfloat16;
    test.options.keep_o_float32 = keep;
    expect_forecast(test, Tiles::whole);
  }
}

TEST_P(Memory, IsTheForecastWithSinksAndReplicatedQueries) {
  Case test = make_case(GetParam());
  test.problem.sinks = true;
  test.problem.replicated_q = true;
  expect_forecast(test, Tiles::whole);
}

// dlse is read where it is, by the owner of its rows: nothing of it is kept, and none of it travels.
TEST_P(Memory, IsTheForecastWithAGradientOfLse) {
  for (const bool sinks : {false, true}) {
    Case test = make_case(GetParam());
    test.dlse = true;
    test.problem.sinks = sinks;
    expect_forecast(test, Tiles::whole);
    test.problem.replicated_q = true;
    expect_forecast(test, Tiles::whole);
  }
}

TEST_P(Memory, IsTheForecastOfOneRank) { expect_forecast(make_case(GetParam(), "full", 1), Tiles::whole); }

TEST_P(Memory, IsTheForecastOfTheTorchscaleDialect) {
  expect_forecast(make_case(GetParam(), "dilated:64x1,128x2@torchscale"), Tiles::partial);
}

TEST(Memory, OfBucketsIsTheForecast) {
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::pass_q}) {
    Case test = make_case(strategy);
    test.options.bucket_rows = 32;
    expect_forecast(test, Tiles::partial);
  }
}

// The caller's tensors, from their shapes.
TEST(Memory, OfTheCallersTensorsIsTheirSize) {
  Case test = make_case(Strategy::ring);
  test.problem.dtype = DType::float16;
  test.problem.batch = 2;
  test.problem.tokens_q = 100;
  const std::int64_t rows_q = 2 * 34 * 4;  // rank 0 of 3
  const std::int64_t rows_k = 2 * kTokens * 2;
  const std::map<std::string, std::int64_t> forward{
      {"q", rows_q * 16 * 2}, {"k", rows_k * 16 * 2}, {"v", rows_k * 24 * 2}, {"o", rows_q * 24 * 2}, {"lse", rows_q * 4}};
  std::map<std::string, std::int64_t> backward = forward;
  backward.insert({{"do", rows_q * 24 * 2}, {"dq", rows_q * 16 * 2}, {"dk", rows_k * 16 * 2}, {"dv", rows_k * 24 * 2}});
  const Plan plan = make_plan(test.problem, test.options, 0);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::map<std::string, std::int64_t> lines;
    for (const MemoryLine& line : plan.memory(pass)) {
      if (!line.in_arena) lines[line.component] = line.bytes;
    }
    EXPECT_EQ(lines, pass == Pass::forward ? forward : backward);
  }
}

// The arena is no larger than its regions, each rounded up to 64 bytes.
TEST(Memory, OfTheArenaIsThatOfItsRegions) {
  const Plan plan = make_plan(make_case(Strategy::ring).problem, make_case(Strategy::ring).options, 1);
  for (const internal::Program* program : {&plan.data().forward, &plan.data().backward}) {
    std::int64_t bytes = 0;
    for (const internal::Region& region : program->regions) bytes += (region.bytes + 63) / 64 * 64;
    EXPECT_LE(program->arena_bytes, bytes);
  }
}

// n = 65,536, 8 heads of 64, ring and exchange in buckets: tensors and arena of the most loaded rank, from the plan.
TEST(Memory, PerRankFallsWithTheRanks) {
  for (const Strategy strategy : {Strategy::ring, Strategy::exchange}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      for (const char* pattern : {"full", "causal"}) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          Case test = make_case(strategy, pattern);
          test.problem.tokens_q = test.problem.tokens_k = 65536;
          test.problem.heads = test.problem.kv_heads = 8;
          test.problem.head_dim = test.problem.head_dim_v = 64;
          test.problem.dtype = dtype;
          test.options.backward = pass == Pass::backward;
          std::vector<std::int64_t> bytes;
          for (const int ranks : {1, 2, 4, 8}) {
            test.problem.ranks = ranks;
            std::int64_t most = 0;
            for (int rank = 0; rank < ranks; ++rank) {
              const Plan plan = make_plan(test.problem, test.options, rank);
              std::int64_t peak = plan.memory_bytes(Pass::forward);
              if (test.options.backward) peak = std::max(peak, plan.memory_bytes(Pass::backward));
              most = std::max(most, peak);
            }
            bytes.push_back(most);
          }
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
    }
  }
}

}  // namespace
}  // namespace ringspan::testing
