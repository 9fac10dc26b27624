#include "oracle/dense.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "oracle/multiplicity.h"

namespace ringspan::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Float32 tensors of a problem on a coarse grid, so that steps of 2^-10 are exact.
struct Data {
  std::vector<float> q, k, v, d_out, d_lse, sinks, slopes;

  explicit Data(const Problem& p, std::uint32_t seed = 7) {
    std::mt19937 random(seed);
    const auto fill = [&](std::vector<float>& values, std::int64_t count) {
      for (std::int64_t x = 0; x < count; ++x) {
        values.push_back(static_cast<float>(static_cast<int>(random() % 257) - 128) / 64.0F);
      }
    };
    fill(q, p.batch * p.tokens_q * p.heads * p.head_dim);
    fill(k, p.batch * p.tokens_k * p.kv_heads * p.head_dim);
    fill(v, p.batch * p.tokens_k * p.kv_heads * p.head_dim_v);
    fill(d_out, p.batch * p.tokens_q * p.heads * p.head_dim_v);
    fill(d_lse, p.batch * p.tokens_q * p.heads);
    fill(sinks, p.heads);
    fill(slopes, p.heads);
  }

  Inputs inputs(const Problem& p) const {
    Inputs inputs;
    inputs.q = contiguous_view(q.data(), DType::float32, p.tokens_q, p.heads, p.head_dim);
    inputs.k = contiguous_view(k.data(), DType::float32, p.tokens_k, p.kv_heads, p.head_dim);
    inputs.v = contiguous_view(v.data(), DType::float32, p.tokens_k, p.kv_heads, p.head_dim_v);
    inputs.d_out = contiguous_view(d_out.data(), DType::float32, p.tokens_q, p.heads, p.head_dim_v);
    inputs.d_lse = d_lse.data();
    inputs.sinks = sinks.data();
    inputs.alibi_slopes = slopes.data();
    inputs.dropped = [](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, int) {
      return (b + h + 3 * i + 5 * j) % 4 == 0;
    };
    return inputs;
  }
};

Problem small_problem() {
  Problem p;
  p.batch = 2;
  p.tokens_q = 5;
  p.tokens_k = 6;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 3;
  p.head_dim_v = 2;
  return p;
}

// What do and dlse are the gradients of.
double loss(const Problem& p, const Data& data) {
  const Result result = dense(p, data.inputs(p), Arithmetic::exact, false);
  double sum = 0;
  for (std::size_t x = 0; x < result.o.values.size(); ++x) sum += result.o.values[x] * data.d_out[x];
  for (std::size_t x = 0; x < result.lse.values.size(); ++x) {
    if (std::isfinite(result.lse.values[x])) sum += result.lse.values[x] * data.d_lse[x];
  }
  return sum;
}

// Compares every gradient with a central difference.
void expect_gradients(const Problem& p) {
  Data data(p);
  const Result result = dense(p, data.inputs(p), Arithmetic::exact, true);
  const auto check = [&](const char* name, std::vector<float>& input, const std::vector<double>& gradient) {
    ASSERT_EQ(input.size(), gradient.size()) << name;
    constexpr float kStep = 0x1p-10F;
    for (std::size_t x = 0; x < input.size(); ++x) {
      const float before = input[x];
      input[x] = before + kStep;
      const double above = loss(p, data);
      input[x] = before - kStep;
      const double below = loss(p, data);
      input[x] = before;
      const double difference = (above - below) / (2.0 * kStep);
      EXPECT_NEAR(gradient[x], difference, 2e-4 * (1.0 + std::abs(difference))) << name << ' ' << x;
    }
  };
  check("dq", data.q, result.dq.values);
  check("dk", data.k, result.dk.values);
  check("dv", data.v, result.dv.values);
  if (p.sinks) check("dsinks", data.sinks, result.dsinks.values);
}

