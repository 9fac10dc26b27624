// EmulatedMachine: a block of threads on a CPU, in lockstep; see machine.h.
//
// Registers of all threads lie in memory; a warp-wide instruction gathers its operands from the fragments of the 32 lanes,
// computes, and scatters the result, exactly as the PTX ISA places them. Sums of an mma are float32, in ascending order of the
// inner dimension (tensor cores leave theirs open). Cost: some hundred times that of the CPU kernels.
//
// Asynchronous copies arrive as late as they may: when they have been waited for, at the next barrier; until then there is NaN.
// A machine that knows the shared memory throws std::logic_error where a matrix is loaded from chunks that have not arrived,
// and where a copy begins to chunks that a matrix was loaded from after the last barrier.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/block_parts.h"
#include "cuda/emulated_product.h"

namespace ringspan::cuda {

template <int kBlockThreads>
class EmulatedMachine {
 public:
  static constexpr int kThreads = kBlockThreads;

  template <typename T, int kCount>
  struct Registers {
    T (&operator[](int thread))[kCount] { return values[thread]; }
    T values[kThreads][kCount];
  };

  template <DType kType>
  static std::uint32_t pack(float low, float high) {
    using Storage = kernels::Storage<kType>;
    return static_cast<std::uint32_t>(Storage::store(low)) | static_cast<std::uint32_t>(Storage::store(high)) << 16;
  }
  template <DType kType>
  static FloatPair unpack(std::uint32_t pair) {
    FloatPair floats;
    unpack<kType>(pair, &floats.low);
    return floats;
  }
  template <DType kType>
  static std::uint32_t note_non_finite(std::uint32_t pair, std::uint32_t notes) {
    const FloatPair values = unpack<kType>(pair), sums = unpack<kType>(notes);
    return pack<kType>(0.0F * values.low + sums.low, 0.0F * values.high + sums.high);
  }
  template <DType kType>
  static float exp(float x) {
    return std::exp(x);
  }
  template <DType kType>
  static float exp2(float x) {
    return std::exp2(x);
  }

  static float reciprocal(float x) { return 1.0F / x; }
  static bool any_lane(bool flag) { return flag; }
  static int hidden(int value) { return value; }
  static int uniform(int value) { return value; }

  EmulatedMachine() = default;
  EmulatedMachine(const unsigned char* shared, int bytes)
      : shared_(shared), copied_(static_cast<std::size_t>(bytes / 16)), read_(static_cast<std::size_t>(bytes / 16)) {}

  template <typename Body>
  void each(Body&& body) {
    for (int thread = 0; thread < kThreads; ++thread) body(thread);
  }
  void sync() {
    for (const auto& [to, from] : arrived_) {
      if (from != nullptr) {
        std::memcpy(to, from, 16);
      } else {
        std::memset(to, 0, 16);
      }
      if (shared_ != nullptr) copied_[chunk(to)] = false;
    }
    arrived_.clear();
    std::fill(read_.begin(), read_.end(), false);
  }
  void sync_warps() {}
  bool sync_any(Registers<int, 1>& flags) {
    sync();
    bool any = false;
    each([&](int thread) { any = any || flags[thread][0] != 0; });
    return any;
  }

  void copy_async(int, void* to, const void* from, bool valid) {
    require(reinterpret_cast<std::uintptr_t>(to) % 16 == 0, "cp.async writes 16 aligned bytes");
    require(!valid || reinterpret_cast<std::uintptr_t>(from) % 16 == 0, "cp.async reads 16 aligned bytes");
    begin_write(to);
    if (shared_ != nullptr) copied_[chunk(to)] = true;
    std::memset(to, 0xff, 16);
    begun_.emplace_back(to, valid ? from : nullptr);
  }
  void wait_copies() {
    arrived_.insert(arrived_.end(), begun_.begin(), begun_.end());
    begun_.clear();
  }
  void store_shared(int, void* to, const Chunk& value) {
    begin_write(to);
    std::memcpy(to, &value, 16);
  }
  Chunk load_shared(int, const void* from) {
    check_arrived(from);
    Chunk value;
    std::memcpy(&value, from, 16);
    return value;
  }

  template <bool kTranspose, typename Address>
  void load_matrix(Registers<std::uint32_t, 4>& out, Address&& at) {
    for (int warp = 0; warp < kThreads; warp += 32) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t rows[8][8];
        for (int row = 0; row < 8; ++row) {
          const void* from = at(warp + matrix * 8 + row);
          check_arrived(from);
          if (shared_ != nullptr) read_[chunk(from)] = true;
          std::memcpy(rows[row], from, sizeof rows[row]);
        }
        for (int lane = 0; lane < 32; ++lane) {
          const int major = lane / 4;
          const int minor = lane % 4 * 2;
          const std::uint32_t low = kTranspose ? rows[minor][major] : rows[major][minor];
          const std::uint32_t high = kTranspose ? rows[minor + 1][major] : rows[major][minor + 1];
          out[warp + lane][matrix] = low | high << 16;
        }
      }
    }
  }

  template <DType kType, int kCount>
  void mma(Registers<float, kCount>& c, int tile, Registers<std::uint32_t, 4>& a, Registers<std::uint32_t, 4>& b, int half) {
    for (int warp = 0; warp < kThreads; warp += 32) {
      multiply_fragments(kType, &c[warp][tile * 4], kCount, a[warp], &b[warp][half * 2]);
    }
  }

  template <int kCount>
  void quad_max(Registers<float, kCount>& r) {
    reduce(r, 4, [](float a, float b) { return a > b || b != b ? a : b; });  // as fmaxf: a NaN loses
  }
  template <int kCount>
  void quad_sum(Registers<float, kCount>& r) {
    sum_lanes(r, 4);
  }
  template <int kCount>
  void sum_lanes(Registers<float, kCount>& r, int lanes) {
    reduce(r, lanes, [](float a, float b) { return a + b; });
  }

 private:
  static void require(bool holds, const char* rule) {
    if (!holds) throw std::logic_error(rule);
  }
  std::size_t chunk(const void* at) const {
    return static_cast<std::size_t>(static_cast<const unsigned char*>(at) - shared_) / 16;
  }
  void begin_write(const void* to) const {
    if (shared_ == nullptr) return;
    require(!read_[chunk(to)], "shared memory is written without a barrier after it was read");
    require(!copied_[chunk(to)], "shared memory is written while a copy to it is under way");
  }
  void check_arrived(const void* from) const {
    if (shared_ != nullptr) require(!copied_[chunk(from)], "shared memory is read before a copy to it has arrived");
  }

  const unsigned char* shared_ = nullptr;
  std::vector<bool> copied_, read_;  // by chunk: a copy is under way; a matrix was loaded from it since the last barrier
  std::vector<std::pair<void*, const void*>> begun_, arrived_;

  template <DType kType>
  static void unpack(std::uint32_t pair, float* out) {
    out[0] = kernels::Storage<kType>::load(static_cast<std::uint16_t>(pair));
    out[1] = kernels::Storage<kType>::load(static_cast<std::uint16_t>(pair >> 16));
  }

  // Butterfly over the lowest lane bits, as shfl.sync.bfly does it.
  template <int kCount, typename Join>
  void reduce(Registers<float, kCount>& r, int lanes, Join&& join) {
    for (int mask = 1; mask < lanes; mask *= 2) {
      const Registers<float, kCount> before = r;
      for (int thread = 0; thread < kThreads; ++thread) {
        for (int i = 0; i < kCount; ++i) r[thread][i] = join(before.values[thread][i], before.values[thread ^ mask][i]);
      }
    }
  }
};

}  // namespace ringspan::cuda
