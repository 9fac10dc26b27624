// The rows of the mission: one named test for each, with the failure of the prototypes that it guards against. docs/mission.md
// maps the prototypes' variants to command lines.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "api_testing/world.h"
#include "base/float16.h"
#include "ringspan/error.h"

namespace ringspan::testing {
namespace {

Case make(std::string_view pattern, Strategy strategy, int ranks, std::int64_t tokens,
          std::string_view sharding = "contiguous") {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 4;
  p.kv_heads = 4;
  p.head_dim = p.head_dim_v = 16;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  p.sharding_q = p.sharding_k = Sharding::parse(sharding);
  test.options.strategy = strategy;
  return test;
}

float at(const std::vector<std::byte>& bytes, DType dtype, std::int64_t index) {
  if (dtype == DType::float32) {
    float value = 0;
    std::memcpy(&value, bytes.data() + index * 4, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes.data() + index * 2, 2);
  return dtype == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

double largest_difference(const std::vector<std::byte>& a, const std::vector<std::byte>& b, DType dtype) {
  double largest = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(a.size()) / size_of(dtype); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(at(a, dtype, i)) - static_cast<double>(at(b, dtype, i))));
  }
  return largest;
}

// "V2 collective" gathered all keys and had no backward pass at all.
TEST(Mission, AllGatherForwardAndBackward) {
  for (const char* pattern : {"full", "causal", "dilated:16x1,32x2,64x4 & causal"}) {
    for (const int ranks : {1, 2, 4}) EXPECT_EQ(judge(make(pattern, Strategy::all_gather, ranks, 131)), "");
  }
}

// The peer-to-peer prototypes were wrong in each of causal, dilated and distributed taken together.
TEST(Mission, AsynchronousRing) {
  for (const char* pattern : {"full", "causal", "dilated:16x1,32x2,64x4", "dilated:16x1,32x2,64x4 & causal"}) {
    for (const char* sharding : {"contiguous", "zigzag", "striped"}) {
      EXPECT_EQ(judge(make(pattern, Strategy::ring, 4, 131, sharding)), "");
    }
  }
}

// The synchronous ring is the same plan with waiting before computing: the same bits.
TEST(Mission, SynchronousRingHasTheSameBits) {
  Case test = make("causal", Strategy::ring, 3, 100, "zigzag");
  const Whole whole(test);
  const Outputs overlapped = run(test, whole);
  test.execute.overlap = false;
  const Outputs synchronous = run(test, whole);
  EXPECT_TRUE(overlapped == synchronous);
  EXPECT_EQ(judge(test, whole, synchronous), "");
}

// The prototypes kept every query on every rank, so memory per rank grew as ranks were added.
TEST(Mission, FullyShardedMemoryFallsAsOneOverP) {
  const auto bytes = [](int ranks, const char* tensor) {
    const Case test = make("causal", Strategy::ring, ranks, 4096);
    for (const MemoryLine& line : make_plan(test.problem, test.options, 0).memory(Pass::backward)) {
      if (line.component == tensor) return line.bytes;
    }
    return std::int64_t{-1};
  };
  for (const char* tensor : {"q", "k", "v", "o", "do", "dq", "dk", "dv", "lse"}) {
    EXPECT_EQ(bytes(4, tensor) * 4, bytes(1, tensor)) << tensor;
  }
}

// With the query replicated each rank returned a different output; here q is whole and equal on every rank, k and v are 1/p,
// and the outputs have the same bits everywhere (run() compares them between ranks).
TEST(Mission, ReplicatedQueryRing) {
  for (const char* pattern : {"full", "causal", "dilated:16x1,32x2,64x4"}) {
    for (const Strategy strategy : {Strategy::ring, Strategy::pass_q}) {
      Case test = make(pattern, strategy, 4, 128);
      test.problem.replicated_q = true;
      EXPECT_EQ(judge(test), "");
      for (int rank = 0; rank < 4; ++rank) {
        for (const MemoryLine& line : make_plan(test.problem, test.options, rank).memory(Pass::forward)) {
          const bool of_keys = line.component == "k" || line.component == "v";
          if (of_keys || line.component == "q") {
            EXPECT_EQ(line.bytes, (of_keys ? 128 / 4 : 128) * 4 * 16 * 4);
          }
        }
      }
    }
  }
}

// Dilation restarted at every chunk: a key's residue was counted from the chunk, not from its segment.
TEST(Mission, DilationAcrossRanksAndChunkBoundaries) {
  for (const Strategy strategy :
       {Strategy::ring, Strategy::exchange, Strategy::all_gather, Strategy::pass_q, Strategy::ulysses}) {
    for (const char* dialect : {"longnet", "torchscale", "head_groups"}) {
      // Segments straddle ranks (3 ranks of 34, 33, 33 rows) and rates do not divide them.
      EXPECT_EQ(judge(make("dilated:10x1,25x3,80x4@" + std::string(dialect), strategy, 3, 100)), "");
      EXPECT_EQ(judge(make("dilated:10x1,25x3,80x4@" + std::string(dialect) + " & causal", strategy, 3, 100)), "");
    }
  }
}

// Two prototypes had gradients of one rank only.
TEST(Mission, BackwardAcrossRanksEqualsOneRank) {
  for (const Strategy strategy : {Strategy::ring, Strategy::exchange, Strategy::ulysses}) {
    Case test = make("dilated:16x1,32x2,64x4 & causal", strategy, 1, 96);
    const Whole whole(test);
    const Outputs one = run(test, whole);
    test.problem.ranks = 4;
    const Outputs four = run(test, whole);
    for (const auto member : {&Outputs::o, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
      EXPECT_LT(largest_difference(one.*member, four.*member, DType::float32), 1e-5);
    }
  }
}

// The prototypes refused lengths that the largest segment does not divide. The sizes of the paper: mission_slow_test.cc
TEST(Mission, NoDivisibilityConstraint) {
  EXPECT_EQ(judge(make("dilated:16x1,32x2,64x4", Strategy::ring, 4, 127)), "");  // prime
  EXPECT_EQ(judge(make("dilated:16x1,32x2,64x4", Strategy::ring, 7, 5)), "");    // fewer tokens than ranks
  EXPECT_EQ(judge(make("causal", Strategy::exchange, 7, 1)), "");
  EXPECT_EQ(judge(make("causal", Strategy::ulysses, 3, 0)), "");
}

// The prototypes allocated temporaries as large as the sequence. Buffers here are a few buckets, whatever n is.
TEST(Mission, BucketsBoundTheBuffers) {
  for (const Strategy strategy : {Strategy::ring, Strategy::exchange, Strategy::pass_q}) {
    Case test = make("causal", strategy, 4, 256, "zigzag");
    test.options.bucket_rows = 16;
    EXPECT_EQ(judge(test), "");
    test.options.bucket_rows = PlanOptions::kBucketNone;
    EXPECT_EQ(judge(test), "");
    const auto buffers = [&](std::int64_t tokens) {
      Case larger = make("causal", strategy, 4, tokens);
      larger.options.bucket_rows = 16;
      std::int64_t bytes = 0;
      for (const MemoryLine& line : make_plan(larger.problem, larger.options, 1).memory(Pass::forward)) {
        if (line.component == "buckets" || line.component == "staging") bytes += line.bytes;
      }
      return bytes;
    };
    EXPECT_EQ(buffers(1024), buffers(8192));
  }
}

// Rows without a key gave NaN, which then spread through the merge.
TEST(Mission, RowsWithoutAKeyAreZero) {
  for (const Strategy strategy : {Strategy::ring, Strategy::all_gather, Strategy::pass_q, Strategy::ulysses, Strategy::local}) {
    Case test = make("causal", strategy, 3, 40);
    test.problem.tokens_k = 25;  // bottom-right: the first 15 queries see nothing
    const Whole whole(test);
    const Outputs outputs = run(test, whole);
    EXPECT_EQ(judge(test, whole, outputs), "");
    const std::int64_t row = 4 * 16;
    for (std::int64_t i = 0; i < 15 * row; ++i) {
      ASSERT_EQ(at(outputs.o, DType::float32, i), 0.0F);
      ASSERT_EQ(at(outputs.dq, DType::float32, i), 0.0F);
    }
    for (int h = 0; h < 4; ++h) EXPECT_EQ(outputs.lse[static_cast<std::size_t>(h * 40)], -INFINITY);
  }
}

// float16 logits overflowed. Here |s| is beyond 65,504 by far and everything stays finite and right.
TEST(Mission, Float16LogitsFarBeyondTheRange) {
  for (const Strategy strategy : {Strategy::ring, Strategy::ulysses}) {
    Case test = make("causal", strategy, 3, 64);
    test.problem.dtype = DType::float16;
    test.problem.scale = 4000.0F;  // q . k is about 4, so the logits are about 16,000 and up to 80,000 and more
    test.gain = 8.0F;
    const Whole whole(test);
    const Outputs outputs = run(test, whole);
    EXPECT_GT(*std::max_element(outputs.lse.begin(), outputs.lse.end()), 65504.0F);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(outputs.o.size()) / 2; ++i) {
      ASSERT_TRUE(std::isfinite(at(outputs.o, DType::float16, i)));
    }
    for (const auto member : {&Outputs::dq, &Outputs::dk, &Outputs::dv}) {
      for (std::int64_t i = 0; i < static_cast<std::int64_t>((outputs.*member).size()) / 2; ++i) {
        ASSERT_FALSE(std::isnan(at(outputs.*member, DType::float16, i)));
      }
    }
  }
}

// Sums of contributions below float16's resolution were lost when partial results travelled in 16 bits.
TEST(Mission, SixteenBitErrorDoesNotGrowWithRanks) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const int ranks : {2, 7}) {
      Case test = make("full", Strategy::ring, ranks, 210);
      test.problem.dtype = dtype;
      EXPECT_EQ(judge(test), "");
    }
  }
}

