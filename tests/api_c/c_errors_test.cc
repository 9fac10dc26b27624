// Every way to misuse the C API has a status and a text; nothing is thrown or crashes.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "api_c/structs.h"
#include "ringspan/ringspan_c.h"

namespace {

ringspan_problem make_problem(int ranks = 1) {
  ringspan_problem problem;
  std::memset(&problem, 0, sizeof problem);
  problem.struct_size = sizeof problem;
  problem.tokens_q = problem.tokens_k = 8;
  problem.heads = 2;
  problem.head_dim = 4;
  problem.ranks = ranks;
  return problem;
}

void expect_error(std::int32_t status, std::int32_t expected, const std::string& text) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(ringspan_last_error()).find(text), std::string::npos) << ringspan_last_error();
}

TEST(CErrors, OfProblems) {
  ringspan_plan* plan = nullptr;
  const auto refused = [&](const ringspan_problem& problem, std::int32_t status, const std::string& text) {
    expect_error(ringspan_plan_create(&problem, nullptr, 0, &plan), status, text);
    EXPECT_EQ(plan, nullptr);
  };
  ringspan_problem problem = make_problem();
  expect_error(ringspan_plan_create(nullptr, nullptr, 0, &plan), RINGSPAN_INVALID_ARGUMENT, "problem is null");
  expect_error(ringspan_plan_create(&problem, nullptr, 0, nullptr), RINGSPAN_INVALID_ARGUMENT, "plan is null");
  expect_error(ringspan_plan_create(&problem, nullptr, 1, &plan), RINGSPAN_INVALID_ARGUMENT, "rank (1) must be in [0, 1)");
  problem.struct_size = 0;
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "problem.struct_size (0) must be the size of the struct");
  problem = make_problem();
  problem.pattern = "casual";
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "casual");
  problem = make_problem();
  problem.sharding_k = "diagonal";
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "diagonal");
  problem = make_problem();
  problem.dtype = 3;
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "dtype (3) must be RINGSPAN_FLOAT32");
  problem = make_problem();
  problem.cu_seqlens_q_count = 3;
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "cu_seqlens_q is null, but 3 entries are announced");
  problem = make_problem();
  problem.kv_heads = 3;
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "kv_heads");
  // Counts that were never set: nothing is read by them.
  const int32_t offsets[] = {0, 8};
  problem = make_problem();
  problem.pattern = "documents";
  problem.cu_seqlens_q = offsets;
  problem.cu_seqlens_q_count = UINT64_MAX;
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "cu_seqlens_q has 18446744073709551615 entries, but at most");
  const int64_t lengths[] = {8};
  problem = make_problem();
  problem.starts_k = lengths;
  problem.lengths_k = lengths;
  refused(problem, RINGSPAN_INVALID_ARGUMENT, "starts_k[0] (8) must be in [0, 0], the tokens_k less lengths_k[0]");
  problem = make_problem();
  problem.lengths_q = lengths;
  for (const std::int64_t batch : {std::int64_t{-1}, std::int64_t{1} << 58, INT64_MAX}) {
    problem.batch = batch;
    refused(problem, RINGSPAN_INVALID_ARGUMENT, "batch (" + std::to_string(batch) + ") must be in [1, ");
  }
}

// What this version does not know must be zero, whether it lies behind the struct or is reserved in it.
TEST(CErrors, OfStructsOfOtherVersions) {
  struct Newer {
    ringspan_problem known;
    uint64_t unknown[2];
  } newer = {make_problem(), {0, 0}};
  newer.known.struct_size = sizeof newer;
  ringspan_plan* plan = nullptr;
  EXPECT_EQ(ringspan_plan_create(&newer.known, nullptr, 0, &plan), RINGSPAN_OK) << ringspan_last_error();
  ringspan_plan_destroy(plan);
  newer.unknown[1] = 42;
  expect_error(ringspan_plan_create(&newer.known, nullptr, 0, &plan), RINGSPAN_UNSUPPORTED,
               "problem has something set at byte " + std::to_string(sizeof newer.known + 8));
  ringspan_problem problem = make_problem();
  for (const std::uint64_t size : {7, 9, 12, 100'000}) {
    problem.struct_size = size;
    expect_error(ringspan_plan_create(&problem, nullptr, 0, &plan), RINGSPAN_INVALID_ARGUMENT,
                 "problem.struct_size (" + std::to_string(size) + ") must be the size of the struct");
  }
  problem = make_problem();
  auto options = ringspan::make_struct<ringspan_options>();
  options.reserved = 1;
  expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_INVALID_ARGUMENT, "options.reserved (1) must be 0");
  EXPECT_EQ(plan, nullptr);
}

