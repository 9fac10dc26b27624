// HopperMachine: warpgroup products and asynchronous copies on the block itself; see warpgroup.h. For nvcc only. Machine code
// for other targets than sm_90a has none of it: there the operations are empty and nothing launches such a program.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/device_machine.h"
#ifdef RINGSPAN_CUDA_PHASES
#include "cuda/device_phases.h"
#endif
#include "cuda/device_tensor_maps.h"
#include "cuda/warpgroup.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define RINGSPAN_WARPGROUPS 1
#else
#define RINGSPAN_WARPGROUPS 0
#endif

// One instruction: `acc` accumulators named %0 ... by `list`, then the other operands from number `A` on.
// clang-format off
#define RINGSPAN_ACC32                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31}, "
#define RINGSPAN_ACC64                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define RINGSPAN_OUT8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define RINGSPAN_OUT32(c) RINGSPAN_OUT8(c, 0), RINGSPAN_OUT8(c, 8), RINGSPAN_OUT8(c, 16), RINGSPAN_OUT8(c, 24)
#define RINGSPAN_OUT64(c)                                                                                   \
  RINGSPAN_OUT32(c), RINGSPAN_OUT8(c, 32), RINGSPAN_OUT8(c, 40), RINGSPAN_OUT8(c, 48), RINGSPAN_OUT8(c, 56)
// d, a-desc, b-desc, scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b
#define RINGSPAN_WGMMA(shape, type, list, outs, a_number, b_number, accumulate_number, trans_number)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_number ", 0;\n"                                              \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " " list a_number ", " b_number                \
               ", p, 1, 1, 0, " trans_number ";\n}\n"                                                                      \
               : outs : "l"(a), "l"(b), "r"(accumulate), "n"(kTranspose) : "memory")
// d, a, b-desc, scale-d, imm-scale-a, imm-scale-b, imm-trans-b
#define RINGSPAN_WGMMA_REGISTERS(shape, type, list, outs, a_numbers, b_number, accumulate_number)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_number ", 0;\n"                                              \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " " list a_numbers ", " b_number               \
               ", p, 1, 1, 1;\n}\n"                                                                                        \
               : outs : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate) : "memory")
// clang-format on

namespace ringspan::cuda {

// The threads of one role: kRoleThreads from number kFirstThread of the block on.
template <int kRoleThreads, int kFirstThread = 0>
class HopperMachine : public CudaMachine<kRoleThreads> {
 public:
  template <typename T, int kCount>
  using Registers = typename CudaMachine<kRoleThreads>::template Registers<T, kCount>;

