#include "kernels/attend_dense.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace ringspan::kernels::testing {
namespace {

template <typename Real>
class Dense {
 public:
  Dense(const World& world, const std::vector<Part>& parts)
      : world_(world), spec_(world.spec), parts_(parts), q_(world.q), k_(world.k), v_(world.v), d_out_(world.d_out) {}

  DenseResult run(bool backward) {
    backward_ = backward;
    const std::int64_t h = spec_.heads();
    r_.o = r_.o_size = Values(spec_.batch, spec_.n_q, h, spec_.head_dim_v);
    r_.lse = r_.delta = Values(spec_.batch, spec_.n_q, h, 1);
    r_.dq = r_.dq_size = Values(spec_.batch, spec_.n_q, h, spec_.head_dim);
    r_.dk = r_.dk_size = Values(spec_.batch, spec_.n_k, spec_.kv_heads, spec_.head_dim);
    r_.dv = r_.dv_size = Values(spec_.batch, spec_.n_k, spec_.kv_heads, spec_.head_dim_v);
    for (std::int64_t b = 0; b < spec_.batch; ++b)
      for (std::int64_t head = 0; head < h; ++head)
        for (std::int64_t row = 0; row < spec_.n_q; ++row) run_row(b, head, row);
    return std::move(r_);
  }

 private:
  // A tensor without its gaps.
  struct Operand {
    explicit Operand(const Tensor& t) : rows(t.rows()), heads(t.heads()), width(t.width()) {
      t.for_each([&](auto b, auto r, auto h, auto e) { data.push_back(static_cast<Real>(t.get(b, r, h, e))); });
    }
    const Real* operator()(std::int64_t b, std::int64_t r, std::int64_t h) const {
      return data.data() + ((b * rows + r) * heads + h) * width;
    }
    std::int64_t rows, heads, width;
    std::vector<Real> data;
  };

  struct Pair {
    std::int64_t key;
    Real score, derivative, factor, p;
    double size;
  };

  Real round(Real value) const {
    if constexpr (sizeof(Real) == sizeof(double)) return value;
    return static_cast<Real>(round_to(spec_.dtype, value));
  }

  Pair pair(std::int64_t b, std::int64_t head, std::int64_t row, std::int64_t key) const {
    Real dot = 0;
    Real size = 0;
    const Real *q = q_(b, row, head), *k = k_(b, key, head / spec_.group);
    for (int e = 0; e < spec_.head_dim; ++e) {
      const Real product = q[e] * k[e];
      dot += product;
      size += std::abs(product);
    }
    const std::int64_t i = world_.position_q(row);
    const std::int64_t j = world_.position_k(key);
    Pair pair{key, round(static_cast<Real>(world_.scale()) * dot),      1, 1,
              0,   std::abs(world_.scale()) * static_cast<double>(size)};
    if (spec_.softcap != 0.0F) {
      const Real tanh = std::tanh(pair.score / static_cast<Real>(spec_.softcap));
      pair.score = round(static_cast<Real>(spec_.softcap) * tanh);
      pair.derivative = 1 - tanh * tanh;
    }
    const Real slope = world_.slopes[static_cast<std::size_t>(b * spec_.heads() + head)];
    const Real bias = slope * static_cast<Real>(std::abs(j - i - spec_.diagonal));
    pair.score = round(pair.score - bias);
    pair.size += static_cast<double>(bias);
    if (spec_.dropout != 0.0F) {
      const bool dropped = is_dropped(spec_.seed, spec_.dropout, b, head, i, j, spec_.state);
      pair.factor = dropped ? 0 : 1 / (1 - static_cast<Real>(spec_.dropout));
    }
    return pair;
  }

  std::vector<Pair> pairs_of(std::int64_t b, std::int64_t head, std::int64_t row) const {
    std::vector<Pair> pairs;
    const auto in = [](std::int64_t x, std::int64_t first, std::int64_t step, std::int64_t count) {
      return x >= first && (x - first) % step == 0 && (x - first) / step < count;
    };
    for (const Part& part : parts_) {
      if (b < part.batch_first || b >= part.batch_first + part.batch_count) continue;
      if (!in(head, part.head_first, part.head_step, part.head_count) || !in(row, part.q_row, part.q_stride, part.q_count))
        continue;
      for (std::int64_t c = 0; c < part.k_count; ++c) {
        const std::int64_t key = part.k_row + c * part.k_stride;
        const std::int64_t difference = world_.position_k(key) - world_.position_q(row);
        if (difference >= part.lo && difference <= part.hi) pairs.push_back(pair(b, head, row, key));
      }
    }
    return pairs;
  }

