// dsinks, dk and dv of an o and an lse that were computed, against those of the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "oracle/compare.h"
#include "oracle/dense.h"
#include "oracle/row_engine.h"

namespace ringspan::oracle {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float round_to(DType dtype, double value) {
  if (dtype == DType::bfloat16) return NaiveBfloat16::round(static_cast<float>(value));
  if (dtype == DType::float16) return NaiveFloat16::round(static_cast<float>(value));
  return static_cast<float>(value);
}

struct World {
  Problem problem;
  std::vector<float> q, k, v, d_out, d_lse, sinks, o, lse;
  Inputs inputs;
  Result whole;

  explicit World(const Problem& p, std::uint32_t seed, float v_size = 1) : problem(p) {
    problem.sinks = true;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::int64_t count, DType dtype, float size = 1) {
      for (std::int64_t x = 0; x < count; ++x) values.push_back(round_to(dtype, size * normal(random)));
    };
    const std::int64_t rows = p.batch * p.tokens_q * p.heads;
    fill(q, rows * p.head_dim, p.dtype);
    fill(k, p.batch * p.tokens_k * p.kv_heads * p.head_dim, p.dtype);
    fill(v, p.batch * p.tokens_k * p.kv_heads * p.head_dim_v, p.dtype, v_size);
    fill(d_out, rows * p.head_dim_v, p.dtype);
    fill(d_lse, rows, DType::float32);
    fill(sinks, p.heads, DType::float32);
    inputs.q = contiguous_view(q.data(), DType::float32, p.tokens_q, p.heads, p.head_dim);
    inputs.k = contiguous_view(k.data(), DType::float32, p.tokens_k, p.kv_heads, p.head_dim);
    inputs.v = contiguous_view(v.data(), DType::float32, p.tokens_k, p.kv_heads, p.head_dim_v);
    inputs.d_out = contiguous_view(d_out.data(), DType::float32, p.tokens_q, p.heads, p.head_dim_v);
    inputs.d_lse = d_lse.data();
    inputs.sinks = sinks.data();
    inputs.dropped = [](std::int64_t, std::int64_t h, std::int64_t i, std::int64_t j, int) { return (h + i + j) % 4 == 0; };
    whole = dense(problem, inputs, Arithmetic::exact, true);
    for (const double value : whole.o.values) o.push_back(round_to(p.dtype, value));
    for (const double value : whole.lse.values) lse.push_back(static_cast<float>(value));
  }

  SinkSums sums() const {
    const View view = contiguous_view(o.data(), DType::float32, problem.tokens_q, problem.heads, problem.head_dim_v);
    return dsinks_of_outputs(problem, inputs, view, lse.data());
  }
  std::string judge(std::vector<double> actual) const {
    const Tensor exact = sums().dsinks;
    for (double& value : actual) value = static_cast<float>(value);
    const Comparison result = compare("dsinks", exact, exact, actual, DType::float32);
    return result.passed ? "" : to_string(result);
  }
  // dk and dv of every key, judged by those of the o and lse; "" where both pass.
  std::string judge_keys(const std::vector<double>& dk, const std::vector<double>& dv) const {
    const Given given{contiguous_view(o.data(), DType::float32, problem.tokens_q, problem.heads, problem.head_dim_v),
                      lse.data()};
    std::vector<Row> keys;  // in the order of the whole
    for (std::int64_t x = 0; x < whole.dk.rows(); ++x) {
      keys.push_back({x / problem.kv_heads / problem.tokens_k, x % problem.kv_heads, x / problem.kv_heads % problem.tokens_k});
    }
    const Result exact = sampled(problem, inputs, Arithmetic::exact, true, {}, keys, &given);
    const Result naive = sampled(problem, inputs, Arithmetic::naive, true, {}, keys, &given);
    std::string failures;
    const auto compare_one = [&](const char* name, const Tensor& right, const Tensor& plain, std::vector<double> actual) {
      for (double& value : actual) value = round_to(problem.dtype, value);
      const Comparison result = compare(name, right, plain, actual, problem.dtype);
      if (!result.passed) failures += to_string(result) + "\n";
    };
    compare_one("dk", exact.dk, naive.dk, dk);
    compare_one("dv", exact.dv, naive.dv, dv);
    return failures;
  }
  std::size_t row(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return static_cast<std::size_t>((b * problem.tokens_q + i) * problem.heads + h);
  }
  std::size_t statistic(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return static_cast<std::size_t>((b * problem.heads + h) * problem.tokens_q + i);
  }
};

