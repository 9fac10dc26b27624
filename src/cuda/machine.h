// The tile machine: what a block of threads is to the block programs of this folder. A program is written once and runs on
// two machines: CudaMachine (device_machine.h) is the block itself, EmulatedMachine (emulated_machine.h) runs all threads of
// a block in lockstep on a CPU, with the fragment layouts of the PTX ISA, so that what is tested without a GPU is the program
// that a GPU runs.
//
// A machine M has
//   kThreads                   threads of the block, a multiple of 32
//   Registers<T, N>            N values of every thread; r[thread] is that thread's T[N]
//   each(f)                    f(thread) for every thread. A thread sees what others wrote to shared memory in an earlier
//                              each() only after sync()
//   copy_async(thread, to, from, valid)   cp.async, in each(): 16 bytes to `to` in shared memory; not valid: zeros, and `from`
//                              is not read. There for all after wait_copies() and then sync(), by all threads
//   store_shared(thread, to, chunk), load_shared(thread, from)   16 bytes by ordinary instructions, in each()
//   uniform(value)             a value that is the same in all threads, known to be so by the compiler
//   any_lane(flag)             in each(): whether that of any thread of the warp is set, or of this one alone: for what does no
//                              harm to a thread that does not need it
//   hidden(value)              the value, of which the compiler knows nothing: what seldom runs is not to be computed ahead,
//                              for every tile, into registers that are scarce
//   sync(), sync_any(r)        barrier; the second returns, to all, whether any thread's r[thread][0] is not 0
//   sync_warps()               each warp by itself
//   load_matrix<kTranspose>(out, at)   ldmatrix .x4: four 8 x 8 matrices of 16-bit elements; thread i of a warp gives, as
//                              at(thread), the address of row i % 8 of matrix i / 8 (16 bytes, aligned)
//   mma<kType>(c, j, a, b, i)  C += A B, m16n8k16, 16-bit operands, float32 sums: C is c[thread][4 j .. 4 j + 3], A is a, B is
//                              b[thread][2 i .. 2 i + 1]
//   unpack<kType>(pair)        a pair of 16-bit elements as floats
//   note_non_finite<kType>(pair, notes)   of 16-bit elements: 0 x pair + notes, which stays +-0 until one is NaN or infinite
//   pack<kType>(low, high)     two floats rounded to 16 bits; exp<kType>(x), exp2<kType>(x), as exact as results of that type
//                              need: for 16 bits, denormal results are 0
//   reciprocal(x)              1 / x of x >= 1, infinity included, to some units in the last place, without a branch
//   quad_max(r), quad_sum(r)   over the four threads that hold one row of a C fragment, for every element of r
//   sum_lanes(r, lanes)        over each `lanes` threads side by side, a power of 2 up to a warp, for every element of r
// All but each() are called by the whole block at once: control flow around them must be the same for all threads.
//
// Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"), g = lane / 4, t = lane % 4:
//   C   c0 c1: row g, columns 2t, 2t + 1;   c2 c3: row g + 8
//   A   a0: row g, columns 2t, 2t + 1;   a1: row g + 8;   a2, a3: the same rows, columns 2t + 8, 2t + 9
//   B   b0: rows 2t, 2t + 1 of column g;   b1: rows 2t + 8, 2t + 9
#pragma once

#include <cstdint>

#include "base/float16.h"
#include "kernels/storage.h"

#if defined(__CUDACC__)
#define RINGSPAN_DEVICE __device__ __forceinline__
#define RINGSPAN_UNROLL _Pragma("unroll")
#define RINGSPAN_UNROLL_4 _Pragma("unroll 4")
#define RINGSPAN_NO_UNROLL _Pragma("unroll 1")  // seldom taken, or to be short
#define RINGSPAN_ASSUME_GLOBAL(pointer) \
  __builtin_assume(__isGlobal(pointer))  // not shared memory: loads and stores of their own
#else
#define RINGSPAN_ASSUME_GLOBAL(pointer)
#define RINGSPAN_DEVICE inline
#define RINGSPAN_UNROLL
#define RINGSPAN_UNROLL_4
#define RINGSPAN_NO_UNROLL
#endif

namespace ringspan::cuda {

inline constexpr float kLog2E = 1.44269504F;

// Where a thread's elements of a C fragment are: warp w holds rows 16 w .. 16 w + 15 of the block's tile.
struct Lane {
  int row = 0;     // of c0, c1; that of c2, c3 is row + 8
  int column = 0;  // of c0, c2 in the first n8 tile; c1, c3 are the next one, tile j begins at 8 j
};
RINGSPAN_DEVICE Lane lane_of(int thread) { return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2}; }

}  // namespace ringspan::cuda
