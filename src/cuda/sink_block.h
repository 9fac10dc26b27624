// The gradient of sinks as block programs: summed in float64, in an order that depends on nothing but the tasks.
#pragma once

#include <cmath>

#include "cuda/arguments.h"
#include "cuda/block_parts.h"
#include "cuda/machine.h"

namespace ringspan::cuda {

RINGSPAN_DEVICE float load_element(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::float32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return dtype == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

// Block h: gradient[h] -= sum over the tasks with head h, their batch items and rows, of e^(sink_h - lse) delta; thread t sums
// rows t, t + kRowThreads, ... of each task, then the threads' sums are added in order.
template <typename M>
RINGSPAN_DEVICE void sink_gradient_block(M& m, const SinkArguments& arguments, std::int64_t head, double* shared) {
  if (arguments.sinks[head] == kMinusInfinity) return;  // none, whatever delta is
  m.each([&](int thread) {
    double sum = 0.0;
    for (std::int64_t index = 0; index < arguments.task_count; ++index) {
      const kernels::RowTask& task = arguments.tasks[index];
      const std::int64_t step = task.head_step < 1 ? 1 : task.head_step;
      const std::int64_t t = (head - task.head_first) / step;
      if (head < task.head_first || t >= task.head_count || (head - task.head_first) % step != 0) continue;
      const kernels::Operand& lse = task.operands[0];
      const kernels::Operand& delta = task.operands[1];
      for (std::int64_t row = thread; row < task.batch_count * task.row_count; row += M::kThreads) {
        const std::int64_t b = row / task.row_count;
        const std::int64_t r = row % task.row_count;
        const float value = load_element(lse.data, lse.dtype, b * lse.batch_stride + r * lse.row_stride + t * lse.head_stride);
        if (value == kMinusInfinity) continue;
        const float d =
            load_element(delta.data, delta.dtype, b * delta.batch_stride + r * delta.row_stride + t * delta.head_stride);
        sum += ::exp(static_cast<double>(arguments.sinks[head]) - static_cast<double>(value)) * static_cast<double>(d);
      }
    }
    shared[thread] = sum;
  });
  m.sync();
  m.each([&](int thread) {
    if (thread != 0) return;
    double sum = 0.0;
    for (int other = 0; other < M::kThreads; ++other) sum += shared[other];
    arguments.gradient[head] -= sum;
  });
}

// dsinks[h] = the gradients of all ranks, in rank order.
template <typename M>
RINGSPAN_DEVICE void sum_sinks_block(M& m, const SinkArguments& arguments, std::int64_t block) {
  m.each([&](int thread) {
    const std::int64_t head = block * M::kThreads + thread;
    if (head >= arguments.heads) return;
    double sum = 0.0;
    for (std::int64_t rank = 0; rank < arguments.ranks; ++rank) sum += arguments.gradient[rank * arguments.heads + head];
    arguments.total[head] = static_cast<float>(sum);
  });
}

}  // namespace ringspan::cuda
