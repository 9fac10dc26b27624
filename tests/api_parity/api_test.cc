// Attention over ranks against the float64 oracle: patterns x strategies x dtypes x kinds of ranks, forward and backward.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>

#include "api_testing/world.h"
#include "comm_testing/decorators.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

constexpr Strategy kStrategies[] = {Strategy::local, Strategy::all_gather, Strategy::exchange,
                                    Strategy::ring,  Strategy::pass_q,     Strategy::ulysses};

Case make_case(std::string_view pattern, Strategy strategy, int ranks, std::int64_t tokens = 61) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 12;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  test.options.strategy = strategy;
  if (p.pattern.documents) p.cu_seqlens_q = {0, 7, 7, static_cast<std::int32_t>(tokens / 2), static_cast<std::int32_t>(tokens)};
  return test;
}

std::string name_of(Strategy strategy) {
  std::string name(to_string(strategy));
  std::erase_if(name, [](char c) { return c == '-'; });
  return name;
}

class Strategies : public ::testing::TestWithParam<Strategy> {
 protected:
  Case make(std::string_view pattern, int ranks, std::int64_t tokens = 61) const {
    return make_case(pattern, GetParam(), ranks, tokens);
  }
};
INSTANTIATE_TEST_SUITE_P(Api, Strategies, ::testing::ValuesIn(kStrategies),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(Strategies, OneRank) { EXPECT_EQ(judge(make("causal", 1)), ""); }

TEST_P(Strategies, EveryPattern) {
  for (const char* pattern :
       {"full", "causal", "window:5,3", "causal & window:9,-1", "causal@top_left", "documents & causal", "prefix:10",
        "block:0-20,0-30;20-61,5-61,causal", "dilated:16x1,32x2,64x4", "dilated:16x1,32x2@torchscale",
        "dilated:16x1,32x4@head_groups & causal", "dilated:8x2,16x4 & documents & causal"}) {
    EXPECT_EQ(judge(make(pattern, 3)), "");
  }
}

TEST_P(Strategies, EveryWorld) {
  for (const int ranks : {2, 4, 7}) EXPECT_EQ(judge(make("causal", ranks)), "");
}

TEST_P(Strategies, EverySharding) {
  for (const char* sharding : {"zigzag", "striped", "block_striped:5"}) {
    Case test = make("causal & window:20,-1", 3);
    test.problem.sharding_q = Sharding::parse(sharding);
    test.problem.sharding_k = Sharding::parse(sharding);
    EXPECT_EQ(judge(test), "");
    test.problem.sharding_k = Sharding{};
    EXPECT_EQ(judge(test), "");
  }
}

TEST_P(Strategies, EveryDType) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const bool keep : {true, false}) {
      Case test = make("causal", 3);
      test.problem.dtype = dtype;
      test.options.keep_o_float32 = keep;
      EXPECT_EQ(judge(test), "");
    }
  }
}

TEST_P(Strategies, EveryHeadRatio) {
  for (const auto& [heads, kv_heads] : {std::pair{3, 3}, std::pair{4, 1}, std::pair{6, 2}}) {
    Case test = make("causal", 3, 40);
    test.problem.heads = heads;
    test.problem.kv_heads = kv_heads;
    EXPECT_EQ(judge(test), "");
  }
}

TEST_P(Strategies, EveryLength) {
  for (const std::int64_t tokens : {0, 1, 2, 5, 31}) EXPECT_EQ(judge(make("causal", 4, tokens)), "");
  Case cross = make("causal", 3, 30);
  cross.problem.tokens_k = 47;
  EXPECT_EQ(judge(cross), "");
  cross.problem.tokens_k = 11;
  EXPECT_EQ(judge(cross), "");
}

TEST_P(Strategies, BatchesAndTheirLengths) {
  Case test = make("causal", 3, 30);
  test.problem.batch = 3;
  EXPECT_EQ(judge(test), "");
  test.problem.lengths_q = {30, 17, 0};
  test.problem.lengths_k = {30, 17, 5};
  EXPECT_EQ(judge(test), "");
  test.problem.starts_k = {0, 13, 9};
  EXPECT_EQ(judge(test), "");
  test.problem.lengths_q = test.problem.lengths_k = {};  // padding on the left
  EXPECT_EQ(judge(test), "");
}

TEST_P(Strategies, ReplicatedQueries) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case test = make("causal", 3);
    test.problem.dtype = dtype;
    test.problem.replicated_q = true;
    EXPECT_EQ(judge(test), "");
  }
}

TEST_P(Strategies, SoftcapAlibiSinksDropoutDlse) {
  for (int option = 0; option < 6; ++option) {
    Case test = make(option == 5 ? "dilated:16x1,32x2" : "causal", 3, 45);
    if (option == 0 || option == 5) test.problem.softcap = 5.0F;
    if (option == 1 || option == 5) test.problem.alibi = true;
    if (option == 2 || option == 5) test.problem.sinks = true;
    if (option == 3 || option == 5) test.problem.dropout = 0.3F;
    if (option == 4 || option == 5) test.dlse = true;
    test.problem.seed = 99;
    EXPECT_EQ(judge(test), "");
  }
}

