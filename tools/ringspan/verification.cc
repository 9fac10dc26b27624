#include "verification.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "oracle/dense.h"
#include "oracle/multiplicity.h"
#include "pattern/lower.h"
#include "text.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

using oracle::Arithmetic;
using oracle::Row;

// Multiply-adds per element of a pair, of both arithmetics; some seconds on one core.
constexpr double kDenseWork = 1e10;
constexpr double kSampledWork = 2e9;
constexpr int kSampledQueries = 64;
constexpr int kSampledKeys = 24;
constexpr int kCandidates = 400;

double width_of(const Problem& problem) { return problem.head_dim + problem.head_dim_v; }

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

// About how many pairs an exact row of dk, dv takes: every query that sees the key needs its whole row.
double pairs_behind(const Problem& problem, const Row& key, double pairs_per_query) {
  const int group = problem.group();
  Restriction restriction = unrestricted(problem);
  restriction.k_begin = key.position;
  restriction.k_end = key.position + 1;
  restriction.head_begin = static_cast<int>(key.head) * group;
  restriction.head_end = restriction.head_begin + group;
  double queries = 0;
  for_each_slice(problem, restriction, [&](const Slice& slice) {
    const bool here = slice.batch_first <= key.batch && key.batch < slice.batch_first + slice.batch_count;
    if (here) queries += static_cast<double>(slice.q.count) * static_cast<double>(slice.heads.count);
  });
  return queries * pairs_per_query;
}

Row draw(std::mt19937_64& random, std::int64_t batch, std::int64_t heads, std::int64_t tokens) {
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
  Row row;
  row.batch = below(batch);
  row.head = below(heads);
  row.position = below(tokens);
  return row;
}

struct Sample {
  std::vector<Row> queries, keys;
};

// The first and the last query, and others at random; keys at random as far as the work goes.
Sample draw_sample(const Problem& problem, bool backward, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Sample sample;
  if (problem.tokens_q > 0) {
    sample.queries = {{0, 0, 0}, {problem.batch - 1, problem.heads - 1, problem.tokens_q - 1}};
    for (int n = 2; n < kSampledQueries; ++n)
      sample.queries.push_back(draw(random, problem.batch, problem.heads, problem.tokens_q));
  }
  if (!backward || problem.tokens_k == 0) return sample;
  const double rows =
      static_cast<double>(problem.batch) * problem.heads * static_cast<double>(std::max<std::int64_t>(problem.tokens_q, 1));
  const double pairs_per_query = std::max(1.0, static_cast<double>(pair_count(problem)) / rows);
  double left = kSampledWork / width_of(problem);
  Row cheapest;
  double lowest = -1;
  for (int n = 0; n < kCandidates && static_cast<int>(sample.keys.size()) < kSampledKeys; ++n) {
    const Row key = draw(random, problem.batch, problem.kv_heads, problem.tokens_k);
    const double work = pairs_behind(problem, key, pairs_per_query);
    if (work <= left) {
      sample.keys.push_back(key);
      left -= work;
    }
    if (lowest < 0 || work < lowest) {
      lowest = work;
      cheapest = key;
    }
  }
  if (sample.keys.empty()) sample.keys.push_back(cheapest);
  return sample;
}

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
  oracle::SinkSums sinks;
  if (backward && problem.sinks) {
    sinks = oracle::dsinks_of_outputs(problem, inputs, view_of(outputs.o, shapes.o), floats(outputs.lse));
    // Otherwise one wrong NaN of o or lse would excuse a NaN of dsinks.
    sample.queries.insert(sample.queries.end(), sinks.not_finite.begin(), sinks.not_finite.end());
  }
  result.sampled = true;
  result.query_rows = static_cast<std::int64_t>(sample.queries.size());
  result.key_rows = static_cast<std::int64_t>(sample.keys.size());
  const oracle::Result exact = oracle::sampled(problem, inputs, Arithmetic::exact, backward, sample.queries, sample.keys);
  const oracle::Result naive = oracle::sampled(problem, inputs, Arithmetic::naive, backward, sample.queries, sample.keys);
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
  const double work = static_cast<double>(pair_count(problem)) * width_of(problem) * (backward ? 4 : 1);
  if (work <= kDenseWork) {
    verify_all(result, problem, oracle_inputs.inputs, shapes, outputs, backward);
  } else {
    verify_sample(result, problem, oracle_inputs.inputs, shapes, outputs, backward, seed);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

std::string to_text(const Verification& verification) {
  std::string text = verification.passed ? "agrees with float64" : "DISAGREES with float64";
  text += verification.sampled
              ? fmt::format(" on {} and {}, with all that they depend on", counted(verification.query_rows, "query row"),
                            counted(verification.key_rows, "key row"))
              : " on every element";
  text += fmt::format(" ({})\n", seconds_text(verification.seconds));
  text += fmt::format("  {:<20}{:>12}{:>12}{:>12}\n", "", "elements", "max error", "naive has");
  for (const oracle::Comparison& c : verification.comparisons) {
    const std::string naive = std::isnan(c.max_naive_error) ? "-" : fmt::format("{:.1e}", c.max_naive_error);
    text += fmt::format("  {:<20}{:>12}{:>12.1e}{:>12}{}\n", c.name, count_text(c.elements), c.max_error, naive,
                        c.passed ? "" : "  FAILED");
  }
  for (const std::string& name : verification.from_outputs) {
    text += fmt::format("  {} is compared with the sum over all rows of the o and lse computed\n", name);
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
