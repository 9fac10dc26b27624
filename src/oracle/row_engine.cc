#include "oracle/row_engine.h"

#include "base/check.h"
#include "oracle/dropout.h"

namespace ringspan::oracle {
namespace {

constexpr double kFloat32 = 0x1p-24;

template <typename Real>
Real minus_infinity() {
  return -std::numeric_limits<Real>::infinity();
}

// NaN once one of them is.
template <typename Real>
Real larger(Real a, Real b) {
  return b > a || std::isnan(b) ? b : a;
}

// Scale of the final output: the head_groups dialect divides by the number of branches.
double output_scale(const Problem& problem) {
  const auto& dilated = problem.pattern.dilated;
  if (!dilated || dilated->dialect != Dialect::head_groups) return 1.0;
  return 1.0 / static_cast<double>(dilated->branches.size());
}

}  // namespace

template <typename Policy>
RowEngine<Policy>::RowEngine(const Problem& problem, const Inputs& inputs, bool backward)
    : problem_(problem), inputs_(inputs), backward_(backward) {
  const double scale = problem.scale != 0.0F ? problem.scale : 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  scale_ = static_cast<Real>(scale);
  softcap_ = problem.softcap;
  output_scale_ = static_cast<Real>(output_scale(problem));
  if (problem.dropout > 0.0F) keep_scale_ = static_cast<Real>(1.0 / (1.0 - static_cast<double>(problem.dropout)));
  RINGSPAN_CHECK(!problem.sinks || inputs.sinks != nullptr);
  RINGSPAN_CHECK(!problem.alibi || inputs.alibi_slopes != nullptr);
  RINGSPAN_CHECK(!backward || problem.tokens_q == 0 || inputs.d_out.data != nullptr);
  states.resize(static_cast<std::size_t>(oracle::states(problem)));
  q.resize(static_cast<std::size_t>(problem.head_dim));
  dq.resize(q.size());
  o.resize(static_cast<std::size_t>(problem.head_dim_v));
  d_out_.resize(o.size());
}

template <typename Policy>
void RowEngine<Policy>::run(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible) {
  RINGSPAN_CHECK(visible.size() == states.size());
  load(row);
  scores(row, block, visible);
  softmax(visible);
  drop(row, block, visible);
  outputs(block, visible);
  bound_outputs(block, visible);
  if (!backward_) return;
  gradients(block, visible);
  bound_gradients(block, visible);
}

// Of float32 roundings only those of the score, of exp(score - lse) and of dot products remain; o was rounded to the dtype.
template <typename Policy>
void RowEngine<Policy>::run_given(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible,
                                  const Given& given) {
  RINGSPAN_CHECK(states.size() == 1 && visible.size() == 1 && backward_);
  load(row);
  scores(row, block, visible);
  State& state = states.front();
  lse = given.lse_of(problem_, row.batch, row.head, row.i);
  state.weight = 1;
  probabilities(state, visible.front(), lse);
  drop(row, block, visible);
  load_row(given.o, row.batch, row.i, row.head, problem_.head_dim_v, o.data());
  state.o.assign(o.begin(), o.end());
  Real delta = 0;
  for (std::size_t c = 0; c < o.size(); ++c) {
    delta += d_out_[c] * o[c];
    state.o[c] /= output_scale_;  // as d_out is multiplied
  }
  gradients(block, visible, &delta);
  double k_two = 0;
  for (const std::uint32_t key : visible.front().keys) k_two = std::max(k_two, block.k_norms[key].two);
  o_error_ = 0;
  slack = 4.0 + std::sqrt(static_cast<double>(std::max(problem_.head_dim, problem_.head_dim_v))) +
          4.0 * (std::abs(static_cast<double>(scale_)) * q_norms.two * k_two + farthest_) +
          (std::isinf(lse) ? 0.0 : std::abs(static_cast<double>(lse)));
  bound_gradients(block, visible);
}

template <typename Policy>
void RowEngine<Policy>::load(const RowCoordinates& row) {
  load_row(inputs_.q, row.batch, row.i, row.head, problem_.head_dim, q.data());
  q_norms = norms_of(q.data(), problem_.head_dim);
  const bool padding = !problem_.lengths_q.empty() && row.i >= problem_.lengths_q[static_cast<std::size_t>(row.batch)];
  sink_ = problem_.sinks && !padding ? static_cast<Real>(inputs_.sinks[row.head]) : minus_infinity<Real>();
  slope_ =
      problem_.alibi ? static_cast<Real>(inputs_.alibi_slopes[row.batch * inputs_.alibi_batch_stride + row.head]) : Real{0};
  d_lse_ = 0;
  if (!backward_) return;
  load_row(inputs_.d_out, row.batch, row.i, row.head, problem_.head_dim_v, d_out_.data());
  do_norms = norms_of(d_out_.data(), problem_.head_dim_v);
  if (inputs_.d_lse != nullptr) d_lse_ = inputs_.d_lse[(row.batch * problem_.heads + row.head) * problem_.tokens_q + row.i];
}

template <typename Policy>
void RowEngine<Policy>::scores(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible) {
  const std::int64_t center = row.i + diagonal(problem_, row.batch, row.i);
  farthest_ = 0;
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    const auto& keys = visible[s].keys;
    state.score.resize(keys.size());
    dot_rows(q.data(), block.k.data(), q.size(), keys, state.score.data());
    for (Real& score : state.score) score = Policy::round(scale_ * score);
    if (softcap_ > 0) {
      for (Real& score : state.score) score = Policy::round(softcap_ * std::tanh(score / softcap_));
    }
    state.ds.assign(state.score.begin(), state.score.end());  // the capped score, which the gradient needs
    if (!problem_.alibi) continue;
    for (std::size_t x = 0; x < keys.size(); ++x) {
      const std::int64_t j = block.range.begin + keys[x];
      const Real term = Policy::round(slope_ * static_cast<Real>(std::abs(j - center)));
      farthest_ = std::max(farthest_, std::abs(static_cast<double>(term)));
      state.score[x] = Policy::round(state.score[x] - term);
    }
  }
}

