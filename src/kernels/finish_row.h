// What a row's state becomes: o and lse. The one place for that arithmetic on the CPU, for the finalize launch and for tasks
// that finish their rows. For code of the baseline instruction set only; no allocation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/storage.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct RowResult {
  bool empty;    // the row has no key: o is 0, whatever acc holds
  float factor;  // of acc; 0 times NaN is NaN
  float lse;
};

// sink: -inf where there is none.
inline RowResult finish_state(float m, float l, float sink) {
  if (m == kMinusInfinity) l = 0.0F;
  const bool empty = l == 0.0F;
  float keep = 1.0F;
  if (sink != kMinusInfinity) {
    const float m_new = std::max(m, sink);
    keep = m == m_new ? 1.0F : std::exp(m - m_new);
    l = l * keep + (sink == m_new ? 1.0F : std::exp(sink - m_new));
    m = m_new;
  }
  if (l == 0.0F) return {true, 0.0F, kMinusInfinity};
  return {empty, keep / l, m + std::log(l)};
}

namespace finish_detail {

// Two loops, as the compiler takes vectors only where it knows that reading and writing do not overlap, or do so exactly.
inline void scale_row(const float* row, float factor, float* out, int width) {
  if (row == out) {
    for (int e = 0; e < width; ++e) out[e] *= factor;
  } else {
    for (int e = 0; e < width; ++e) out[e] = row[e] * factor;
  }
}

// Rounding takes many instructions: in vectors of eight where the machine has them; the same bits.
template <typename Target>
void round_row(const float* row, float factor, typename Target::Type* out, int width) {
  for (int e = 0; e < width; ++e) out[e] = Target::store(row[e] * factor);
}
#if defined(__x86_64__)
template <typename Target>
__attribute__((target("avx2"))) void round_row_avx2(const float* row, float factor, typename Target::Type* out, int width) {
  for (int e = 0; e < width; ++e) out[e] = Target::store(row[e] * factor);
}
#endif
template <typename Target>
void store_row(const float* row, float factor, typename Target::Type* out, int width) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return round_row_avx2<Target>(row, factor, out, width);
#endif
  round_row<Target>(row, factor, out, width);
}

}  // namespace finish_detail

// acc: nullptr of an empty row; may be o or o32. factor: of the result, times output_scale. o32: the same in float32, or
// nullptr.
template <typename Target>
void finish_row(const float* acc, float factor, typename Target::Type* o, float* o32, int width) {
  using namespace finish_detail;
  if (acc == nullptr) {
    std::fill_n(o, width, Target::store(0.0F));
    if (o32 != nullptr) std::fill_n(o32, width, 0.0F);
    return;
  }
  if constexpr (std::is_same_v<typename Target::Type, float>) {
    scale_row(acc, factor, o, width);
    if (o32 != nullptr && o32 != o) std::copy_n(o, width, o32);
  } else {
    if (o32 != nullptr) {
      scale_row(acc, factor, o32, width);
      acc = o32, factor = 1.0F;
    }
    store_row<Target>(acc, factor, o, width);
  }
}

// The result of row `row` of the task's head t and batch item `batch`, both counted from its first, from its state, which is
// (m, l, acc) wherever that lies.
inline void finish_task_row(const AttendParams& params, const AttendTask& task, std::int64_t batch, std::int64_t t,
                            std::int64_t row, float m, float l, const float* acc) {
  const float sink = params.sinks != nullptr ? params.sinks[task.head_first + t * task.head_step] : kMinusInfinity;
  const RowResult result = finish_state(m, l, sink);
  const float factor = result.factor * params.output_scale;
  if (result.empty) acc = nullptr;
  float* const o32 = task.o32.data != nullptr ? row_of<float>(task.o32, batch, t, row) : nullptr;
  *row_of<float>(task.lse, batch, t, row) = result.lse;
  const auto finish = [&]<typename Target>(Target) {
    finish_row<Target>(acc, factor, row_of<typename Target::Type>(task.o, batch, t, row), o32, params.shape.head_dim_v);
  };
  switch (params.shape.dtype) {
    case DType::float32:
      return finish(Storage<DType::float32>{});
    case DType::bfloat16:
      return finish(Storage<DType::bfloat16>{});
    case DType::float16:
      return finish(Storage<DType::float16>{});
  }
}

// The same of a row whose state is where the task says, or that had nothing before.
inline void finish_task_row(const AttendParams& params, const AttendTask& task, std::int64_t batch, std::int64_t t,
                            std::int64_t row) {
  if (task.m.data == nullptr) return finish_task_row(params, task, batch, t, row, kMinusInfinity, 0.0F, nullptr);
  finish_task_row(params, task, batch, t, row, *row_of<const float>(task.m, batch, t, row),
                  *row_of<const float>(task.l, batch, t, row), row_of<const float>(task.acc, batch, t, row));
}

}  // namespace ringspan::kernels