// Else a number that was never set, or that a later version gives a meaning, would pass for a yes.
TEST(CErrors, OfFlags) {
  ringspan_plan* plan = nullptr;
  using Problem = ringspan_problem;
  for (const auto& [name, member] :
       {std::pair{"replicated_q", &Problem::replicated_q}, {"alibi", &Problem::alibi}, {"sinks", &Problem::sinks}}) {
    ringspan_problem problem = make_problem();
    problem.*member = 5;
    expect_error(ringspan_plan_create(&problem, nullptr, 0, &plan), RINGSPAN_INVALID_ARGUMENT,
                 std::string(name) + " (5) must be 0 or 1");
  }
  using Options = ringspan_options;
  const ringspan_problem problem = make_problem();
  for (const auto& [name, member] : {std::pair{"forward_only", &Options::forward_only},
                                     {"round_o", &Options::round_o},
                                     {"host_tensors", &Options::host_tensors}}) {
    auto options = ringspan::make_struct<ringspan_options>();
    options.*member = -1;
    expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_INVALID_ARGUMENT,
                 std::string(name) + " (-1) must be 0 or 1");
  }
  EXPECT_EQ(plan, nullptr);
}

TEST(CErrors, OfOptions) {
  const ringspan_problem problem = make_problem();
  ringspan_options options;
  std::memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  ringspan_plan* plan = nullptr;
  options.strategy = "teleport";
  expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_INVALID_ARGUMENT, "teleport");
  options.strategy = nullptr;
  options.memory_budget = 1;
  expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_OUT_OF_BUDGET, "memory_budget (1 bytes)");
  options.memory_budget = 0;
  options.threads = -1;
  expect_error(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_INVALID_ARGUMENT, "threads (-1)");
}

TEST(CErrors, OfHandlesAndOutputs) {
  int32_t number = 0;
  int64_t bytes = 0;
  const char* text = nullptr;
  const ringspan_problem problem = make_problem();
  uint64_t rows = 0;
  expect_error(ringspan_comm_rank(nullptr, &number), RINGSPAN_INVALID_ARGUMENT, "comm is null");
  expect_error(ringspan_plan_arena_bytes(nullptr, 0, &bytes), RINGSPAN_INVALID_ARGUMENT, "plan is null");
  expect_error(ringspan_plan_text(nullptr, &text), RINGSPAN_INVALID_ARGUMENT, "plan is null");
  expect_error(ringspan_attention_forward(nullptr, nullptr), RINGSPAN_INVALID_ARGUMENT, "attention is null");
  expect_error(ringspan_comm_create(nullptr, nullptr), RINGSPAN_INVALID_ARGUMENT, "comm is null");
  ringspan_comm* comm = nullptr;
  expect_error(ringspan_comm_create(nullptr, &comm), RINGSPAN_INVALID_ARGUMENT, "callbacks is null");
  expect_error(ringspan_comm_create_threads(0, &comm), RINGSPAN_INVALID_ARGUMENT, "ranks (0)");
  expect_error(ringspan_shard_positions(&problem, 2, 0, nullptr, 0, &rows), RINGSPAN_INVALID_ARGUMENT, "side (2)");
  expect_error(ringspan_shard_positions(&problem, 0, 1, nullptr, 0, &rows), RINGSPAN_INVALID_ARGUMENT,
               "rank (1) must be in [0, 1)");
  ringspan_plan* plan = nullptr;  // of a call that fails nothing is written
  ASSERT_EQ(ringspan_plan_create(&problem, nullptr, 0, &plan), RINGSPAN_OK);
  bytes = -7;
  expect_error(ringspan_plan_host_bytes(plan, RINGSPAN_FORWARD, &bytes, nullptr), RINGSPAN_INVALID_ARGUMENT, "to_host is null");
  expect_error(ringspan_plan_host_nanoseconds(plan, RINGSPAN_FORWARD, &bytes, nullptr), RINGSPAN_INVALID_ARGUMENT,
               "exposed is null");
  EXPECT_EQ(bytes, -7);
  ringspan_plan_destroy(plan);
  ringspan_plan_destroy(nullptr);
  ringspan_comm_destroy(nullptr);
  ringspan_attention_destroy(nullptr);
}