template <typename Policy>
void RowEngine<Policy>::softmax(std::span<const Visible> visible) {
  Real max = sink_;
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    state.max = minus_infinity<Real>();
    for (const Real score : state.score) state.max = larger(state.max, score);
    max = larger(max, state.max);
    state.sum = 0;
    for (std::size_t x = 0; x < state.score.size(); ++x) {
      state.sum += static_cast<Real>(visible[s].counts[x]) * std::exp(state.score[x] - state.max);
    }
    state.lse = state.score.empty() ? minus_infinity<Real>() : state.max + std::log(state.sum);
  }
  Real sum = sink_ == minus_infinity<Real>() ? Real{0} : sink_ == max ? Real{1} : std::exp(sink_ - max);
  for (const State& state : states) {
    if (!state.score.empty()) sum += state.sum * std::exp(state.max - max);
  }
  lse = std::isinf(max) && max < 0 ? minus_infinity<Real>() : max + std::log(sum);
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    // One state: the sink takes its part inside the softmax. Several: each is a softmax of its own, weighted afterwards.
    const bool alone = states.size() == 1;
    const Real norm = alone ? lse : state.lse;
    state.weight = alone || state.score.empty() ? Real{1} : Policy::round(std::exp(state.lse - lse));
    probabilities(state, visible[s], norm);
  }
}

template <typename Policy>
void RowEngine<Policy>::probabilities(State& state, const Visible& visible, Real norm) {
  state.p.resize(state.score.size());
  for (std::size_t x = 0; x < state.score.size(); ++x) {
    state.p[x] = Policy::round(static_cast<Real>(visible.counts[x]) * std::exp(state.score[x] - norm));
  }
}

template <typename Policy>
void RowEngine<Policy>::drop(const RowCoordinates& row, const KeyBlock<Real>& block, std::span<const Visible> visible) {
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    state.dropped_p.assign(state.p.begin(), state.p.end());
    for (std::size_t x = 0; problem_.dropout > 0.0F && x < state.p.size(); ++x) {
      const std::int64_t j = block.range.begin + visible[s].keys[x];
      const bool dropped = inputs_.dropped ? inputs_.dropped(row.batch, row.head, row.i, j, static_cast<int>(s))
                                           : is_dropped(problem_, row.batch, row.head, row.i, j, static_cast<int>(s));
      state.dropped_p[x] = Policy::round(state.p[x] * (dropped ? Real{0} : keep_scale_));
    }
  }
}

template <typename Policy>
void RowEngine<Policy>::outputs(const KeyBlock<Real>& block, std::span<const Visible> visible) {
  std::fill(o.begin(), o.end(), Real{0});
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    state.o.assign(o.size(), Real{0});
    gather_rows(state.dropped_p.data(), block.v.data(), o.size(), visible[s].keys, state.o.data());
    for (std::size_t c = 0; c < o.size(); ++c) o[c] += Policy::round(state.weight * Policy::round(state.o[c]));
  }
  for (Real& value : o) value = Policy::round(output_scale_ * value);
}

