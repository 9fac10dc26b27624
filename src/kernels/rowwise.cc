#include "kernels/rowwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/finish_row.h"
#include "kernels/progress.h"
#include "kernels/storage.h"

namespace ringspan::kernels {
namespace {

// Elements per piece of work: some ten microseconds.
constexpr std::int64_t kPieceElements = std::int64_t{1} << 15;

// Of a sum of exponentials, in one thread: some ten microseconds.
constexpr std::int64_t kRowsPerTick = 1024;

// One row of one head of one batch item.
struct Row {
  const RowTask& task;
  std::int64_t batch, row, head;

  template <typename T>
  T* operand(int index) const {
    const Operand& view = task.operands[index];
    return static_cast<T*>(view.data) + batch * view.batch_stride + row * view.row_stride + head * view.head_stride;
  }
  float& scalar(int index) const { return *operand<float>(index); }
};

template <typename Function>
void with_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::float32:
      return function(Storage<DType::float32>{});
    case DType::bfloat16:
      return function(Storage<DType::bfloat16>{});
    case DType::float16:
      return function(Storage<DType::float16>{});
  }
}

// Tasks one after the other (two may write the same rows), the rows of a large one dealt to the threads in pieces.
template <typename Function>
void for_rows(std::span<const RowTask> tasks, int width, const Context& context, Function&& function) {
  const std::int64_t rows_per_piece = std::max<std::int64_t>(1, kPieceElements / std::max(width, 1));
  Progress progress(context, 0);
  for (const RowTask& task : tasks) {
    const std::int64_t rows = task.batch_count * task.row_count * task.head_count;
    const std::int64_t pieces = (rows + rows_per_piece - 1) / rows_per_piece;
    const auto run_piece = [&](std::int64_t piece, int) {
      const std::int64_t end = std::min(rows, (piece + 1) * rows_per_piece);
      std::int64_t index = piece * rows_per_piece;
      Row row{task, index / (task.row_count * task.head_count), index / task.head_count % task.row_count,
              index % task.head_count};
      for (; index < end; ++index) {
        function(row);
        if (++row.head < task.head_count) continue;
        row.head = 0;
        if (++row.row < task.row_count) continue;
        row.row = 0;
        ++row.batch;
      }
    };
    if (pieces > 1) {
      context.pool.parallel_for(pieces, run_piece, context.progress);
    } else if (pieces == 1) {
      run_piece(0, 0);
      progress.tick();
    }
  }
}

// What the first kOperands operands of a task have without gaps in all of them, as spans as long as they get.
template <int kOperands>
class Spans {
 public:
  Spans(const RowTask& task, int width) : length_(width) {
    dims_[0].count = task.batch_count;
    dims_[1].count = task.row_count;
    dims_[2].count = task.head_count;
    for (int index = 0; index < kOperands; ++index) {
      const Operand& view = task.operands[index];
      dims_[0].strides[index] = view.batch_stride;
      dims_[1].strides[index] = view.row_stride;
      dims_[2].strides[index] = view.head_stride;
    }
    std::sort(dims_, dims_ + 3, [](const Dim& a, const Dim& b) { return a.strides[0] < b.strides[0]; });
    for (Dim& dim : dims_) {
      elements_ *= dim.count;
      if (!std::all_of(dim.strides, dim.strides + kOperands, [this](std::int64_t stride) { return stride == length_; }))
        continue;
      length_ *= dim.count;
      dim.count = 1;
    }
    elements_ *= width;
  }

  std::int64_t pieces() const { return (elements_ + kPieceElements - 1) / kPieceElements; }

  // function(where it begins in each operand, how many elements) for what of each span lies in the piece.
  template <typename Function>
  void for_piece(std::int64_t piece, const Function& function) const {
    std::int64_t begin = piece * kPieceElements;
    const std::int64_t end = std::min(elements_, begin + kPieceElements);
    std::int64_t index[3], at = begin % length_, span = begin / length_;
    for (int d = 0; d < 3; ++d) {
      index[d] = span % dims_[d].count;
      span /= dims_[d].count;
    }
    while (begin < end) {
      const std::int64_t count = std::min(length_ - at, end - begin);
      std::int64_t offsets[kOperands];
      for (int operand = 0; operand < kOperands; ++operand) {
        offsets[operand] = at;
        for (int d = 0; d < 3; ++d) offsets[operand] += index[d] * dims_[d].strides[operand];
      }
      function(offsets, count);
      begin += count;
      at = 0;
      for (int d = 0; d < 3 && ++index[d] == dims_[d].count; ++d) index[d] = 0;
    }
  }

