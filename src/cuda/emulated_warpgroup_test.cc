// The emulated warpgroup operations against the PTX ISA, whose layouts are written out here once more by themselves, and the
// rules that a program must not break.
#include "cuda/emulated_warpgroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "cuda/tile_policy.h"
#include "cuda/tile_ring.h"
#include "cuda/warpgroup_tile.h"

namespace ringspan::cuda {
namespace {

constexpr int kThreads = 256;
using Machine = EmulatedHopperMachine<kThreads>;
using Policy = WarpgroupForward<DType::bfloat16, 128, false>;

// "Matrix Descriptor Format": bits 13-0, 29-16 and 45-32 are (x & 0x3ffff) >> 4; 51-49 base offset; 63-62 swizzle, 1: 128
// bytes.
TEST(WarpgroupDescriptor, Bits) {
  const std::uint64_t d = descriptor(0x2a400, 0x4000, 0x400);
  EXPECT_EQ(d & 0x3fff, 0x2a40U);
  EXPECT_EQ(d >> 16 & 0x3fff, 0x400U);
  EXPECT_EQ(d >> 32 & 0x3fff, 0x40U);
  EXPECT_EQ(d >> 62, 1U);
  EXPECT_EQ(d & ~0x40003fff3fff3fffULL, 0U);
  EXPECT_EQ(descriptor(0x1c0000 | 0x400, 0, 0) & 0x3fff, 0x40U) << "18 bits of an address";
  EXPECT_EQ(offset_k<128>(64, 96), 128 * 128 + 64 * 128 + 64) << "second panel, chunk 4 of row 64";
  EXPECT_EQ(descriptor_mn<128>(0x400) >> 16 & 0x3fff, 128 * 128U >> 4) << "from panel to panel";
  for (const int bytes : {0, 32, 0x1c000}) {
    EXPECT_EQ(advance(descriptor_mn<128>(0x20000), bytes), descriptor_mn<128>(0x20000U + static_cast<std::uint32_t>(bytes)));
  }
}

// Shared memory with A (128 x 128) and B (128 x 128) as tiles, brought there by copies.
struct World {
  World() {
    machine.init_barrier(barrier(), kThreads);
    std::mt19937 random(11);
    for (auto* matrix : {&a, &b}) {
      matrix->resize(128 * 128);
      for (std::uint16_t& x : *matrix) x = float_to_bfloat16(static_cast<float>(static_cast<int>(random() % 9) - 4));
    }
  }
  RowsView<const std::uint16_t> rows(const std::vector<std::uint16_t>& matrix) const { return {matrix.data(), 128}; }
  unsigned char* a_tile() { return shared.data() + 1008; }  // shared memory begins at address 16
  unsigned char* b_tile() { return a_tile() + 128 * 256; }
  void copy() {
    copy_swizzled<128, 128, std::uint16_t>(machine, a_tile(), {rows(a), 0, 128, 128});
    copy_swizzled<128, 128, std::uint16_t>(machine, b_tile(), {rows(b), 0, 128, 128});
    machine.arrive_when_copied(barrier());
  }
  std::uint32_t barrier() { return block.address_of(b_tile() + 128 * 256); }
  void wait() { machine.wait(barrier(), phase++ % 2); }
  void arrive() {
    wait();
    machine.fence_async();
    machine.sync();
  }
  void multiply() { product_rows<Policy>(machine, c, machine.shared_address(a_tile()), machine.shared_address(b_tile())); }
  static float value(const std::vector<std::uint16_t>& matrix, int row, int column) {
    return bfloat16_to_float(matrix[static_cast<std::size_t>(row * 128 + column)]);
  }

