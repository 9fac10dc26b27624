// For tests: attention as a dense loop over the pairs of a list of parts, in float64 (the truth) or in the storage dtype with
// float32 sums, every intermediate rounded (the naive computation whose error bounds what a kernel may have).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attend_world.h"

namespace ringspan::kernels::testing {

// Indexed [((b * rows + row) * heads + h) * width + e].
struct Values {
  std::int64_t rows = 0, heads = 0, width = 0;
  std::vector<double> data;
  Values() = default;
  Values(std::int64_t batch, std::int64_t r, std::int64_t h, std::int64_t w, double value = 0.0)
      : rows(r), heads(h), width(w), data(static_cast<std::size_t>(batch * r * h * w), value) {}
  double* row(std::int64_t b, std::int64_t r, std::int64_t h) { return data.data() + ((b * rows + r) * heads + h) * width; }
  double& operator()(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e) { return row(b, r, h)[e]; }
  double operator()(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e) const {
    return const_cast<Values&>(*this)(b, r, h, e);
  }
};

// Results, and beside each the sum of the magnitudes that went into it: a rounding error is a few eps of that.
struct DenseResult {
  Values o, lse, delta, dq, dk, dv;
  Values o_size, dq_size, dk_size, dv_size;
  double largest_score = 0.0;  // of scale sum |q_e k_e|: what the rounding errors of a score are proportional to
};

// In float64, and as the dtype would have it.
DenseResult exact_attention(const World& world, const std::vector<Part>& parts, bool backward = true);
DenseResult naive_attention(const World& world, const std::vector<Part>& parts, bool backward = true);

// The largest violation of |value - truth| <= 2 max |naive - truth| + floor, where floor is a few roundings of the magnitudes
// that were summed, amplified by the largest score (an error of eps |s| in a score is one of eps |s| in its probability).
// Positive: a failure. A value that should be finite and is not counts as infinitely wrong.
template <typename Get>
double excess_error(const Values& truth, const Values& naive, const Values& size, double largest_score, std::int64_t batch,
                    Get&& get) {
  double naive_error = 0.0;
  for (std::size_t i = 0; i < truth.data.size(); ++i) {
    const double error = std::abs(naive.data[i] - truth.data[i]);
    if (error > naive_error && std::isfinite(error)) naive_error = error;
  }
  double worst = -kInfinity;
  const double eps = 0x1p-23;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t r = 0; r < truth.rows; ++r)
      for (std::int64_t h = 0; h < truth.heads; ++h)
        for (std::int64_t e = 0; e < truth.width; ++e) {
          const double value = get(b, r, h, e);
          if (value == truth(b, r, h, e)) continue;
          const double error = std::abs(value - truth(b, r, h, e));
          const double floor = eps * (4.0 + largest_score) * size(b, r, h, e) + 0x1p-126;
          const double excess = std::isnan(error) ? kInfinity : error - 2.0 * naive_error - floor;
          worst = std::max(worst, excess);
        }
  return worst;
}

}  // namespace ringspan::kernels::testing
