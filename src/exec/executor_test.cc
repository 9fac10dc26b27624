// The executor on programs written by hand: two ranks that send each other their keys and values, one rank alone.
#include "exec/executor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <latch>
#include <limits>
#include <map>
#include <random>
#include <string>

#include "comm/rounds.h"
#include "comm_testing/decorators.h"
#include "exec/arena.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::internal {
namespace {

constexpr int kRows = 5;  // per rank
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 8;
constexpr int kDimV = 6;

// Rank `rank` of `ranks` attends to all keys: its own while those of the next rank travel, one hop per stage.
class HandMade {
 public:
  HandMade(int ranks, int rank) {
    data_ = std::make_shared<PlanData>();
    Problem& problem = data_->problem;
    problem.tokens_q = problem.tokens_k = kRows * ranks;
    problem.heads = kHeads;
    problem.kv_heads = kKvHeads;
    problem.head_dim = kDim;
    problem.head_dim_v = kDimV;
    problem.ranks = ranks;
    data_->rank = rank;
    data_->shard_q = data_->shard_k = Shard{{{kRows * rank, 1, kRows}}, {0}, kRows};
    data_->options.attend_kernel = "reference";  // needs no scratch
    data_->fingerprint = 77;
    build(ranks, rank);
  }

  Plan plan() const { return Plan(data_); }
  PlanData& data() { return *data_; }

 private:
  std::int64_t region(std::int64_t bytes) {
    const std::int64_t offset = program_->arena_bytes;
    program_->regions.push_back({"region", Component::buckets, offset, bytes});
    program_->arena_bytes = (offset + bytes + 63) / 64 * 64;
    return offset;
  }

  std::int32_t view(TensorKind kind, int width, std::int64_t arena_offset = -1) {
    const int heads = is_key_side(kind) ? kKvHeads : kHeads;
    View view;
    view.kind = kind;
    view.in_arena = arena_offset >= 0;
    view.width = width;
    view.offset = arena_offset;
    view.head_stride = width;
    view.row_stride = static_cast<std::int64_t>(heads) * width;
    view.batch_stride = kRows * view.row_stride;
    view.heads = {0, 1, heads};
    program_->views.push_back(view);
    return static_cast<std::int32_t>(program_->views.size()) - 1;
  }

  Launch rows(LaunchKind kind, int heads, int width, std::initializer_list<std::int32_t> views, float value = 0.0F) {
    RowItem item;
    item.batch_count = 1;
    item.heads = {0, 1, heads};
    item.rows = kRows;
    int index = 0;
    for (const std::int32_t each : views) item.operands[index++].view = each;
    program_->row_items.push_back(item);
    return {kind, static_cast<std::int64_t>(program_->row_items.size()) - 1, 1, width, value, false};
  }

  Launch attend(int rank, int owner, std::initializer_list<std::int32_t> views) {
    AttendItem item;
    item.slice.heads = {0, 1, kHeads};
    item.slice.q = {kRows * rank, 1, kRows};
    item.slice.k = {kRows * owner, 1, kRows};
    int index = 0;
    for (const std::int32_t each : views) item.operands[index++].view = each;
    program_->attend_items.push_back(item);
    return {LaunchKind::attend, static_cast<std::int64_t>(program_->attend_items.size()) - 1, 1, 1, 0.0F, false};
  }

