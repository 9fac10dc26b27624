// The arithmetic of emulated products, on float32 operands. Compiled without sanitizers (CMakeLists.txt), which have nothing to
// find between these arrays and would take most of the time.
#pragma once

#include <cstdint>

#include "cuda/warpgroup.h"
#include "ringspan/dtype.h"

namespace ringspan::cuda {

inline constexpr int kInner = 16;  // the inner dimension of a product

// out[row][k] of an operand whose 16-byte chunks follow one another: for K dense those of a row, for MN dense those of 8 rows,
// by k.
void load_operand(DType dtype, Major major, const std::uint16_t* chunks, int rows, float* out);

// c[row][column] += a[row][k] b[column][k], k ascending.
void multiply_rows(float* c, const float* a, const float* b, int rows, int columns);

// The same in the registers of a warpgroup, columns / 2 of each thread, for 64 rows; c anew unless it accumulates.
void multiply_warpgroup(float* c, const float* a, const float* b, int columns, bool accumulate);

// The same of one warp's mma.m16n8k16, whose lanes hold parts of the matrices as the PTX ISA places them: 4 numbers of c, 4
// registers of 16-bit pairs of a and 2 of b. A lane's are `c_step` after those of the lane before, of a and b 4.
void multiply_fragments(DType dtype, float* c, int c_step, const std::uint32_t* a, const std::uint32_t* b);

}  // namespace ringspan::cuda
