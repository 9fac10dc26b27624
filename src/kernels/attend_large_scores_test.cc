// Rows whose scores are so large that float32 tells hardly any of them apart, beside ordinary ones, by every attend kernel of
// the list.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/attend.h"
#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class LargeScoresTest : public KernelTest {};

struct Option {
  const char* name;
  float scale, softcap, alibi_slope;
  bool exact() const { return softcap == 0.0F && alibi_slope == 0.0F && std::abs(scale) == 4.0F; }  // scores in float32
};
constexpr Option kOptions[] = {{"plain", 4.0F, 0.0F, 0.0F},
                               {"an odd scale", 3.8612F, 0.0F, 0.0F},
                               {"negative scale", -4.0F, 0.0F, 0.0F},
                               {"softcap", 4.0F, 1e10F, 0.0F},
                               {"ALiBi", 4.0F, 0.0F, 1e8F}};

struct Form {
  std::int64_t n_q, n_k;
  int head_dim;
  std::int64_t hi;
};
// Few queries that see every key: 4, 8 or 16 to a vector, or rows of keys as they are. Tiles: up to 64 depths, and beyond.
constexpr Form kForms[] = {{3, 150, 64, kUnbounded},  {6, 150, 64, kUnbounded},   {12, 150, 64, kUnbounded},
                           {20, 90, 20, kUnbounded},  {70, 600, 64, kUnbounded},  {70, 1100, 16, 500},
                           {40, 150, 96, kUnbounded}, {70, 600, 128, kUnbounded}, {70, 150, 128, 60}};

bool is_large(std::int64_t row) { return row % 3 != 0; }
bool is_near(std::int64_t row) { return row % 4 == 0; }  // of a large row: scores of 1e7 that differ by 2 or more

// q . k of a large row is q[0] k[0] + q[1] k[1], which every dtype and every sum holds exactly: 2e6, or 3e8 to 3e9.
void set_scores(World& world, bool hot) {
  for (std::int64_t row = 0; row < world.spec.n_q; ++row) {
    world.q.set(0, row, 0, 0, 0), world.q.set(0, row, 0, 1, 0);
    if (!is_large(row)) continue;
    for (int e = 0; e < world.spec.head_dim; ++e) world.q.set(0, row, 0, e, 0);
    const double mantissa = 1.0 + static_cast<double>(row * 5 % 93 + 3) / 128.0;
    const double a = std::ldexp(mantissa, is_near(row) ? 6 : 12 + static_cast<int>(row % 4));
    world.q.set(0, row, 0, 0, row % 5 == 2 ? -a : a);
    world.q.set(0, row, 0, 1, is_near(row) ? 0.5 : 0.0);
  }
  for (std::int64_t key = 0; key < world.spec.n_k; ++key) {
    world.k.set(0, key, 0, 0, hot && key == world.spec.n_k / 3 ? 49152 : 32768);
    world.k.set(0, key, 0, 1, static_cast<double>(key / 16 % 32));
  }
}

void expect_large_row(const World& world, const Option& option, std::int64_t row, std::int64_t hi, const std::string& what) {
  std::vector<double> scores;
  for (std::int64_t key = 0; key < world.spec.n_k && key - row <= hi; ++key) {
    const double dot =
        world.q.get(0, row, 0, 0) * world.k.get(0, key, 0, 0) + world.q.get(0, row, 0, 1) * world.k.get(0, key, 0, 1);
    double s = dot * static_cast<double>(option.scale);
    if (option.softcap > 0.0F) s = option.softcap * std::tanh(s / option.softcap);
    scores.push_back(s - world.slopes[0] * static_cast<double>(std::abs(key - row)));
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  double l = 0.0;
  for (double& score : scores) l += score = std::exp(score - top);
  const double m = world.m.get(0, row, 0, 0), got = world.l.get(0, row, 0, 0);
  if (option.exact()) {
    ASSERT_NEAR(m + std::log(got), top + std::log(l), 1e-3) << what;
  } else {
    ASSERT_NEAR(m, top, 1e-6 * std::abs(top)) << what;
    ASSERT_NEAR(got, l, 1e-4 * l) << what;
  }
  for (int e = 0; e < world.spec.head_dim_v; ++e) {
    double o = 0.0;
    for (std::size_t key = 0; key < scores.size(); ++key)
      o += scores[key] / l * world.v.get(0, static_cast<std::int64_t>(key), 0, e);
    ASSERT_NEAR(world.acc.get(0, row, 0, e) / got, o, 0.02) << what;
  }
}

void expect_same_row(const World& a, const World& b, std::int64_t row, const std::string& what) {
  ASSERT_EQ(a.m.get(0, row, 0, 0), b.m.get(0, row, 0, 0)) << what;
  ASSERT_EQ(a.l.get(0, row, 0, 0), b.l.get(0, row, 0, 0)) << what;
  for (int e = 0; e < a.spec.head_dim_v; ++e) ASSERT_EQ(a.acc.get(0, row, 0, e), b.acc.get(0, row, 0, e)) << what;
}

// Equal keys have the mean of v, one above them has all weight, and neither kind of rows changes the bits of the other.
TEST_P(LargeScoresTest, BesideOrdinaryRows) {
  const bool slow = kernel().name.ends_with("_reference");
  for (const Option& option : kOptions) {
    for (const Form& form : kForms) {
      for (const bool hot : {false, true}) {
        Spec s = spec(form.n_q, slow ? form.n_k / 5 : form.n_k, form.head_dim);
        s.scale = option.scale, s.softcap = option.softcap, s.alibi_slope = option.alibi_slope;
        World mixed(s), threaded(s), alone[2] = {World(s), World(s)};  // without large rows, with no other
        for (World* world : {&mixed, &threaded, &alone[0], &alone[1]}) set_scores(*world, hot);
        for (std::int64_t row = 0; row < s.n_q; ++row) {
          for (int e = 0; e < s.head_dim; ++e) alone[is_large(row) ? 0 : 1].q.set(0, row, 0, e, 0);
        }
        const std::vector<Part> parts{mixed.whole(-kUnbounded, form.hi)};
        for (World* world : {&mixed, &alone[0], &alone[1]}) run_kernel(kernel(), *world, parts);
        run_kernel(kernel(), threaded, parts, 3);
        for (std::int64_t row = 0; row < s.n_q; ++row) {
          const std::string what =
              std::string(option.name) + (hot ? ", one hot: " : ": ") + s.describe() + ", row " + std::to_string(row);
          expect_same_row(mixed, alone[is_large(row) ? 1 : 0], row, what);
          expect_same_row(mixed, threaded, row, what);
          if (is_large(row) && (option.exact() || !is_near(row))) expect_large_row(mixed, option, row, form.hi, what);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, LargeScoresTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_KERNELS)), kernel_name);

}  // namespace
}  // namespace ringspan::kernels::testing