  // tensor_maps: a parameter of the kernel, of a role that copies boxes.
  explicit __device__ __forceinline__ HopperMachine(const TensorMaps* tensor_maps = nullptr)
      : tensor_maps_(tensor_maps), warpgroup_(uniform((static_cast<int>(threadIdx.x) - kFirstThread) / kWarpgroup)) {}

  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
    body(static_cast<int>(threadIdx.x) - kFirstThread);
  }
  // Named barriers: 0 is that of the whole block, 1 of those who multiply, 2 and 3 of the halves of the warpgroup behind them;
  // from 4 on turns.
  __device__ __forceinline__ void sync() { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kRoleThreads) : "memory"); }
  __device__ __forceinline__ bool sync_any(Registers<int, 1>& flags) {
    int any;
    asm volatile(
        "{\n.reg .pred mine, all;\nsetp.ne.b32 mine, %1, 0;\nbar.red.or.pred all, %2, %3, mine;\nselp.b32 %0, 1, 0, all;\n}\n"
        : "=r"(any)
        : "r"(flags.values[0]), "n"(kBarrier), "n"(kRoleThreads)
        : "memory");
    return any != 0;
  }

  using CudaMachine<kRoleThreads>::shared_address;
  using CudaMachine<kRoleThreads>::uniform;

  static __device__ __forceinline__ float min_or_nan(float x, float y) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
  }
  static __device__ __forceinline__ int fetch_add(int* counter, int value) { return atomicAdd(counter, value); }
  static __device__ __forceinline__ void any_of_warps(Registers<int, 1>& flags) {
    flags.values[0] = __any_sync(0xffffffffU, flags.values[0] != 0);
  }
  template <typename Body>
  static __device__ __forceinline__ void by_warps(Registers<int, 1>& flags, Body&& body) {
    if (__any_sync(0xffffffffU, flags.values[0] != 0)) body();
  }

  __device__ __forceinline__ void fence_async() {
#if RINGSPAN_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }

  static __device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  }
  static __device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  __device__ __forceinline__ void arrive_threads(std::uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
#ifdef RINGSPAN_CUDA_RACECHECK  // a tool that looks for races knows only the threads that arrived
  static constexpr int kArrivalsOfWarp = 32;
#else
  static constexpr int kArrivalsOfWarp = 1;
#endif
  __device__ __forceinline__ void arrive_warps(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < kArrivalsOfWarp) arrive_threads(barrier);
  }
  __device__ __forceinline__ void arrive_when_copied(std::uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  }
  __device__ __forceinline__ void prefetch_maps(int count) {
    const int thread = static_cast<int>(threadIdx.x) - kFirstThread;
    if (thread < count) asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_maps_->maps + thread) : "memory");
  }
  __device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  }
  template <int kRows>
  __device__ __forceinline__ void copy_box(const TileMaps&, int map, std::uint32_t to, const BoxCorner& corner,
                                           std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(tensor_maps_->maps + map), "r"(barrier), "r"(corner.column), "r"(corner.row), "r"(corner.head), "r"(corner.item)
        : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t barrier, int parity) {
    asm volatile(
        "{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}\n" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
  }

#ifdef RINGSPAN_CUDA_PHASES
  __device__ __forceinline__ void note(Phase phase) { phases_.note(phase, threadIdx.x == kFirstThread); }
#else
  static __device__ __forceinline__ void note(Phase) {}
#endif

  // The turn is that of the first warpgroup, until it is passed.
  __device__ __forceinline__ void begin_turns() {
    if (warpgroup_ == 1) arrive_turn(0);
  }
  __device__ __forceinline__ void take_turn() {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + warpgroup_), "n"(kRoleThreads) : "memory");
  }
  __device__ __forceinline__ void pass_turn() { arrive_turn(1 - warpgroup_); }
  __device__ __forceinline__ void end_turns() {  // nobody may leave with a turn that waits for another
    if (warpgroup_ == 0) take_turn();
  }

  // By all threads of the role: how many registers each has from here on.
  template <int kCount>
  static __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  }
  template <int kCount>
  static __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }

  template <DType kType, int kN, Major kMajor, typename DescribeA>
  __device__ __forceinline__ void multiply(Registers<float, kN / 2>& sums, DescribeA&& describe_a, std::uint64_t b,
                                           int accumulate) {
    const std::uint64_t a = describe_a(warpgroup_);
    [[maybe_unused]] float(&c)[kN / 2] = sums.values;
    [[maybe_unused]] constexpr int kTranspose = kMajor == Major::mn;
#if RINGSPAN_WARPGROUPS
    if constexpr (kN == 64 && kType == DType::bfloat16) {
      RINGSPAN_WGMMA("m64n64k16", "bf16", RINGSPAN_ACC32, RINGSPAN_OUT32(c), "%32", "%33", "%34", "%35");
    } else if constexpr (kN == 64) {
      RINGSPAN_WGMMA("m64n64k16", "f16", RINGSPAN_ACC32, RINGSPAN_OUT32(c), "%32", "%33", "%34", "%35");
    } else if constexpr (kType == DType::bfloat16) {
      RINGSPAN_WGMMA("m64n128k16", "bf16", RINGSPAN_ACC64, RINGSPAN_OUT64(c), "%64", "%65", "%66", "%67");
    } else {
      RINGSPAN_WGMMA("m64n128k16", "f16", RINGSPAN_ACC64, RINGSPAN_OUT64(c), "%64", "%65", "%66", "%67");
    }
#endif
  }

  template <DType kType, int kN, int kCount>
  __device__ __forceinline__ void multiply_from_registers(Registers<float, kN / 2>& sums,
                                                          Registers<std::uint32_t, kCount>& weights, int first, std::uint64_t b,
                                                          int accumulate) {
    [[maybe_unused]] float(&c)[kN / 2] = sums.values;
    [[maybe_unused]] const std::uint32_t* a = weights.values + first;
#if RINGSPAN_WARPGROUPS
    if constexpr (kN == 64 && kType == DType::bfloat16) {
      RINGSPAN_WGMMA_REGISTERS("m64n64k16", "bf16", RINGSPAN_ACC32, RINGSPAN_OUT32(c), "{%32, %33, %34, %35}", "%36", "%37");
    } else if constexpr (kN == 64) {
      RINGSPAN_WGMMA_REGISTERS("m64n64k16", "f16", RINGSPAN_ACC32, RINGSPAN_OUT32(c), "{%32, %33, %34, %35}", "%36", "%37");
    } else if constexpr (kType == DType::bfloat16) {
      RINGSPAN_WGMMA_REGISTERS("m64n128k16", "bf16", RINGSPAN_ACC64, RINGSPAN_OUT64(c), "{%64, %65, %66, %67}", "%68", "%69");
    } else {
      RINGSPAN_WGMMA_REGISTERS("m64n128k16", "f16", RINGSPAN_ACC64, RINGSPAN_OUT64(c), "{%64, %65, %66, %67}", "%68", "%69");
    }
#endif
  }

  template <typename... Group>
  __device__ __forceinline__ void fence_registers(Group&... groups) {
    (hold(groups), ...);
#if RINGSPAN_WARPGROUPS
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void commit_products() {
#if RINGSPAN_WARPGROUPS
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
  }
  template <int kPending, typename... Group>
  __device__ __forceinline__ void wait_products(Group&... groups) {
#if RINGSPAN_WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
    (hold(groups), ...);
  }

 private:
#ifdef RINGSPAN_CUDA_PHASES
  PhaseClock phases_;
#endif
  const TensorMaps* const tensor_maps_;
  const int warpgroup_;  // of the role
  static constexpr int kBarrier = kFirstThread == 0 ? 1 : kFirstThread % kWarpgroup == 0 ? 2 : 3;
  static constexpr int kFirstTurn = 4;
  static __device__ __forceinline__ void arrive_turn(int warpgroup) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + warpgroup), "n"(kRoleThreads) : "memory");
  }
  // The compiler may not move what touches these registers across this place.
  template <int kCount>
  static __device__ __forceinline__ void hold(Registers<float, kCount>& r) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r.values[i])::"memory");
  }
  template <int kCount>
  static __device__ __forceinline__ void hold(Registers<std::uint32_t, kCount>& r) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r.values[i])::"memory");
  }
};

}  // namespace ringspan::cuda
