// One row of attention: everything that query i of one head contributes, in float64 or as a naive computation in a storage
// dtype would. Private to the oracle.
//
// Real is double with exact rounding, or float with Round to the storage dtype wherever an eager implementation would store
// a tensor: scores, probabilities, outputs, and each of their gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/float16.h"
#include "oracle/dense.h"
#include "oracle/linear.h"
#include "oracle/multiplicity.h"

namespace ringspan::oracle {

struct Exact {
  using Real = double;
  static double round(double x) { return x; }
};
struct NaiveFloat32 {
  using Real = float;
  static float round(float x) { return x; }
};
struct NaiveBfloat16 {
  using Real = float;
  static float round(float x) { return bfloat16_to_float(float_to_bfloat16(x)); }
};
// A score that float16 cannot hold stays as it is: an overflow would say nothing about what error is acceptable.
struct NaiveFloat16 {
  using Real = float;
  static float round(float x) {
    const float rounded = float16_to_float(float_to_float16(x));
    return std::isinf(rounded) ? x : rounded;
  }
};

// Half the distance between 1 and the next number.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return 0x1p-24;
    case DType::bfloat16:
      return 0x1p-8;
    case DType::float16:
      return 0x1p-11;
  }
  return 1.0;
}

// Hardware may take what is smaller for zero, in products of 16-bit operands.
constexpr double kSmallestNormal = 0x1p-126;

inline double smallest_step(DType dtype) { return dtype == DType::float16 ? 0x1p-24 : kSmallestNormal; }

inline double load(const View& view, std::int64_t offset) {
  switch (view.dtype) {
    case DType::float32:
      return static_cast<const float*>(view.data)[offset];
    case DType::bfloat16:
      return bfloat16_to_float(static_cast<const std::uint16_t*>(view.data)[offset]);
    case DType::float16:
      return float16_to_float(static_cast<const std::uint16_t*>(view.data)[offset]);
  }
  return 0.0;
}

template <typename Real>
void load_row(const View& view, std::int64_t batch, std::int64_t position, std::int64_t head, std::int64_t width, Real* out) {
  const std::int64_t offset = batch * view.batch_stride + position * view.row_stride + head * view.head_stride;
  for (std::int64_t c = 0; c < width; ++c) out[c] = static_cast<Real>(load(view, offset + c));
}

// Norms of a row, for the error bounds.
struct Norms {
  double two = 0.0;
  double max = 0.0;
};

template <typename Real>
Norms norms_of(const Real* row, std::int64_t width) {
  Norms norms;
  for (std::int64_t c = 0; c < width; ++c) {
    norms.two += static_cast<double>(row[c]) * row[c];
    norms.max = std::max(norms.max, std::abs(static_cast<double>(row[c])));
  }
  norms.two = std::sqrt(norms.two);
  return norms;
}

// The keys [range.begin, range.end) of one kv head, converted.
template <typename Real>
struct KeyBlock {
  Range range;
  std::vector<Real> k, v;
  std::vector<Norms> k_norms, v_norms;

  void load(const Problem& problem, const Inputs& inputs, std::int64_t batch, std::int64_t kv_head, Range wanted) {
    range = wanted;
    const auto count = static_cast<std::size_t>(range.end - range.begin);
    const auto d = static_cast<std::size_t>(problem.head_dim), dv = static_cast<std::size_t>(problem.head_dim_v);
    k.resize(count * d);
    v.resize(count * dv);
    k_norms.resize(count);
    v_norms.resize(count);
    for (std::size_t x = 0; x < count; ++x) {
      const std::int64_t j = range.begin + static_cast<std::int64_t>(x);
      load_row(inputs.k, batch, j, kv_head, problem.head_dim, &k[x * d]);
      load_row(inputs.v, batch, j, kv_head, problem.head_dim_v, &v[x * dv]);
      k_norms[x] = norms_of(&k[x * d], problem.head_dim);
      v_norms[x] = norms_of(&v[x * dv], problem.head_dim_v);
    }
  }
};

// Who query i attends to, relative to a KeyBlock: one list per state.
struct Visible {
  std::vector<std::uint32_t> keys;
  std::vector<std::uint8_t> counts;
  void clear() {
    keys.clear();
    counts.clear();
  }
};