TEST(CErrors, OfPlansWithoutBackward) {
  const ringspan_problem problem = make_problem();
  ringspan_options options;
  std::memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.forward_only = 1;
  ringspan_plan* plan = nullptr;
  ASSERT_EQ(ringspan_plan_create(&problem, &options, 0, &plan), RINGSPAN_OK) << ringspan_last_error();
  EXPECT_STREQ(ringspan_last_error(), "");
  uint64_t count = 0;
  expect_error(ringspan_plan_memory(plan, RINGSPAN_BACKWARD, nullptr, 0, &count), RINGSPAN_INVALID_ARGUMENT,
               "no backward pass");
  expect_error(ringspan_plan_memory(plan, 2, nullptr, 0, &count), RINGSPAN_INVALID_ARGUMENT, "pass (2)");
  ringspan_peer_traffic traffic;
  expect_error(ringspan_plan_traffic(plan, RINGSPAN_FORWARD, &traffic, 0), RINGSPAN_INVALID_ARGUMENT, "capacity (0)");
  ringspan_plan_destroy(plan);
}

TEST(CErrors, OfArenasAndStructsAtExecution) {
  const ringspan_problem problem = make_problem();
  ringspan_plan* plan = nullptr;
  ASSERT_EQ(ringspan_plan_create(&problem, nullptr, 0, &plan), RINGSPAN_OK);
  ringspan_comm* comm = nullptr;
  ASSERT_EQ(ringspan_comm_create_threads(1, &comm), RINGSPAN_OK);
  ringspan_attention* attention = nullptr;
  alignas(64) std::byte memory[64];
  expect_error(ringspan_attention_create_with_plan(plan, comm, nullptr, nullptr, 64, &attention), RINGSPAN_INVALID_ARGUMENT,
               "arena is null, but arena_bytes is 64");
  expect_error(ringspan_attention_create_with_plan(plan, comm, nullptr, memory, 0, &attention), RINGSPAN_INVALID_ARGUMENT,
               "arena_bytes is 0, but arena is given and the plan needs");
  expect_error(ringspan_attention_create_with_plan(plan, comm, nullptr, memory, 64, &attention), RINGSPAN_INVALID_ARGUMENT,
               "arena has 64 bytes, but the plan needs");
  ringspan_execute_options execute = {sizeof execute, -1.0, 0, 0, nullptr, nullptr, nullptr, nullptr};
  expect_error(ringspan_attention_create_with_plan(plan, comm, &execute, nullptr, 0, &attention), RINGSPAN_INVALID_ARGUMENT,
               "deadline (-1 s) must be positive");
  execute = {sizeof execute, 0, 2, 0, nullptr, nullptr, nullptr, nullptr};
  expect_error(ringspan_attention_create_with_plan(plan, comm, &execute, nullptr, 0, &attention), RINGSPAN_INVALID_ARGUMENT,
               "trace (2) must be 0 or 1");
  execute = {sizeof execute, 0, 0, 2, nullptr, nullptr, nullptr, nullptr};
  expect_error(ringspan_attention_create_with_plan(plan, comm, &execute, nullptr, 0, &attention), RINGSPAN_INVALID_ARGUMENT,
               "nondeterministic (2) must be 0 or 1");
  ASSERT_EQ(ringspan_attention_create_with_plan(plan, comm, nullptr, nullptr, 0, &attention), RINGSPAN_OK);
  ringspan_forward_tensors tensors;
  std::memset(&tensors, 0, sizeof tensors);
  expect_error(ringspan_attention_forward(attention, &tensors), RINGSPAN_INVALID_ARGUMENT, "tensors.struct_size (0)");
  tensors.struct_size = sizeof tensors;
  expect_error(ringspan_attention_forward(attention, &tensors), RINGSPAN_INVALID_ARGUMENT, "q.data is null");
  ringspan_pass_stats stats = {};
  const char* json = "";
  expect_error(ringspan_attention_set_deadline(attention, 0.0), RINGSPAN_INVALID_ARGUMENT, "deadline (0 s) must be positive");
  expect_error(ringspan_attention_set_deadline(nullptr, 1.0), RINGSPAN_INVALID_ARGUMENT, "attention is null");
  EXPECT_EQ(ringspan_attention_set_deadline(attention, 1.0), RINGSPAN_OK);
  expect_error(ringspan_attention_trace(nullptr, &json), RINGSPAN_INVALID_ARGUMENT, "attention is null");
  expect_error(ringspan_attention_stats(attention, RINGSPAN_FORWARD, &stats), RINGSPAN_INVALID_ARGUMENT,
               "stats.struct_size (0)");
  // An older header's struct, without its last members, is fine.
  stats.struct_size = 16;
  stats.received_bytes = -7;
  EXPECT_EQ(ringspan_attention_stats(attention, RINGSPAN_FORWARD, &stats), RINGSPAN_OK);
  EXPECT_EQ(stats.received_bytes, -7);
  // Of a newer one's the rest becomes zero.
  struct {
    ringspan_pass_stats known;
    uint64_t unknown;
  } newer = {{sizeof newer, 0, 0, 0, 0}, 7};
  EXPECT_EQ(ringspan_attention_stats(attention, RINGSPAN_FORWARD, &newer.known), RINGSPAN_OK);
  EXPECT_EQ(newer.known.struct_size, sizeof newer);
  EXPECT_EQ(newer.unknown, 0U);
  ringspan_attention_destroy(attention);
  ringspan_comm_destroy(comm);
  ringspan_plan_destroy(plan);
}