// The prototypes called .view() on what was not contiguous, or copied it. Here rows lie apart, heads first, NaN between them.
TEST(Mission, StridedInputsAndOutputs) {
  const Case test = make("dilated:16x1,32x2,64x4 & causal", Strategy::ring, 3, 90, "zigzag");
  run(test, Whole(test), [](Attention& attention, const RankTensors& tensors) {
    constexpr std::int64_t kHeads = 4;
    constexpr std::int64_t kDim = 16;
    constexpr std::int64_t kRow = 2 * kDim + 3;
    forward_and_backward(attention, tensors);
    const ForwardTensors dense = tensors.forward();
    const BackwardTensors gradients = tensors.backward();
    const std::int64_t rows = tensors.shard_q.rows;
    const auto apart = [&](const Tensor& tensor, std::vector<float>& memory) {
      memory.assign(static_cast<std::size_t>(kHeads * rows * kRow), NAN);
      const Tensor strided{memory.data(), kHeads * rows * kRow, kRow, rows * kRow};
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          std::memcpy(memory.data() + h * rows * kRow + i * kRow,
                      static_cast<const float*>(tensor.data) + i * tensor.token_stride + h * tensor.head_stride, kDim * 4);
        }
      }
      return strided;
    };
    const auto input = [&](const ConstTensor& tensor, std::vector<float>& memory) {
      return apart({const_cast<void*>(tensor.data), tensor.batch_stride, tensor.token_stride, tensor.head_stride}, memory);
    };
    const auto expect_equal = [&](const Tensor& strided, const Tensor& expected) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t i = 0; i < rows; ++i) {
          ASSERT_EQ(std::memcmp(static_cast<const float*>(strided.data) + i * strided.token_stride + h * strided.head_stride,
                                static_cast<const float*>(expected.data) + i * expected.token_stride + h * expected.head_stride,
                                kDim * 4),
                    0);
        }
      }
    };
    std::vector<float> q, k, v, o, d_out, dq, dk, dv;
    ForwardTensors forward = dense;
    forward.q = input(dense.q, q);
    forward.k = input(dense.k, k);
    forward.v = input(dense.v, v);
    forward.o = apart(dense.o, o);
    std::fill(o.begin(), o.end(), NAN);
    attention.forward(forward);
    expect_equal(forward.o, dense.o);
    BackwardTensors backward = gradients;
    backward.q = forward.q;
    backward.k = forward.k;
    backward.v = forward.v;
    backward.o = forward.o;
    backward.d_out = input(gradients.d_out, d_out);
    backward.dq = apart(gradients.dq, dq);
    backward.dk = apart(gradients.dk, dk);
    backward.dv = apart(gradients.dv, dv);
    for (auto* memory : {&dq, &dk, &dv}) std::fill(memory->begin(), memory->end(), NAN);
    attention.backward(backward);
    expect_equal(backward.dq, gradients.dq);
    expect_equal(backward.dk, gradients.dk);
    expect_equal(backward.dv, gradients.dv);
  });
}

// p ranks on one device or one process: the same plan, the same bits, over threads, processes and a fake asynchronous device.
TEST(Mission, SimulationOfManyRanksHasTheSameBits) {
  Case test = make("dilated:16x1,32x2,64x4 & causal", Strategy::exchange, 4, 90);
  const Whole whole(test);
  const Outputs threads = run(test, whole);
  EXPECT_TRUE(run(test, whole) == threads);
  test.ranks = Ranks::processes;
  EXPECT_TRUE(run(test, whole) == threads);
  test.ranks = Ranks::threads;
  test.execute.fake_device = true;
  EXPECT_TRUE(run(test, whole) == threads);
}

// Memory was one number from the allocator. Here it is a forecast by component, and the parts add up.
TEST(Mission, MemoryByComponent) {
  const Case test = make("causal", Strategy::ring, 4, 1024, "zigzag");
  const Plan plan = make_plan(test.problem, test.options, 2);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::int64_t arena = 0;
    for (const MemoryLine& line : plan.memory(pass)) {
      if (line.in_arena) arena += line.bytes;
    }
    EXPECT_GT(arena, 0);
    EXPECT_LE(arena, plan.arena_bytes());
  }
}

}  // namespace
}  // namespace ringspan::testing