  void build(int ranks, int rank) {
    program_ = &data_->forward;
    const std::int64_t state = region((2 + kDimV) * kRows * kHeads * 4);
    const std::int64_t slot_bytes = kRows * kKvHeads * (kDim + kDimV) * 4;
    const std::int64_t slots[2] = {region(slot_bytes), region(slot_bytes)};
    kernels::AttendShape shape{DType::float32, kDim, kDimV, kHeads / kKvHeads, false, false, false, 1};
    program_->scratch_offset = region(kernels::select_attend(shape, "reference").scratch_bytes(shape));
    const std::int32_t q = view(TensorKind::q, kDim);
    const std::int32_t k = view(TensorKind::k, kDim);
    const std::int32_t v = view(TensorKind::v, kDimV);
    const std::int32_t o = view(TensorKind::o, kDimV);
    const std::int32_t lse = view(TensorKind::lse, 1);
    const std::int32_t m = view(TensorKind::m, 1, state);
    const std::int32_t l = view(TensorKind::l, 1, state + kRows * kHeads * 4);
    const std::int32_t acc = view(TensorKind::acc, kDimV, state + 2 * kRows * kHeads * 4);
    std::int32_t slot_k[2];
    std::int32_t slot_v[2];
    for (int slot = 0; slot < 2; ++slot) {
      slot_k[slot] = view(TensorKind::k, kDim, slots[slot]);
      slot_v[slot] = view(TensorKind::v, kDimV, slots[slot] + kRows * kKvHeads * kDim * 4);
    }

    Stage first;
    first.name = "own keys";
    first.before = {rows(LaunchKind::fill, kHeads, 1, {m}, -std::numeric_limits<float>::infinity()),
                    rows(LaunchKind::fill, kHeads, 1, {l}), rows(LaunchKind::fill, kHeads, kDimV, {acc})};
    if (ranks > 1) {
      first.before.push_back(rows(LaunchKind::copy, kKvHeads, kDim, {k, slot_k[0]}));
      first.before.push_back(rows(LaunchKind::copy, kKvHeads, kDimV, {v, slot_v[0]}));
    }
    first.compute = {attend(rank, rank, {q, k, v, m, l, acc})};
    const auto hop =
        [&](int step) {  // what is in slot step % 2 goes to the previous rank, the next rank's arrives in the other
          Round round;
          round.number = static_cast<std::uint64_t>(step);
          round.transfers = {{true, (rank + ranks - 1) % ranks, slots[step % 2], slot_bytes, -1, rank, TransferOp::copy},
                             {false, (rank + 1) % ranks, slots[(step + 1) % 2], slot_bytes, -1, rank, TransferOp::copy}};
          return round;
        };
    if (ranks > 1) first.rounds = {hop(0)};
    program_->stages.push_back(first);
    for (int step = 1; step < ranks; ++step) {
      Stage stage;
      stage.name = "step " + std::to_string(step);
      const int slot = step % 2;
      stage.compute = {attend(rank, (rank + step) % ranks, {q, slot_k[slot], slot_v[slot], m, l, acc})};
      if (step + 1 < ranks) stage.rounds = {hop(step)};
      program_->stages.push_back(stage);
    }
    Stage last;
    last.name = "finalize";
    last.compute = {rows(LaunchKind::finalize, kHeads, kDimV, {m, l, acc, o, lse}, 1.0F)};
    program_->stages.push_back(last);
  }

  std::shared_ptr<PlanData> data_;
  Program* program_ = nullptr;
};

// The whole tensors of a problem, seeded, and the expected output from the definition in float64.
struct Whole {
  explicit Whole(int ranks, unsigned seed = 1) : tokens(kRows * ranks) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto* tensor : {&q, &k, &v}) {
      const int width = tensor == &v ? kDimV : kDim;
      tensor->resize(static_cast<std::size_t>(tokens) * (tensor == &q ? kHeads : kKvHeads) * static_cast<std::size_t>(width));
      for (float& value : *tensor) value = normal(random);
    }
  }

  // Output row (token, head), lse last.
  std::vector<double> expected(int token, int head) const {
    const int kv = head / (kHeads / kKvHeads);
    std::vector<double> scores(static_cast<std::size_t>(tokens));
    double sum = 0;
    for (int j = 0; j < tokens; ++j) {
      double dot = 0;
      for (int c = 0; c < kDim; ++c)
        dot += static_cast<double>(q[(token * kHeads + head) * kDim + c]) * k[(j * kKvHeads + kv) * kDim + c];
      scores[j] = std::exp(dot / std::sqrt(static_cast<double>(kDim)));
      sum += scores[j];
    }
    std::vector<double> row(kDimV + 1, 0.0);
    for (int j = 0; j < tokens; ++j) {
      for (int c = 0; c < kDimV; ++c) row[c] += scores[j] / sum * v[(j * kKvHeads + kv) * kDimV + c];
    }
    row[kDimV] = std::log(sum);
    return row;
  }

  int tokens;
  std::vector<float> q, k, v;
};

