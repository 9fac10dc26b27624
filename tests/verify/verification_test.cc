// Sampled verification: of which rows, and whether it sees gradients that are wrong on one rank only.
#include "verification.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "oracle/multiplicity.h"
#include "sample.h"

namespace ringspan::cli {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Problem problem_of(std::int64_t tokens, int ranks) {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.head_dim = p.head_dim_v = 32;
  p.ranks = ranks;
  return p;
}

int rank_of(const Problem& p, std::int64_t key) {
  for (int rank = 0; rank < p.ranks; ++rank) {
    for (const Progression& piece : make_shard(p.sharding_k, p.tokens_k, p.ranks, rank).pieces) {
      if (piece.contains(key)) return rank;
    }
  }
  return -1;
}

std::set<int> ranks_of_seen_keys(const Problem& p, const Sample& sample) {
  std::set<int> ranks;
  for (const oracle::Row& key : sample.keys) {
    const oracle::Range queries = oracle::query_bounds(p, key.batch, key.position);
    if (queries.begin < queries.end) ranks.insert(rank_of(p, key.position));
  }
  return ranks;
}

TEST(Sample, HasAKeyOfEveryRankHoweverManyQueriesSeeIt) {
  for (const char* pattern : {"full", "causal", "causal&window:8000,0", "window:300,0"}) {
    for (const char* sharding : {"contiguous", "zigzag", "striped"}) {
      Problem p = problem_of(30000, 4);
      p.pattern = Pattern::parse(pattern);
      p.sharding_k = p.sharding_q = Sharding::parse(sharding);
      const Sample sample = draw_sample(p, true, 1);
      EXPECT_EQ(ranks_of_seen_keys(p, sample), (std::set<int>{0, 1, 2, 3})) << pattern << ' ' << sharding;
      EXPECT_EQ(sample.from_outputs, std::string(pattern) != "window:300,0");
      EXPECT_TRUE(sample.ranks_without_keys.empty());
      EXPECT_EQ(sample.queries.size(), 64U);
    }
  }
}

TEST(Sample, LeavesPaddingOut) {
  Problem p = problem_of(30000, 2);
  p.batch = 2;
  p.lengths_q = p.lengths_k = {1000, 16000};
  const Sample sample = draw_sample(p, true, 1);
  EXPECT_EQ(ranks_of_seen_keys(p, sample), (std::set<int>{0, 1}));
  for (const oracle::Row& key : sample.keys) EXPECT_LT(key.position, p.lengths_k[static_cast<std::size_t>(key.batch)]);
  p.lengths_q = p.lengths_k = {1000, 14000};  // the second rank holds padding only: one of it, whose gradients are 0
  int padding = 0;
  for (const oracle::Row& key : draw_sample(p, true, 1).keys) padding += key.position >= 15000 ? 1 : 0;
  EXPECT_EQ(padding, 1);
}

TEST(Sample, NamesTheRanksWhoseKeysTakeTooLong) {  // several states, which o and lse do not tell apart
  Problem p = problem_of(65536, 4);
  p.pattern = Pattern::parse("dilated:32768x1,65536x1@torchscale");
  const Sample sample = draw_sample(p, true, 1);
  EXPECT_FALSE(sample.from_outputs);
  EXPECT_EQ(sample.keys.size(), 1U);
  EXPECT_EQ(sample.ranks_without_keys.size(), 3U);
}

// Full attention with k = 0: all keys weigh the same, and gradients are sums that take no attention.
struct Uniform {
  Problem problem;
  std::int64_t n;
  std::size_t d;
  std::vector<float> q, k, v, d_out, o, lse, dq, dk, dv;

