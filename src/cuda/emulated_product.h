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

}  // namespace ringspan::cuda
