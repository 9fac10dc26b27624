// EmulatedHopperMachine: warpgroup products and asynchronous copies on a CPU, in lockstep; see warpgroup.h.
//
// What is asynchronous happens as late as the rules allow: copies arrive when they are waited for (emulated_block.h), products
// read shared memory and registers when they are waited for. And each 16 bytes of shared memory and each set of registers knows
// what has been done to it, so that a broken rule throws std::logic_error where it is broken, not as a wrong number later. Sums
// are float32, in ascending order of the inner dimension (tensor cores leave theirs open).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <stdexcept>
#include <vector>

#include "cuda/block_parts.h"
#include "cuda/emulated_block.h"
#include "cuda/emulated_machine.h"
#include "cuda/emulated_product.h"
#include "cuda/tile_maps.h"
#include "cuda/warpgroup.h"

namespace ringspan::cuda {

template <int kBlockThreads>
class EmulatedHopperMachine {
 public:
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kWarpgroups = kThreads / kWarpgroup;

  template <typename T, int kCount>
  class Registers {
   public:
    Registers() = default;
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
    T (&operator[](int thread))[kCount] {
      require(users == 0, "registers of a product that was not waited for are touched");
      touched = true;
      return values[thread];
    }
    T values[kThreads][kCount];
    int users = 0;        // products that were not waited for
    bool touched = true;  // since the last fence
  };

  // One role of the block.
  explicit EmulatedHopperMachine(EmulatedBlock& block, int role = 0) : block_(block), role_(role) {
    std::fill_n(takes_part_, kThreads / 32, true);
  }

  template <DType kType>
  static std::uint32_t pack(float low, float high) {
    return EmulatedMachine<32>::pack<kType>(low, high);
  }
  template <DType kType>
  static std::uint32_t note_non_finite(std::uint32_t pair, std::uint32_t notes) {
    return EmulatedMachine<32>::note_non_finite<kType>(pair, notes);
  }
  template <DType kType>
  static float exp(float x) {
    return std::exp(x);
  }
  template <DType kType>
  static float exp2(float x) {
    return std::exp2(x);
  }

  template <typename Body>
  void each(Body&& body) {
    for (int thread = 0; thread < kThreads; ++thread) {
      if (takes_part_[thread / 32]) body(thread);
    }
  }
  void sync() { block_.sync(role_); }
  void sync_warps() {}
  bool sync_any(Registers<int, 1>& flags) {
    sync();
    bool any = false;
    each([&](int thread) { any = any || flags[thread][0] != 0; });
    return any;
  }
  template <int kCount>
  void quad_max(Registers<float, kCount>& r) {
    reduce(r, [](float a, float b) { return a > b || b != b ? a : b; });  // as fmaxf: a NaN loses
  }
  template <int kCount>
  void quad_sum(Registers<float, kCount>& r) {
    reduce(r, [](float a, float b) { return a + b; });
  }

  std::uint32_t shared_address(const void* p) const { return block_.address_of(p); }

  static int uniform(int value) { return value; }
  static float reciprocal(float x) { return 1.0F / x; }
  static float min_or_nan(float x, float y) { return std::isnan(x) || x < y ? x : y; }
  static int fetch_add(int* counter, int value) { return std::atomic_ref(*counter).fetch_add(value); }
  void any_of_warps(Registers<int, 1>& flags) {
    for (int warp = 0; warp < kThreads; warp += 32) {
      int any = 0;
      for (int lane = 0; lane < 32; ++lane) any |= flags[warp + lane][0] != 0 ? 1 : 0;
      for (int lane = 0; lane < 32; ++lane) flags[warp + lane][0] = any;
    }
  }
  template <typename Body>
  void by_warps(Registers<int, 1>& flags, Body&& body) {
    for (int thread = 0; thread < kThreads; ++thread) {
      require(flags[thread][0] == flags[thread / 32 * 32][0], "the threads of a warp go different ways");
      takes_part_[thread / 32] = flags[thread][0] != 0;
    }
    body();
    std::fill_n(takes_part_, kThreads / 32, true);
  }
  static bool any_lane(bool flag) { return flag; }
  static int hidden(int value) { return value; }

  void copy_async(int, void* to, const void* from, bool valid) {
    require(reinterpret_cast<std::uintptr_t>(from) % 16 == 0, "cp.async takes 16 aligned bytes");
    block_.begin_copy(role_, to, valid ? from : nullptr);
  }
  void store_shared(int, void* to, const Chunk& value) {
    block_.begin_write(role_, shared_address(to));
    std::memcpy(to, &value, 16);
  }
  Chunk load_shared(int, const void* from) {
    block_.check_load(role_, shared_address(from));
    Chunk value;
    std::memcpy(&value, from, 16);
    return value;
  }
  void fence_async() { block_.fence_async(role_); }