struct Outputs {
  std::vector<float> o = std::vector<float>(kRows * kHeads * kDimV, NAN);
  std::vector<float> lse = std::vector<float>(kRows * kHeads, NAN);
};

ForwardTensors tensors_of(const Whole& whole, int rank, Outputs& outputs) {
  ForwardTensors tensors;
  tensors.q = dense_bshd(whole.q.data() + rank * kRows * kHeads * kDim, kRows, kHeads, kDim);
  tensors.k = dense_bshd(whole.k.data() + rank * kRows * kKvHeads * kDim, kRows, kKvHeads, kDim);
  tensors.v = dense_bshd(whole.v.data() + rank * kRows * kKvHeads * kDimV, kRows, kKvHeads, kDimV);
  tensors.o = dense_bshd(outputs.o.data(), kRows, kHeads, kDimV);
  tensors.lse = dense_bshd(outputs.lse.data(), kRows, kHeads, 1);
  return tensors;
}

void expect_right(const Whole& whole, int rank, const Outputs& outputs) {
  for (int row = 0; row < kRows; ++row) {
    for (int head = 0; head < kHeads; ++head) {
      const std::vector<double> expected = whole.expected(rank * kRows + row, head);
      for (int c = 0; c < kDimV; ++c) {
        EXPECT_NEAR(outputs.o[(row * kHeads + head) * kDimV + c], expected[c], 1e-5) << "row " << row << " head " << head;
      }
      EXPECT_NEAR(outputs.lse[row * kHeads + head], expected[kDimV], 1e-5);
    }
  }
}