TEST(Dense, TwoKeysByHand) {
  Problem p;
  p.tokens_q = 1;
  p.tokens_k = 2;
  p.head_dim = 1;
  p.head_dim_v = 1;
  p.scale = 0.5F;
  const float q[] = {2}, k[] = {1, 3}, v[] = {10, 20};
  Inputs inputs;
  inputs.q = contiguous_view(q, DType::float32, 1, 1, 1);
  inputs.k = contiguous_view(k, DType::float32, 2, 1, 1);
  inputs.v = contiguous_view(v, DType::float32, 2, 1, 1);
  const Result result = dense(p, inputs, Arithmetic::exact, false);
  const double e1 = std::exp(1.0), e3 = std::exp(3.0);
  EXPECT_NEAR(result.lse.values[0], std::log(e1 + e3), 1e-15);
  EXPECT_NEAR(result.o.values[0], (10 * e1 + 20 * e3) / (e1 + e3), 1e-14);
}

TEST(Dense, QueriesOfNaNHaveNaN) {
  Problem p = small_problem();
  Data data(p);
  data.q[0] = std::numeric_limits<float>::quiet_NaN();
  const Result result = dense(p, data.inputs(p), Arithmetic::exact, false);
  EXPECT_TRUE(std::isnan(result.lse.values[0]));
  EXPECT_TRUE(std::isnan(result.o.values[0]));
  EXPECT_TRUE(std::isfinite(result.lse.values[1]));
}

TEST(Dense, OptionsByHandInTheirOrder) {  // softcap before ALiBi, the sink only in the denominator, dropout last
  Problem p;
  p.tokens_q = 1;
  p.tokens_k = 2;
  p.head_dim = 1;
  p.head_dim_v = 1;
  p.scale = 1.0F;
  p.softcap = 2.0F;
  p.alibi = p.sinks = true;
  p.dropout = 0.5F;
  const float q[] = {1}, k[] = {1, 3}, v[] = {10, 20}, slopes[] = {0.25F}, sinks[] = {0.5F};
  Inputs inputs;
  inputs.q = contiguous_view(q, DType::float32, 1, 1, 1);
  inputs.k = contiguous_view(k, DType::float32, 2, 1, 1);
  inputs.v = contiguous_view(v, DType::float32, 2, 1, 1);
  inputs.alibi_slopes = slopes;
  inputs.sinks = sinks;
  inputs.dropped = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t j, int) { return j == 0; };
  const Result result = dense(p, inputs, Arithmetic::exact, false);
  const double s0 = std::exp(2 * std::tanh(0.5) - 0.25), s1 = std::exp(2 * std::tanh(1.5)), sum = s0 + s1 + std::exp(0.5);
  EXPECT_NEAR(result.lse.values[0], std::log(sum), 1e-15);
  EXPECT_NEAR(result.o.values[0], 2 * 20 * s1 / sum, 1e-14);
}

TEST(Dense, RowsWithoutKeysAreZero) {
  Problem p = small_problem();
  p.batch = 1;
  p.tokens_q = 6;
  p.tokens_k = 3;
  p.pattern.causal = true;
  const Data data(p);
  const Result result = dense(p, data.inputs(p), Arithmetic::exact, true);
  for (std::int64_t h = 0; h < p.heads; ++h) {
    EXPECT_EQ(result.lse.values[static_cast<std::size_t>(h * 6)], -kInfinity);
    EXPECT_EQ(result.o.values[static_cast<std::size_t>(h * 2)], 0.0);
    EXPECT_EQ(result.dq.values[static_cast<std::size_t>(h * 3)], 0.0);
  }
}

TEST(Dense, PaddingHasNoSink) {
  Problem p = small_problem();
  p.sinks = true;
  p.lengths_q = {5, 2};
  p.lengths_k = {6, 0};
  const Data data(p);
  const Result result = dense(p, data.inputs(p), Arithmetic::exact, true);
  const auto lse = [&](std::int64_t b, std::int64_t h, std::int64_t i) {
    return result.lse.values[static_cast<std::size_t>((b * p.heads + h) * p.tokens_q + i)];
  };
  EXPECT_EQ(lse(1, 3, 1), data.sinks[3]);  // a query without keys, but not padding
  EXPECT_EQ(lse(1, 3, 2), -kInfinity);
}