  void init_barrier(std::uint32_t barrier, int arrivals) { block_.init_barrier(barrier, arrivals); }
  void arrive_threads(std::uint32_t barrier) { block_.arrive(role_, barrier, kThreads); }
  static constexpr int kArrivalsOfWarp = 1;
  void arrive_warps(std::uint32_t barrier) { block_.arrive(role_, barrier, kThreads / 32); }
  void arrive_when_copied(std::uint32_t barrier) { block_.arrive_when_copied(role_, barrier, kThreads); }
  void prefetch_maps(int) {}
  void expect_bytes(std::uint32_t barrier, int bytes) { block_.expect_bytes(barrier, bytes); }
  template <int kRows>
  void copy_box(const TileMaps& maps, int map, std::uint32_t to, const BoxCorner& corner, std::uint32_t barrier) {
    require(to % kSwizzleBytes == 0, "a box begins at a multiple of the swizzle's pattern");
    const TileMap& from = maps.maps[map];
    for (int row = 0; row < kRows; ++row) {
      for (int chunk = 0; chunk < 8; ++chunk) {
        std::uint16_t elements[8] = {};
        for (int e = 0; e < 8; ++e) {
          const int column = corner.column + chunk * 8 + e;
          const bool inside = column < from.width && corner.row >= 0 && corner.row + row < from.rows &&
                              corner.head < from.heads && corner.item < from.items();
          if (!inside) continue;
          elements[e] =
              static_cast<const std::uint16_t*>(from.begin)[corner.item * from.item_stride() + corner.head * from.head_stride +
                                                            (std::int64_t{corner.row} + row) * from.row_stride + column];
        }
        const std::uint32_t address = to + static_cast<std::uint32_t>(row * kPanelRowBytes + chunk * 16);
        block_.begin_box_copy(role_, address ^ (address >> 7 & 7) << 4, elements);
      }
    }
    block_.count_bytes_when_copied(role_, barrier, kRows * kPanelRowBytes);
  }
  void wait(std::uint32_t barrier, int parity) { block_.wait(role_, barrier, parity); }
  static void note(Phase) {}
  // Warpgroups of a role run in lockstep.
  void begin_turns() {}
  void take_turn() {}
  void pass_turn() {}
  void end_turns() {}

  template <DType kType, int kN, Major kMajor, typename DescribeA>
  void multiply(Registers<float, kN / 2>& c, DescribeA&& describe_a, std::uint64_t b, int accumulate) {
    Product product;
    product.reads = reads_of(b, kMajor, kN);
    for (int group = 0; group < kWarpgroups; ++group) {
      const std::vector<std::uint32_t> more = reads_of(describe_a(group), Major::k, kWarpgroupRows);
      product.reads.insert(product.reads.end(), more.begin(), more.end());
    }
    use(c, product);
    product.run = [this, &c, accumulate](const std::uint32_t* reads) {
      const std::vector<float> columns = load<kType>(kMajor, reads, kN);
      for (int group = 0; group < kWarpgroups; ++group) {
        const std::vector<float> rows = load<kType>(Major::k, reads + kN * 2 + group * kWarpgroupRows * 2, kWarpgroupRows);
        multiply_warpgroup(c.values[group * kWarpgroup], rows.data(), columns.data(), kN, accumulate != 0);
      }
    };
    issue(std::move(product));
  }

  template <DType kType, int kN, int kCount>
  void multiply_from_registers(Registers<float, kN / 2>& c, Registers<std::uint32_t, kCount>& a, int first, std::uint64_t b,
                               int accumulate) {
    Product product;
    product.reads = reads_of(b, Major::mn, kN);
    use(c, product);
    use(a, product);
    product.run = [this, &c, &a, first, accumulate](const std::uint32_t* reads) {
      const std::vector<float> columns = load<kType>(Major::mn, reads, kN);
      for (int group = 0; group < kWarpgroups; ++group) {
        float rows[kWarpgroupRows][kInner];
        for (int thread = 0; thread < kWarpgroup; ++thread) {
          const int row = thread / 32 * 16 + thread % 32 / 4;
          const int column = thread % 4 * 2;
          for (int part = 0; part < 4; ++part) {
            const std::uint32_t pair = a.values[group * kWarpgroup + thread][first + part];
            float* out = &rows[row + part % 2 * 8][column + part / 2 * 8];
            out[0] = kernels::Storage<kType>::load(static_cast<std::uint16_t>(pair));
            out[1] = kernels::Storage<kType>::load(static_cast<std::uint16_t>(pair >> 16));
          }
        }
        multiply_warpgroup(c.values[group * kWarpgroup], rows[0], columns.data(), kN, accumulate != 0);
      }
    };
    issue(std::move(product));
  }