 private:
  struct Dim {
    std::int64_t count, strides[kOperands];
  };
  std::int64_t length_, elements_ = 1;
  Dim dims_[3];
};

// As for_rows, where rows that lie one behind the other need not be told apart: function(task, offsets, count).
template <int kOperands, typename Function>
void for_spans(std::span<const RowTask> tasks, int width, const Context& context, const Function& function) {
  Progress progress(context, 0);
  for (const RowTask& task : tasks) {
    const Spans<kOperands> spans(task, width);
    const auto run_piece = [&](std::int64_t piece, int) {
      spans.for_piece(piece, [&](const std::int64_t* offsets, std::int64_t count) { function(task, offsets, count); });
    };
    if (spans.pieces() > 1) {
      context.pool.parallel_for(spans.pieces(), run_piece, context.progress);
    } else if (spans.pieces() == 1) {
      run_piece(0, 0);
      progress.tick();
    }
  }
}

// function(Source, first element there, Target, first element there) of operands 0 and 1.
template <typename Function>
void with_operands(const RowTask& task, const std::int64_t* offsets, const Function& function) {
  with_dtype(task.operands[0].dtype, [&]<typename Source>(Source) {
    with_dtype(task.operands[1].dtype, [&]<typename Target>(Target) {
      function(Source{}, static_cast<const typename Source::Type*>(task.operands[0].data) + offsets[0], Target{},
               static_cast<typename Target::Type*>(task.operands[1].data) + offsets[1]);
    });
  });
}

// The state (m, l, acc) takes in (m_other, l_other, values): both are e^-m-scaled sums. No effect where m_other = -inf.
template <typename Values>
void merge_into(float& m, float& l, float* acc, float m_other, float l_other, Values, const typename Values::Type* values,
                int width) {
  if (m_other == kMinusInfinity) return;
  if (m == kMinusInfinity) {  // nothing yet, whatever l and acc hold
    m = m_other;
    l = l_other;
    for (int e = 0; e < width; ++e) acc[e] = Values::load(values[e]) + 0.0F;
    return;
  }
  const float m_new = std::max(m, m_other);
  const float keep = m == m_new ? 1.0F : std::exp(m - m_new);
  const float take = m_other == m_new ? 1.0F : std::exp(m_other - m_new);
  l = l * keep + l_other * take;
  for (int e = 0; e < width; ++e) acc[e] = acc[e] * keep + Values::load(values[e]) * take;
  m = m_new;
}

// Eight partial sums, added pairwise: independent of the machine, and the compiler may use vectors.
template <typename A, typename B>
float dot_of(A, B, const typename A::Type* a, const typename B::Type* b, int width) {
  float sums[8] = {};
  int e = 0;
  for (; e + 8 <= width; e += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += A::load(a[e + lane]) * B::load(b[e + lane]);
  }
  for (int lane = 0; e < width; ++e, ++lane) sums[lane] += A::load(a[e]) * B::load(b[e]);
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

}  // namespace

void copy_rows(std::span<const RowTask> tasks, int width, const Context& context) {
  for_spans<2>(tasks, width, context, [](const RowTask& task, const std::int64_t* offsets, std::int64_t count) {
    with_operands(task, offsets, [count]<typename Source, typename Target>(Source, const auto* source, Target, auto* target) {
      if constexpr (std::is_same_v<Source, Target>) {
        std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(*target));
      } else {
        for (std::int64_t e = 0; e < count; ++e) target[e] = Target::store(Source::load(source[e]));
      }
    });
  });
}

