// Allocations inside forward and backward, after one warm-up of both: none, on any thread, whatever the strategy, the transport
// and the queue.
#include <gtest/gtest.h>

#include <barrier>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "alloc/counting.h"
#include "api_testing/world.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

// The counter itself: it sees every way to allocate, from any thread.
TEST(Counting, SeesEveryWayToAllocate) {
  const auto counts = [](auto&& allocate) {
    start_counting();
    allocate();
    stop_counting();
    return counted().count;
  };
  const auto use = [](void* memory) {
    asm volatile("" : : "r"(memory) : "memory");  // keeps the compiler from removing the pair
    return memory;
  };
  EXPECT_EQ(counts([] {}), 0);
  EXPECT_EQ(counts([&] { std::free(use(std::malloc(8))); }), 1);
  EXPECT_EQ(counts([&] { std::free(use(std::calloc(2, 8))); }), 1);
  EXPECT_EQ(counts([&] { std::free(use(std::aligned_alloc(64, 64))); }), 1);
  EXPECT_EQ(counts([&] { delete static_cast<int*>(use(new int)); }), 1);
  EXPECT_EQ(counts([&] { ::operator delete(use(::operator new(64, std::align_val_t{64})), std::align_val_t{64}); }), 1);
  std::vector<int> values;
  EXPECT_EQ(counts([&] { values.resize(100); }), 1);
  EXPECT_GE(counts([&] { std::thread([&] { std::free(use(std::malloc(8))); }).join(); }), 2);
}

Case make_case(Strategy strategy, const char* pattern = "causal") {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = 75;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = p.head_dim_v = 16;
  p.ranks = 3;
  p.pattern = Pattern::parse(pattern);
  test.options.strategy = strategy;
  return test;
}

// What all ranks together (threads), or the worst rank (processes), allocate in two forward and backward passes.
void expect_none(Case test) {
  const Whole whole(test);
  for (const Ranks ranks : {Ranks::threads, Ranks::processes}) {
    test.ranks = ranks;
    std::barrier meeting(ranks == Ranks::threads ? test.problem.ranks : 1);
    SCOPED_TRACE(to_string(test));
    std::string found;
    const RankScript script = [&](Attention& attention, const RankTensors& tensors) {
      const bool first = ranks == Ranks::processes || attention.plan().rank() == 0;
      forward_and_backward(attention, tensors);
      meeting.arrive_and_wait();
      if (first) start_counting();
      meeting.arrive_and_wait();
      forward_and_backward(attention, tensors);
      forward_and_backward(attention, tensors);
      meeting.arrive_and_wait();
      if (!first) return;
      stop_counting();
      const Allocations allocations = counted();
      if (allocations.count == 0) return;
      throw Error(std::to_string(allocations.count) + " allocations of " + std::to_string(allocations.bytes) +
                  " bytes, the first at" + allocations.first);
    };
    try {
      run(test, whole, script);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST(Allocations, NoneWhateverTheStrategy) {
  for (const Strategy strategy :
       {Strategy::local, Strategy::all_gather, Strategy::exchange, Strategy::ring, Strategy::pass_q, Strategy::ulysses}) {
    expect_none(make_case(strategy));
  }
}

TEST(Allocations, NoneInBuckets) {
  Case test = make_case(Strategy::ring, "dilated:16x1,32x2 & causal");
  test.options.bucket_rows = 5;
  expect_none(test);
}

TEST(Allocations, NoneIn16Bits) {
  Case test = make_case(Strategy::exchange);
  test.problem.dtype = DType::bfloat16;
  expect_none(test);
}

TEST(Allocations, NoneWithThreads) {
  Case test = make_case(Strategy::ring);
  test.options.threads = 3;
  expect_none(test);
}

TEST(Allocations, NoneWithEveryOption) {
  Case test = make_case(Strategy::exchange);
  test.problem.softcap = 4.0F;
  test.problem.alibi = test.problem.sinks = test.dlse = true;
  test.problem.dropout = 0.2F;
  test.execute.trace = true;
  expect_none(test);
}

TEST(Allocations, NoneWithReplicatedQueries) {
  Case test = make_case(Strategy::ring);
  test.problem.replicated_q = true;
  expect_none(test);
}

TEST(Allocations, NoneOnTheFakeDevice) {
  Case test = make_case(Strategy::pass_q);
  test.execute.fake_device = true;
  expect_none(test);
}

}  // namespace
}  // namespace ringspan::testing
