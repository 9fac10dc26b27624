// EmulatedMachine: a block of threads on a CPU, in lockstep; see machine.h.
//
// Registers of all threads lie in memory; a warp-wide instruction gathers its operands from the fragments of the 32 lanes,
// computes, and scatters the result, exactly as the PTX ISA places them. Sums of an mma are float32, in ascending order of the
// inner dimension (tensor cores leave theirs open). Cost: some hundred times that of the CPU kernels; no allocation.
#pragma once

#include <cmath>
#include <cstring>

#include "cuda/machine.h"

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
  static float exp(float x) {
    return std::exp(x);
  }
  template <DType kType>
  static float exp2(float x) {
    return std::exp2(x);
  }

  static int hidden(int value) { return value; }

  template <typename Body>
  void each(Body&& body) {
    for (int thread = 0; thread < kThreads; ++thread) body(thread);
  }
  void sync() {}
  bool sync_any(Registers<int, 1>& flags) {
    bool any = false;
    each([&](int thread) { any = any || flags[thread][0] != 0; });
    return any;
  }

  template <bool kTranspose, typename Address>
  void load_matrix(Registers<std::uint32_t, 4>& out, Address&& at) {
    for (int warp = 0; warp < kThreads; warp += 32) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t rows[8][8];
        for (int row = 0; row < 8; ++row) std::memcpy(rows[row], at(warp + matrix * 8 + row), sizeof rows[row]);
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
      float a_rows[16][16];
      float b_columns[8][16];
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4;
        const int k = lane % 4 * 2;
        for (int part = 0; part < 4; ++part) unpack<kType>(a[warp + lane][part], &a_rows[g + part % 2 * 8][k + part / 2 * 8]);
        for (int part = 0; part < 2; ++part) unpack<kType>(b[warp + lane][half * 2 + part], &b_columns[g][k + part * 8]);
      }
      for (int lane = 0; lane < 32; ++lane) {
        float* out = &c[warp + lane][tile * 4];
        for (int element = 0; element < 4; ++element) {
          const float* row = a_rows[lane / 4 + element / 2 * 8];
          const float* column = b_columns[lane % 4 * 2 + element % 2];
          float sum = out[element];
          for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
          out[element] = sum;
        }
      }
    }
  }

  template <int kCount>
  void quad_max(Registers<float, kCount>& r) {
    reduce(r, [](float a, float b) { return a > b || b != b ? a : b; });  // as fmaxf: a NaN loses
  }
  template <int kCount>
  void quad_sum(Registers<float, kCount>& r) {
    reduce(r, [](float a, float b) { return a + b; });
  }

 private:
  template <DType kType>
  static void unpack(std::uint32_t pair, float* out) {
    out[0] = kernels::Storage<kType>::load(static_cast<std::uint16_t>(pair));
    out[1] = kernels::Storage<kType>::load(static_cast<std::uint16_t>(pair >> 16));
  }

  // Butterfly over lane bits 0 and 1, as shfl.sync.bfly does it.
  template <int kCount, typename Join>
  void reduce(Registers<float, kCount>& r, Join&& join) {
    for (int mask = 1; mask <= 2; mask *= 2) {
      const Registers<float, kCount> before = r;
      for (int thread = 0; thread < kThreads; ++thread) {
        for (int i = 0; i < kCount; ++i) r[thread][i] = join(before.values[thread][i], before.values[thread ^ mask][i]);
      }
    }
  }
};

}  // namespace ringspan::cuda