TEST(Dense, AnInfiniteSinkTakesAllWeight) {
  Problem p = small_problem();
  p.sinks = true;
  Data data(p);
  std::fill(data.sinks.begin(), data.sinks.end(), std::numeric_limits<float>::infinity());
  data.sinks[1] = -std::numeric_limits<float>::infinity();  // none
  const Result result = dense(p, data.inputs(p), Arithmetic::exact, true);
  for (std::size_t x = 0; x < result.o.values.size(); ++x) {
    if (x / 2 % 4 != 1) {
      EXPECT_EQ(result.o.values[x], 0.0);
    }
  }
  for (std::size_t x = 0; x < result.dq.values.size(); ++x) {
    if (x / 3 % 4 != 1) {
      EXPECT_EQ(result.dq.values[x], 0.0);
    }
  }
  for (std::size_t x = 0; x < result.lse.values.size(); ++x) {
    EXPECT_EQ(result.lse.values[x] == kInfinity, x / 5 % 4 != 1);
  }
  EXPECT_TRUE(std::isnan(result.dsinks.values[0]));  // a derivative at infinity
  EXPECT_EQ(result.dsinks.values[1], 0.0);
}

TEST(Dense, DroppedPairsAreVisible) {  // their weight is p times 0
  Problem p = small_problem();
  p.dropout = 0.25F;
  Data data(p);
  Inputs inputs = data.inputs(p);
  inputs.dropped = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t j, int) { return j == 0; };
  const auto with = [&](std::vector<float>& tensor, float value) {
    const float before = std::exchange(tensor[0], value);
    const Result result = dense(p, inputs, Arithmetic::exact, true);
    tensor[0] = before;
    return result;
  };
  const Result score = with(data.k, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(score.o.values[0]));
  EXPECT_TRUE(std::isnan(score.dv.values[0]));
  const Result value = with(data.v, std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(value.o.values[0]));
  EXPECT_FALSE(std::isnan(value.o.values[1]));  // of another column
  EXPECT_TRUE(std::isnan(value.dq.values[0]));
}

TEST(Dense, HiddenKeysNeverMatter) {
  Problem p = small_problem();
  p.pattern.causal = true;
  Data data(p);
  const Result before = dense(p, data.inputs(p), Arithmetic::exact, true);
  p.pattern.window = Window{-1, 0};
  p.lengths_k = {5, 5};
  p.pattern.align = Align::top_left;
  const Result expected = dense(p, data.inputs(p), Arithmetic::exact, true);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t x = 0; x < p.kv_heads * p.head_dim; ++x) {
      data.k[static_cast<std::size_t>((b * 6 + 5) * p.kv_heads * p.head_dim + x)] = std::numeric_limits<float>::quiet_NaN();
    }
    for (std::int64_t x = 0; x < p.kv_heads * p.head_dim_v; ++x) {
      data.v[static_cast<std::size_t>((b * 6 + 5) * p.kv_heads * p.head_dim_v + x)] = std::numeric_limits<float>::infinity();
    }
  }
  const Result actual = dense(p, data.inputs(p), Arithmetic::exact, true);
  EXPECT_EQ(actual.o.values, expected.o.values);
  EXPECT_EQ(actual.dk.values, expected.dk.values);
  EXPECT_NE(before.o.values, expected.o.values);
}

TEST(Dense, GradientsOfPlainAttention) { expect_gradients(small_problem()); }

TEST(Dense, GradientsWithEverything) {
  Problem p = small_problem();
  p.pattern.causal = true;
  p.softcap = 1.5F;
  p.alibi = p.sinks = true;
  p.dropout = 0.25F;
  expect_gradients(p);
}

TEST(Dense, GradientsOfDocuments) {
  Problem p = small_problem();
  p.pattern.causal = p.pattern.documents = true;
  p.cu_seqlens_q = {0, 2, 5};
  p.cu_seqlens_k = {0, 4, 6};
  p.scale = 0.3F;
  expect_gradients(p);
}

