// The kernels of kernels/rowwise.h as block programs: fill, copy, add, merge, merge_states, finalize, delta, and the gradient
// of the sinks, which is summed in float64 in an order that depends on nothing but the tasks.
//
// A row is handled by 1 to 32 threads, as its width says; tasks that write what others touch come in waves (schedule.h). Cost:
// each operand is read or written once.
#pragma once

#include "cuda/arguments.h"
#include "cuda/block_parts.h"
#include "cuda/finish_row.h"
#include "cuda/machine.h"
#include "cuda/row_layout.h"

namespace ringspan::cuda {

RINGSPAN_DEVICE float load_element(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::float32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return dtype == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}
RINGSPAN_DEVICE void store_element(void* data, DType dtype, std::int64_t index, float value) {
  if (dtype == DType::float32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] = dtype == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
  }
}

template <typename M>
class RowBlock {
 public:
  RINGSPAN_DEVICE RowBlock(M& m, const RowArguments& arguments, float* shared)
      : m_(m), arguments_(arguments), shared_(shared) {}

  RINGSPAN_DEVICE void run(std::int64_t block) {
    std::int64_t low = 0;
    std::int64_t high = arguments_.task_count - 1;
    while (low < high) {
      const std::int64_t middle = (low + high + 1) / 2;
      const bool at_or_after = arguments_.first_block(middle) <= block;
      low = at_or_after ? middle : low;
      high = at_or_after ? high : middle - 1;
    }
    task_ = &arguments_.task(low);
    lanes_ = row_lanes(arguments_.width);
    const std::int64_t first = (block - arguments_.first_block(low)) * rows_per_block(arguments_.width);
    for (int step = 0; step < kRowSteps; ++step) {
      first_row_ = first + static_cast<std::int64_t>(step) * (kRowThreads / lanes_);
      run_rows();
    }
  }

 private:
  // What a thread holds of a row between two barriers.
  struct Held {
    float keep = 0.0F, take = 0.0F, m = 0.0F, l = 0.0F;
    bool active = false, fresh = false;  // fresh: the row's own state holds nothing yet
  };

  struct Row {
    std::int64_t batch, row, head;
  };

  RINGSPAN_DEVICE Row row_of(int thread) const {
    const std::int64_t index = first_row_ + thread / lanes_;
    return {index / (task_->row_count * task_->head_count), index / task_->head_count % task_->row_count,
            index % task_->head_count};
  }
  RINGSPAN_DEVICE bool is_row(int thread) const {
    return first_row_ + thread / lanes_ < task_->batch_count * task_->row_count * task_->head_count;
  }
  RINGSPAN_DEVICE std::int64_t offset(int operand, const Row& row) const {
    const kernels::Operand& view = task_->operands[operand];
    return row.batch * view.batch_stride + row.row * view.row_stride + row.head * view.head_stride;
  }
  RINGSPAN_DEVICE float load(int operand, const Row& row, std::int64_t e) const {
    return load_element(task_->operands[operand].data, task_->operands[operand].dtype, offset(operand, row) + e);
  }
  RINGSPAN_DEVICE void store(int operand, const Row& row, std::int64_t e, float value) const {
    store_element(task_->operands[operand].data, task_->operands[operand].dtype, offset(operand, row) + e, value);
  }
  // body(row, e) for the thread's elements of its row.
  template <typename Body>
  RINGSPAN_DEVICE void each_element(Body&& body) {
    m_.each([&](int thread) {
      if (!is_row(thread)) return;
      const Row row = row_of(thread);
      for (int e = thread % lanes_; e < arguments_.width; e += lanes_) body(row, e);
    });
  }

  RINGSPAN_DEVICE void run_rows() {
    switch (arguments_.op) {
      case RowOp::fill:
        return each_element([&](const Row& row, int e) { store(0, row, e, arguments_.value); });
      case RowOp::copy:
        return each_element([&](const Row& row, int e) { copy_element(row, e); });
      case RowOp::add:
        return each_element([&](const Row& row, int e) { store(1, row, e, load(1, row, e) + load(0, row, e)); });
      case RowOp::merge:
        return merge(2, 3, 4, 0);
      case RowOp::merge_states:
        return merge(3, 4, 5, 2);
      case RowOp::finalize:
        return finalize();
      case RowOp::delta:
        return delta();
    }
  }

