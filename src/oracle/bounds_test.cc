// The tolerances are as tight as they need to be: a correct result passes, a slightly wrong one does not.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/float16.h"
#include "oracle/compare.h"
#include "oracle/dense.h"

namespace ringspan::oracle {
namespace {

double round_to(DType dtype, double value) {
  const auto x = static_cast<float>(value);
  switch (dtype) {
    case DType::float32:
      return x;
    case DType::bfloat16:
      return bfloat16_to_float(float_to_bfloat16(x));
    case DType::float16:
      return float16_to_float(float_to_float16(x));
  }
  return 0;
}

class Bounds : public testing::TestWithParam<DType> {
 protected:
  Bounds() {
    problem_.tokens_q = problem_.tokens_k = 300;
    problem_.head_dim = problem_.head_dim_v = 32;
    problem_.dtype = GetParam();
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::vector<float>* tensor : {&q_, &k_, &v_, &d_out_}) {
      for (int x = 0; x < 300 * 32; ++x) tensor->push_back(static_cast<float>(round_to(GetParam(), normal(random))));
    }
    inputs_.q = contiguous_view(q_.data(), DType::float32, 300, 1, 32);
    inputs_.k = contiguous_view(k_.data(), DType::float32, 300, 1, 32);
    inputs_.v = contiguous_view(v_.data(), DType::float32, 300, 1, 32);
    inputs_.d_out = contiguous_view(d_out_.data(), DType::float32, 300, 1, 32);
  }

  // Which of o, lse, dq, dk, dv pass when they were computed for `other` and are judged as results of problem_.
  std::string passing(const Problem& other) const {
    const Result wrong = dense(other, inputs_, Arithmetic::exact, true);
    const Result exact = dense(problem_, inputs_, Arithmetic::exact, true);
    const Result naive = dense(problem_, inputs_, Arithmetic::naive, true);
    std::string names;
    const auto judge = [&](const char* name, Tensor Result::*tensor, DType dtype) {
      std::vector<double> actual;
      for (const double value : (wrong.*tensor).values) actual.push_back(round_to(dtype, value));
      if (compare(name, exact.*tensor, naive.*tensor, actual, dtype).passed) names += std::string(name) + " ";
    };
    judge("o", &Result::o, GetParam());
    judge("lse", &Result::lse, DType::float32);
    judge("dq", &Result::dq, GetParam());
    judge("dk", &Result::dk, GetParam());
    judge("dv", &Result::dv, GetParam());
    return names;
  }

  Problem problem_;
  Inputs inputs_;
  std::vector<float> q_, k_, v_, d_out_;
};
INSTANTIATE_TEST_SUITE_P(DTypes, Bounds, testing::Values(DType::float32, DType::bfloat16, DType::float16),
                         [](const auto& instance) { return std::string(to_string(instance.param)); });

TEST_P(Bounds, TheRoundedTruthPasses) { EXPECT_EQ(passing(problem_), "o lse dq dk dv "); }

TEST_P(Bounds, OneMissingKeyOf300IsNoticed) {
  Problem wrong = problem_;
  wrong.lengths_k = {299};
  EXPECT_EQ(passing(wrong), "");
}

TEST_P(Bounds, ABandShiftedByOneIsNoticed) {
  problem_.pattern.causal = true;
  Problem wrong = problem_;
  wrong.pattern.causal = false;
  wrong.pattern.window = Window{-1, 1};
  EXPECT_EQ(passing(wrong), "");
}

TEST_P(Bounds, ADroppedBranchIsNoticed) {
  problem_.pattern.dilated = Dilated{{{64, 1}, {128, 2}, {256, 4}}, Dialect::longnet, false};
  Problem wrong = problem_;
  wrong.pattern.dilated->branches.pop_back();
  EXPECT_EQ(passing(wrong), "");
}

TEST_P(Bounds, ASlightlyWrongScaleIsNoticed) {
  Problem wrong = problem_;
  wrong.scale = 1.05F / std::sqrt(32.0F);
  EXPECT_EQ(passing(wrong), "");
}

TEST_P(Bounds, ARoundedOWidensOnlyTheGradientsOfScores) {
  const Result before = dense(problem_, inputs_, Arithmetic::exact, true);
  inputs_.rounded_o = true;
  const Result after = dense(problem_, inputs_, Arithmetic::exact, true);
  EXPECT_EQ(before.o.floors, after.o.floors);
  EXPECT_EQ(before.dv.floors, after.dv.floors);
  for (std::size_t row = 0; row < 300; ++row) {
    EXPECT_GT(after.dq.floors[row], before.dq.floors[row]);
    EXPECT_GT(after.dk.floors[row], before.dk.floors[row]);
  }
}

}  // namespace
}  // namespace ringspan::oracle