class ExecutorRanks : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(ExecutorRanks, ComputesAttention) {
  const auto [ranks, fake_device] = GetParam();
  const Whole whole(ranks);
  run_thread_ranks(ranks, [&, fake = fake_device](Communicator& communicator) {
    HandMade made(communicator.size(), communicator.rank());
    ExecuteOptions options;
    options.fake_device = fake;
    options.fake_device_seed = static_cast<std::uint64_t>(communicator.rank()) + 1;
    options.trace = true;
    Executor executor(made.plan(), communicator, options, {});
    Outputs first;
    executor.forward(tensors_of(whole, communicator.rank(), first));
    expect_right(whole, communicator.rank(), first);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Outputs again;
      executor.forward(tensors_of(whole, communicator.rank(), again));
      EXPECT_EQ(std::memcmp(again.o.data(), first.o.data(), first.o.size() * 4), 0);
      EXPECT_EQ(std::memcmp(again.lse.data(), first.lse.data(), first.lse.size() * 4), 0);
    }
    const std::int64_t bytes = (communicator.size() - 1) * kRows * kKvHeads * (kDim + kDimV) * 4;
    EXPECT_EQ(executor.stats(Pass::forward).sent_bytes, bytes);
    EXPECT_EQ(executor.stats(Pass::forward).received_bytes, bytes);
    EXPECT_GE(executor.stats(Pass::forward).seconds, executor.stats(Pass::forward).waiting_seconds);
    const std::string json = executor.trace().json();
    EXPECT_NE(json.find("\"own keys\""), std::string::npos);
    EXPECT_EQ(json.find("\"name\":\"handshake\"") != std::string::npos, communicator.size() > 1);
    EXPECT_NE(json.find("\"finalize\""), std::string::npos);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ExecutorRanks, testing::Combine(testing::Values(1, 2, 3, 4), testing::Bool()));

template <typename Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no InvalidArgument";
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose allocators end the program instead
TEST(Arena, SaysHowMuchCannotBeHad) {
  try {
    Arena(std::int64_t{1} << 60, {});
    ADD_FAILURE() << "an exabyte was had";
  } catch (const OutOfBudget& error) {
    EXPECT_EQ(std::string(error.what()).find("out of memory: the arena needs 1152921504606846976 bytes"), 0U) << error.what();
  }
}
#endif

TEST(Executor, RefusesWhatDoesNotFitThePlan) {
  auto world = make_thread_world(2);
  HandMade two(2, 0);
  const auto make = [&](Communicator& communicator, ExecuteOptions options = {}, std::span<std::byte> arena = {}) {
    return message_of([&] { Executor executor(two.plan(), communicator, options, arena); });
  };
  EXPECT_EQ(make(*world[1]), "the communicator is rank 1's, but the plan was made for rank 0");
  EXPECT_EQ(make(*make_thread_world(3)[0]), "the communicator has 3 ranks, but the plan was made for 2");
  EXPECT_EQ(make(*world[0], {.deadline = Communicator::Seconds(0)}), "deadline (0 s) must be positive");
  alignas(64) static std::byte memory[4096];
  EXPECT_EQ(make(*world[0], {}, {memory, 64}),
            "arena has 64 bytes, but the plan needs " + std::to_string(two.data().forward.arena_bytes));
  EXPECT_NE(make(*world[0], {}, {memory + 8, 4000}).find("must be aligned to 64 bytes"), std::string::npos);
}

TEST(Executor, FindsTasksThatLeaveTheirMemory) {
  auto world = make_thread_world(1);
  const auto expect_refused = [&](auto&& spoil) {
    HandMade made(1, 0);
    spoil(made.data().forward);
    EXPECT_THROW(Executor(made.plan(), *world[0], {}, {}), std::logic_error);
  };
  expect_refused([](Program& program) { program.row_items.front().rows = 1000; });
  expect_refused([](Program& program) { program.row_items.back().operands[3].row = 1; });
  expect_refused([](Program& program) { program.views[5].offset = program.arena_bytes; });
  expect_refused([](Program& program) { program.attend_items[0].slice.heads.count = kHeads + 1; });
  expect_refused([](Program& program) { program.attend_items[0].operands[kV].view = -1; });
  expect_refused([](Program& program) { program.stages[0].before[0].count = 100; });
  expect_refused([](Program& program) { program.stages[0].before[2].width = 1; });
}

// Every message about the caller's tensors; with one rank the error is its own.
TEST(Executor, ChecksTheCallersTensors) {
  auto world = make_thread_world(1);
  HandMade made(1, 0);
  Executor executor(made.plan(), *world[0], {}, {});
  const Whole whole(1);
  Outputs outputs;
  const auto refused = [&](auto&& spoil) {
    ForwardTensors tensors = tensors_of(whole, 0, outputs);
    spoil(tensors);
    return message_of([&] { executor.forward(tensors); });
  };
  EXPECT_EQ(refused([](auto& t) { t.q.data = nullptr; }),
            "q.data is null, but rank 0 holds 1 x 5 x 4 rows of it (batch, tokens, heads)");
  EXPECT_EQ(refused([](auto& t) { t.lse.data = nullptr; }),
            "lse.data is null, but rank 0 holds 1 x 5 x 4 rows of it (batch, tokens, heads)");
  EXPECT_NE(refused([](auto& t) {
              t.v.data = static_cast<const char*>(t.v.data) + 2;
            }).find("must be aligned to 4 bytes, the size of float32"),
            std::string::npos);
  EXPECT_EQ(refused([](auto& t) { t.o.token_stride = 0; }),
            "o is written and must not overlap itself: its token stride (0) must be at least 6");
  EXPECT_EQ(refused([](auto& t) { t.o.head_stride = kDimV - 1; }),
            "o is written and must not overlap itself: its head stride (5) must be at least 6");
  EXPECT_EQ(refused([](auto& t) { t.o.data = const_cast<void*>(t.v.data); }), "o is written and must not share memory with v");
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;
  EXPECT_EQ(refused([](auto& t) { t.o.token_stride = kHuge; }),
            "o: the token stride (4611686018427387903) is too large: 4 steps of it must stay within 2^63 bytes");
  EXPECT_EQ(refused([](auto& t) { t.k.head_stride = -kHuge; }),
            "k: the head stride (-4611686018427387903) is too large: 1 steps of it must stay within 2^63 bytes");
  const float one[kHeads] = {};
  EXPECT_EQ(refused([&](auto& t) { t.sinks = one; }), "sinks is given, but the problem has sinks = false");
  EXPECT_EQ(refused([&](auto& t) { t.alibi_slopes = one; }), "alibi_slopes is given, but the problem has alibi = false");
  EXPECT_EQ(message_of([&] { executor.backward({}); }),
            "the plan has no backward pass: it was made with backward = false (in C forward_only = 1)");
  // A refusal leaves the executor usable.
  executor.forward(tensors_of(whole, 0, outputs));
  expect_right(whole, 0, outputs);
}

TEST(Executor, WantsSinksAndSlopesWhereTheProblemHasThem) {
  auto world = make_thread_world(1);
  HandMade made(1, 0);
  made.data().problem.sinks = made.data().problem.alibi = true;
  Executor executor(made.plan(), *world[0], {}, {});
  const Whole whole(1);
  Outputs outputs;
  ForwardTensors tensors = tensors_of(whole, 0, outputs);
  const float values[kHeads] = {};
  EXPECT_EQ(message_of([&] { executor.forward(tensors); }), "alibi_slopes is null, but the problem has alibi = true");
  tensors.alibi_slopes = values;
  EXPECT_EQ(message_of([&] { executor.forward(tensors); }), "sinks is null, but the problem has sinks = true");
  tensors.sinks = values;
  tensors.alibi_batch_stride = 3;
  EXPECT_EQ(message_of([&] { executor.forward(tensors); }), "alibi_batch_stride (3) must be 0 or at least heads (4)");
  tensors.alibi_batch_stride = kHeads;
  executor.forward(tensors);
  tensors.o.data = const_cast<float*>(values);
  EXPECT_EQ(message_of([&] { executor.forward(tensors); }), "o is written and must not share memory with alibi_slopes");
}

// Rows may lie anywhere: outputs and inputs with gaps, heads outside tokens.
TEST(Executor, ReadsAndWritesStridedTensors) {
  auto world = make_thread_world(1);
  HandMade made(1, 0);
  Executor executor(made.plan(), *world[0], {}, {});
  const Whole whole(1);
  Outputs dense;
  ForwardTensors tensors = tensors_of(whole, 0, dense);
  executor.forward(tensors);
  std::vector<float> k(kRows * kKvHeads * kDim * 2);
  for (int row = 0; row < kRows; ++row) {
    for (int head = 0; head < kKvHeads; ++head) {
      for (int c = 0; c < kDim; ++c) k[(head * kRows + row) * 2 * kDim + c] = whole.k[(row * kKvHeads + head) * kDim + c];
    }
  }
  std::vector<float> o(kRows * kHeads * 10, -7.0F);
  tensors.k = ConstTensor(k.data(), 0, 2 * kDim, kRows * 2 * kDim);
  tensors.o = {o.data(), 0, 10, kRows * 10};
  executor.forward(tensors);
  for (int row = 0; row < kRows; ++row) {
    for (int head = 0; head < kHeads; ++head) {
      for (int c = 0; c < 10; ++c) {
        const float expected = c < kDimV ? dense.o[(row * kHeads + head) * kDimV + c] : -7.0F;
        EXPECT_EQ(o[(head * kRows + row) * 10 + c], expected) << row << " " << head << " " << c;
      }
    }
  }
}

// One rank's tensors are wrong: both ranks say so at once, and both can go on.
TEST(ExecutorErrors, OfOneRankAreRaisedByAll) {
  const Whole whole(2);
  run_thread_ranks(2, [&](Communicator& communicator) {
    HandMade made(2, communicator.rank());
    Executor executor(made.plan(), communicator, {}, {});
    Outputs outputs;
    ForwardTensors tensors = tensors_of(whole, communicator.rank(), outputs);
    if (communicator.rank() == 1) tensors.k.data = nullptr;
    const std::string message = message_of([&] { executor.forward(tensors); });
    EXPECT_NE(message.find("k.data is null, but rank 1 holds"), std::string::npos) << message;
    executor.forward(tensors_of(whole, communicator.rank(), outputs));
    expect_right(whole, communicator.rank(), outputs);
  });
}

TEST(ExecutorErrors, DifferentPlansAreRefused) {
  const Whole whole(2);
  run_thread_ranks(2, [&](Communicator& communicator) {
    HandMade made(2, communicator.rank());
    made.data().fingerprint += static_cast<std::uint64_t>(communicator.rank());
    Executor executor(made.plan(), communicator, {}, {});
    Outputs outputs;
    try {
      executor.forward(tensors_of(whole, communicator.rank(), outputs));
      ADD_FAILURE() << "the plans differ";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("ranks disagree on the plan (fingerprint)"), std::string::npos) << error.what();
    }
  });
}

