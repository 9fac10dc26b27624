// For tests: the oracle's bounds where a pass keeps partial results in the storage dtype (PlanOptions::partials).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "oracle/compare.h"
#include "oracle/dense.h"
#include "oracle/multiplicity.h"

namespace ringspan::testing {

// What rounding the results of each call to 16 bits adds: at most a unit roundoff of the sum of the terms' sizes, which
// does not depend on how they are dealt to calls; o, from which delta is computed, has such an error too.
class PartialsBounds {
 public:
  PartialsBounds(const Problem& problem, const oracle::Inputs& inputs, oracle::Result& exact)
      : p_(problem),
        exact_(exact),
        q_(oracle::to_doubles(inputs.q, p_.batch, p_.tokens_q, p_.heads, p_.head_dim)),
        k_(oracle::to_doubles(inputs.k, p_.batch, p_.tokens_k, p_.kv_heads, p_.head_dim)),
        v_(oracle::to_doubles(inputs.v, p_.batch, p_.tokens_k, p_.kv_heads, p_.head_dim_v)),
        d_out_(oracle::to_doubles(inputs.d_out, p_.batch, p_.tokens_q, p_.heads, p_.head_dim_v)),
        dk_(k_.size()),
        dv_(v_.size()) {}

  void widen() {
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      for (std::int64_t i = 0; i < p_.tokens_q; ++i) {
        for (std::int64_t h = 0; h < p_.heads; ++h) add_row(b, i, h);
      }
    }
    if (exact_.dk.values.empty()) return;
    for (std::size_t row = 0; row < exact_.dk.floors.size(); ++row) {
      raise(exact_.dk.floors[row], &dk_[row * static_cast<std::size_t>(p_.head_dim)], p_.head_dim);
      raise(exact_.dv.floors[row], &dv_[row * static_cast<std::size_t>(p_.head_dim_v)], p_.head_dim_v);
    }
  }

 private:
  static double dot(const double* a, const double* b, int width) {
    double sum = 0;
    for (int e = 0; e < width; ++e) sum += a[e] * b[e];
    return sum;
  }
  static void add(double* sums, double weight, const double* values, int width) {
    for (int e = 0; e < width; ++e) sums[e] += weight * std::abs(values[e]);
  }
  void raise(double& floor, const double* sums, int width) const {
    const bool is_half = p_.dtype == DType::float16;
    const double unit = is_half ? 0x1p-11 : 0x1p-8;
    floor +=
        1.01 * unit * *std::max_element(sums, sums + width) + (is_half ? 0x1p-18 : 0.0);  // steps below 2^-14, of 128 calls
  }

  void add_row(std::int64_t b, std::int64_t i, std::int64_t h) {
    const auto row = static_cast<std::size_t>((b * p_.tokens_q + i) * p_.heads + h);
    const auto d = static_cast<std::size_t>(p_.head_dim), dv = static_cast<std::size_t>(p_.head_dim_v);
    const double lse = exact_.lse.values[static_cast<std::size_t>((b * p_.heads + h) * p_.tokens_q + i)];
    const double* const q = &q_[row * d];
    const double* const d_out = &d_out_[row * dv];
    std::vector<double> p(static_cast<std::size_t>(p_.tokens_k)), o(dv), dq(d), magnitudes(dv);
    const auto key = [&](std::int64_t j) {
      return static_cast<std::size_t>((b * p_.tokens_k + j) * p_.kv_heads + h / p_.group());
    };
    const double scale = static_cast<double>(p_.effective_scale());
    for (std::int64_t j = 0; j < p_.tokens_k; ++j) {
      const int count = oracle::multiplicity(p_, b, h, i, j);
      if (count == 0) continue;
      p[static_cast<std::size_t>(j)] = count * std::exp(scale * dot(q, &k_[key(j) * d], p_.head_dim) - lse);
      add(o.data(), p[static_cast<std::size_t>(j)], &v_[key(j) * dv], p_.head_dim_v);
    }
    raise(exact_.o.floors[row], o.data(), p_.head_dim_v);
    if (exact_.dk.values.empty()) return;
    for (std::size_t e = 0; e < dv; ++e) magnitudes[e] = std::abs(d_out[e]);
    const double delta = dot(d_out, &exact_.o.values[row * dv], p_.head_dim_v);
    const double of_delta = 2 * dot(magnitudes.data(), o.data(), p_.head_dim_v);  // o is rounded once more at the end
    for (std::int64_t j = 0; j < p_.tokens_k; ++j) {
      const double weight = p[static_cast<std::size_t>(j)];
      if (weight == 0.0) continue;
      const double ds = std::abs(scale) * weight * (std::abs(dot(d_out, &v_[key(j) * dv], p_.head_dim_v) - delta) + of_delta);
      add(dq.data(), ds, &k_[key(j) * d], p_.head_dim);
      add(&dk_[key(j) * d], ds, q, p_.head_dim);
      add(&dv_[key(j) * dv], weight, d_out, p_.head_dim_v);
    }
    raise(exact_.dq.floors[row], dq.data(), p_.head_dim);
  }

  const Problem& p_;
  oracle::Result& exact_;
  std::vector<double> q_, k_, v_, d_out_, dk_, dv_;  // the last two: sums of sizes
};

// Case::widen; no longer than the problem.
inline std::function<void(const oracle::Inputs&, oracle::Result&)> partials_bounds(const Problem& problem) {
  return [&problem](const oracle::Inputs& inputs, oracle::Result& exact) { PartialsBounds(problem, inputs, exact).widen(); };
}

}  // namespace ringspan::testing
