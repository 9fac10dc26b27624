#include "oracle/dense.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "oracle/row_engine.h"

namespace ringspan::oracle {
namespace {

void resize(Tensor& tensor, std::int64_t rows, std::int64_t width, bool floors) {
  tensor.width = width;
  tensor.values.assign(static_cast<std::size_t>(rows * width), 0.0);
  if (floors) tensor.floors.assign(static_cast<std::size_t>(rows), 0.0);
}

Result make_result(const Problem& problem, std::int64_t queries, std::int64_t keys, std::int64_t sinks, bool floors,
                   bool backward) {
  Result result;
  resize(result.o, queries, problem.head_dim_v, floors);
  resize(result.lse, queries, 1, floors);
  if (!backward) return result;
  resize(result.dq, queries, problem.head_dim, floors);
  resize(result.dk, keys, problem.head_dim, floors);
  resize(result.dv, keys, problem.head_dim_v, floors);
  if (problem.sinks) resize(result.dsinks, sinks, 1, floors);
  return result;
}

template <typename Real>
void store(Tensor& tensor, std::int64_t row, const std::vector<Real>& values, double floor) {
  std::copy(values.begin(), values.end(), tensor.values.begin() + row * tensor.width);
  if (!tensor.floors.empty()) tensor.floors[static_cast<std::size_t>(row)] = floor;
}

double largest_of(const Tensor& tensor, std::int64_t row) {
  return norms_of(&tensor.values[static_cast<std::size_t>(row * tensor.width)], tensor.width).max;
}

// The visible keys of one query row relative to block_begin, for every state.
void see(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t block_begin,
         std::vector<std::uint8_t>& buffer, std::vector<Visible>& visible) {
  const Range keys = key_bounds(problem, batch, i);
  buffer.resize(static_cast<std::size_t>(keys.end - keys.begin));
  for (std::size_t s = 0; s < visible.size(); ++s) {
    visible[s].clear();
    multiplicity_row(problem, batch, head, i, static_cast<int>(s), keys, buffer);
    for (std::size_t x = 0; x < buffer.size(); ++x) {
      if (buffer[x] == 0) continue;
      visible[s].keys.push_back(static_cast<std::uint32_t>(keys.begin + static_cast<std::int64_t>(x) - block_begin));
      visible[s].counts.push_back(buffer[x]);
    }
  }
}

template <typename Policy>
class Dense {
 public:
  using Real = typename Policy::Real;

  Dense(const Problem& problem, const Inputs& inputs, bool backward)
      : problem_(problem),
        backward_(backward),
        exact_(std::is_same_v<Policy, Exact>),
        inputs_(inputs),
        engine_(problem, inputs, backward),
        result_(make_result(problem, problem.batch * problem.tokens_q * problem.heads,
                            problem.batch * problem.tokens_k * problem.kv_heads, problem.heads, exact_, backward)),
        sink_bounds_(static_cast<std::size_t>(problem.heads)) {}

  Result run() {
    std::vector<int> classes;
    for (std::int64_t h = 0; h < problem_.heads; ++h) classes.push_back(head_class(problem_, h));
    const int last = classes.empty() ? -1 : *std::max_element(classes.begin(), classes.end());
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      key_bounds_.assign(static_cast<std::size_t>(problem_.tokens_k * problem_.kv_heads), {});
      value_bounds_ = key_bounds_;
      for (int c = 0; c <= last; ++c) run_class(b, c, classes);
      if (backward_) finish_keys(b);
    }
    if (backward_ && problem_.sinks && exact_) {
      for (std::size_t h = 0; h < sink_bounds_.size(); ++h)
        result_.dsinks.floors[h] = sink_bounds_[h].floor(problem_.dtype, std::abs(result_.dsinks.values[h]));
    }
    return std::move(result_);
  }

 private:
  void run_class(std::int64_t b, int head_class, const std::vector<int>& classes) {
    const auto first = std::find(classes.begin(), classes.end(), head_class) - classes.begin();
    std::vector<std::vector<Visible>> rows(static_cast<std::size_t>(problem_.tokens_q),
                                           std::vector<Visible>(static_cast<std::size_t>(states(problem_))));
    std::vector<std::uint8_t> buffer;
    for (std::size_t i = 0; i < rows.size(); ++i) see(problem_, b, first, static_cast<std::int64_t>(i), 0, buffer, rows[i]);
    std::int64_t loaded = -1;
    for (std::int64_t h = first; h < problem_.heads; ++h) {
      if (classes[static_cast<std::size_t>(h)] != head_class) continue;
      const std::int64_t kv_head = h / problem_.group();
      if (kv_head != loaded) block_.load(problem_, inputs_, b, kv_head, {0, problem_.tokens_k});
      loaded = kv_head;
      run_head(b, h, rows);
    }
  }

