// Several ranks, each with its shard in pinned memory of its host: results against the float64 oracle.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/host_stream_world.h"

namespace ringspan::testing {
namespace {

Case make_ranks(int ranks, const char* sharding, std::string_view pattern, std::int64_t rows, std::int64_t tokens = 61) {
  Case test = make_case(pattern, rows, tokens);
  test.problem.ranks = ranks;
  test.problem.sharding_q = test.problem.sharding_k = Sharding::parse(sharding);
  return test;
}

// Each rank's shard on its host: pieces of all ranks pass by, over messages that the host moves or from device to device.
TEST(HostStreamOfRanks, PatternsAndShardings) {
  std::int64_t rows = 5;
  for (const int ranks : {2, 3}) {
    for (const auto& [sharding, pattern] :
         std::vector<std::pair<const char*, const char*>>{{"contiguous", "full"},
                                                          {"zigzag", "causal"},
                                                          {"striped", "window:5,3"},
                                                          {"contiguous", "causal & window:7,-1"},
                                                          {"block_striped:4", "documents & causal"},
                                                          {"contiguous", "dilated:16x1,32x2,64x4"},
                                                          {"zigzag", "dilated:16x1,32x4@head_groups & causal"}}) {
      Case test = make_ranks(ranks, sharding, pattern, rows);
      EXPECT_EQ(judge_streamed(test), "") << sharding << " " << pattern;
      rows = rows * 2 % 41;
    }
  }
  Case peers = make_ranks(3, "zigzag", "causal", 6);
  peers.peer_copies = true;
  peers.devices.assign(3, test_device());
  EXPECT_EQ(judge_streamed(peers), "");
}

TEST(HostStreamOfRanks, OptionsAndDTypes) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case test = make_ranks(3, "zigzag", "causal", 8);
    test.problem.dtype = dtype;
    test.problem.softcap = 15.0F;
    test.problem.alibi = test.problem.sinks = true;
    test.problem.dropout = 0.2F;
    test.dlse = true;
    EXPECT_EQ(judge_streamed(test), "");
    test.dlse = false;
    test.options.backward = false;
    EXPECT_EQ(judge_streamed(test), "");
  }
}

// Ranks without queries, without keys, with fewer pieces than others, with one.
TEST(HostStreamOfRanks, UnevenAndEmptyShards) {
  for (const auto& [queries, keys] :
       {std::pair{5, 40}, std::pair{40, 5}, std::pair{3, 3}, std::pair{0, 13}, std::pair{13, 0}, std::pair{2, 61}}) {
    for (const std::int64_t rows : {3, 1000}) {
      Case test = make_ranks(4, "contiguous", "full", rows);
      test.problem.tokens_q = queries;
      test.problem.tokens_k = keys;
      test.problem.sinks = true;
      EXPECT_EQ(judge_streamed(test), "") << queries << " x " << keys << " in pieces of " << rows;
    }
  }
  Case lengths = make_ranks(3, "zigzag", "causal", 7);
  lengths.problem.lengths_q = lengths.problem.lengths_k = {61, 20};
  EXPECT_EQ(judge_streamed(lengths), "");
}

TEST(HostStreamOfRanks, RandomProblems) {
  int run = 0;
  for (std::uint64_t index = 0; run < 10; ++index) {
    std::optional<Case> test = draw(22, index, 5'000'000);
    if (!test) continue;
    const Problem drawn = test->problem;
    stream(*test, most_tokens(drawn) / 11 + 1 + static_cast<std::int64_t>(index % 5));
    test->problem.ranks = drawn.ranks;
    test->problem.sharding_q = drawn.sharding_q;
    test->problem.sharding_k = drawn.sharding_k;
    test->problem.replicated_q = false;
    EXPECT_EQ(judge_streamed(*test), "") << "case " << index << " of seed 22, pieces of " << test->options.bucket_rows;
    ++run;
  }
}

TEST(HostStreamOfRanks, SameBitsHoweverMessagesGo) {
  Case test = make_ranks(2, "zigzag", "causal", 16, 90);
  test.problem.dtype = DType::float16;
  const Whole whole(test);
  const Outputs first = stream_on_device(test, whole);
  test.seed = 2;  // of the delays
  EXPECT_EQ(stream_on_device(test, whole), first);
  test.peer_copies = true;
  test.devices.assign(2, test_device());
  EXPECT_EQ(stream_on_device(test, whole), first);
}

}  // namespace
}  // namespace ringspan::testing
