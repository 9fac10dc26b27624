// The emulated instructions against the tables of the PTX ISA, written out here once more by themselves.
#include "cuda/emulated_machine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

namespace ringspan::cuda {
namespace {

using Machine = EmulatedMachine<64>;

// "ldmatrix": thread T holds elements (T / 4, 2 (T % 4)) and (T / 4, 2 (T % 4) + 1) of each matrix; with .trans those of the
// transposed matrix. Threads 0-7 give the rows of matrix 0, 8-15 of matrix 1, and so on.
TEST(EmulatedMachine, LoadMatrix) {
  alignas(16) std::uint16_t memory[2][4][8][8];
  std::uint16_t next = 1;
  for (auto& warp : memory)
    for (auto& matrix : warp)
      for (auto& row : matrix)
        for (auto& element : row) element = next++;
  Machine machine;
  const auto at = [&](int thread) { return memory[thread / 32][thread % 32 / 8][thread % 8]; };
  Machine::Registers<std::uint32_t, 4> plain, transposed;
  machine.load_matrix<false>(plain, at);
  machine.load_matrix<true>(transposed, at);
  for (int thread = 0; thread < 64; ++thread) {
    for (int x = 0; x < 4; ++x) {
      const auto& matrix = memory[thread / 32][x];
      const int r = thread % 32 / 4, c = 2 * (thread % 4);
      EXPECT_EQ(plain[thread][x], matrix[r][c] | static_cast<std::uint32_t>(matrix[r][c + 1]) << 16);
      EXPECT_EQ(transposed[thread][x], matrix[c][r] | static_cast<std::uint32_t>(matrix[c + 1][r]) << 16);
    }
  }
}

// A (16 x 16), B (16 x 8) and C (16 x 8) are placed into registers by the formulas of "Matrix Fragments for mma.m16n8k16":
//   A: row = groupID for a0 a1 a4 a5, else groupID + 8; column = 2 t + (i & 1), + 8 for i >= 4
//   B: row = 2 t + (i & 1), + 8 for i >= 2; column = groupID        C: row = groupID, + 8 for i >= 2; column = 2 t + (i & 1)
TEST(EmulatedMachine, MultiplyAccumulate) {
  std::mt19937 random(7);
  const auto draw = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };  // exact in 16 bits
  float a[2][16][16], b[2][16][8], c[2][16][8];
  for (int warp = 0; warp < 2; ++warp) {
    for (auto& row : a[warp])
      for (float& x : row) x = draw();
    for (auto& row : b[warp])
      for (float& x : row) x = draw();
    for (auto& row : c[warp])
      for (float& x : row) x = draw();
  }
  Machine machine;
  Machine::Registers<std::uint32_t, 4> a_part, b_part;
  Machine::Registers<float, 8> c_part;
  for (int thread = 0; thread < 64; ++thread) {
    const int w = thread / 32, g = thread % 32 / 4, t = thread % 4;
    std::uint16_t a_bits[8], b_bits[4];
    for (int i = 0; i < 8; ++i) {
      const int row = i == 0 || i == 1 || i == 4 || i == 5 ? g : g + 8;
      a_bits[i] = float_to_bfloat16(a[w][row][2 * t + (i & 1) + (i >= 4 ? 8 : 0)]);
    }
    for (int i = 0; i < 4; ++i) b_bits[i] = float_to_bfloat16(b[w][2 * t + (i & 1) + (i >= 2 ? 8 : 0)][g]);
    for (int i = 0; i < 4; ++i) {
      a_part[thread][i] = a_bits[2 * i] | static_cast<std::uint32_t>(a_bits[2 * i + 1]) << 16;
      b_part[thread][i] = i < 2 ? 0xffffffffU : b_bits[2 * i - 4] | static_cast<std::uint32_t>(b_bits[2 * i - 3]) << 16;
      c_part[thread][i] = 1e9F;
      c_part[thread][4 + i] = c[w][g + (i >= 2 ? 8 : 0)][2 * t + (i & 1)];
    }
  }
  machine.mma<DType::bfloat16>(c_part, 1, a_part, b_part, 1);
  for (int thread = 0; thread < 64; ++thread) {
    const int w = thread / 32, g = thread % 32 / 4, t = thread % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = g + (i >= 2 ? 8 : 0), column = 2 * t + (i & 1);
      float expected = c[w][row][column];
      for (int k = 0; k < 16; ++k) expected += a[w][row][k] * b[w][k][column];
      EXPECT_EQ(c_part[thread][4 + i], expected);
      EXPECT_EQ(c_part[thread][i], 1e9F);
    }
  }
}