void on_two_ranks(const std::function<void(int rank, ringspan_comm*)>& body) {
  ringspan_comm* comms[2];
  ASSERT_EQ(ringspan_comm_create_threads(2, comms), RINGSPAN_OK);
  std::thread other([&] { body(1, comms[1]); });
  body(0, comms[0]);
  other.join();
  for (ringspan_comm* comm : comms) ringspan_comm_destroy(comm);
}

// A rank whose arguments cannot even be read tells the others.
TEST(CErrors, OfOneRankReachAll) {
  on_two_ranks([](int rank, ringspan_comm* comm) {
    const ringspan_problem problem = make_problem(2);
    ringspan_problem typo = problem;
    typo.pattern = "causal & widow:1,1";
    auto execute = ringspan::make_struct<ringspan_execute_options>();
    execute.struct_size = 1;
    ringspan_attention* attention = nullptr;
    const bool bad = rank == 1;
    const auto create = [&](const ringspan_problem* p, const ringspan_execute_options* e, ringspan_attention** out) {
      return ringspan_attention_create(bad ? p : &problem, nullptr, comm, bad ? e : nullptr, bad ? out : &attention);
    };
    expect_error(create(&typo, nullptr, &attention), RINGSPAN_INVALID_ARGUMENT, "widow");
    expect_error(create(nullptr, nullptr, &attention), RINGSPAN_INVALID_ARGUMENT, "problem is null");
    expect_error(create(&problem, &execute, &attention), RINGSPAN_INVALID_ARGUMENT, "execute.struct_size (1)");
    expect_error(create(&problem, nullptr, nullptr), RINGSPAN_INVALID_ARGUMENT, "attention is null");

    ringspan_plan* plan = nullptr;
    ASSERT_EQ(ringspan_plan_create(&problem, nullptr, rank, &plan), RINGSPAN_OK);
    const auto with_plan = [&](const ringspan_plan* p, const ringspan_execute_options* e, uint64_t bytes) {
      return ringspan_attention_create_with_plan(bad ? p : plan, comm, bad ? e : nullptr, nullptr, bad ? bytes : 0, &attention);
    };
    expect_error(with_plan(nullptr, nullptr, 0), RINGSPAN_INVALID_ARGUMENT, "plan is null");
    expect_error(with_plan(plan, nullptr, 64), RINGSPAN_INVALID_ARGUMENT, "arena is null, but arena_bytes is 64");
    expect_error(with_plan(plan, &execute, 0), RINGSPAN_INVALID_ARGUMENT, "execute.struct_size (1)");
    EXPECT_EQ(with_plan(plan, nullptr, 0), RINGSPAN_OK) << ringspan_last_error();
    ringspan_attention_destroy(attention);
    EXPECT_EQ(create(&problem, nullptr, &attention), RINGSPAN_OK) << ringspan_last_error();
    ringspan_attention_destroy(attention);
    ringspan_plan_destroy(plan);
  });
}