  // The bits where the types are the same: a signalling NaN stays one.
  RINGSPAN_DEVICE void copy_element(const Row& row, int e) {
    const kernels::Operand& source = task_->operands[0];
    const kernels::Operand& target = task_->operands[1];
    if (source.dtype != target.dtype) return store(1, row, e, load(0, row, e));
    if (source.dtype == DType::float32) {
      static_cast<std::uint32_t*>(target.data)[offset(1, row) + e] =
          static_cast<const std::uint32_t*>(source.data)[offset(0, row) + e];
    } else {
      static_cast<std::uint16_t*>(target.data)[offset(1, row) + e] =
          static_cast<const std::uint16_t*>(source.data)[offset(0, row) + e];
    }
  }

  // The state in operands m, l, acc takes in the values with their maximum in operand 1 (a partial: l = 1) or 0 and 1 (a
  // state).
  RINGSPAN_DEVICE void merge(int m, int l, int acc, int values) {
    const bool partial = arguments_.op == RowOp::merge;
    m_.each([&](int thread) {
      Held& held = held_[thread][0];
      held.active = false;
      if (!is_row(thread)) return;
      const Row row = row_of(thread);
      const float m_other = load(partial ? 1 : 0, row, 0);
      if (m_other == kMinusInfinity) return;
      const float l_other = partial ? 1.0F : load(1, row, 0);
      const float m_own = load(m, row, 0);
      held.active = true;
      held.fresh = m_own == kMinusInfinity;
      held.m = held.fresh || m_own < m_other ? m_other : m_own;  // a NaN stays, whichever has it
      held.keep = m_own == held.m ? 1.0F : expf(m_own - held.m);
      held.take = m_other == held.m ? 1.0F : expf(m_other - held.m);
      held.l = (held.fresh ? 0.0F : load(l, row, 0) * held.keep) + l_other * held.take;
    });
    m_.sync();
    m_.each([&](int thread) {
      const Held& held = held_[thread][0];
      if (!held.active) return;
      const Row row = row_of(thread);
      if (thread % lanes_ == 0) {
        store(m, row, 0, held.m);
        store(l, row, 0, held.l);
      }
      for (int e = thread % lanes_; e < arguments_.width; e += lanes_) {
        const float own = held.fresh ? 0.0F : load(acc, row, e) * held.keep;
        store(acc, row, e, own + load(values, row, e) * held.take);
      }
    });
    m_.sync();
  }

  // lse may take the place of m, and o that of acc: everything is read before anything is written.
  RINGSPAN_DEVICE void finalize() {
    m_.each([&](int thread) {
      if (!is_row(thread)) return;
      const Row row = row_of(thread);
      const std::int64_t head = task_->head_first + row.head * task_->head_step;
      const float sink = arguments_.sinks != nullptr ? arguments_.sinks[head] : kMinusInfinity;
      results_[thread][0] = finish_state(load(0, row, 0), load(1, row, 0), sink, arguments_.value);
    });
    m_.sync();
    m_.each([&](int thread) {
      if (!is_row(thread)) return;
      const Row row = row_of(thread);
      const RowResult& result = results_[thread][0];
      if (thread % lanes_ == 0) store(4, row, 0, result.lse);
      for (int e = thread % lanes_; e < arguments_.width; e += lanes_) {
        const float value = result.factor == 0.0F ? 0.0F : load(2, row, e) * result.factor;
        store(3, row, e, value);
        if (task_->operands[5].data != nullptr) store(5, row, e, value);
      }
    });
    m_.sync();
  }

  RINGSPAN_DEVICE void delta() {
    m_.each([&](int thread) {
      float sum = 0.0F;
      if (is_row(thread)) {
        const Row row = row_of(thread);
        for (int e = thread % lanes_; e < arguments_.width; e += lanes_) sum += load(0, row, e) * load(1, row, e);
      }
      shared_[thread] = sum;
    });
    m_.sync();
    m_.each([&](int thread) {
      if (thread % lanes_ != 0 || !is_row(thread)) return;
      const Row row = row_of(thread);
      float sum = shared_[thread];
      for (int lane = 1; lane < lanes_; ++lane) sum += shared_[thread + lane];
      store(2, row, 0, task_->operands[3].data == nullptr ? sum : sum - load(3, row, 0));
    });
    m_.sync();
  }

  M& m_;
  const RowArguments& arguments_;
  float* shared_;  // kRowThreads
  const kernels::RowTask* task_ = nullptr;
  std::int64_t first_row_ = 0;
  int lanes_ = 1;
  typename M::template Registers<Held, 1> held_;
  typename M::template Registers<RowResult, 1> results_;
};

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