TEST(EmulatedMachine, QuadReductionsAndVotes) {
  Machine machine;
  Machine::Registers<float, 2> r;
  Machine::Registers<int, 1> flags;
  for (int thread = 0; thread < 64; ++thread) {
    r[thread][0] = static_cast<float>(thread * 7 % 11);
    r[thread][1] = thread % 4 == 2 ? std::nanf("") : static_cast<float>(-thread);
    flags[thread][0] = 0;
  }
  EXPECT_FALSE(machine.sync_any(flags));
  flags[63][0] = 1;
  EXPECT_TRUE(machine.sync_any(flags));
  Machine::Registers<float, 2> largest = r, sum = r;
  machine.quad_max(largest);
  machine.quad_sum(sum);
  for (int quad = 0; quad < 64; quad += 4) {
    float expected_max = -1, expected_sum = 0;
    for (int i = 0; i < 4; ++i) expected_max = std::max(expected_max, r[quad + i][0]), expected_sum += r[quad + i][0];
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(largest[quad + i][0], expected_max);
      EXPECT_EQ(largest[quad + i][1], static_cast<float>(-quad));
      EXPECT_EQ(sum[quad + i][0], expected_sum);
      EXPECT_TRUE(std::isnan(sum[quad + i][1]));
    }
  }
}

// A block's shared memory: eight chunks, of which copies fill the first ones from `from`.
struct Copies : testing::Test {
  alignas(16) unsigned char shared[128] = {};
  alignas(16) std::uint32_t from[32];
  Machine machine{shared, sizeof shared};

  Copies() {
    for (std::uint32_t i = 0; i < 32; ++i) from[i] = i + 1;
  }
  void copy(int chunk, bool valid = true) { machine.copy_async(0, shared + chunk * 16, from + chunk * 4, valid); }
  std::uint32_t word(int chunk) {
    std::uint32_t value;
    std::memcpy(&value, shared + chunk * 16, 4);
    return value;
  }
  void load() {
    Machine::Registers<std::uint32_t, 4> out;
    machine.load_matrix<false>(out, [&](int) { return shared + 16; });
  }
};

TEST_F(Copies, ArriveWhenWaitedForAtABarrier) {
  copy(1), copy(2, false);
  EXPECT_EQ(word(1), ~0U);
  machine.sync();
  EXPECT_EQ(word(1), ~0U);  // not waited for
  machine.wait_copies();
  EXPECT_EQ(word(1), ~0U);  // other threads' copies
  machine.sync();
  EXPECT_EQ(word(1), 5U);
  EXPECT_EQ(word(2), 0U);
  load();
}

TEST_F(Copies, AreNotReadBeforeTheyArrive) {
  copy(1);
  EXPECT_THROW(load(), std::logic_error);
  EXPECT_THROW(machine.load_shared(0, shared + 16), std::logic_error);
  EXPECT_THROW(machine.store_shared(0, shared + 16, Chunk{}), std::logic_error);
  machine.wait_copies();
  EXPECT_THROW(load(), std::logic_error);
}

TEST_F(Copies, DoNotBeginWhereOthersMayStillRead) {
  load();
  EXPECT_THROW(copy(1), std::logic_error);
  EXPECT_THROW(machine.store_shared(0, shared + 16, Chunk{}), std::logic_error);
  machine.sync();
  copy(1);
}

TEST_F(Copies, TakeAlignedChunks) {
  EXPECT_THROW(machine.copy_async(0, shared + 4, from, true), std::logic_error);
  EXPECT_THROW(machine.copy_async(0, shared, from + 1, true), std::logic_error);
  machine.copy_async(0, shared, from + 1, false);  // not read
}

}  // namespace
}  // namespace ringspan::cuda
