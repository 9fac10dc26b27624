// The C API end to end: plan, attention over threads, the same bits as the C++ API.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "api_c/structs.h"
#include "ringspan/ringspan.h"
#include "ringspan/ringspan_c.h"

extern "C" const char* version_seen_by_c(void);

namespace ringspan {
namespace {

constexpr int kTokens = 37;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 8;

ringspan_problem make_problem(int ranks) {
  auto problem = make_struct<ringspan_problem>();
  problem.tokens_q = problem.tokens_k = kTokens;
  problem.heads = kHeads;
  problem.kv_heads = kKvHeads;
  problem.head_dim = kDim;
  problem.ranks = ranks;
  problem.pattern = "causal & window:9,-1";
  problem.sharding_q = problem.sharding_k = "zigzag";
  return problem;
}

std::vector<float> random_rows(std::size_t rows, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(rows * kDim);
  for (float& value : values) value = normal(random);
  return values;
}

// One rank's tensors, seeded by the rank.
struct Tensors {
  Tensors(std::int64_t rows_of_rank, int rank) : rows(rows_of_rank) {
    const auto seed = static_cast<unsigned>(rank);
    const auto n = static_cast<std::size_t>(rows);
    q = random_rows(n * kHeads, 10 + seed);
    k = random_rows(n * kKvHeads, 20 + seed);
    v = random_rows(n * kKvHeads, 30 + seed);
    d_out = random_rows(n * kHeads, 40 + seed);
    for (auto* output : {&o, &dq}) output->assign(q.size(), -1);
    for (auto* output : {&dk, &dv}) output->assign(k.size(), -1);
    lse.assign(n * kHeads, -1);
  }
  std::int64_t rows;
  std::vector<float> q, k, v, d_out, o, lse, dq, dk, dv;
  bool operator==(const Tensors&) const = default;
};

ringspan_tensor rows_of(std::vector<float>& data, int heads) { return {data.data(), 0, std::int64_t{heads} * kDim, kDim}; }

// Threads of the program's; counts their calls in the context, an int.
void run_on_threads(void* context, void (*run)(void*), void* argument, int32_t threads) {
  ++*static_cast<int*>(context);
  std::vector<std::thread> others;
  for (int32_t thread = 1; thread < threads; ++thread) others.emplace_back(run, argument);
  run(argument);
  for (std::thread& other : others) other.join();
}

void run_c(ringspan_comm* comm, Tensors& t, bool with_plan) {
  int32_t rank = -1;
  int32_t size = -1;
  ASSERT_EQ(ringspan_comm_rank(comm, &rank), RINGSPAN_OK);
  ASSERT_EQ(ringspan_comm_size(comm, &size), RINGSPAN_OK);
  const ringspan_problem problem = make_problem(size);
  auto options = make_struct<ringspan_options>();
  options.strategy = "ring";
  options.threads = 2;
  int calls_on_threads = 0;
  ringspan_attention* attention = nullptr;
  std::vector<std::byte> memory;
  if (with_plan) {
    ringspan_plan* plan = nullptr;
    ASSERT_EQ(ringspan_plan_create(&problem, &options, rank, &plan), RINGSPAN_OK) << ringspan_last_error();
    int64_t bytes = 0;
    ASSERT_EQ(ringspan_plan_arena_bytes(plan, rank, &bytes), RINGSPAN_OK);
    memory.resize(static_cast<std::size_t>(bytes) + 64);
    std::byte* arena = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    ASSERT_EQ(ringspan_attention_create_with_plan(plan, comm, nullptr, arena, static_cast<std::uint64_t>(bytes), &attention),
              RINGSPAN_OK)
        << ringspan_last_error();
    ringspan_plan_destroy(plan);
  } else {
    ringspan_execute_options execute = {sizeof execute, 60.0, 1, 0, nullptr, nullptr, run_on_threads, &calls_on_threads};
    ASSERT_EQ(ringspan_attention_create(&problem, &options, comm, &execute, &attention), RINGSPAN_OK) << ringspan_last_error();
  }
  auto forward = make_struct<ringspan_forward_tensors>();
  forward.q = rows_of(t.q, kHeads);
  forward.k = rows_of(t.k, kKvHeads);
  forward.v = rows_of(t.v, kKvHeads);
  forward.o = rows_of(t.o, kHeads);
  forward.lse = {t.lse.data(), 0, 1, t.rows};
  ASSERT_EQ(ringspan_attention_forward(attention, &forward), RINGSPAN_OK) << ringspan_last_error();
  EXPECT_EQ(calls_on_threads > 0, !with_plan);
  const int calls_of_forward = calls_on_threads;
  ringspan_backward_tensors backward = backward_after(forward);
  backward.d_out = rows_of(t.d_out, kHeads);
  backward.dq = rows_of(t.dq, kHeads);
  backward.dk = rows_of(t.dk, kKvHeads);
  backward.dv = rows_of(t.dv, kKvHeads);
  ASSERT_EQ(ringspan_attention_backward(attention, &backward), RINGSPAN_OK) << ringspan_last_error();
  EXPECT_EQ(calls_on_threads > calls_of_forward, !with_plan);

  ringspan_pass_stats stats = {sizeof stats, 0, 0, -1, -1};
  ASSERT_EQ(ringspan_attention_stats(attention, RINGSPAN_BACKWARD, &stats), RINGSPAN_OK);
  ringspan_plan* plan = nullptr;
  ASSERT_EQ(ringspan_attention_plan(attention, &plan), RINGSPAN_OK);
  std::vector<ringspan_peer_traffic> traffic(static_cast<std::size_t>(size));
  ASSERT_EQ(ringspan_plan_traffic(plan, RINGSPAN_BACKWARD, traffic.data(), traffic.size()), RINGSPAN_OK);
  int64_t sent = 0;
  for (const ringspan_peer_traffic& peer : traffic) sent += peer.sent_bytes;
  EXPECT_EQ(stats.sent_bytes, sent);
  EXPECT_GT(stats.seconds, 0);
  const char* text = nullptr;
  ASSERT_EQ(ringspan_plan_text(plan, &text), RINGSPAN_OK);
  EXPECT_GT(std::strlen(text), 20U);
  ASSERT_EQ(ringspan_plan_json(plan, &text), RINGSPAN_OK);
  EXPECT_EQ(text[0], '{');
  uint64_t fingerprint = 0;
  ASSERT_EQ(ringspan_plan_fingerprint(plan, &fingerprint), RINGSPAN_OK);
  EXPECT_NE(fingerprint, 0U);
  ringspan_plan_destroy(plan);
  ASSERT_EQ(ringspan_attention_trace(attention, &text), RINGSPAN_OK);
  EXPECT_EQ(std::strstr(text, "handshake") != nullptr, size > 1 && !with_plan) << text;
  ringspan_attention_destroy(attention);
}

void run_cpp(Communicator& communicator, Tensors& t) {
  Problem problem;
  problem.tokens_q = problem.tokens_k = kTokens;
  problem.heads = kHeads;
  problem.kv_heads = kKvHeads;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.ranks = communicator.size();
  problem.pattern = Pattern::parse("causal & window:9,-1");
  problem.sharding_q = problem.sharding_k = Sharding::parse("zigzag");
  PlanOptions options;
  options.strategy = Strategy::ring;
  Attention attention(problem, options, communicator);
  const auto rows = [&](std::vector<float>& data, int heads) { return dense_bshd(data.data(), t.rows, heads, kDim); };
  const Tensor o = rows(t.o, kHeads);
  const Tensor lse = dense_bhsd(t.lse.data(), t.rows, kHeads, 1);
  attention.forward({.q = rows(t.q, kHeads), .k = rows(t.k, kKvHeads), .v = rows(t.v, kKvHeads), .o = o, .lse = lse});
  attention.backward({.q = rows(t.q, kHeads),
                      .k = rows(t.k, kKvHeads),
                      .v = rows(t.v, kKvHeads),
                      .o = o,
                      .lse = lse,
                      .d_out = rows(t.d_out, kHeads),
                      .dlse = {},
                      .dq = rows(t.dq, kHeads),
                      .dk = rows(t.dk, kKvHeads),
                      .dv = rows(t.dv, kKvHeads)});
}

class CApi : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CApi, ::testing::Values(1, 3));

TEST_P(CApi, GivesTheBitsOfTheCppApi) {
  const int ranks = GetParam();
  const ringspan_problem problem = make_problem(ranks);
  std::vector<Tensors> expected;
  for (int rank = 0; rank < ranks; ++rank) {
    uint64_t rows = 0;
    ASSERT_EQ(ringspan_shard_positions(&problem, RINGSPAN_KEYS, rank, nullptr, 0, &rows), RINGSPAN_OK);
    expected.emplace_back(static_cast<std::int64_t>(rows), rank);
  }
  std::vector<Tensors> by_plan = expected;
  std::vector<Tensors> by_problem = expected;
  run_thread_ranks(ranks, [&](Communicator& communicator) {
    run_cpp(communicator, expected[static_cast<std::size_t>(communicator.rank())]);
  });
  std::vector<ringspan_comm*> comms(static_cast<std::size_t>(ranks));
  ASSERT_EQ(ringspan_comm_create_threads(ranks, comms.data()), RINGSPAN_OK);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < comms.size(); ++rank) {
    threads.emplace_back([&, rank] {
      run_c(comms[rank], by_plan[rank], true);
      run_c(comms[rank], by_problem[rank], false);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ringspan_comm* comm : comms) ringspan_comm_destroy(comm);
  EXPECT_TRUE(by_plan == expected);
  EXPECT_TRUE(by_problem == expected);
  EXPECT_NE(expected[0].dk[0], -1.0F);
}

TEST(CApi, TellsShardsMemoryAndVersion) {
  EXPECT_EQ(std::string(version_seen_by_c()), "0.1.0");
  const ringspan_problem problem = make_problem(3);
  std::vector<int64_t> positions(100);
  uint64_t rows = 0;
  ASSERT_EQ(ringspan_shard_positions(&problem, RINGSPAN_QUERIES, 1, positions.data(), positions.size(), &rows), RINGSPAN_OK);
  positions.resize(rows);
  EXPECT_EQ(positions, make_shard(Sharding::parse("zigzag"), kTokens, 3, 1).positions());
  ringspan_plan* plan = nullptr;
  ASSERT_EQ(ringspan_plan_create(&problem, nullptr, 1, &plan), RINGSPAN_OK) << ringspan_last_error();
  uint64_t count = 0;
  ASSERT_EQ(ringspan_plan_memory(plan, RINGSPAN_FORWARD, nullptr, 0, &count), RINGSPAN_OK);
  std::vector<ringspan_memory_line> lines(count);
  ASSERT_EQ(ringspan_plan_memory(plan, RINGSPAN_FORWARD, lines.data(), count, &count), RINGSPAN_OK);
  EXPECT_EQ(std::string(lines[0].component), "q");
  EXPECT_EQ(lines[0].bytes, static_cast<int64_t>(rows) * kHeads * kDim * 4);
  EXPECT_EQ(lines[0].in_arena, 0);
  int64_t arena = 0;
  int64_t in_arena = 0;
  ASSERT_EQ(ringspan_plan_arena_bytes(plan, 1, &arena), RINGSPAN_OK);
  for (const ringspan_memory_line& line : lines) in_arena += line.in_arena != 0 ? line.bytes : 0;
  EXPECT_GT(in_arena, 0);
  EXPECT_EQ(in_arena, arena);
  ringspan_plan_destroy(plan);
}

}  // namespace
}  // namespace ringspan