  void run_head(std::int64_t b, std::int64_t h, const std::vector<std::vector<Visible>>& rows) {
    dk_.assign(block_.k.size(), Real{0});
    dv_.assign(block_.v.size(), Real{0});
    for (std::int64_t i = 0; i < problem_.tokens_q; ++i) {
      const auto& visible = rows[static_cast<std::size_t>(i)];
      engine_.run({b, h, i}, block_, visible);
      const std::int64_t row = (b * problem_.tokens_q + i) * problem_.heads + h;
      store(result_.o, row, engine_.o, engine_.o_floor);
      store(result_.lse, (b * problem_.heads + h) * problem_.tokens_q + i, std::vector<Real>{engine_.lse}, engine_.lse_floor);
      if (!backward_) continue;
      store(result_.dq, row, engine_.dq, engine_.dq_floor);
      if (problem_.sinks) result_.dsinks.values[static_cast<std::size_t>(h)] += static_cast<double>(engine_.dsink);
      for (std::size_t s = 0; s < visible.size(); ++s) {
        const auto& state = engine_.states[s];
        scatter_rows(state.ds.data(), engine_.q.data(), engine_.q.size(), visible[s].keys, dk_.data());
        scatter_rows(state.dropped_p.data(), state.d_out.data(), state.d_out.size(), visible[s].keys, dv_.data());
      }
      if (exact_) bound_keys(h, visible);
    }
    if (backward_) fold_keys(b, h / problem_.group());
  }

  // Contributions of the row just computed to the bounds of dk, dv and dsinks.
  void bound_keys(std::int64_t h, std::span<const Visible> visible) {
    const std::int64_t kv_head = h / problem_.group();
    for (std::size_t s = 0; s < visible.size(); ++s) {
      for (std::size_t x = 0; x < visible[s].keys.size(); ++x) {
        const auto at = static_cast<std::size_t>(visible[s].keys[x] * problem_.kv_heads + kv_head);
        engine_.add_key_bounds(block_, s, x, visible[s].keys[x], key_bounds_[at], value_bounds_[at]);
      }
    }
    if (!problem_.sinks) return;
    const double factor = engine_.dsink_factor;
    sink_bounds_[static_cast<std::size_t>(h)].add(engine_.dsink_size, engine_.dsink_size, engine_.slack, factor, factor);
  }

  // A finished query head enters its kv head, rounded first where gradients of a repeated key would be.
  void fold_keys(std::int64_t b, std::int64_t kv_head) {
    for (std::int64_t j = 0; j < problem_.tokens_k; ++j) {
      const std::int64_t row = (b * problem_.tokens_k + j) * problem_.kv_heads + kv_head;
      for (std::int64_t c = 0; c < problem_.head_dim; ++c) {
        result_.dk.values[static_cast<std::size_t>(row * problem_.head_dim + c)] +=
            static_cast<double>(Policy::round(dk_[static_cast<std::size_t>(j * problem_.head_dim + c)]));
      }
      for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) {
        result_.dv.values[static_cast<std::size_t>(row * problem_.head_dim_v + c)] +=
            static_cast<double>(Policy::round(dv_[static_cast<std::size_t>(j * problem_.head_dim_v + c)]));
      }
    }
  }

  void finish_keys(std::int64_t b) {
    const std::int64_t rows = problem_.tokens_k * problem_.kv_heads;
    for (std::int64_t row = 0; exact_ && row < rows; ++row) {
      const auto at = static_cast<std::size_t>(row);
      result_.dk.floors[static_cast<std::size_t>(b * rows + row)] =
          key_bounds_[at].floor(problem_.dtype, largest_of(result_.dk, b * rows + row));
      result_.dv.floors[static_cast<std::size_t>(b * rows + row)] =
          value_bounds_[at].floor(problem_.dtype, largest_of(result_.dv, b * rows + row));
    }
  }

 private:
  const Problem& problem_;
  const bool backward_, exact_;
  const Inputs& inputs_;
  RowEngine<Policy> engine_;
  Result result_;
  KeyBlock<Real> block_;
  std::vector<Real> dk_, dv_;
  std::vector<ColumnBound> key_bounds_, value_bounds_, sink_bounds_;
};