TEST_P(Strategies, ForkedRanks) {
  Case test = make("causal & window:30,-1", 3);
  test.ranks = Ranks::processes;
  EXPECT_EQ(judge(test), "");
}

TEST_P(Strategies, FakeDevice) {
  for (const char* pattern : {"causal", "dilated:16x1,32x2@torchscale"}) {
    Case test = make(pattern, 3);
    test.execute.fake_device = true;
    test.problem.sinks = std::string_view(pattern) == "causal";
    EXPECT_EQ(judge(test), "");
  }
}

// Messages that complete late and out of order, receive buffers that hold garbage until waited for, sends that are checked for
// having been left alone: on both queues.
TEST_P(Strategies, HostileTransport) {
  for (const bool fake_device : {false, true}) {
    for (const char* pattern : {"causal", "dilated:16x1,32x4"}) {
      Case test = make(pattern, 4);
      test.execute.fake_device = fake_device;
      test.wrap = [](Communicator& inner) {
        return std::make_unique<comm_testing::HostileCommunicator>(inner, 17 + static_cast<std::uint64_t>(inner.rank()));
      };
      EXPECT_EQ(judge(test), "");
    }
  }
}

TEST_P(Strategies, ForwardOnly) {
  Case test = make("causal", 3);
  test.options.backward = false;
  EXPECT_EQ(judge(test), "");
}

// Small tasks, which the ranges of threads cut.
TEST(Threads, SameBitsOfSmallTasks) {
  for (const char* pattern :
       {"causal & dilated:4x2,8x4", "causal & dilated:4x2,8x4@torchscale", "window:3,1", "dilated:16x1,32x2"}) {
    Case test;
    test.problem.tokens_q = test.problem.tokens_k = 2000;
    test.problem.heads = test.problem.kv_heads = 2;
    test.problem.head_dim = test.problem.head_dim_v = 16;
    test.problem.pattern = Pattern::parse(pattern);
    const Whole whole(test);
    const Outputs first = run(test, whole);
    for (const int threads : {2, 3, 4, 7}) {
      test.options.threads = threads;
      EXPECT_TRUE(run(test, whole) == first) << pattern << ", " << threads << " threads";
    }
  }
}

// A stride that nobody steps over may be anything.
TEST(Strides, OfDimensionsOfOneElement) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kLeast = std::numeric_limits<std::int64_t>::min();
  Case test = make_case("full", Strategy::local, 1, 300);
  test.problem.tokens_q = 1;
  const Whole whole(test);
  const Outputs expected = run(test, whole);
  EXPECT_EQ(judge(test, whole, expected), "");
  for (const std::int64_t stride : {kMost, kLeast, std::int64_t{1} << 40, std::int64_t{0}}) {
    const Outputs outputs = run(test, whole, [&](Attention& attention, const RankTensors& tensors) {
      ForwardTensors forward = tensors.forward();
      BackwardTensors backward = tensors.backward();
      forward.q.token_stride = forward.o.token_stride = forward.k.batch_stride = forward.v.batch_stride = stride;
      backward.q.token_stride = backward.o.token_stride = backward.d_out.token_stride = backward.dq.token_stride = stride;
      backward.dk.batch_stride = backward.dq.batch_stride = stride;
      attention.forward(forward);
      attention.backward(backward);
    });
    EXPECT_TRUE(outputs == expected) << stride;
  }
}

// The same bits run after run, whatever the number of threads and the queue.
TEST_P(Strategies, SamePlanSameBits) {
  Case test = make("causal", 3, 90);
  const Whole whole(test);
  const Outputs first = run(test, whole);
  EXPECT_EQ(judge(test, whole, first), "");
  EXPECT_TRUE(run(test, whole) == first);
  test.options.threads = 2;
  EXPECT_TRUE(run(test, whole) == first) << "2 threads";
  test.execute.fake_device = true;
  EXPECT_TRUE(run(test, whole) == first) << "fake device";
  const Outputs repeated = run(test, whole, [](Attention& attention, const RankTensors& tensors) {
    for (int repeat = 0; repeat < 3; ++repeat) forward_and_backward(attention, tensors);
  });
  EXPECT_TRUE(repeated == first) << "third run of one Attention";
}

class Buckets : public ::testing::TestWithParam<Strategy> {};
INSTANTIATE_TEST_SUITE_P(Api, Buckets, ::testing::Values(Strategy::exchange, Strategy::ring, Strategy::pass_q),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(Buckets, OfAnySize) {
  for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{4}, std::int64_t{1000}, PlanOptions::kBucketNone}) {
    for (const char* pattern : {"causal", "dilated:16x2,32x4"}) {
      Case test = make_case(pattern, GetParam(), 3, 40);
      test.options.bucket_rows = rows;
      EXPECT_EQ(judge(test), "");
    }
  }
}

