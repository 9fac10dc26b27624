// Kernels over rows of one or more operands: copy, merge, finalize, delta. All are elementwise in (batch, row, head), cut
// into pieces that are dealt to the threads; the bits do not depend on the number of threads. Running cannot fail.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attend.h"

namespace ringspan::kernels {

// One operand of a rowwise task: element strides, `data` at its first element; the last dimension is dense.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  bool operator==(const Operand&) const = default;
};

struct RowTask {
  std::int64_t batch_count = 0;
  std::int64_t row_count = 0;
  std::int64_t head_count = 0;
  std::int64_t head_first = 0, head_step = 1;  // global query heads, for sinks
  Operand operands[6];
  bool operator==(const RowTask&) const = default;
};

// operands {source, destination}, `width` elements per row; dtypes may differ (float32 -> 16 bit rounds to nearest even).
void copy_rows(std::span<const RowTask> tasks, int width, const Context& context);
// destination += source; operands {source, destination}; the sum is computed in float32.
void add_rows(std::span<const RowTask> tasks, int width, const Context& context);
// operands {destination}: every element becomes `value`.
void fill_rows(std::span<const RowTask> tasks, int width, float value, const Context& context);

// States are those of kernels/attend.h: m = -inf is the identity, whatever l and acc hold.
//
// A partial result enters a state: operands {o (any dtype, normalised, width), lse, m, l, acc}; as a state it is (lse, 1, o).
void merge_rows(std::span<const RowTask> tasks, int width, const Context& context);
// operands {m, l, acc, m', l', acc'}: state' takes in state (used to join the states of the torchscale dialect).
void merge_states(std::span<const RowTask> tasks, int width, const Context& context);
// A state becomes a result: operands {m, l, acc, o (any dtype), lse (float32), o32 (optional: data == nullptr, else float32)}:
// with a sink (sinks != nullptr: sinks[h]) merged first; lse = m + log l; o = output_scale acc / l; a row with l = 0 gives
// o = 0, lse = -inf. acc and o may be the same float32 memory.
void finalize_rows(std::span<const RowTask> tasks, int width, float output_scale, const float* sinks, const Context& context);
// delta = rowsum(do . o) - dlse: operands {do, o, delta (float32), dlse (float32; data == nullptr: 0)}, float32 arithmetic.
void delta_rows(std::span<const RowTask> tasks, int width, const Context& context);
// Gradient of the sinks: operands {lse, delta}; gradient[h] -= sum over batch and rows of e^(sink_h - lse) delta. Summed in
// float64 in a fixed order; gradient is float64 (heads).
void sink_gradient(std::span<const RowTask> tasks, const float* sinks, double* gradient, const Context& context);

}  // namespace ringspan::kernels
