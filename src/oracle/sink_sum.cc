#include <cmath>
#include <cstddef>

#include "base/check.h"
#include "oracle/dense.h"
#include "oracle/row_engine.h"

namespace ringspan::oracle {
namespace {

// What one query adds; that and what rounding each element of o makes of it, in units of roundoff; its size before
// cancellation; and what an element of o is multiplied with.
struct Part {
  double value = 0, spread = 0, size = 0, factor = 0;
};

// With several states weights are detached, so that only lse reaches the sink.
Part part_of(const std::vector<double>& d_out, const std::vector<double>& o, double d_lse, double p, bool several_states) {
  double delta = 0, squares = 0, d_out_squares = 0, o_squares = 0;
  for (std::size_t c = 0; c < o.size(); ++c) {
    delta += d_out[c] * o[c];
    squares += d_out[c] * o[c] * d_out[c] * o[c];
    d_out_squares += d_out[c] * d_out[c];
    o_squares += o[c] * o[c];
  }
  Part part;
  part.value = p * (d_lse - (several_states ? 0.0 : delta));
  part.spread = std::abs(part.value) + p * std::sqrt(squares);
  part.size = p * (std::sqrt(d_out_squares * o_squares) + std::abs(d_lse));
  part.factor = p * std::sqrt(d_out_squares);
  return part;
}

}  // namespace

SinkSums dsinks_of_outputs(const Problem& problem, const Inputs& inputs, const View& o, const float* lse) {
  RINGSPAN_CHECK(problem.sinks && inputs.sinks != nullptr && inputs.d_out.data != nullptr);
  const auto heads = static_cast<std::size_t>(problem.heads);
  SinkSums result;
  result.dsinks.values.assign(heads, 0.0);
  result.dsinks.floors.assign(heads, 0.0);
  std::vector<ColumnBound> bounds(heads);
  std::vector<std::int64_t> not_finite(heads, 0);
  std::vector<double> o_row(static_cast<std::size_t>(problem.head_dim_v)), d_out_row(o_row.size());
  const double dot_slack = 4.0 + std::sqrt(static_cast<double>(problem.head_dim_v));
  const bool several_states = states(problem) > 1;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int64_t rows =
        problem.lengths_q.empty() ? problem.tokens_q : problem.lengths_q[static_cast<std::size_t>(b)];  // padding has no sink
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t h = 0; h < problem.heads; ++h) {
        const double sink = inputs.sinks[h];
        if (std::isinf(sink) && sink < 0) continue;  // none
        const std::int64_t at = (b * problem.heads + h) * problem.tokens_q + i;
        load_row(o, b, i, h, problem.head_dim_v, o_row.data());
        load_row(inputs.d_out, b, i, h, problem.head_dim_v, d_out_row.data());
        const double d_lse = inputs.d_lse != nullptr ? inputs.d_lse[at] : 0.0;
        const Part part = part_of(d_out_row, o_row, d_lse, std::exp(sink - lse[at]), several_states);
        const auto head = static_cast<std::size_t>(h);
        result.dsinks.values[head] += part.value;
        const double slack = dot_slack + std::abs(sink) + std::abs(static_cast<double>(lse[at]));
        bounds[head].add(part.spread, part.size, slack, part.factor, part.factor);
        if (!std::isfinite(part.value) && not_finite[head]++ == 0) result.not_finite.push_back({b, h, i});
      }
    }
  }
  for (std::size_t h = 0; h < heads; ++h)
    result.dsinks.floors[h] = bounds[h].floor(problem.dtype, std::abs(result.dsinks.values[h]));
  return result;
}

}  // namespace ringspan::oracle
