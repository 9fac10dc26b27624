// The score of one pair in float32 and its derivative, from the formula: scale, softcap, ALiBi. For the reference kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/attend.h"

namespace ringspan::kernels {

struct Score {
  float value = 0.0F;
  float derivative = 1.0F;  // with respect to scale q . k: 1 - tanh^2 of the capped score
};

inline float alibi_slope(const AttendParams& params, std::int64_t batch, std::int64_t head) {
  return params.shape.alibi ? params.alibi_slopes[batch * params.alibi_batch_stride + head] : 0.0F;
}

// `dot` is q . k; `distance` is j - i - diagonal.
inline Score score_of(const AttendParams& params, float dot, float slope, std::int64_t distance) {
  Score score{params.scale * dot, 1.0F};
  if (params.shape.softcap) {
    const float tanh = std::tanh(score.value / params.softcap);
    score = {params.softcap * tanh, 1.0F - tanh * tanh};
  }
  if (params.shape.alibi) score.value -= slope * static_cast<float>(distance < 0 ? -distance : distance);
  return score;
}

// What a kept probability is multiplied with.
inline float dropout_keep(const AttendParams& params) { return params.shape.dropout ? 1.0F / (1.0F - params.dropout) : 1.0F; }

}  // namespace ringspan::kernels