TEST(Dense, GradientsOfDilatedMultisets) {
  Problem p = small_problem();
  p.pattern.dilated = Dilated{{{2, 1}, {4, 2}, {6, 1}}, Dialect::longnet, false};
  p.sinks = true;
  expect_gradients(p);
}

TEST(Dense, GradientsOfHeadGroups) {
  Problem p = small_problem();
  p.pattern.dilated = Dilated{{{3, 1}, {6, 2}}, Dialect::head_groups, false};
  p.dropout = 0.25F;
  expect_gradients(p);
}

// The weights of torchscale are constants to the gradient: each branch is an attention of its own with do scaled by its weight.
TEST(Dense, TorchscaleIsASumOfBranchesWithDetachedWeights) {
  Problem p = small_problem();
  p.pattern.dilated = Dilated{{{3, 1}, {6, 2}}, Dialect::torchscale, false};
  Data data(p);
  std::fill(data.d_lse.begin(), data.d_lse.end(), 0.0F);
  const Result whole = dense(p, data.inputs(p), Arithmetic::exact, true);
  std::vector<double> o(whole.o.values.size()), dq(whole.dq.values.size()), dk(whole.dk.values.size()),
      dv(whole.dv.values.size());
  for (const DilatedBranch& branch : p.pattern.dilated->branches) {
    Problem one = p;
    one.pattern.dilated->branches = {branch};
    const Result alone = dense(one, data.inputs(one), Arithmetic::exact, false);
    Data scaled = data;
    for (std::size_t x = 0; x < o.size(); ++x) {
      const std::size_t row = x / 2, h = row % 4, i = row / 4 % 5, b = row / 20;
      const std::size_t at = (b * 4 + h) * 5 + i;
      const double weight = std::isinf(alone.lse.values[at]) ? 0.0 : std::exp(alone.lse.values[at] - whole.lse.values[at]);
      o[x] += weight * alone.o.values[x];
      scaled.d_out[x] = static_cast<float>(weight * data.d_out[x]);
    }
    const Result gradient = dense(one, scaled.inputs(one), Arithmetic::exact, true);
    for (std::size_t x = 0; x < dq.size(); ++x) dq[x] += gradient.dq.values[x];
    for (std::size_t x = 0; x < dk.size(); ++x) dk[x] += gradient.dk.values[x];
    for (std::size_t x = 0; x < dv.size(); ++x) dv[x] += gradient.dv.values[x];
  }
  for (std::size_t x = 0; x < o.size(); ++x) EXPECT_NEAR(whole.o.values[x], o[x], 1e-12);
  for (std::size_t x = 0; x < dq.size(); ++x) EXPECT_NEAR(whole.dq.values[x], dq[x], 1e-5);
  for (std::size_t x = 0; x < dk.size(); ++x) EXPECT_NEAR(whole.dk.values[x], dk[x], 1e-5);
  for (std::size_t x = 0; x < dv.size(); ++x) EXPECT_NEAR(whole.dv.values[x], dv[x], 1e-5);
}

TEST(Dense, LogitsBeyondFloat16StayFinite) {
  Problem p = small_problem();
  p.scale = 100000.0F;
  p.dtype = DType::float16;
  const Data data(p);
  for (const Arithmetic arithmetic : {Arithmetic::exact, Arithmetic::naive}) {
    const Result result = dense(p, data.inputs(p), arithmetic, true);
    for (const double value : result.o.values) EXPECT_TRUE(std::isfinite(value));
    double largest = 0;
    for (const double value : result.lse.values) largest = std::max(largest, std::abs(value));
    EXPECT_GT(largest, 2 * 65504.0);
  }
}