// Whichever way the tensors of one rank cannot be read, all ranks refuse the pass, and the next one pairs with the next one.
TEST(CErrors, OfTensorsOfOneRankReachAll) {
  on_two_ranks([](int rank, ringspan_comm* comm) {
    auto problem = ringspan::make_struct<ringspan_problem>();
    problem.tokens_q = problem.tokens_k = 2;
    problem.heads = problem.head_dim = 1;
    problem.ranks = 2;
    ringspan_attention* attention = nullptr;
    ASSERT_EQ(ringspan_attention_create(&problem, nullptr, comm, nullptr, &attention), RINGSPAN_OK) << ringspan_last_error();
    float q = 0, k = 0, v = 0, o = 0, lse = 0, d_out = 0, dq = 0, dk = 0, dv = 0;  // one token, one head, one element
    auto forward = ringspan::make_struct<ringspan_forward_tensors>();
    for (const auto& [tensor, data] : {std::pair{&forward.q, &q}, {&forward.k, &k}, {&forward.v, &v}, {&forward.o, &o}}) {
      tensor->data = data;
    }
    forward.lse.data = &lse;
    ringspan_backward_tensors backward = ringspan::backward_after(forward);
    for (const auto& [tensor, data] :
         {std::pair{&backward.d_out, &d_out}, {&backward.dq, &dq}, {&backward.dk, &dk}, {&backward.dv, &dv}}) {
      tensor->data = data;
    }
    const auto expect_right = [&](float step) {  // q = 0: every query sees the mean of both values
      v = step + static_cast<float>(2 * rank);
      d_out = step;
      ASSERT_EQ(ringspan_attention_forward(attention, &forward), RINGSPAN_OK) << ringspan_last_error();
      EXPECT_EQ(o, step + 1);
      ASSERT_EQ(ringspan_attention_backward(attention, &backward), RINGSPAN_OK) << ringspan_last_error();
      EXPECT_EQ(dv, step);
    };
    const bool bad = rank == 1;
    expect_error(ringspan_attention_forward(attention, bad ? nullptr : &forward), RINGSPAN_INVALID_ARGUMENT, "tensors is null");
    expect_right(10);
    ringspan_forward_tensors unset = forward;
    unset.struct_size = 0;
    expect_error(ringspan_attention_forward(attention, bad ? &unset : &forward), RINGSPAN_INVALID_ARGUMENT,
                 "tensors.struct_size (0)");
    expect_right(20);
    expect_error(ringspan_attention_backward(attention, bad ? nullptr : &backward), RINGSPAN_INVALID_ARGUMENT,
                 "tensors is null");
    expect_right(30);
    ringspan_attention_destroy(attention);
  });
}

// An abort reaches a peer that waits.
void expect_abort(const char* reason, const std::string& text) {
  ringspan_comm* comms[2];
  ASSERT_EQ(ringspan_comm_create_threads(2, comms), RINGSPAN_OK);
  std::thread other([&] { EXPECT_EQ(ringspan_comm_abort(comms[1], reason), RINGSPAN_OK); });
  const ringspan_problem problem = make_problem(2);
  ringspan_attention* attention = nullptr;
  expect_error(ringspan_attention_create(&problem, nullptr, comms[0], nullptr, &attention), RINGSPAN_PEER_FAILURE, text);
  other.join();
  ringspan_comm_destroy(comms[0]);
  ringspan_comm_destroy(comms[1]);
}

TEST(CErrors, OfAnAbort) {
  expect_abort("out of ink", "out of ink");
  expect_abort(nullptr, "no reason given");
}

// What failed is what one would give as the reason.
TEST(CErrors, OfAnAbortForTheLastError) {
  ringspan_comm* comms[2];
  ASSERT_EQ(ringspan_comm_create_threads(2, comms), RINGSPAN_OK);
  ringspan_attention* attention = nullptr;
  expect_error(ringspan_attention_forward(nullptr, nullptr), RINGSPAN_INVALID_ARGUMENT, "attention is null");
  EXPECT_EQ(ringspan_comm_abort(comms[1], ringspan_last_error()), RINGSPAN_OK);
  EXPECT_STREQ(ringspan_last_error(), "");
  const ringspan_problem problem = make_problem(2);
  expect_error(ringspan_attention_create(&problem, nullptr, comms[0], nullptr, &attention), RINGSPAN_PEER_FAILURE,
               "aborted: attention is null");
  for (ringspan_comm* comm : comms) ringspan_comm_destroy(comm);
}

}  // namespace