template <typename Policy>
void RowEngine<Policy>::gradients(const KeyBlock<Real>& block, std::span<const Visible> visible, const Real* delta_of_o) {
  std::fill(dq.begin(), dq.end(), Real{0});
  dsink = 0;
  Real sink_delta = 0;
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    const auto& keys = visible[s].keys;
    const std::size_t count = keys.size();
    state.d_out.resize(d_out_.size());
    for (std::size_t c = 0; c < d_out_.size(); ++c) state.d_out[c] = Policy::round(output_scale_ * state.weight * d_out_[c]);
    state.d_out_norms = norms_of(state.d_out.data(), problem_.head_dim_v);
    state.dp.resize(count);
    state.ds_slope.resize(count);
    dot_rows(state.d_out.data(), block.v.data(), o.size(), keys, state.dp.data());
    Real delta = 0;
    for (std::size_t x = 0; x < count; ++x) {
      const bool dropped = problem_.dropout > 0.0F && state.dropped_p[x] == 0;
      state.dp[x] = Policy::round(Policy::round(state.dp[x]) * (dropped ? Real{0} : keep_scale_));
      delta += state.p[x] * state.dp[x];
    }
    if (delta_of_o != nullptr) delta = *delta_of_o;
    sink_delta += delta;
    for (std::size_t x = 0; x < count; ++x) {
      const Real capped = state.ds[x];
      const Real through_lse = Policy::round(state.weight * state.p[x] * d_lse_);
      Real ds = Policy::round(Policy::round(state.p[x] * (state.dp[x] - delta)) + through_lse);
      if (softcap_ > 0) ds = Policy::round(ds * (1 - (capped / softcap_) * (capped / softcap_)));
      state.ds[x] = Policy::round(scale_ * ds);
      state.ds_slope[x] = std::abs(static_cast<double>(scale_)) *
                          (std::abs(static_cast<double>(state.dp[x])) + std::abs(static_cast<double>(delta)) +
                           std::abs(static_cast<double>(d_lse_)));
    }
    gather_rows(state.ds.data(), block.k.data(), q.size(), keys, dq.data());
  }
  for (Real& value : dq) value = Policy::round(value);
  dsink_size = dsink_factor = 0;
  if (sink_ == minus_infinity<Real>()) return;
  // The weights of several states are detached, so that only lse reaches the sink.
  if (states.size() > 1) sink_delta = 0;
  const Real p = Policy::round(std::exp(sink_ - lse));  // NaN of an infinite sink, as inf - inf is
  dsink = Policy::round(p * (d_lse_ - sink_delta));
  dsink_size = static_cast<double>(p) *
               (do_norms.two * norms_of(o.data(), problem_.head_dim_v).two + std::abs(static_cast<double>(d_lse_)));
  if (inputs_.rounded_o && states.size() == 1) dsink_factor = static_cast<double>(p) * do_norms.two;
}

// Absolute errors, bounded by norms. Errors of different keys are independent: they add up like the root of their squares.
//   o     every p is rounded to the dtype once, and in float32 has a relative error of `slack` units; the sum itself and what
//         all p have in common (the largest score, the sum of p) go with the result; a p that is no normal number may count as
//         0, whatever it is multiplied with
//   lse   the error of the scores plus that of the sum
// slack counts float32 roundings: of exp and the like, of a sum of n terms (sqrt(n)), of the score in both passes.
template <typename Policy>
void RowEngine<Policy>::bound_outputs(const KeyBlock<Real>& block, std::span<const Visible> visible) {
  double k_two = 0, v_max = 0, v_sum = 0, v_squares = 0, squares = 0, terms = 0;
  for (std::size_t s = 0; s < states.size(); ++s) {
    for (std::size_t x = 0; x < visible[s].keys.size(); ++x) {
      k_two = std::max(k_two, block.k_norms[visible[s].keys[x]].two);
      v_max = std::max(v_max, block.v_norms[visible[s].keys[x]].max);
      v_sum += 1 + static_cast<double>(keep_scale_) * block.v_norms[visible[s].keys[x]].max;
      v_squares += block.v_norms[visible[s].keys[x]].max * block.v_norms[visible[s].keys[x]].max;
      const double p = static_cast<double>(states[s].weight) * static_cast<double>(states[s].dropped_p[x]);
      squares += p * p;
    }
    terms += static_cast<double>(visible[s].keys.size());
  }
  const double score = std::abs(static_cast<double>(scale_)) * q_norms.two * k_two + farthest_;
  slack = 4.0 + std::sqrt(terms) + 4.0 * score;
  const double spread = static_cast<double>(output_scale_) * v_max * std::sqrt(squares);
  o_error_ = kFloat32 * slack * (spread + norms_of(o.data(), problem_.head_dim_v).max);
  o_floor = 2.0 * unit_roundoff(problem_.dtype) * spread + o_error_ +
            smallest_step(problem_.dtype) * (1 + std::sqrt(v_squares)) + kSmallestNormal * v_sum;
  lse_floor = kFloat32 * (slack + (std::isinf(lse) ? 0.0 : std::abs(static_cast<double>(lse))));
}