  std::vector<std::uint16_t> a, b;
  std::vector<unsigned char> shared = std::vector<unsigned char>(2 * 128 * 256 + 1088);
  EmulatedBlock block{shared.data(), static_cast<int>(shared.size())};
  Machine machine{block};
  int phase = 0;
  Machine::Registers<float, 64> c;
  Machine::Registers<std::uint32_t, 32> w;
};

// In 16 bytes, before the swizzle: element (row, k) of the panel k / 64 at ((row % 8, row / 8), k / 8 % 8) : ((8, 64), 1); then
// bits 4-6 of the address are xored with bits 7-9.
TEST(EmulatedWarpgroup, TilesAreSwizzled) {
  const auto world = std::make_unique<World>();
  world->copy();
  world->arrive();
  for (int row = 0; row < 128; ++row) {
    for (int k = 0; k < 128; ++k) {
      int address = (k / 64 * 128 / 8 * 64 + row / 8 * 64 + row % 8 * 8 + k % 64 / 8) * 16;
      address ^= (address / 128 % 8) * 16;
      std::uint16_t bits = 0;
      std::memcpy(&bits, world->a_tile() + address + k % 8 * 2, 2);
      ASSERT_EQ(bits, world->a[static_cast<std::size_t>(row * 128 + k)]) << row << ' ' << k;
    }
  }
}

// D fragment: thread T of a warpgroup has rows 16 (T / 32) + T % 32 / 4 + 8 (i / 2 % 2), columns 8 (i / 4) + 2 (T % 4) + i % 2.
TEST(EmulatedWarpgroup, ProductOfRows) {
  const auto world = std::make_unique<World>();
  world->copy();
  world->arrive();
  world->machine.fence_registers(world->c);
  world->multiply();
  world->machine.commit_products();
  world->machine.wait_products<0>(world->c);
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int i = 0; i < 64; ++i) {
      const int row = thread / 128 * 64 + thread % 128 / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float expected = 0;
      for (int k = 0; k < 128; ++k) expected += World::value(world->a, row, k) * World::value(world->b, column, k);
      ASSERT_EQ(world->c[thread][i], expected) << thread << ' ' << i;
    }
  }
}

// A fragment from registers: a0 a1 of row T % 32 / 4, a2 a3 eight below, both columns 2 (T % 4); a4 .. a7 the same, columns
// + 8.
TEST(EmulatedWarpgroup, ProductOfWeights) {
  const auto world = std::make_unique<World>();
  world->copy();
  world->arrive();
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int i = 0; i < 64; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      world->c[thread][i] = static_cast<float>(row);
      const int k = i / 8 * 16 + i % 8 / 4 * 8 + thread % 4 * 2 + i % 2;
      std::uint32_t& pair = world->w[thread][i / 2];
      const std::uint32_t bits = world->a[static_cast<std::size_t>(row * 128 + k)];
      pair = i % 2 == 0 ? bits : pair | bits << 16;
    }
  }
  world->machine.fence_registers(world->c, world->w);
  product_weights<Policy>(world->machine, world->c, world->w, world->machine.shared_address(world->b_tile()));
  world->machine.commit_products();
  world->machine.wait_products<0>(world->c, world->w);
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int i = 0; i < 64; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      auto expected = static_cast<float>(row);
      for (int k = 0; k < 128; ++k) expected += World::value(world->a, row, k) * World::value(world->b, k, column);
      ASSERT_EQ(world->c[thread][i], expected) << thread << ' ' << i;
    }
  }
}

TEST(EmulatedWarpgroup, CopiesFillWithZeros) {
  const auto world = std::make_unique<World>();
  copy_swizzled<128, 128, std::uint16_t>(world->machine, world->a_tile(), {world->rows(world->a), 1, 3, 19});
  // Rows that begin at odd addresses: element by element.
  copy_swizzled<128, 128, std::uint16_t>(world->machine, world->b_tile(), {{world->a.data() + 1, 127}, 1, 3, 19});
  world->machine.arrive_when_copied(world->barrier());
  world->arrive();
  for (int row = 0; row < 128; ++row) {
    for (int k = 0; k < 128; ++k) {
      const bool inside = row < 3 && k < 19;
      const int offset = chunk_offset<128>(row, k / 8) + k % 8 * 2;
      std::uint16_t copied = 0, stored = 0;
      std::memcpy(&copied, world->a_tile() + offset, 2);
      std::memcpy(&stored, world->b_tile() + offset, 2);
      ASSERT_EQ(copied, inside ? world->a[static_cast<std::size_t>((row + 1) * 128 + k)] : 0);
      ASSERT_EQ(stored, inside ? world->a[static_cast<std::size_t>(1 + (row + 1) * 127 + k)] : 0);
    }
  }
}