Problem make_problem(DType dtype) {
  Problem p;
  p.batch = 2;
  p.tokens_q = p.tokens_k = 60;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 8;
  p.head_dim_v = 16;
  p.dtype = dtype;
  p.pattern.causal = true;
  return p;
}

class SinkSum : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, SinkSum, testing::Values(DType::float32, DType::bfloat16, DType::float16),
                         [](const auto& instance) { return std::string(to_string(instance.param)); });

TEST_P(SinkSum, OfRoundedOutputsIsThatOfTheWhole) {
  std::vector<Pattern> patterns(4);
  patterns[1].causal = true;
  patterns[2].dilated = Dilated{{{16, 1}, {32, 2}}, Dialect::longnet, false};
  patterns[3].dilated = Dilated{{{16, 1}, {32, 2}}, Dialect::head_groups, false};
  for (std::size_t pattern = 0; pattern < patterns.size(); ++pattern) {
    for (const std::uint32_t seed : {1, 2, 3}) {
      for (const float v_size : {1.0F, 1e-6F}) {  // of the second float16 holds little
        Problem p = make_problem(GetParam());
        p.pattern = patterns[pattern];
        p.lengths_q = {60, 41};
        p.dropout = seed == 3 ? 0.25F : 0.0F;
        p.softcap = seed == 2 ? 3.0F : 0.0F;
        SCOPED_TRACE("pattern " + std::to_string(pattern) + ", seed " + std::to_string(seed) + ", v of size " +
                     std::to_string(v_size));
        const World world(p, seed, v_size);
        EXPECT_EQ(world.judge(world.whole.dsinks.values), "");
        EXPECT_TRUE(world.sums().not_finite.empty());
        EXPECT_EQ(world.judge_keys(world.whole.dk.values, world.whole.dv.values), "");
      }
    }
  }
}

struct Missing {
  const char* what;
  bool d_lse, d_out;
  std::int64_t from_batch, from_row;
};
constexpr Missing kMissing[] = {{"dlse", true, false, 0, 0},
                                {"do", false, true, 0, 0},
                                {"a batch item", true, true, 1, 0},
                                {"the rows of the last of four ranks", true, true, 0, 45}};

TEST_P(SinkSum, WhatIsLeftOutIsNoticed) {
  for (const std::uint32_t seed : {1, 2, 3}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const World world(make_problem(GetParam()), seed);
    for (const Missing& missing : kMissing) {
      World wrong = world;
      wrong.inputs.d_lse = wrong.d_lse.data();
      wrong.inputs.d_out.data = wrong.d_out.data();
      for (std::int64_t x = 0; x < 2 * 60 * 4; ++x) {
        const std::int64_t b = x / 240, i = x / 4 % 60, h = x % 4;
        if (b < missing.from_batch || i < missing.from_row) continue;
        if (missing.d_lse) wrong.d_lse[world.statistic(b, i, h)] = 0;
        if (missing.d_out) std::fill_n(&wrong.d_out[world.row(b, i, h) * 16], 16, 0.0F);
      }
      EXPECT_NE(world.judge(wrong.sums().dsinks.values), "") << missing.what;
    }
    std::vector<double> swapped = world.whole.dsinks.values;
    std::swap(swapped[0], swapped[1]);
    EXPECT_NE(world.judge(swapped), "");
  }
}