// An embedder's communicator may throw anything in a pass: the peers hear of it, and the executor stays failed.
TEST(ExecutorErrors, WhateverACommunicatorThrowsFailsThePass) {
  class Throwing final : public comm_testing::ForwardingCommunicator {
   public:
    using ForwardingCommunicator::ForwardingCommunicator;
    Request post(std::uint64_t round, std::span<const Message> batch) override {
      if (round < kPlanRoundsEnd) throw 42;
      return ForwardingCommunicator::post(round, batch);
    }
  };
  const Whole whole(2);
  run_thread_ranks(2, [&](Communicator& communicator) {
    Throwing throwing(communicator);
    const int rank = communicator.rank();
    HandMade made(2, rank);
    Executor executor(made.plan(), rank == 1 ? throwing : communicator, {}, {});
    Outputs outputs;
    for (int call = 0; call < 2; ++call) {
      try {
        executor.forward(tensors_of(whole, rank, outputs));
        ADD_FAILURE() << "nothing thrown";
      } catch (const CommError& error) {
        EXPECT_EQ(rank, 0);
        EXPECT_NE(std::string(error.what()).find("rank 1 aborted: unknown exception"), std::string::npos) << error.what();
      } catch (int thrown) {
        EXPECT_EQ(rank, 1);
        EXPECT_EQ(thrown, 42);
      }
    }
  });
}

// A peer that fails in the middle ends the others at once; they stay failed.
TEST(ExecutorErrors, AFailedRankFailsItsPeersAndStaysFailed) {
  const Whole whole(2);
  auto world = make_thread_world(2);
  std::latch both_done(2);  // an abort may overtake a pass that the peer has not finished
  const auto body = [&](int rank) {
    HandMade made(2, rank);
    Executor executor(made.plan(), *world[rank], {.deadline = Communicator::Seconds(20)}, {});
    Outputs outputs;
    executor.forward(tensors_of(whole, rank, outputs));
    both_done.arrive_and_wait();
    if (rank == 1) return world[rank]->abort("out of paper");
    for (int call = 0; call < 2; ++call) {
      try {
        executor.forward(tensors_of(whole, rank, outputs));
        ADD_FAILURE() << "the peer has aborted";
      } catch (const CommError& error) {
        EXPECT_NE(std::string(error.what()).find("out of paper"), std::string::npos) << error.what();
      }
    }
  };
  std::thread other(body, 1);
  body(0);
  other.join();
}

}  // namespace
}  // namespace ringspan::internal