// Rows one by one; a key row goes through all the queries that may see it.
template <typename Policy>
class Sampled {
 public:
  using Real = typename Policy::Real;

  Sampled(const Problem& problem, const Inputs& inputs, bool backward, const Given* given)
      : problem_(problem), inputs_(inputs), backward_(backward), given_(given), engine_(problem, inputs, backward) {}

  Result run(std::span<const Row> queries, std::span<const Row> keys) {
    Result result = make_result(problem_, static_cast<std::int64_t>(queries.size()), static_cast<std::int64_t>(keys.size()), 0,
                                std::is_same_v<Policy, Exact>, backward_);
    for (std::size_t x = 0; x < queries.size(); ++x) {
      const auto row = static_cast<std::int64_t>(x);
      const Row& query = queries[x];
      compute(query.batch, query.head, query.position, key_bounds(problem_, query.batch, query.position));
      store(result.o, row, engine_.o, engine_.o_floor);
      store(result.lse, row, std::vector<Real>{engine_.lse}, engine_.lse_floor);
      if (backward_) store(result.dq, row, engine_.dq, engine_.dq_floor);
    }
    for (std::size_t x = 0; backward_ && x < keys.size(); ++x) run_key(keys[x], static_cast<std::int64_t>(x), result);
    return result;
  }

 private:
  // The row of one query, out of a block that covers `wanted` at least.
  void compute(std::int64_t batch, std::int64_t head, std::int64_t i, Range wanted) {
    const std::int64_t kv_head = head / problem_.group();
    const Range own = key_bounds(problem_, batch, i);
    const bool covered =
        batch == batch_ && kv_head == kv_head_ && block_.range.begin <= own.begin && own.end <= block_.range.end;
    if (!covered) {
      block_.load(problem_, inputs_, batch, kv_head, {std::min(own.begin, wanted.begin), std::max(own.end, wanted.end)});
      batch_ = batch;
      kv_head_ = kv_head;
    }
    see(problem_, batch, head, i, block_.range.begin, buffer_, visible_);
    engine_.run({batch, head, i}, block_, visible_);
  }

  void run_key(const Row& key, std::int64_t row, Result& result) {
    const Range queries = query_bounds(problem_, key.batch, key.position);
    Range wanted{key.position, key.position + 1};
    for (std::int64_t i = queries.begin; given_ == nullptr && i < queries.end; ++i) {
      const Range own = key_bounds(problem_, key.batch, i);
      if (own.begin < own.end) wanted = {std::min(wanted.begin, own.begin), std::max(wanted.end, own.end)};
    }
    std::vector<Real> dk(static_cast<std::size_t>(problem_.head_dim)), dv(static_cast<std::size_t>(problem_.head_dim_v));
    ColumnBound dk_bound, dv_bound;
    for (std::int64_t h = key.head * problem_.group(); h < (key.head + 1) * problem_.group(); ++h) {
      std::vector<Real> head_dk(dk.size()), head_dv(dv.size());
      int whole_rows = 2;
      for (std::int64_t i = queries.begin; i < queries.end; ++i) {
        const int count = multiplicity(problem_, key.batch, h, i, key.position);
        if (count == 0) continue;
        const Trust trust = given_ != nullptr ? trust_in(key.batch, h, i) : Trust{};
        if (given_ == nullptr || (!(trust.o && trust.lse) && whole_rows-- > 0)) {
          compute(key.batch, h, i, wanted);
          add_pair(key.position, {}, head_dk, head_dv, dk_bound, dv_bound);
        } else {
          compute_given(key, h, i, count);
          add_pair(key.position, trust, head_dk, head_dv, dk_bound, dv_bound);
        }
      }
      for (std::size_t c = 0; c < dk.size(); ++c) dk[c] += Policy::round(head_dk[c]);
      for (std::size_t c = 0; c < dv.size(); ++c) dv[c] += Policy::round(head_dv[c]);
    }
    store(result.dk, row, dk, dk_bound.floor(problem_.dtype, norms_of(dk.data(), problem_.head_dim).max));
    store(result.dv, row, dv, dv_bound.floor(problem_.dtype, norms_of(dv.data(), problem_.head_dim_v).max));
  }

