// What the agreement before planning says when ranks were given different things, field by field, and that the communicator
// can be used again afterwards.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/rounds.h"
#include "exec/handshake.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::internal {
namespace {

constexpr Communicator::Seconds kDeadline{20};

struct Given {
  Problem problem;
  PlanOptions options;
};

Given given() {
  Given both;
  both.problem.tokens_q = both.problem.tokens_k = 12;
  both.problem.heads = both.problem.kv_heads = 2;
  both.problem.ranks = 3;
  both.options.strategy = Strategy::local;
  return both;
}

// What every rank is told when rank 2 was given something else; "" where they agree. All must be told alike.
std::string told(const std::function<void(Given&)>& differ) {
  std::vector<std::string> texts(3);
  run_thread_ranks(3, [&](Communicator& communicator) {
    Given own = given();
    if (communicator.rank() == 2) differ(own);
    std::string& text = texts[static_cast<std::size_t>(communicator.rank())];
    try {
      agree_on_problem(communicator, own.problem, own.options, kDeadline);
    } catch (const Error& error) {
      text = error.what();
    }
    const Given again = given();
    agree_on_problem(communicator, again.problem, again.options, kDeadline);
  });
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const std::string prefix = "rank " + std::to_string(rank) + "/3: ";
    if (texts[rank].rfind(prefix, 0) == 0) texts[rank].erase(0, prefix.size());
    const std::string where = "on rank 2: ";
    if (texts[rank].rfind(where, 0) == 0) texts[rank].erase(0, where.size());
    EXPECT_EQ(texts[rank], texts[0]);
  }
  return texts[0];
}

TEST(HandshakeErrors, ValuesThatDiffer) {
  EXPECT_EQ(told([](Given&) {}), "");
  EXPECT_EQ(told([](Given& g) { g.problem.batch = 2; }), "ranks disagree on batch: 1 on rank 0, 2 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.tokens_q = 13; }), "ranks disagree on tokens_q: 12 on rank 0, 13 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.tokens_k = 11; }), "ranks disagree on tokens_k: 12 on rank 0, 11 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.heads = 4; }), "ranks disagree on heads: 2 on rank 0, 4 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.kv_heads = 1; }), "ranks disagree on kv_heads: 2 on rank 0, 1 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.head_dim = 32; }), "ranks disagree on head_dim: 64 on rank 0, 32 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.head_dim_v = 32; }), "ranks disagree on head_dim_v: 64 on rank 0, 32 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.dtype = DType::float16; }),
            "ranks disagree on dtype: float32 on rank 0, float16 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.alibi = true; }), "ranks disagree on alibi: false on rank 0, true on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.sinks = true; }), "ranks disagree on sinks: false on rank 0, true on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.replicated_q = true; }),
            "ranks disagree on replicated_q: false on rank 0, true on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.bucket_rows = 64; }), "ranks disagree on bucket_rows: 0 on rank 0, 64 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.computing_ranks = 2; }),
            "ranks disagree on computing_ranks: 0 on rank 0, 2 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.backward = false; }), "ranks disagree on backward: true on rank 0, false on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.keep_o_float32 = false; }),
            "ranks disagree on keep_o_float32: true on rank 0, false on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.strategy = Strategy::ring; }),
            "ranks disagree on strategy: local on rank 0, ring on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.scale = 0.5F; }), "ranks disagree on scale: 0 on rank 0, 0.5 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.softcap = 5.0F; }), "ranks disagree on softcap: 0 on rank 0, 5 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.problem.dropout = 0.25F; }), "ranks disagree on dropout: 0 on rank 0, 0.25 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.cost.flops_per_second = 7; }),
            "ranks disagree on cost.flops_per_second: 100000000000 on rank 0, 7 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.cost.bytes_per_second = 7; }),
            "ranks disagree on cost.bytes_per_second: 5000000000 on rank 0, 7 on rank 2");
  EXPECT_EQ(told([](Given& g) { g.options.cost.message_nanoseconds = 7; }),
            "ranks disagree on cost.message_nanoseconds: 20000 on rank 0, 7 on rank 2");
}

// Compared by hash: the field is named, the values are only fingerprints.
TEST(HandshakeErrors, OtherFieldsThatDiffer) {
  const auto names = [](const std::function<void(Given&)>& differ, const std::string& field) {
    const std::string text = told(differ);
    EXPECT_EQ(text.rfind("ranks disagree on " + field + ": 0x", 0), 0U) << text;
  };
  names([](Given& g) { g.problem.pattern.causal = true; }, "pattern (hash)");
  names([](Given& g) { g.problem.seed = 5; }, "seed");
  names([](Given& g) { g.problem.sharding_q.kind = ShardingKind::zigzag; }, "sharding_q (hash)");
  names([](Given& g) { g.problem.sharding_k.kind = ShardingKind::striped; }, "sharding_k (hash)");
  names([](Given& g) { g.problem.lengths_q = {5}; }, "lengths_q (hash)");
  names([](Given& g) { g.problem.lengths_k = {5}; }, "lengths_k (hash)");
  names([](Given& g) { g.problem.starts_k = {5}; }, "starts_k (hash)");
}

