#include "verification.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "oracle/dense.h"
#include "pattern/lower.h"
#include "sample.h"
#include "text.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

using oracle::Arithmetic;
using oracle::Row;

constexpr double kDenseWork = 1e10;  // multiply-adds per element of a pair, of both arithmetics; some seconds on one core

oracle::View view_of(const std::byte* data, const TensorShape& shape) {
  const ConstTensor tensor = as_tensor(data, shape);
  return {tensor.data, shape.dtype, tensor.batch_stride, tensor.token_stride, tensor.head_stride};
}

// The oracle's inputs; a gradient that no file holds is made here.
struct OracleInputs {
  oracle::Inputs inputs;
  Pages d_out;
  Pages dlse;

  OracleInputs(const Problem& problem, const Inputs& from, Layout layout, bool backward) {
    const TensorShape o = OutputShapes(problem, layout).o;
    inputs.q = view_of(from.q.data, from.q.shape);
    inputs.k = view_of(from.k.data, from.k.shape);
    inputs.v = view_of(from.v.data, from.v.shape);
    inputs.sinks = from.sinks;
    inputs.alibi_slopes = from.alibi_slopes;
    inputs.alibi_batch_stride = from.alibi_batch_stride;
    if (!backward) return;
    if (from.gradient.kind == GradientSpec::Kind::file) {
      inputs.d_out = view_of(from.d_out.data, o);
    } else {
      d_out = Pages(o.bytes());
      const Shard all{{{0, 1, o.tokens}}, {0}, o.tokens};
      if (from.gradient.kind == GradientSpec::Kind::ones) {
        fill_ones(all, o, d_out.data());
      } else {
        fill_normal(from.gradient.seed, all, o, d_out.data());
      }
      inputs.d_out = view_of(d_out.data(), o);
    }
    inputs.d_lse = reinterpret_cast<const float*>(from.dlse.data);
  }
};

void compare(Verification& result, const char* name, const oracle::Tensor& exact, const oracle::Tensor& naive,
             const std::vector<double>& actual, DType dtype) {
  result.comparisons.push_back(oracle::compare(name, exact, naive, actual, dtype));
  result.passed = result.passed && result.comparisons.back().passed;
}

std::vector<double> all_rows(const std::byte* data, const TensorShape& shape) {
  return oracle::to_doubles(view_of(data, shape), shape.batch, shape.tokens, shape.heads, shape.width);
}

const float* floats(const std::byte* data) { return reinterpret_cast<const float*>(data); }

// lse and dsinks lie as the oracle's: (batch, heads, tokens) and (heads).
std::vector<double> flat(const std::byte* data, std::int64_t count) { return {floats(data), floats(data) + count}; }

void verify_all(Verification& result, const Problem& problem, const oracle::Inputs& inputs, const OutputShapes& shapes,
                const Outputs& outputs, bool backward) {
  const oracle::Result exact = oracle::dense(problem, inputs, Arithmetic::exact, backward);
  const oracle::Result naive = oracle::dense(problem, inputs, Arithmetic::naive, backward);
  const DType dtype = problem.dtype;
  compare(result, "o", exact.o, naive.o, all_rows(outputs.o, shapes.o), dtype);
  compare(result, "lse", exact.lse, naive.lse, flat(outputs.lse, shapes.lse.bytes() / 4), DType::float32);
  if (!backward) return;
  compare(result, "dq", exact.dq, naive.dq, all_rows(outputs.dq, shapes.dq), dtype);
  compare(result, "dk", exact.dk, naive.dk, all_rows(outputs.dk, shapes.dk), dtype);
  compare(result, "dv", exact.dv, naive.dv, all_rows(outputs.dv, shapes.dv), dtype);
  if (problem.sinks) compare(result, "dsinks", exact.dsinks, naive.dsinks, flat(outputs.dsinks, problem.heads), DType::float32);
}

