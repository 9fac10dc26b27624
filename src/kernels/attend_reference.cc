#include <algorithm>
#include <limits>

#include "kernels/dropout.h"
#include "kernels/finish_row.h"
#include "kernels/progress.h"
#include "kernels/reference.h"
#include "kernels/score.h"
#include "kernels/storage.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {
namespace {

// One (batch item, query head) of one task.
template <DType kType>
class HeadForward {
 public:
  using Element = typename Storage<kType>::Type;

  HeadForward(const AttendParams& params, const AttendTask& task, const Unit& unit, std::int64_t t)
      : params_(params),
        task_(task),
        batch_(unit.batch - task.batch_first),
        t_(t),
        k_(row_of<Element>(task.k, batch_, kv_index(task, unit.kv_head))),
        v_(row_of<Element>(task.v, batch_, kv_index(task, unit.kv_head))),
        slope_(alibi_slope(params, unit.batch, head())),
        dropout_(params.seed, params.dropout, unit.batch, head(), task.state) {}

  void run(Progress& progress) {
    for (std::int64_t row = 0; row < task_.q_count; ++row) {
      const IndexRange keys = keys_of_row(task_, row);
      if (task_.m.data != nullptr) {
        float* const acc = row_of<float>(task_.acc, batch_, t_, row);
        if (!keys.empty())
          run_row(row, keys, *row_of<float>(task_.m, batch_, t_, row), *row_of<float>(task_.l, batch_, t_, row), acc);
        if (task_.o.data != nullptr) finish_task_row(params_, task_, batch_, t_, row);
      } else {
        float m = kMinusInfinity, l = 0.0F, acc[kMaxHeadDim];
        if (!keys.empty()) run_row(row, keys, m, l, acc);
        finish_task_row(params_, task_, batch_, t_, row, m, l, acc);
      }
      progress.tick();
    }
  }

 private:
  std::int64_t head() const { return task_.head_first + t_ * task_.head_step; }

  float score(const Element* q, std::int64_t i, std::int64_t c) const {
    const Element* k = k_ + c * task_.k.row_stride;
    float dot = 0.0F;
    for (int e = 0; e < params_.shape.head_dim; ++e) dot += Storage<kType>::load(q[e]) * Storage<kType>::load(k[e]);
    return score_of(params_, dot, slope_, task_.k_first + c * task_.k_step - i - task_.diagonal).value;
  }

  // The row's state takes in all its keys at once: the maximum first, so that acc is rescaled once.
  void run_row(std::int64_t row, IndexRange keys, float& m, float& l, float* acc) {
    const Element* q = row_of<Element>(task_.q, batch_, t_, row);
    const std::int64_t i = task_.q_first + row * task_.q_step;

    if (m == kMinusInfinity) {  // nothing yet
      l = 0.0F;
      std::fill_n(acc, params_.shape.head_dim_v, 0.0F);
    }
    float m_new = m;
    for (std::int64_t c = keys.begin; c < keys.end; ++c) m_new = std::max(m_new, score(q, i, c));
    if (m_new != m) {  // never when both are -inf, so that no inf - inf arises
      const float shrink = std::exp(m - m_new);
      l *= shrink;
      for (int e = 0; e < params_.shape.head_dim_v; ++e) acc[e] *= shrink;
      m = m_new;
    }
    const float keep = dropout_keep(params_);
    for (std::int64_t c = keys.begin; c < keys.end; ++c) {
      const float s = score(q, i, c);
      if (s == kMinusInfinity) continue;  // no weight, also while m is -inf
      const float p = std::exp(s - m_new);
      l += p;
      const bool dropped = params_.shape.dropout && dropout_.is_dropped(i, task_.k_first + c * task_.k_step);
      const float weight = dropped ? 0.0F : keep * p;  // of a visible key, which a NaN passes whatever its weight
      const Element* v = v_ + c * task_.v.row_stride;
      for (int e = 0; e < params_.shape.head_dim_v; ++e) acc[e] += weight * Storage<kType>::load(v[e]);
    }
    if (m == kMinusInfinity && l != 0.0F) m = 0.0F;  // NaN only
  }

  const AttendParams& params_;
  const AttendTask& task_;
  std::int64_t batch_;
  std::int64_t t_;
  const Element* k_;
  const Element* v_;
  float slope_;
  DropoutRow dropout_;
};

}  // namespace

bool reference_supports(const AttendShape& shape, DType dtype) {
  return shape.dtype == dtype && shape.head_dim >= 1 && shape.head_dim <= kMaxHeadDim && shape.head_dim_v >= 1 &&
         shape.head_dim_v <= kMaxHeadDim && shape.group >= 1 && shape.threads >= 1;
}

std::int64_t reference_scratch_bytes(const AttendShape&) { return 0; }

template <DType kType>
void attend_reference(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
  const int group = params.shape.group;
  const Units units(tasks, group);
  context.pool.parallel_for(
      units.count(),
      [&](std::int64_t index, int thread) {
        const Unit unit = units.at(index);
        Progress progress(context, thread);
        for (const AttendTask& task : tasks) {
          const IndexRange heads = heads_of_unit(task, unit, group);
          for (std::int64_t t = heads.begin; t < heads.end; ++t) HeadForward<kType>(params, task, unit, t).run(progress);
        }
      },
      context.progress);
}

template void attend_reference<DType::float32>(const AttendParams&, std::span<const AttendTask>, const Context&);
template void attend_reference<DType::bfloat16>(const AttendParams&, std::span<const AttendTask>, const Context&);
template void attend_reference<DType::float16>(const AttendParams&, std::span<const AttendTask>, const Context&);

}  // namespace ringspan::kernels