// Rows of lse and o that are not finite count where the inputs make them so, and only there.
TEST_P(SinkSum, KeysHaveNaNWhereTheInputsMakeIt) {
  const World right(make_problem(GetParam()), 6);
  std::vector<double> dk = right.whole.dk.values, dv = right.whole.dv.values;
  for (const double factor : {0.0, 0.9}) {
    std::vector<double> less = dk;
    std::for_each(less.begin() + 80, less.begin() + 160, [&](double& x) { x *= factor; });
    EXPECT_NE(right.judge_keys(less, dv), "");
    less = dv;
    std::for_each(less.begin() + 160, less.begin() + 320, [&](double& x) { x *= factor; });
    EXPECT_NE(right.judge_keys(dk, less), "");
  }
  World wrong = right;
  for (std::int64_t i = 30; i < 60; ++i) wrong.o[right.row(0, i, 1) * 16] = std::numeric_limits<float>::quiet_NaN();
  std::fill_n(dk.begin(), 8, std::numeric_limits<double>::quiet_NaN());
  EXPECT_NE(wrong.judge_keys(dk, dv), "");
  for (std::int64_t i = 30; i < 60; ++i) wrong.lse[right.statistic(0, i, 1)] = std::numeric_limits<float>::quiet_NaN();
  std::fill_n(dv.begin(), 16, std::numeric_limits<double>::quiet_NaN());
  EXPECT_NE(wrong.judge_keys(right.whole.dk.values, dv), "");

  World legal(make_problem(GetParam()), 6);
  legal.v[5] = std::numeric_limits<float>::quiet_NaN();  // of key 0, kv head 0
  legal.whole = dense(legal.problem, legal.inputs, Arithmetic::exact, true);
  for (std::size_t x = 0; x < legal.o.size(); ++x) legal.o[x] = round_to(GetParam(), legal.whole.o.values[x]);
  ASSERT_TRUE(std::isnan(legal.whole.dk.values[0]));
  EXPECT_EQ(legal.judge_keys(legal.whole.dk.values, legal.whole.dv.values), "");
  legal.whole.dv.values[3] += 1;
  EXPECT_NE(legal.judge_keys(legal.whole.dk.values, legal.whole.dv.values), "");
}

TEST_P(SinkSum, ASinkOfMinusInfinityHasNoneAndOneOfInfinityNaN) {
  World world(make_problem(GetParam()), 4);
  world.sinks = {-kInfinity, kInfinity, 0.5F, 1};
  world.inputs.sinks = world.sinks.data();
  for (std::int64_t i = 0; i < 60; ++i) {
    world.o[world.row(0, i, 0) * 16] = std::numeric_limits<float>::quiet_NaN();
    world.lse[world.statistic(0, i, 1)] = world.lse[world.statistic(1, i, 1)] = kInfinity;
  }
  const SinkSums sums = world.sums();
  EXPECT_EQ(sums.dsinks.values[0], 0.0);
  EXPECT_TRUE(std::isnan(sums.dsinks.values[1]));
  EXPECT_TRUE(std::isfinite(sums.dsinks.values[2]));
  ASSERT_EQ(sums.not_finite.size(), 1U);
  EXPECT_EQ(sums.not_finite[0].head, 1);
}

TEST_P(SinkSum, RowsThatAreNotFiniteAreNamed) {
  World world(make_problem(GetParam()), 5);
  world.o[world.row(1, 17, 2) * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
  world.o[world.row(1, 23, 2) * 16 + 3] = kInfinity;
  world.lse[world.statistic(0, 9, 3)] = -kInfinity;  // with a sink no row but padding has it
  const std::vector<Row> rows = world.sums().not_finite;
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(std::vector<std::int64_t>({rows[0].batch, rows[0].head, rows[0].position}), std::vector<std::int64_t>({0, 3, 9}));
  EXPECT_EQ(std::vector<std::int64_t>({rows[1].batch, rows[1].head, rows[1].position}), std::vector<std::int64_t>({1, 2, 17}));
}

}  // namespace
}  // namespace ringspan::oracle
