// CudaMachine: the block of threads that runs the program; see machine.h. For nvcc only.
#pragma once

#include "cuda/block_parts.h"

namespace ringspan::cuda {

template <int kBlockThreads>
class CudaMachine {
 public:
  static constexpr int kThreads = kBlockThreads;

  template <typename T, int kCount>
  struct Registers {
    __device__ __forceinline__ T (&operator[](int))[kCount] { return values; }
    T values[kCount];
  };

  template <DType kType>
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t pair;
    if constexpr (kType == DType::bfloat16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
  }
  template <DType kType>
  static __device__ __forceinline__ FloatPair unpack(std::uint32_t pair) {
    if constexpr (kType == DType::bfloat16) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
    FloatPair floats;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
        : "=f"(floats.low), "=f"(floats.high)
        : "r"(pair));
    return floats;
  }
  template <DType kType>
  static __device__ __forceinline__ std::uint32_t note_non_finite(std::uint32_t pair, std::uint32_t notes) {
    std::uint32_t sum;
    if constexpr (kType == DType::bfloat16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0), "r"(notes));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0), "r"(notes));
    }
    return sum;
  }
  template <DType kType>
  static __device__ __forceinline__ float exp(float x) {
    if constexpr (kType == DType::float32) return expf(x);
    return exp2<kType>(x * kLog2E);
  }
  template <DType kType>
  static __device__ __forceinline__ float exp2(float x) {
    if constexpr (kType == DType::float32) return exp2f(x);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  static __device__ __forceinline__ int hidden(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  static __device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
  }

  static __device__ __forceinline__ bool any_lane(bool flag) { return __any_sync(0xffffffffU, flag) != 0; }
  static __device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffU, value, 0); }

  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
    body(static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ void sync() { __syncthreads(); }
  __device__ __forceinline__ void sync_warps() { __syncwarp(); }
  __device__ __forceinline__ bool sync_any(Registers<int, 1>& flags) { return __syncthreads_or(flags.values[0]) != 0; }

  __device__ __forceinline__ void copy_async(int, void* to, const void* from, bool valid) {
    asm volatile(
        "{\n.reg .pred ignore;\nsetp.eq.b32 ignore, %2, 0;\n"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n}\n" ::"r"(shared_address(to)),
        "l"(from), "r"(static_cast<int>(valid))
        : "memory");
  }
  __device__ __forceinline__ void store_shared(int, void* to, const Chunk& chunk) { *static_cast<Chunk*>(to) = chunk; }
  __device__ __forceinline__ Chunk load_shared(int, const void* from) { return *static_cast<const Chunk*>(from); }
  __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  template <bool kTranspose, typename Address>
  __device__ __forceinline__ void load_matrix(Registers<std::uint32_t, 4>& out, Address&& at) {
    const std::uint32_t address = shared_address(at(static_cast<int>(threadIdx.x)));
    std::uint32_t(&r)[4] = out.values;
    if constexpr (kTranspose) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address)
                   : "memory");
    }
  }

  template <DType kType, int kCount>
  __device__ __forceinline__ void mma(Registers<float, kCount>& c, int tile, Registers<std::uint32_t, 4>& a,
                                      Registers<std::uint32_t, 4>& b_pair, int half) {
    float* d = c.values + tile * 4;
    const std::uint32_t(&r)[4] = a.values;
    const std::uint32_t* b = b_pair.values + half * 2;
    if constexpr (kType == DType::bfloat16) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(b[0]), "r"(b[1]));
    }
  }

  template <int kCount>
  __device__ __forceinline__ void quad_max(Registers<float, kCount>& r) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) r.values[i] = fmaxf(r.values[i], __shfl_xor_sync(0xffffffffU, r.values[i], mask));
    }
  }
  template <int kCount>
  __device__ __forceinline__ void quad_sum(Registers<float, kCount>& r) {
    sum_lanes(r, 4);
  }
  template <int kCount>
  __device__ __forceinline__ void sum_lanes(Registers<float, kCount>& r, int lanes) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      if (mask >= lanes) break;
#pragma unroll
      for (int i = 0; i < kCount; ++i) r.values[i] += __shfl_xor_sync(0xffffffffU, r.values[i], mask);
    }
  }
};

}  // namespace ringspan::cuda