  void run_row(std::int64_t b, std::int64_t head, std::int64_t row) {
    std::vector<Pair> pairs = pairs_of(b, head, row);
    const Real infinity = std::numeric_limits<Real>::infinity();
    Real m = -infinity;
    for (const Pair& pair : pairs) m = std::max(m, pair.score);
    r_.lse(b, row, head, 0) = -kInfinity;
    if (pairs.empty()) return;
    Real l = 0;
    for (Pair& pair : pairs) {
      r_.largest_score = std::max(r_.largest_score, pair.size);
      pair.p = std::exp(pair.score - m);
      l += pair.p;
    }
    const std::int64_t kv = head / spec_.group;
    const Real output_scale = spec_.output_scale;
    std::vector<Real> sums(static_cast<std::size_t>(spec_.head_dim_v), 0);
    double* const sizes = r_.o_size.row(b, row, head);
    for (const Pair& pair : pairs) {
      if (pair.factor == 0) continue;
      const Real* const v = v_(b, pair.key, kv);
      const Real weight = pair.factor * pair.p / l, rounded = round(weight);
      for (std::size_t e = 0; e < sums.size(); ++e) {
        sums[e] += rounded * v[e];
        sizes[e] += static_cast<double>(std::abs(weight * v[e]));
      }
    }
    Real delta = 0;
    for (std::size_t e = 0; e < sums.size(); ++e) {
      const Real o = round(output_scale * sums[e]);
      r_.o.row(b, row, head)[e] = static_cast<double>(o);
      sizes[e] *= spec_.output_scale;
      delta += o * d_out_(b, row, head)[e];
    }
    r_.lse(b, row, head, 0) = static_cast<double>(m + std::log(l));
    r_.delta(b, row, head, 0) = static_cast<double>(delta);
    if (!backward_) return;
    for (const Pair& pair : pairs) backward_pair(b, head, row, pair, round(pair.p / l), delta);
  }

  void backward_pair(std::int64_t b, std::int64_t head, std::int64_t row, const Pair& pair, Real p, Real delta) {
    const std::int64_t kv = head / spec_.group;
    Real dp = 0;
    double dp_size = std::abs(static_cast<double>(delta));
    const Real factor = pair.factor * static_cast<Real>(spec_.output_scale);
    if (factor != 0) {
      const Real *const d_out = d_out_(b, row, head), *const v = v_(b, pair.key, kv);
      double *const dv = r_.dv.row(b, pair.key, kv), *const dv_size = r_.dv_size.row(b, pair.key, kv);
      const Real weight = factor * p, rounded = round(weight);
      for (int e = 0; e < spec_.head_dim_v; ++e) {
        dp += factor * d_out[e] * v[e];
        dp_size += static_cast<double>(std::abs(factor * d_out[e] * v[e]));
        add(dv[e], rounded * d_out[e]);
        dv_size[e] += static_cast<double>(std::abs(weight * d_out[e]));
      }
    }
    const Real scale = world_.scale();
    const Real slope = scale * round(p * (dp - delta) * pair.derivative);
    const double size = static_cast<double>(std::abs(p * scale)) * dp_size;
    const Real *const q = q_(b, row, head), *const k = k_(b, pair.key, kv);
    double *const dq = r_.dq.row(b, row, head), *const dq_size = r_.dq_size.row(b, row, head);
    double *const dk = r_.dk.row(b, pair.key, kv), *const dk_size = r_.dk_size.row(b, pair.key, kv);
    for (int e = 0; e < spec_.head_dim; ++e) {
      add(dq[e], slope * k[e]);
      dq_size[e] += size * std::abs(static_cast<double>(k[e]));
      add(dk[e], slope * q[e]);
      dk_size[e] += size * std::abs(static_cast<double>(q[e]));
    }
  }

  static void add(double& sum, Real value) { sum = static_cast<double>(static_cast<Real>(sum) + value); }

  const World& world_;
  const Spec& spec_;
  const std::vector<Part>& parts_;
  Operand q_, k_, v_, d_out_;
  DenseResult r_;
  bool backward_ = true;
};

}  // namespace

DenseResult exact_attention(const World& world, const std::vector<Part>& parts, bool backward) {
  return Dense<double>(world, parts).run(backward);
}
DenseResult naive_attention(const World& world, const std::vector<Part>& parts, bool backward) {
  return Dense<float>(world, parts).run(backward);
}

}  // namespace ringspan::kernels::testing