void add_rows(std::span<const RowTask> tasks, int width, const Context& context) {
  for_spans<2>(tasks, width, context, [](const RowTask& task, const std::int64_t* offsets, std::int64_t count) {
    with_operands(task, offsets, [count]<typename Source, typename Target>(Source, const auto* source, Target, auto* target) {
      for (std::int64_t e = 0; e < count; ++e) target[e] = Target::store(Target::load(target[e]) + Source::load(source[e]));
    });
  });
}

void fill_rows(std::span<const RowTask> tasks, int width, float value, const Context& context) {
  for_spans<1>(tasks, width, context, [value](const RowTask& task, const std::int64_t* offsets, std::int64_t count) {
    with_dtype(task.operands[0].dtype, [&]<typename Target>(Target) {
      using Type = typename Target::Type;
      Type* const begin = static_cast<Type*>(task.operands[0].data) + offsets[0];
      if (value == 0.0F && !std::signbit(value)) {  // zeros in every type
        std::memset(begin, 0, static_cast<std::size_t>(count) * sizeof(Type));
      } else {
        std::fill_n(begin, count, Target::store(value));
      }
    });
  });
}

void merge_rows(std::span<const RowTask> tasks, int width, const Context& context) {
  for_rows(tasks, width, context, [width](const Row& row) {
    with_dtype(row.task.operands[0].dtype, [&]<typename Values>(Values values) {
      merge_into(row.scalar(2), row.scalar(3), row.operand<float>(4), row.scalar(1), 1.0F, values,
                 row.operand<const typename Values::Type>(0), width);
    });
  });
}

void merge_states(std::span<const RowTask> tasks, int width, const Context& context) {
  for_rows(tasks, width, context, [width](const Row& row) {
    merge_into(row.scalar(3), row.scalar(4), row.operand<float>(5), row.scalar(0), row.scalar(1), Storage<DType::float32>{},
               row.operand<const float>(2), width);
  });
}

void finalize_rows(std::span<const RowTask> tasks, int width, float output_scale, const float* sinks, const Context& context) {
  for_rows(tasks, width, context, [=](const Row& row) {
    const std::int64_t head = row.task.head_first + row.head * row.task.head_step;
    const RowResult result = finish_state(row.scalar(0), row.scalar(1), sinks != nullptr ? sinks[head] : kMinusInfinity);
    row.scalar(4) = result.lse;
    float* const o32 = row.task.operands[5].data != nullptr ? row.operand<float>(5) : nullptr;
    with_dtype(row.task.operands[3].dtype, [&]<typename Target>(Target) {
      finish_row<Target>(result.empty ? nullptr : row.operand<const float>(2), result.factor * output_scale,
                         row.operand<typename Target::Type>(3), o32, width);
    });
  });
}

void delta_rows(std::span<const RowTask> tasks, int width, const Context& context) {
  for_rows(tasks, width, context, [width](const Row& row) {
    with_dtype(row.task.operands[0].dtype, [&]<typename A>(A a) {
      with_dtype(row.task.operands[1].dtype, [&]<typename B>(B b) {
        const float dot = dot_of(a, b, row.operand<const typename A::Type>(0), row.operand<const typename B::Type>(1), width);
        row.scalar(2) = row.task.operands[3].data == nullptr ? dot : dot - row.scalar(3);
      });
    });
  });
}

void sink_gradient(std::span<const RowTask> tasks, const float* sinks, double* gradient, const Context& context) {
  for (const RowTask& task : tasks) {
    const auto sum_head = [&](std::int64_t t, int thread) {
      Progress progress(context, thread);
      const std::int64_t head = task.head_first + t * task.head_step;
      if (sinks[head] == kMinusInfinity) return;  // none, whatever delta is
      double sum = 0.0;
      for (std::int64_t batch = 0; batch < task.batch_count; ++batch) {
        for (std::int64_t r = 0; r < task.row_count; ++r) {
          const Row row{task, batch, r, t};
          if (r % kRowsPerTick == 0) progress.tick();
          if (row.scalar(0) == kMinusInfinity) continue;
          sum += std::exp(static_cast<double>(sinks[head]) - static_cast<double>(row.scalar(0))) *
                 static_cast<double>(row.scalar(1));
        }
      }
      gradient[head] -= sum;
    };
    context.pool.parallel_for(task.head_count, sum_head, context.progress);
  }
}

}  // namespace ringspan::kernels