TEST(Dense, SampledRowsAreTheRowsOfTheWhole) {
  Problem p = small_problem();
  p.tokens_q = 23;
  p.tokens_k = 31;
  p.pattern.causal = p.pattern.documents = true;
  p.cu_seqlens_q = {0, 9, 9, 23};
  p.cu_seqlens_k = {0, 10, 15, 31};
  p.alibi = p.sinks = true;
  for (const Dialect dialect : {Dialect::longnet, Dialect::torchscale, Dialect::head_groups}) {
    p.pattern.dilated = Dilated{{{4, 1}, {8, 2}}, dialect, dialect == Dialect::longnet};
    for (const Arithmetic arithmetic : {Arithmetic::exact, Arithmetic::naive}) {
      const Data data(p);
      const Result whole = dense(p, data.inputs(p), arithmetic, true);
      std::vector<Row> queries, keys;
      for (std::int64_t x = 0; x < 2 * 23 * 4; x += 5) queries.push_back({x % 2, x / 2 % 4, x / 8 % 23});
      for (std::int64_t x = 0; x < 2 * 31 * 2; x += 3) keys.push_back({x % 2, x / 2 % 2, x / 4 % 31});
      const Result some = sampled(p, data.inputs(p), arithmetic, true, queries, keys);
      for (std::size_t x = 0; x < queries.size(); ++x) {
        const Row& row = queries[x];
        const auto at = static_cast<std::size_t>((row.batch * 23 + row.position) * 4 + row.head);
        for (std::size_t c = 0; c < 2; ++c) EXPECT_EQ(some.o.values[x * 2 + c], whole.o.values[at * 2 + c]);
        for (std::size_t c = 0; c < 3; ++c) EXPECT_EQ(some.dq.values[x * 3 + c], whole.dq.values[at * 3 + c]);
        EXPECT_EQ(some.lse.values[x],
                  whole.lse.values[static_cast<std::size_t>((row.batch * 4 + row.head) * 23 + row.position)]);
        if (arithmetic == Arithmetic::exact) {
          EXPECT_EQ(some.dq.floors[x], whole.dq.floors[at]);
        }
      }
      for (std::size_t x = 0; x < keys.size(); ++x) {
        const Row& row = keys[x];
        const auto at = static_cast<std::size_t>((row.batch * 31 + row.position) * 2 + row.head);
        for (std::size_t c = 0; c < 3; ++c) EXPECT_NEAR(some.dk.values[x * 3 + c], whole.dk.values[at * 3 + c], 1e-6);
        for (std::size_t c = 0; c < 2; ++c) EXPECT_NEAR(some.dv.values[x * 2 + c], whole.dv.values[at * 2 + c], 1e-6);
        if (arithmetic == Arithmetic::exact) {
          EXPECT_NEAR(some.dk.floors[x], whole.dk.floors[at], 1e-9);
        }
      }
    }
  }
}

TEST(Dense, NaiveErrorsHaveTheSizeOfTheirDtype) {
  Problem p = small_problem();
  p.tokens_q = p.tokens_k = 40;
  const Data data(p);
  const Result exact = dense(p, data.inputs(p), Arithmetic::exact, true);
  double before = 0;
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    p.dtype = dtype;
    const Result naive = dense(p, data.inputs(p), Arithmetic::naive, true);
    double error = 0;
    for (std::size_t x = 0; x < exact.dq.values.size(); ++x) {
      error = std::max(error, std::abs(exact.dq.values[x] - naive.dq.values[x]));
    }
    EXPECT_GT(error, before * 4);
    EXPECT_LT(error, dtype == DType::float32 ? 1e-5 : 1e-1);
    before = error;
  }
}

TEST(Dense, EmptyProblemsHaveEmptyResults) {
  for (const auto& [nq, nk] : {std::pair{0, 0}, {0, 4}, {3, 0}}) {
    Problem p = small_problem();
    p.tokens_q = nq;
    p.tokens_k = nk;
    const Data data(p);
    const Result result = dense(p, data.inputs(p), Arithmetic::exact, true);
    EXPECT_EQ(result.o.rows(), 2 * nq * 4);
    EXPECT_EQ(result.dk.rows(), 2 * nk * 2);
    for (const double value : result.lse.values) EXPECT_EQ(value, -kInfinity);
  }
}

}  // namespace
}  // namespace ringspan::oracle