// One rank's own problem is wrong: everybody is told what is wrong with it, with the class of its error.
TEST(HandshakeErrors, AnInvalidProblemOfOneRank) {
  EXPECT_NE(told([](Given& g) { g.problem.heads = -1; }).find("heads (-1)"), std::string::npos);
  EXPECT_NE(told([](Given& g) { g.problem.pattern.align = static_cast<Align>(77); }).find("pattern.align (77)"),
            std::string::npos);
  EXPECT_EQ(told([](Given& g) { g.problem.ranks = 4; }), "ranks (4) must equal the size of the communicator (3)");
}

// Also of options: everybody is told which rank's, though the smallest budget wins.
TEST(HandshakeErrors, InvalidOptionsOfOneRank) {
  EXPECT_EQ(told([](Given& g) { g.options.memory_budget = -5; }), "memory_budget (-5) must be 0 (unlimited) or positive");
  EXPECT_EQ(told([](Given& g) { g.options.tuned.bucket_rows = -5; }), "tuned.bucket_rows (-5) must not be negative");
  run_thread_ranks(3, [](Communicator& communicator) {
    Given own = given();
    if (communicator.rank() == 1) own.options.memory_budget = -5;
    try {
      agree_on_problem(communicator, own.problem, own.options, kDeadline);
      ADD_FAILURE() << "rank " << communicator.rank() << " was not told";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()).find("on rank 1: ") != std::string::npos, communicator.rank() != 1) << error.what();
    }
  });
}

TEST(HandshakeErrors, AnInvalidDeadlineOfOneRank) {
  run_thread_ranks(3, [](Communicator& communicator) {
    const Given own = given();
    EXPECT_THROW(agree_on_problem(communicator, own.problem, own.options,
                                  communicator.rank() == 0 ? Communicator::Seconds(0) : kDeadline),
                 InvalidArgument);
  });
}

TEST(HandshakeErrors, ArgumentsThatCannotBeRead) {
  run_thread_ranks(3, [](Communicator& communicator) {
    const Given own = given();
    const auto take_part = [&] {
      if (communicator.rank() == 1) {
        refuse(communicator, std::make_exception_ptr(Unsupported("no such pattern")), kDeadline, kAgreeRounds);
      }
      agree_on_problem(communicator, own.problem, own.options, kDeadline);
    };
    try {
      take_part();
      ADD_FAILURE() << "rank " << communicator.rank() << " was not told";
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find("no such pattern"), std::string::npos);
    }
  });
}

TEST(Handshake, TheSmallestBudgetWinsAndThreadsAreFree) {
  run_thread_ranks(3, [](Communicator& communicator) {
    Given own = given();
    const std::int64_t budgets[] = {0, 5000, 4000};  // 0: unlimited
    own.options.memory_budget = budgets[communicator.rank()];
    own.options.threads = 1 + communicator.rank();
    own.options.attend_kernel = communicator.rank() == 0 ? "reference" : "";
    const PlanOptions agreed = agree_on_problem(communicator, own.problem, own.options, kDeadline);
    EXPECT_EQ(agreed.memory_budget, 4000);
    EXPECT_EQ(agreed.tuned.bucket_rows, 0);
    EXPECT_EQ(agreed.threads, own.options.threads);
    EXPECT_EQ(agreed.attend_kernel, own.options.attend_kernel);
    own.options.tuned.bucket_rows = 512 - communicator.rank();
    EXPECT_EQ(agree_on_problem(communicator, own.problem, own.options, kDeadline).tuned.bucket_rows, 510);
    own.options.memory_budget = 0;
    EXPECT_EQ(agree_on_problem(communicator, own.problem, own.options, kDeadline).memory_budget, 0);
  });
}

// Which buckets are chosen depends on it: kernels take tasks over the same rows together on all ranks, or on none.
TEST(Handshake, TasksAreGroupedByAllOrNone) {
  for (const bool one_calls : {false, true}) {
    run_thread_ranks(3, [&](Communicator& communicator) {
      Given own = given();
      own.options.device = DeviceKind::cuda;
      own.problem.dtype = DType::bfloat16;
      const bool calls = one_calls && communicator.rank() == 1;
      if (calls) own.options.partials = Partials::storage;
      const PlanOptions agreed = agree_on_problem(communicator, own.problem, own.options, kDeadline);
      EXPECT_EQ(agreed.most_overhead.ungrouped_tasks, one_calls && !calls);
      EXPECT_FALSE(agreed.most_overhead.gradient_sums);
    });
  }
}

}  // namespace
}  // namespace ringspan::internal