  template <typename... Group>
  void fence_registers(Group&... groups) {
    ((groups.touched = false), ...);
  }
  void commit_products() { products_.emplace_back(); }
  template <int kPending, typename... Group>
  void wait_products(Group&... groups) {
    require(products_.back().empty(), "products are waited for that were not committed");
    while (products_.size() > kPending + 1) {
      for (Product& product : products_.front()) {
        product.run(product.reads.data());
        block_.end_product(role_, product.reads);
        for (int* users : product.users) --*users;
      }
      products_.pop_front();
    }
    require(((groups.users == 0) && ...), "registers are taken back from a product that was not waited for");
  }

 private:
  bool takes_part_[kThreads / 32];  // of each warp, in by_warps()
  struct Product {
    std::function<void(const std::uint32_t* reads)> run;
    std::vector<std::uint32_t> reads;  // chunks of its operands, B first
    std::vector<int*> users;
  };

  // Where an element lies: rows are M or N, k is the inner dimension. Canonical layouts of the 128-byte swizzle, in 16 bytes:
  //   K dense   ((8, m), 2) : ((8, stride), 1)      MN dense   ((8, m), (8, 2)) : ((1, leading), (8, stride))
  // then address bits 4-6 are xored with bits 7-9.
  static std::uint32_t element_address(std::uint64_t descriptor, Major major, int row, int k) {
    const auto field = [&](int bit) { return static_cast<std::uint32_t>(descriptor >> bit & 0x3fffU) << 4; };
    require(descriptor >> 62 == 1 && (descriptor >> 49 & 7) == 0 && (descriptor >> 52 & 0x3ff) == 0 &&
                (descriptor >> 14 & 3) == 0 && (descriptor >> 30 & 3) == 0 && (descriptor >> 46 & 7) == 0,
            "a descriptor is not of the 128-byte swizzle with base offset 0");
    std::uint32_t address = field(0);
    if (major == Major::k) {
      address += static_cast<std::uint32_t>(row / 8) * field(32) + static_cast<std::uint32_t>(row % 8 * 128 + k * 2);
    } else {
      address += static_cast<std::uint32_t>(row / 64) * field(16) + static_cast<std::uint32_t>(row % 64 * 2) +
                 static_cast<std::uint32_t>(k / 8) * field(32) + static_cast<std::uint32_t>(k % 8 * 128);
    }
    return address ^ (address >> 7 & 7) << 4;
  }

  // Chunks of an operand, in the order of load_operand().
  static std::vector<std::uint32_t> reads_of(std::uint64_t descriptor, Major major, int rows) {
    std::vector<std::uint32_t> reads;
    reads.reserve(static_cast<std::size_t>(rows) * 2);
    const int row_step = major == Major::k ? 1 : 8;
    const int k_step = major == Major::k ? 8 : 1;
    for (int row = 0; row < rows; row += row_step) {
      for (int k = 0; k < kInner; k += k_step) reads.push_back(element_address(descriptor, major, row, k));
    }
    return reads;
  }

  template <DType kType>
  std::vector<float> load(Major major, const std::uint32_t* reads, int rows) const {
    const auto elements = static_cast<std::size_t>(rows) * kInner;
    std::vector<std::uint16_t> chunks(elements);
    for (std::size_t i = 0; i < elements / 8; ++i) std::memcpy(&chunks[i * 8], block_.at(reads[i]), 16);
    std::vector<float> operand(elements);
    load_operand(kType, major, chunks.data(), rows, operand.data());
    return operand;
  }

  template <typename Group>
  static void use(Group& group, Product& product) {
    require(!group.touched, "a product uses registers that were touched since the last fence_registers()");
    ++group.users;
    product.users.push_back(&group.users);
  }
  void issue(Product&& product) {
    block_.begin_product(role_, product.reads);
    products_.back().push_back(std::move(product));
  }

  template <int kCount, typename Join>
  void reduce(Registers<float, kCount>& r, Join&& join) {
    for (int quad = 0; quad < kThreads; quad += 4) {
      for (int i = 0; i < kCount; ++i) {
        float v[4];
        for (int t = 0; t < 4; ++t) v[t] = r[quad + t][i];
        const float once[4] = {join(v[0], v[1]), join(v[1], v[0]), join(v[2], v[3]), join(v[3], v[2])};
        for (int t = 0; t < 4; ++t) r[quad + t][i] = join(once[t], once[t ^ 2]);  // as shfl.sync.bfly over lane bits 0, 1
      }
    }
  }

  EmulatedBlock& block_;
  const int role_;
  std::deque<std::vector<Product>> products_ = std::deque<std::vector<Product>>(1);
};

}  // namespace ringspan::cuda