  // Whether what was given of a row can be what the inputs make of it, whatever they are: lse of a row that sees anything.
  struct Trust {
    bool o = true, lse = true;
  };
  Trust trust_in(std::int64_t batch, std::int64_t head, std::int64_t i) {
    o_.resize(static_cast<std::size_t>(problem_.head_dim_v));
    load_row(given_->o, batch, i, head, problem_.head_dim_v, o_.data());
    const float lse = given_->lse_of(problem_, batch, head, i);
    return {std::all_of(o_.begin(), o_.end(), [](double x) { return std::isfinite(x); }),
            !std::isnan(lse) && (lse > 0 || !std::isinf(lse))};
  }

  // What the row of a query that was given has for one key.
  void compute_given(const Row& key, std::int64_t head, std::int64_t i, int count) {
    const bool covered =
        key.batch == batch_ && key.head == kv_head_ && block_.range.begin <= key.position && key.position < block_.range.end;
    if (!covered) block_.load(problem_, inputs_, key.batch, key.head, {key.position, key.position + 1});
    batch_ = key.batch;
    kv_head_ = key.head;
    visible_.front().keys.assign(1, static_cast<std::uint32_t>(key.position - block_.range.begin));
    visible_.front().counts.assign(1, static_cast<std::uint8_t>(count));
    engine_.run_given({key.batch, head, i}, block_, visible_, *given_);
  }

  // What the row just computed adds to dk and dv of one key. What cannot be trusted counts once float64 is not finite either.
  void add_pair(std::int64_t position, Trust trust, std::vector<Real>& dk, std::vector<Real>& dv, ColumnBound& dk_bound,
                ColumnBound& dv_bound) {
    const bool adds_dk = (trust.o && trust.lse) || !std::isfinite(dk[0]);
    const bool adds_dv = trust.lse || !std::isfinite(dv[0]);
    const auto key = static_cast<std::uint32_t>(position - block_.range.begin);
    for (std::size_t s = 0; s < visible_.size(); ++s) {
      const auto& keys = visible_[s].keys;
      const auto found = std::lower_bound(keys.begin(), keys.end(), key);
      if (found == keys.end() || *found != key) continue;
      const auto x = static_cast<std::size_t>(found - keys.begin());
      const auto& state = engine_.states[s];
      for (std::size_t c = 0; adds_dk && c < dk.size(); ++c) dk[c] += state.ds[x] * engine_.q[c];
      for (std::size_t c = 0; adds_dv && c < dv.size(); ++c) dv[c] += state.dropped_p[x] * state.d_out[c];
      engine_.add_key_bounds(block_, s, x, key, dk_bound, dv_bound);
    }
  }

  const Problem& problem_;
  const Inputs& inputs_;
  const bool backward_;
  const Given* given_;
  RowEngine<Policy> engine_;
  KeyBlock<Real> block_;
  std::vector<double> o_;
  std::int64_t batch_ = -1, kv_head_ = -1;
  std::vector<std::uint8_t> buffer_;
  std::vector<Visible> visible_ = std::vector<Visible>(static_cast<std::size_t>(states(problem_)));
};

// Calls `body` with the policy of the arithmetic.
template <typename Body>
Result with_policy(DType dtype, Arithmetic arithmetic, Body body) {
  if (arithmetic == Arithmetic::exact) return body(Exact{});
  switch (dtype) {
    case DType::float32:
      return body(NaiveFloat32{});
    case DType::bfloat16:
      return body(NaiveBfloat16{});
    case DType::float16:
      return body(NaiveFloat16{});
  }
  RINGSPAN_CHECK(false);
}

}  // namespace

View contiguous_view(const void* data, DType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t width) {
  return {data, dtype, tokens * heads * width, heads * width, width};
}

Result dense(const Problem& problem, const Inputs& inputs, Arithmetic arithmetic, bool backward) {
  return with_policy(problem.dtype, arithmetic,
                     [&]<typename Policy>(Policy) { return Dense<Policy>(problem, inputs, backward).run(); });
}

Result sampled(const Problem& problem, const Inputs& inputs, Arithmetic arithmetic, bool backward, std::span<const Row> queries,
               std::span<const Row> keys, const Given* given) {
  RINGSPAN_CHECK(given == nullptr || (queries.empty() && states(problem) == 1));
  Inputs with_o = inputs;
  if (given != nullptr) with_o.rounded_o = problem.dtype != DType::float32;  // which the kernels may have kept in float32
  return with_policy(problem.dtype, arithmetic, [&]<typename Policy>(Policy) {
    return Sampled<Policy>(problem, with_o, backward, given).run(queries, keys);
  });
}

}  // namespace ringspan::oracle