void verify_sample(Verification& result, const Problem& problem, const oracle::Inputs& inputs, const OutputShapes& shapes,
                   const Outputs& outputs, bool backward, std::uint64_t seed) {
  Sample sample = draw_sample(problem, backward, seed);
  const oracle::Given given{view_of(outputs.o, shapes.o), floats(outputs.lse)};
  oracle::SinkSums sinks;
  if (backward && problem.sinks) {
    sinks = oracle::dsinks_of_outputs(problem, inputs, given.o, given.lse);
    // Otherwise one wrong NaN of o or lse would excuse a NaN of dsinks.
    sample.queries.insert(sample.queries.end(), sinks.not_finite.begin(), sinks.not_finite.end());
  }
  result.sampled = true;
  result.query_rows = static_cast<std::int64_t>(sample.queries.size());
  result.key_rows = static_cast<std::int64_t>(sample.keys.size());
  result.ranks_without_keys = sample.ranks_without_keys;
  const auto rows_of = [&](Arithmetic arithmetic) {
    if (!sample.from_outputs) return oracle::sampled(problem, inputs, arithmetic, backward, sample.queries, sample.keys);
    oracle::Result rows = oracle::sampled(problem, inputs, arithmetic, backward, sample.queries, {});
    oracle::Result keys = oracle::sampled(problem, inputs, arithmetic, backward, {}, sample.keys, &given);
    rows.dk = std::move(keys.dk);
    rows.dv = std::move(keys.dv);
    return rows;
  };
  const oracle::Result exact = rows_of(Arithmetic::exact);
  const oracle::Result naive = rows_of(Arithmetic::naive);
  const auto rows = [](const std::byte* data, const TensorShape& shape, const std::vector<Row>& which) {
    return oracle::to_doubles(view_of(data, shape), which, shape.width);
  };
  const DType dtype = problem.dtype;
  compare(result, "o", exact.o, naive.o, rows(outputs.o, shapes.o, sample.queries), dtype);
  compare(result, "lse", exact.lse, naive.lse, rows(outputs.lse, shapes.lse, sample.queries), DType::float32);
  if (!backward) return;
  compare(result, "dq", exact.dq, naive.dq, rows(outputs.dq, shapes.dq, sample.queries), dtype);
  compare(result, "dk", exact.dk, naive.dk, rows(outputs.dk, shapes.dk, sample.keys), dtype);
  compare(result, "dv", exact.dv, naive.dv, rows(outputs.dv, shapes.dv, sample.keys), dtype);
  if (sample.from_outputs) result.from_outputs = {"dk", "dv"};
  if (!problem.sinks) return;
  compare(result, "dsinks", sinks.dsinks, sinks.dsinks, flat(outputs.dsinks, problem.heads), DType::float32);
  result.comparisons.back().max_naive_error = std::numeric_limits<double>::quiet_NaN();
  result.from_outputs.emplace_back("dsinks");
}

}  // namespace

Verification verify_outputs(const Problem& problem, const Inputs& inputs, Layout layout, const Outputs& outputs,
                            std::uint64_t seed, bool rounded_o) {
  const EndAtSignal interruptible;  // the oracle does not ask
  const auto begin = std::chrono::steady_clock::now();
  const bool backward = outputs.dq != nullptr;
  OracleInputs oracle_inputs(problem, inputs, layout, backward);
  oracle_inputs.inputs.rounded_o = rounded_o;
  const OutputShapes shapes(problem, layout);
  Verification result;
  const double work = static_cast<double>(pair_count(problem)) * (problem.head_dim + problem.head_dim_v) * (backward ? 4 : 1);
  if (work <= kDenseWork) {
    verify_all(result, problem, oracle_inputs.inputs, shapes, outputs, backward);
  } else {
    verify_sample(result, problem, oracle_inputs.inputs, shapes, outputs, backward, seed);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

std::string to_text(const Verification& verification) {
  const oracle::Comparison& o = verification.comparisons.front();
  const bool says_nothing = o.elements > 0 && o.both_nan == o.elements;
  std::string text = !verification.passed ? "DISAGREES with float64"
                     : says_nothing       ? "SAYS NOTHING: o is NaN, as float64 has it,"
                                          : "agrees with float64";
  text += verification.sampled
              ? fmt::format(" on {} and {}, with all that they depend on", counted(verification.query_rows, "query row"),
                            counted(verification.key_rows, "key row"))
              : " on every element";
  text += fmt::format(" ({})\n", seconds_text(verification.seconds));
  text += fmt::format("  {:<20}{:>12}{:>12}{:>12}\n", "", "elements", "max error", "naive has");
  for (const oracle::Comparison& c : verification.comparisons) {
    const std::string naive = std::isnan(c.max_naive_error) ? "-" : fmt::format("{:.1e}", c.max_naive_error);
    text +=
        fmt::format("  {:<20}{:>12}{:>12.1e}{:>12}{}{}\n", c.name, count_text(c.elements), c.max_error, naive,
                    c.both_nan == 0 ? "" : fmt::format("  {} NaN in both", count_text(c.both_nan)), c.passed ? "" : "  FAILED");
  }
  for (const std::string& name : verification.from_outputs) {
    text += fmt::format("  {} is compared with the sum over all rows of the o and lse computed\n", name);
  }
  if (!verification.ranks_without_keys.empty()) {
    text += fmt::format("  dk and dv of {} {} were not looked at: their rows take too long\n",
                        verification.ranks_without_keys.size() == 1 ? "rank" : "ranks",
                        fmt::join(verification.ranks_without_keys, ", "));
  }
  for (const oracle::Comparison& c : verification.comparisons) {
    if (c.passed) continue;
    text += "  " + oracle::to_string(c) + "\n";
    if (std::isinf(c.actual) && std::isfinite(c.expected))
      text += "  (an infinity also comes of values whose sum, before it is normalised, exceeds float32: docs/numerics.md)\n";
  }
  return text;
}

}  // namespace ringspan::cli