// Two layers of a model share one Attention: what backward() reads of the first layer's forward() is kept and given back, or
// lies where each of them says.
TEST_P(Strategies, BackwardOfAnEarlierForward) {
  Case test = make("causal", 3);
  test.problem.dtype = DType::bfloat16;  // keeps o in float32
  test.problem.head_dim_v = test.problem.head_dim;
  const Whole whole(test);
  std::atomic<std::size_t> kept{0};
  const auto interleaved = [&](bool given, Attention& attention, const RankTensors& tensors) {
    const std::size_t bytes = attention.saved().size();
    const SharedMemory places(2 * (bytes + 64));  // of pages
    const std::span<std::byte> mine = places.bytes().first(bytes);
    ForwardTensors forward = tensors.forward();
    if (given) forward.saved = mine;
    attention.forward(forward);
    if (!given) std::copy(attention.saved().begin(), attention.saved().end(), mine.begin());
    kept += bytes;

    ForwardTensors other = tensors.forward();
    std::swap(other.k, other.v);
    std::vector<std::uint16_t> o(static_cast<std::size_t>(tensors.shard_q.rows * 4 * 16));
    std::vector<float> lse(static_cast<std::size_t>(tensors.shard_q.rows * 4));
    other.o = dense_bshd(o.data(), tensors.shard_q.rows, 4, 16);
    other.lse = dense_bhsd(lse.data(), tensors.shard_q.rows, 4, 1);
    if (given) other.saved = places.bytes().subspan((bytes + 63) / 64 * 64, bytes);
    attention.forward(other);

    BackwardTensors backward = tensors.backward();
    if (given) {
      backward.saved = mine;
    } else {
      attention.restore_saved(mine);
    }
    attention.backward(backward);
  };
  const Outputs expected = run(test, whole);
  for (const bool given : {false, true}) {
    const auto script = [&](Attention& attention, const RankTensors& tensors) { interleaved(given, attention, tensors); };
    EXPECT_TRUE(run(test, whole, script) == expected) << (given ? "given" : "copied");
  }
  EXPECT_GT(kept, 0U);
}

TEST(Seed, OfLaterPassesReplacesTheProblems) {
  Case test = make_case("causal", Strategy::ring, 2, 20);
  test.problem.dropout = 0.4F;
  test.problem.seed = 5;
  Case expected = test;
  expected.problem.seed = 6;
  const Whole whole(test);
  const Outputs outputs = run(test, whole, [](Attention& attention, const RankTensors& tensors) {
    forward_and_backward(attention, tensors);
    attention.set_seed(6);
    forward_and_backward(attention, tensors);
  });
  EXPECT_EQ(outputs, run(expected, whole));
  EXPECT_FALSE(outputs == run(test, whole));
}

// The judge of all of the above sees a single wrong element of any output.
TEST(Judge, SeesOneWrongElement) {
  Case test = make_case("causal", Strategy::ring, 2, 20);
  test.problem.sinks = true;
  const Whole whole(test);
  const Outputs right = run(test, whole);
  EXPECT_EQ(judge(test, whole, right), "");
  const auto failure = [&](auto&& spoil) {
    Outputs wrong = right;
    spoil(wrong);
    return judge(test, whole, wrong);
  };
  const auto nudge = [](std::vector<std::byte>& tensor) { reinterpret_cast<float*>(tensor.data())[7] += 1e-3F; };
  EXPECT_NE(failure([&](Outputs& outputs) { nudge(outputs.o); }).find("o: failed, 1 of"), std::string::npos);
  EXPECT_NE(failure([&](Outputs& outputs) { nudge(outputs.dq); }).find("dq: failed, 1 of"), std::string::npos);
  EXPECT_NE(failure([&](Outputs& outputs) { nudge(outputs.dk); }).find("dk: failed, 1 of"), std::string::npos);
  EXPECT_NE(failure([&](Outputs& outputs) { nudge(outputs.dv); }).find("dv: failed, 1 of"), std::string::npos);
  EXPECT_NE(failure([](Outputs& outputs) { outputs.lse[3] += 1e-3F; }).find("lse: failed, 1 of"), std::string::npos);
  EXPECT_NE(failure([](Outputs& outputs) { outputs.dsinks[1] += 1e-3F; }).find("dsinks: failed, 1 of"), std::string::npos);
}

TEST(Automatic, FindsAPlanThatIsRight) {
  for (const int ranks : {1, 2, 5}) EXPECT_EQ(judge(make_case("causal", Strategy::automatic, ranks)), "");
}

}  // namespace
}  // namespace ringspan::testing