// What the hardware copies from a map is what threads copy: 64 columns per box, zeros beyond the last one.
TEST(EmulatedWarpgroup, MappedTilesAreTheSame) {
  for (const int width : {128, 72}) {
    const auto world = std::make_unique<World>();
    copy_swizzled<64, 128, std::uint16_t>(world->machine, world->a_tile(), {world->rows(world->a), 5, 64, width});
    world->machine.arrive_when_copied(world->barrier());
    world->wait();
    TileMaps maps;
    maps.maps[maps.count++] = {world->a.data() + 128, 128, 0, 0, 127, 1, 1, width};
    copy_mapped_tile<64, 128>(world->machine, world->b_tile(), maps, 0, {0, 4, 0, 0}, world->barrier());
    EXPECT_NE(std::memcmp(world->a_tile(), world->b_tile(), 64 * 256), 0) << "nobody has waited";
    world->machine.arrive_threads(world->barrier());
    world->wait();
    EXPECT_EQ(std::memcmp(world->a_tile(), world->b_tile(), 64 * 256), 0) << width;
  }
}

// Runs `program` on a new world and returns what rule it broke.
template <typename Program>
std::string broken_rule(Program&& program) {
  const auto world = std::make_unique<World>();
  try {
    program(*world);
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return {};
}

TEST(EmulatedWarpgroup, RulesOfSharedMemory) {
  const auto multiplies = [](auto prepare) {
    return broken_rule([&](World& world) {
      world.copy();
      prepare(world);
      world.machine.fence_registers(world.c);
      world.multiply();
    });
  };
  EXPECT_THAT(multiplies([](World& w) { w.wait(), w.machine.fence_async(), w.machine.sync(); }), ::testing::IsEmpty());
  EXPECT_THAT(multiplies([](World& w) { w.machine.fence_async(), w.machine.sync(); }),
              ::testing::HasSubstr("before its copy was waited for"));
  EXPECT_THAT(multiplies([](World& w) { w.wait(), w.machine.sync(); }), ::testing::HasSubstr("without fence_async"));
  EXPECT_THAT(multiplies([](World& w) { w.wait(), w.machine.fence_async(); }), ::testing::HasSubstr("without a barrier"));
  EXPECT_THAT(multiplies([](World& w) { w.wait(), w.machine.sync(), w.machine.fence_async(); }),
              ::testing::HasSubstr("without a barrier"))
      << "the fence comes before the barrier";
  EXPECT_THAT(multiplies([](World& w) { w.machine.fence_async(), w.wait(), w.machine.sync(); }),
              ::testing::HasSubstr("without fence_async"))
      << "the fence comes after the wait";
  EXPECT_THAT(broken_rule([](World& world) {
                world.machine.fence_registers(world.c);
                world.multiply();
              }),
              ::testing::HasSubstr("never written"));
}

TEST(EmulatedWarpgroup, RulesOfBuffers) {
  const auto writes = [](auto prepare) {
    return broken_rule([&](World& world) {
      world.copy();
      world.arrive();
      world.machine.fence_registers(world.c);
      world.multiply();
      world.machine.commit_products();
      prepare(world);
      world.copy();
    });
  };
  EXPECT_THAT(writes([](World& w) { w.machine.wait_products<0>(w.c), w.machine.sync(); }), ::testing::IsEmpty());
  EXPECT_THAT(writes([](World& w) { w.machine.sync(); }), ::testing::HasSubstr("an unfinished product reads"));
  EXPECT_THAT(writes([](World& w) { w.machine.wait_products<0>(w.c); }), ::testing::HasSubstr("without a barrier"));
  EXPECT_THAT(broken_rule([](World& world) {
                world.copy();
                world.copy();
              }),
              ::testing::HasSubstr("a copy to it is under way"));
  EXPECT_THAT(broken_rule([](World& world) {
                world.machine.store_shared(0, world.a_tile(), {});
                world.machine.load_shared(0, world.a_tile());
              }),
              ::testing::HasSubstr("without a barrier"));
  EXPECT_THAT(broken_rule([](World& world) {
                world.copy();
                world.wait();
                world.machine.load_shared(0, world.a_tile());
              }),
              ::testing::IsEmpty())
      << "all threads met where they waited for their copies";
}

// What ordinary instructions have read, the hardware's copies overwrite after a fence only.
TEST(EmulatedWarpgroup, RulesOfBoxes) {
  const auto overwrites = [](auto prepare) {
    return broken_rule([&](World& world) {
      world.copy();
      world.arrive();
      world.machine.load_shared(0, world.a_tile());
      prepare(world);
      TileMaps maps;
      maps.maps[maps.count++] = {world.a.data(), 128, 0, 0, 127, 1, 1, 128};
      copy_mapped_tile<64, 128>(world.machine, world.a_tile(), maps, 0, {0, 4, 0, 0}, world.barrier());
    });
  };
  EXPECT_THAT(overwrites([](World& w) { w.machine.fence_async(), w.machine.sync(); }), ::testing::IsEmpty());
  EXPECT_THAT(overwrites([](World& w) { w.machine.sync(); }), ::testing::HasSubstr("without fence_async() since it was read"));
}

TEST(EmulatedWarpgroup, RulesOfRegisters) {
  const auto runs = [](auto program) {
    return broken_rule([&](World& world) {
      world.copy();
      world.arrive();
      program(world);
    });
  };
  EXPECT_THAT(runs([](World& w) { w.multiply(); }), ::testing::HasSubstr("touched since the last fence_registers"));
  EXPECT_THAT(runs([](World& w) {
                w.machine.fence_registers(w.c);
                w.c[0][0] = 1.0F;
                w.multiply();
              }),
              ::testing::HasSubstr("touched since the last fence_registers"));
  EXPECT_THAT(runs([](World& w) {
                w.machine.fence_registers(w.c);
                w.multiply();
                w.machine.commit_products();
                w.c[0][0] = 1.0F;
              }),
              ::testing::HasSubstr("a product that was not waited for are touched"));
  EXPECT_THAT(runs([](World& w) {
                w.machine.fence_registers(w.c);
                w.multiply();
                w.machine.commit_products();
                w.machine.wait_products<1>(w.c);
              }),
              ::testing::HasSubstr("taken back from a product"));
  EXPECT_THAT(runs([](World& w) {
                w.machine.fence_registers(w.c);
                w.multiply();
                w.machine.wait_products<0>(w.c);
              }),
              ::testing::HasSubstr("not committed"));
}

// A role that copies tiles of B, two buffers in turn, and one that multiplies A by each.
struct Roles : World {
  static constexpr int kTiles = 5;
  using Producer = EmulatedHopperMachine<128>;

  Roles() {
    TileRing<1>(address(0)).init(machine, 128, kThreads / 32);
    TileRing<2>(address(1)).init(machine, 128, kThreads / 32);
  }
  std::uint32_t address(int ring) { return block.address_of(b_tile() + 2 * 64 * 256) + static_cast<std::uint32_t>(ring) * 16; }
  unsigned char* buffer(int index) { return b_tile() + index * 64 * 256; }

  virtual void produce() {
    TileRing<1> a_ring(address(0));
    copy_swizzled<128, 128, std::uint16_t>(producer, a_tile(), {rows(a), 0, 128, 128});
    a_ring.publish(producer);
    TileRing<2> ring(address(1));
    for (int tile = 0; tile < kTiles; ++tile) produce(ring, tile);
  }
  virtual void produce(TileRing<2>& ring, int tile) {
    ring.acquire(producer);
    copy_b(ring, tile);
    ring.publish(producer);
  }
  void copy_b(const TileRing<2>& ring, int tile) {  // every other one element by element
    const RowsView<const std::uint16_t> from = {b.data() + tile % 2, 128};
    copy_swizzled<64, 128, std::uint16_t>(producer, buffer(ring.buffer()), {from, 0, 64, 128});
  }

  virtual void consume() {
    TileRing<1>(address(0)).wait(machine);
    TileRing<2> ring(address(1));
    for (int tile = 0; tile < kTiles; ++tile) consume(ring, tile);
  }
  virtual void consume(TileRing<2>& ring, int tile) {
    ring.wait(machine);
    machine.fence_async();
    begin_product(ring);
    machine.wait_products<0>(sums);
    ring.release(machine);
    expect_sums(tile);
  }
  void begin_product(const TileRing<2>& ring) {
    machine.fence_registers(sums);
    product_rows<WarpgroupBackward<DType::bfloat16, 128, false>>(machine, sums, block.address_of(a_tile()),
                                                                 block.address_of(buffer(ring.buffer())));
    machine.commit_products();
  }
  void expect_sums(int tile) {
    for (int thread = 0; thread < kThreads; ++thread) {
      const Lane lane = lane_of(thread);
      float expected = 0;
      for (int k = 0; k < 128; ++k) {
        expected += value(a, lane.row, k) * value(b, 0, lane.column * 128 + tile % 2 + k);
      }
      ASSERT_EQ(sums[thread][0], expected) << tile << ' ' << thread;
    }
    ++multiplied;
  }

  std::string broken_rule() {
    try {
      block.run_roles({[&] { consume(); }, [&] { produce(); }});
    } catch (const std::logic_error& error) {
      return error.what();
    }
    return {};
  }

  virtual ~Roles() = default;
  Producer producer{block, 1};
  Machine::Registers<float, 32> sums;
  int multiplied = 0;
};

TEST(EmulatedRoles, TilesGoThroughRings) {
  const auto roles = std::make_unique<Roles>();
  EXPECT_THAT(roles->broken_rule(), ::testing::IsEmpty());
  EXPECT_EQ(roles->multiplied, Roles::kTiles);
}

template <typename Broken>
std::string rule_of_roles() {
  return std::make_unique<Broken>()->broken_rule();
}

TEST(EmulatedRoles, RulesOfRings) {
  struct WithoutFence : Roles {
    void consume(TileRing<2>& ring, int) override { ring.wait(machine), begin_product(ring); }
  };
  EXPECT_THAT(rule_of_roles<WithoutFence>(), ::testing::HasSubstr("without fence_async"));
  struct FenceBeforeWait : Roles {
    void consume(TileRing<2>& ring, int) override { machine.fence_async(), ring.wait(machine), begin_product(ring); }
  };
  EXPECT_THAT(rule_of_roles<FenceBeforeWait>(), ::testing::HasSubstr("without fence_async"));
  struct WithoutWait : Roles {
    void consume(TileRing<2>& ring, int) override { machine.fence_async(), begin_product(ring); }
  };
  EXPECT_THAT(rule_of_roles<WithoutWait>(), ::testing::HasSubstr("a product reads shared memory"));
  struct WithoutAcquire : Roles {
    void produce(TileRing<2>& ring, int tile) override { copy_b(ring, tile), ring.publish(producer); }
  };
  EXPECT_THAT(rule_of_roles<WithoutAcquire>(), ::testing::HasSubstr("shared memory is written while a copy"));
  struct ArrivesBeforeCopies : Roles {
    void produce(TileRing<2>& ring, int tile) override {
      if (tile > 0) return;
      copy_b(ring, tile);
      for (int i = 0; i < 2; ++i) producer.arrive_threads(address(1) + static_cast<std::uint32_t>(ring.buffer()) * 16);
    }
  };
  EXPECT_THAT(rule_of_roles<ArrivesBeforeCopies>(), ::testing::HasSubstr("before its copy was waited for"));
}

TEST(EmulatedRoles, RulesOfReleases) {
  struct ReleasesEarly : Roles {
    void consume(TileRing<2>& ring, int) override {
      ring.wait(machine);
      machine.fence_async();
      begin_product(ring);
      ring.release(machine);
      if (ring.buffer() == 0) machine.wait_products<0>(sums);
    }
  };
  EXPECT_THAT(rule_of_roles<ReleasesEarly>(), ::testing::HasSubstr("an unfinished product reads"));
  struct ReadsAfterRelease : Roles {
    void consume(TileRing<2>& ring, int) override {
      ring.wait(machine);
      const unsigned char* const tile = buffer(ring.buffer());
      ring.release(machine);
      machine.load_shared(0, tile);
    }
  };
  EXPECT_THAT(rule_of_roles<ReadsAfterRelease>(), ::testing::HasSubstr("since another role read it"));
  struct NeverReleases : Roles {
    void consume(TileRing<2>& ring, int) override { ring.wait(machine); }
    void consume() override { Roles::consume(), TileRing<2>(address(1)).wait(machine), block.wait(0, address(1), 1); }
  };
  EXPECT_THAT(rule_of_roles<NeverReleases>(), ::testing::HasSubstr("roles wait for each other"));
  struct ReleasesTwice : Roles {
    void consume(TileRing<2>& ring, int) override {
      ring.wait(machine);
      for (int i = 0; i < 2; ++i) machine.arrive_warps(address(1) + 8);
      machine.arrive_threads(address(1) + 8);
    }
  };
  EXPECT_THAT(rule_of_roles<ReleasesTwice>(), ::testing::HasSubstr("more arrivals"));
}

}  // namespace
}  // namespace ringspan::cuda
