// What a row's state becomes, o and lse, on a device: the one place for that arithmetic, for the finalize launch and for blocks
// that finish their rows, which therefore give the same bits. kernels/finish_row.h is that of the CPU.
#pragma once

#include <cmath>
#include <limits>

#include "cuda/machine.h"

namespace ringspan::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kMinusInfinity = -kInfinity;

struct RowResult {
  bool empty = true;    // the row has no key: o is 0, whatever acc holds
  float factor = 0.0F;  // of acc; 0 times NaN is NaN
  float lse = kMinusInfinity;
};

// sink: -inf where there is none.
RINGSPAN_DEVICE RowResult finish_state(float m, float l, float sink, float output_scale) {
  if (m == kMinusInfinity) l = 0.0F;  // nothing yet, whatever it holds
  const bool empty = l == 0.0F;
  float keep = 1.0F;
  if (sink != kMinusInfinity) {
    const float m_new = m < sink ? sink : m;  // as std::max: a NaN in m stays
    keep = m == m_new ? 1.0F : expf(m - m_new);
    l = fmaf(l, keep, sink == m_new ? 1.0F : expf(sink - m_new));  // said, so that all compilers and kernels do the same
    m = m_new;
  }
  if (l == 0.0F) return {};
  return {empty, keep / l * output_scale, m + logf(l)};
}

}  // namespace ringspan::cuda