// What rounding errors the contributions to one row of dk, dv or dsinks may add up to. Errors of different contributions are
// independent, so that they add up like the roots of squares; those of the sum itself go with the result.
struct ColumnBound {
  double rounded = 0;  // squares of contributions, each rounded to the dtype once
  double slack = 0;    // squares of contributions' bounds times the slack of their query row
  double terms = 0;
  double most_slack = 0;
  double factor_squares = 0;  // of what the coefficients of the contributions are multiplied with
  double flushed = 0;         // what contributions lose, in smallest normal numbers, where their factors count as 0
  void add(double contribution, double bound, double row_slack, double factor, double flushed_factor) {
    flushed += 1 + flushed_factor;
    factor_squares += factor * factor;
    rounded += contribution * contribution;
    slack += bound * row_slack * bound * row_slack;
    terms += 1;
    most_slack = std::max(most_slack, row_slack);
  }
  double floor(DType dtype, double largest_result) const {
    const double sum = std::sqrt(terms) * std::sqrt(rounded) + (std::sqrt(terms) + most_slack) * largest_result;
    return 2.0 * unit_roundoff(dtype) * std::sqrt(rounded) + 0x1p-24 * (std::sqrt(slack) + sum) +
           smallest_step(dtype) * (1 + std::sqrt(factor_squares)) + kSmallestNormal * flushed;
  }
};

// Which row, of what.
struct RowCoordinates {
  std::int64_t batch = 0, head = 0, i = 0;
};

template <typename Policy>
class RowEngine {
 public:
  using Real = typename Policy::Real;

  struct State {
    std::vector<Real> score, p, dropped_p, dp, ds;  // per visible key; ds includes the scale
    std::vector<double> ds_slope;                   // per visible key: scale (|dp| + |delta| + |dlse|)
    std::vector<Real> o, d_out;                     // of the state alone; d_out includes its weight and output scale
    Norms d_out_norms;
    Real max = 0, sum = 0, lse = 0, weight = 1;
    double delta_error = 0;  // to be expected
    double ds_size(std::size_t x) const { return static_cast<double>(p[x]) * ds_slope[x]; }
  };

  RowEngine(const Problem& problem, const Inputs& inputs, bool backward);

  // Computes everything about one query row; visible[s] lists the keys of state s as indices into the block.
  void run(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible);

  // As far as dk and dv of the keys that `visible` lists go, given the row's o and lse: with one state only. `visible` need not
  // list all keys that the row sees; dq, dsink and the bounds of outputs are left undefined.
  void run_given(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible, const Given& given);

  // What the last run() adds to the error bounds of dk and dv of its x-th visible key of state s.
  void add_key_bounds(const KeyBlock<Real>& block, std::size_t s, std::size_t x, std::size_t key, ColumnBound& dk,
                      ColumnBound& dv) const;

  // Results of the last run().
  std::vector<Real> q, o, dq;
  Real lse = 0, dsink = 0;
  std::vector<State> states;
  Norms q_norms, do_norms;
  double o_floor = 0, lse_floor = 0, dq_floor = 0, dsink_size = 0, dsink_factor = 0;
  double slack = 0;  // relative error to be expected of a float32 probability, in units of 2^-24

 private:
  void load(const RowCoordinates& row);
  void scores(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible);
  void softmax(std::span<const Visible> visible);
  void probabilities(State& state, const Visible& visible, Real norm);
  void drop(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible);
  void outputs(const KeyBlock<Real>& block, std::span<const Visible> visible);
  // `delta`: of the one state where o was given, otherwise it is summed.
  void gradients(const KeyBlock<Real>& block, std::span<const Visible> visible, const Real* delta = nullptr);
  void bound_outputs(const KeyBlock<Real>& block, std::span<const Visible> visible);
  void bound_gradients(const KeyBlock<Real>& block, std::span<const Visible> visible);
  double pair_size(const KeyBlock<Real>& block, std::size_t s, std::size_t x, std::size_t key) const;

  const Problem& problem_;
  const Inputs& inputs_;
  const bool backward_;
  Real scale_ = 1, softcap_ = 0, output_scale_ = 1, keep_scale_ = 1;
  std::vector<Real> d_out_;
  Real sink_ = 0, d_lse_ = 0, slope_ = 0;  // sink_ is -inf where there is none
  double farthest_ = 0;                    // the largest ALiBi term
  double o_error_ = 0;                     // to be expected of o in float32
};

}  // namespace ringspan::oracle