  explicit Uniform(std::int64_t tokens, int ranks) : problem(problem_of(tokens, ranks)), n(tokens), d(32) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto count = static_cast<std::size_t>(n) * d;
    k.assign(count, 0);
    dq.assign(count, 0);
    for (std::vector<float>* tensor : {&q, &v, &d_out}) {
      for (std::size_t x = 0; x < count; ++x) tensor->push_back(normal(random));
    }
    const double weight = 1 / static_cast<double>(n), scale = 1 / std::sqrt(static_cast<double>(d));
    std::vector<double> mean(d), sum(d), outer(d * d);
    for (std::size_t x = 0; x < count; ++x) {
      mean[x % d] += weight * v[x];
      sum[x % d] += weight * d_out[x];
      for (std::size_t c = 0; c < d; ++c) outer[(x % d) * d + c] += scale * weight * q[x] * d_out[x / d * d + c];
    }
    for (std::size_t x = 0; x < count; ++x) {
      o.push_back(static_cast<float>(mean[x % d]));
      dv.push_back(static_cast<float>(sum[x % d]));
      double gradient = 0;
      for (std::size_t c = 0; c < d; ++c) gradient += outer[(x % d) * d + c] * (v[x / d * d + c] - mean[c]);
      dk.push_back(static_cast<float>(gradient));
    }
    lse.assign(static_cast<std::size_t>(n), static_cast<float>(std::log(static_cast<double>(n))));
  }

  Verification verify() const {
    const auto bytes = [](const std::vector<float>& values) { return reinterpret_cast<const std::byte*>(values.data()); };
    const TensorShape shape{1, n, 1, static_cast<std::int64_t>(d), DType::float32, Layout::bshd};
    Inputs inputs;
    inputs.q = {bytes(q), shape};
    inputs.k = {bytes(k), shape};
    inputs.v = {bytes(v), shape};
    inputs.gradient.kind = GradientSpec::Kind::file;
    inputs.d_out = {bytes(d_out), shape};
    return verify_outputs(problem, inputs, Layout::bshd, {bytes(o), bytes(lse), bytes(dq), bytes(dk), bytes(dv)}, 1);
  }
};

TEST(SampledVerification, SeesGradientsThatOneRankLeftOut) {
  const Uniform right(9000, 3);
  const Verification verification = right.verify();
  EXPECT_TRUE(verification.passed) << to_text(verification);
  EXPECT_TRUE(verification.sampled);
  EXPECT_EQ(verification.from_outputs, (std::vector<std::string>{"dk", "dv"}));
  for (std::vector<float> Uniform::*of : {&Uniform::dk, &Uniform::dv}) {
    for (int rank = 0; rank < 3; ++rank) {
      Uniform wrong = right;
      const auto rows = static_cast<std::ptrdiff_t>(3000 * wrong.d);
      std::fill_n((wrong.*of).begin() + rank * rows, rows, 0.0F);
      EXPECT_FALSE(wrong.verify().passed) << rank;
    }
  }
}

// What float64 makes of a NaN of o is NaN too, which must excuse nothing.
TEST(SampledVerification, AWrongNaNOfOneRowExcusesNoGradient) {
  Uniform wrong(9000, 3);
  wrong.o[4321 * wrong.d] = kNaN;
  wrong.dk.assign(wrong.dk.size(), kNaN);
  const Verification verification = wrong.verify();
  for (const oracle::Comparison& c : verification.comparisons) EXPECT_EQ(c.passed, c.name != "dk") << c.name;
  wrong.lse[4321] = kNaN;
  wrong.dv.assign(wrong.dv.size(), kNaN);
  for (const oracle::Comparison& c : wrong.verify().comparisons)
    EXPECT_EQ(c.passed, c.name != "dk" && c.name != "dv") << c.name;
}

TEST(SampledVerification, ANaNOfTheInputsIsOneOfAllGradients) {
  Uniform world(9000, 3);
  world.v[17] = kNaN;  // of key 0: o is NaN in one element of every row, and dk everywhere
  for (std::size_t i = 0; i < static_cast<std::size_t>(world.n); ++i) world.o[i * world.d + 17] = kNaN;
  world.dk.assign(world.dk.size(), kNaN);
  world.dq.assign(world.dq.size(), kNaN);
  const Verification verification = world.verify();
  EXPECT_TRUE(verification.passed) << to_text(verification);
  world.dk[7 * world.d] = 0;
  world.dv.assign(world.dv.size(), 0);
  for (const oracle::Comparison& c : world.verify().comparisons) EXPECT_EQ(c.passed, c.name != "dv") << c.name;
}

}  // namespace
}  // namespace ringspan::cli
