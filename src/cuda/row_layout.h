// The rows of a rowwise task: which of its operands have `width` elements per row (the others one), and how rows are dealt to
// threads: 1 to 32 to a row, as its width says. Pure.
#pragma once

#include <cstdint>

#include "cuda/arguments.h"

namespace ringspan::cuda {

inline constexpr int kRowThreads = 128;  // of a block
inline constexpr int kRowSteps = 8;      // rows that a thread has a part in

// A bit per operand (kernels/rowwise.h). Of add operands 2 to 5 are more sources, added in this order, as far as there are any.
constexpr unsigned wide_operands(RowOp op) {
  switch (op) {
    case RowOp::fill:
      return 0b1;
    case RowOp::copy:
    case RowOp::delta:
      return 0b11;
    case RowOp::add:
      return 0b111111;
    case RowOp::merge:
      return 0b10001;
    case RowOp::merge_states:
      return 0b100100;
    case RowOp::finalize:
      return 0b101100;
  }
  return 0;
}

// How many threads a row has, as a power of 2.
constexpr int row_lanes_log2(int width) {
  int log2 = 0;
  while (log2 < 5 && (4 << log2) < width) ++log2;
  return log2;
}
constexpr int rows_at_a_time(int lanes_log2) { return kRowThreads >> lanes_log2; }
constexpr std::int64_t rows_per_block(int width) { return std::int64_t{kRowSteps} * rows_at_a_time(row_lanes_log2(width)); }

}  // namespace ringspan::cuda