// dq = sum ds k, likewise; an error of delta is the same for all keys of the row, so that it does not average out. delta is
// made from an o that sums rounded p, and so has an error of its own even where o is kept in float32; where it is not, each of
// its elements is off by half a step at least.
template <typename Policy>
void RowEngine<Policy>::bound_gradients(const KeyBlock<Real>& block, std::span<const Visible> visible) {
  double k_max = 0, k_sum = 0, k_squares = 0, rounded = 0, sizes = 0, through_delta = 0;
  for (std::size_t s = 0; s < states.size(); ++s) {
    State& state = states[s];
    const double product = state.d_out_norms.two * norms_of(state.o.data(), problem_.head_dim_v).two;
    const double unit = 8.0 * kFloat32 + (inputs_.rounded_o ? unit_roundoff(problem_.dtype) : 0.0);
    const double step = inputs_.rounded_o ? smallest_step(problem_.dtype) : 0.0;
    double probability = 0, squares = 0;
    for (std::size_t x = 0; x < visible[s].keys.size(); ++x) {
      const std::size_t key = visible[s].keys[x];
      k_max = std::max(k_max, block.k_norms[key].max);
      k_sum += 1 + block.k_norms[key].max * (1 + state.ds_slope[x]);
      k_squares += block.k_norms[key].max * block.k_norms[key].max;
      rounded += state.ds_size(x) * state.ds_size(x);
      const double size = pair_size(block, s, x, key);
      sizes += size * size;
      probability += static_cast<double>(state.p[x]);
      const double part = static_cast<double>(state.p[x]) * static_cast<double>(state.dp[x]);
      squares += part * part;
    }
    state.delta_error =
        unit * product + state.d_out_norms.two * (o_error_ + step) + 2.0 * unit_roundoff(problem_.dtype) * std::sqrt(squares);
    through_delta += std::abs(static_cast<double>(scale_)) * state.delta_error * probability;
  }
  dq_floor =
      k_max * (2.0 * unit_roundoff(problem_.dtype) * std::sqrt(rounded) + kFloat32 * slack * std::sqrt(sizes) + through_delta) +
      kFloat32 * slack * norms_of(dq.data(), problem_.head_dim).max +
      smallest_step(problem_.dtype) * (1 + std::sqrt(k_squares)) + kSmallestNormal * k_sum;
}

// Bound of |ds| of a pair before cancellation, with |do| |v| in place of do . v.
template <typename Policy>
double RowEngine<Policy>::pair_size(const KeyBlock<Real>& block, std::size_t s, std::size_t x, std::size_t key) const {
  const State& state = states[s];
  const double product = state.d_out_norms.two * static_cast<double>(keep_scale_) * block.v_norms[key].two;
  return state.ds_size(x) + std::abs(static_cast<double>(scale_)) * static_cast<double>(state.p[x]) * product;
}

template <typename Policy>
void RowEngine<Policy>::add_key_bounds(const KeyBlock<Real>& block, std::size_t s, std::size_t x, std::size_t key,
                                       ColumnBound& dk, ColumnBound& dv) const {
  const double through_delta =
      std::abs(static_cast<double>(scale_)) * static_cast<double>(states[s].p[x]) * states[s].delta_error;
  dk.add((states[s].ds_size(x) + through_delta / unit_roundoff(problem_.dtype)) * q_norms.max,
         pair_size(block, s, x, key) * q_norms.max, slack, q_norms.max, q_norms.max * (1 + states[s].ds_slope[x]));
  const double size = static_cast<double>(states[s].dropped_p[x]) * states[s].d_out_norms.max;
  dv.add(size, size, slack, states[s].d_out_norms.max, static_cast<double>(keep_scale_) * states[s].d_out_norms.max);
}

template class RowEngine<Exact>;
template class RowEngine<NaiveFloat32>;
template class RowEngine<NaiveBfloat16>;
template class RowEngine<NaiveFloat16>;

}  // namespace ringspan::oracle
