#include <cmath>
#include <limits>

#include "base/check.h"
#include "kernels/dropout.h"
#include "kernels/progress.h"
#include "kernels/reference.h"
#include "kernels/score.h"
#include "kernels/storage.h"
#include "kernels/task_view.h"

namespace ringspan::kernels {
namespace {

// One (batch item, query head) of one task.
template <DType kType>
class HeadBackward {
 public:
  using Element = typename Storage<kType>::Type;

  HeadBackward(const AttendParams& params, const AttendTask& task, const Unit& unit, std::int64_t t)
      : params_(params),
        task_(task),
        batch_(unit.batch - task.batch_first),
        t_(t),
        kv_(kv_index(task, unit.kv_head)),
        slope_(alibi_slope(params, unit.batch, head())),
        dropout_(params.seed, params.dropout, unit.batch, head(), task.state) {}

  void run(Progress& progress) {
    for (std::int64_t row = 0; row < task_.q_count; ++row) {
      const float lse = *row_of<float>(task_.lse, batch_, t_, row);
      if (lse == -std::numeric_limits<float>::infinity()) continue;
      const IndexRange keys = keys_of_row(task_, row);
      for (std::int64_t c = keys.begin; c < keys.end; ++c) run_pair(row, c, lse);
      progress.tick();
    }
  }

 private:
  std::int64_t head() const { return task_.head_first + t_ * task_.head_step; }

  void run_pair(std::int64_t row, std::int64_t c, float lse) {
    const Element* q = row_of<Element>(task_.q, batch_, t_, row);
    const Element* d_out = row_of<Element>(task_.d_out, batch_, t_, row);
    const Element* k = row_of<Element>(task_.k, batch_, kv_, c);
    const Element* v = row_of<Element>(task_.v, batch_, kv_, c);
    const std::int64_t i = task_.q_first + row * task_.q_step;
    const std::int64_t j = task_.k_first + c * task_.k_step;

    float dot = 0.0F;
    for (int e = 0; e < params_.shape.head_dim; ++e) dot += Storage<kType>::load(q[e]) * Storage<kType>::load(k[e]);
    const Score score = score_of(params_, dot, slope_, j - i - task_.diagonal);
    const float exponent = score.value - lse;
    const float p = exponent > 0.0F ? 1.0F : std::exp(exponent);  // NaN stays NaN
    const bool dropped = params_.shape.dropout && dropout_.is_dropped(i, j);
    const float factor = dropped ? 0.0F : params_.output_scale * dropout_keep(params_);
    float dp = 0.0F;
    float* dv = row_of<float>(task_.dv, batch_, kv_, c);
    for (int e = 0; e < params_.shape.head_dim_v; ++e) {
      dp += Storage<kType>::load(d_out[e]) * Storage<kType>::load(v[e]);
      dv[e] += factor * p * Storage<kType>::load(d_out[e]);
    }
    dp *= factor;
    const float delta = *row_of<float>(task_.delta, batch_, t_, row);
    const float ds = params_.scale * (p * (dp - delta) * score.derivative);
    float* dq = row_of<float>(task_.dq, batch_, t_, row);
    float* dk = row_of<float>(task_.dk, batch_, kv_, c);
    for (int e = 0; e < params_.shape.head_dim; ++e) {
      dq[e] += ds * Storage<kType>::load(k[e]);
      dk[e] += ds * Storage<kType>::load(q[e]);
    }
  }

  const AttendParams& params_;
  const AttendTask& task_;
  std::int64_t batch_;
  std::int64_t t_;
  std::int64_t kv_;
  float slope_;
  DropoutRow dropout_;
};

}  // namespace

template <DType kType>
void attend_backward_reference(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
  const int group = params.shape.group;
  const Units units(tasks, group);
  context.pool.parallel_for(
      units.count(),
      [&](std::int64_t index, int thread) {
        const Unit unit = units.at(index);
        Progress progress(context, thread);
        for (const AttendTask& task : tasks) {
          RINGSPAN_CHECK(!task.writes_dq && !task.writes_dk_dv);
          const IndexRange heads = heads_of_unit(task, unit, group);
          for (std::int64_t t = heads.begin; t < heads.end; ++t) HeadBackward<kType>(params, task, unit, t).run(progress);
        }
      },
      context.progress);
}

template void attend_backward_reference<DType::float32>(const AttendParams&, std::span<const AttendTask>, const Context&);
template void attend_backward_reference<DType::bfloat16>(const AttendParams&, std::span<const AttendTask>, const Context&);
template void attend_backward_reference<DType::float16>(const AttendParams&, std::span<const AttendTask>, const Context&);

}  // namespace ringspan::kernels
