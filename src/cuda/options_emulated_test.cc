// Softcap, ALiBi and dropout of the block programs, emulated: decisions pair by pair, values of dropped pairs that are not
// finite, and the arithmetic that the programs for warpgroups have of their own. That results are right with options is tested
// with everything else (attend_test.cc, attend_gradient_test.cc).
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/emulated_warpgroup.h"
#include "cuda/emulation.h"
#include "cuda/pair_options.h"
#include "cuda/tile_policy.h"
#include "kernels/attend_harness.h"

namespace ringspan::cuda {
namespace {

using kernels::testing::kUnbounded;
using kernels::testing::Spec;
using kernels::testing::World;

class SoftcapForward : public ::testing::TestWithParam<kernels::AttendKernel> {};
class DropoutForward : public ::testing::TestWithParam<kernels::AttendKernel> {};
class DropoutBackward : public ::testing::TestWithParam<kernels::AttendKernel> {};

bool is_dropped(const World& world, std::int64_t batch, std::int64_t head, std::int64_t row, std::int64_t key) {
  const Spec& s = world.spec;
  return kernels::is_dropped(s.seed, s.dropout, batch, head, world.position_q(row), world.position_k(key), s.state);
}

// Keys that share blocks of Philox and keys that do not, across tiles.
std::vector<Spec> progressions(DType dtype) {
  struct Positions {
    std::int64_t q_first, q_step, k_first, k_step;
  };
  std::vector<Spec> list;
  for (const auto& [q_first, q_step, k_first, k_step] :
       {Positions{0, 1, 0, 1}, {7, 1, 6, 1}, {std::int64_t{1} << 33, 2, (std::int64_t{1} << 33) + 3, 1}, {40, 3, 2, 5}}) {
    Spec s;
    s.dtype = dtype;
    s.batch = 2, s.kv_heads = 2, s.group = 2, s.n_q = 133, s.n_k = 270;
    s.q_first = q_first, s.q_step = q_step, s.k_first = k_first, s.k_step = k_step;
    s.magnitude = 0.0, s.dropout = 0.5F, s.state = 1, s.seed = 77;
    list.push_back(s);
  }
  return list;
}

// scale / softcap is more than float32 can hold; all scores are 0, so that rows are means.
TEST_P(SoftcapForward, OfTheSmallestSoftcapMakesNoNan) {
  Spec s;
  s.dtype = kernels::testing::dtype_of(GetParam());
  s.n_q = 3, s.n_k = 64;
  s.magnitude = 0.0, s.scale = 8.0F, s.softcap = 0x1p-126F;
  World world(s);
  world.v.fill(2.0);
  run_kernel(GetParam(), world, {world.whole()});
  EXPECT_EQ(world.l.get(0, 2, 0, 0), 64.0);
  EXPECT_EQ(world.acc.get(0, 2, 0, 0), 128.0);
}

// All probabilities are equal and values are one-hot, so that acc counts the keys that are kept, twice each.
TEST_P(DropoutForward, DecidesAsDefined) {
  for (const Spec& s : progressions(kernels::testing::dtype_of(GetParam()))) {
    World world(s);
    world.v.for_each([&](auto b, auto r, auto h, auto e) { world.v.set(b, r, h, e, r % 64 == e ? 1.0 : 0.0); });
    run_kernel(GetParam(), world, {world.whole()});
    world.acc.for_each([&](auto b, auto r, auto h, auto e) {
      double kept = 0.0;
      for (std::int64_t key = e; key < s.n_k; key += 64) kept += is_dropped(world, b, h, r, key) ? 0.0 : 2.0;
      ASSERT_EQ(world.acc.get(b, r, h, e), kept) << s.describe() << " row " << r << " head " << h;
    });
    EXPECT_EQ(world.l.get(1, 132, 3, 0), 270.0);
  }
}

// Likewise dv, of probabilities 1 and rows of do that are one-hot.
TEST_P(DropoutBackward, DecidesAsDefined) {
  for (const Spec& s : progressions(kernels::testing::dtype_of(GetParam()))) {
    World world(s);
    world.d_out.for_each([&](auto b, auto r, auto h, auto e) { world.d_out.set(b, r, h, e, r % 64 == e ? 1.0 : 0.0); });
    run_kernel(GetParam(), world, {world.whole()});
    world.dv.for_each([&](auto b, auto key, auto kv, auto e) {
      double kept = 0.0;
      for (std::int64_t row = e; row < s.n_q; row += 64) {
        for (std::int64_t head = kv * 2; head < kv * 2 + 2; ++head) kept += is_dropped(world, b, head, row, key) ? 0.0 : 2.0;
      }
      ASSERT_EQ(world.dv.get(b, key, kv, e), kept) << s.describe() << " key " << key;
    });
  }
}

Spec spec_with_bad_values(DType dtype) {
  Spec s;
  s.dtype = dtype, s.n_q = 150, s.n_k = 300;
  s.dropout = 0.5F;
  return s;
}

// A dropped pair does not bring what is not finite into acc, neither in tiles that all rows see nor in others.
TEST_P(DropoutForward, ValuesOfDroppedPairsHaveNoInfluence) {
  for (const std::int64_t hi : {std::int64_t{kUnbounded}, std::int64_t{0}}) {
    World world(spec_with_bad_values(kernels::testing::dtype_of(GetParam())));
    world.v.set(0, 30, 0, 5, std::nan(""));
    world.v.set(0, 131, 0, 7, INFINITY);
    run_kernel(GetParam(), world, {world.whole(-kUnbounded, hi)});
    for (std::int64_t row = 0; row < 150; ++row) {
      const auto takes = [&](std::int64_t key) { return key - row <= hi && !is_dropped(world, 0, 0, row, key); };
      EXPECT_EQ(std::isnan(world.acc.get(0, row, 0, 5)), takes(30)) << row;
      EXPECT_EQ(world.acc.get(0, row, 0, 7) == INFINITY, takes(131)) << row;
      EXPECT_EQ(std::isfinite(world.acc.get(0, row, 0, 7)), !takes(131)) << row;
      EXPECT_TRUE(std::isfinite(world.acc.get(0, row, 0, 6))) << row;
      EXPECT_TRUE(std::isfinite(world.l.get(0, row, 0, 0))) << row;
    }
  }
}

// Nor what is not finite in do into dv.
TEST_P(DropoutBackward, GradientsOfDroppedPairsHaveNoInfluence) {
  for (const std::int64_t lo : {-std::int64_t{kUnbounded}, std::int64_t{0}}) {
    World world(spec_with_bad_values(kernels::testing::dtype_of(GetParam())));
    world.d_out.set(0, 30, 0, 5, std::nan(""));
    world.d_out.set(0, 131, 0, 7, INFINITY);
    run_kernel(GetParam(), world, {world.whole(lo, kUnbounded)});
    for (std::int64_t key = 0; key < 300; ++key) {
      const auto takes = [&](std::int64_t row) { return key - row >= lo && !is_dropped(world, 0, 0, row, key); };
      EXPECT_EQ(std::isnan(world.dv.get(0, key, 0, 5)), takes(30)) << key;
      EXPECT_EQ(world.dv.get(0, key, 0, 7) == INFINITY, takes(131)) << key;
      EXPECT_EQ(std::isfinite(world.dv.get(0, key, 0, 7)), !takes(131)) << key;
      EXPECT_TRUE(std::isfinite(world.dv.get(0, key, 0, 6))) << key;
    }
  }
}

using Policy = WarpgroupForward<DType::bfloat16, 64, true>;
using Machine = EmulatedHopperMachine<Policy::kThreads>;

TEST(WarpgroupOptions, TanhIsWithinFourUnits) {
  const auto tanh_of = [](float x) { return tanh_by_parts<Policy, Machine>(x); };
  for (double x = 1e-6; x < 40.0; x *= 1.00007) {
    const double exact = std::tanh(static_cast<double>(static_cast<float>(x)));
    ASSERT_NEAR(tanh_of(static_cast<float>(x)), exact, 4.0 * std::ldexp(exact, -24)) << x;
    ASSERT_EQ(tanh_of(static_cast<float>(-x)), -tanh_of(static_cast<float>(x))) << x;
  }
  EXPECT_EQ(tanh_of(INFINITY), 1.0F);
  EXPECT_EQ(tanh_of(-INFINITY), -1.0F);
  EXPECT_EQ(tanh_of(0.0F), 0.0F);
  EXPECT_EQ(tanh_of(1e-40F), 1e-40F);
  EXPECT_TRUE(std::isnan(tanh_of(std::nanf(""))));
}

// What ALiBi takes away is slope |j - i - diagonal|, from either side.
TEST(WarpgroupOptions, DistancesAreExact) {
  kernels::AttendTask task;
  task.q_first = (std::int64_t{1} << 40) + 5, task.q_step = 3, task.k_first = (std::int64_t{1} << 40) - 100, task.k_step = 2;
  task.diagonal = 11, task.batch_first = 1;
  const float slopes[] = {0.0F, 0.0F, 0.0F, 0.25F};
  kernels::AttendParams params;
  params.shape.alibi = true;
  params.alibi_slopes = slopes, params.alibi_batch_stride = 1;
  const Lane lane{21, 6};
  const auto check = [&]<bool kOwnsQueries>() {
    const AlibiRows alibi = alibi_rows<kOwnsQueries>(params, task, 128, 64, 2, 0, lane);
    for (int half = 0; half < 2; ++half) {
      for (const int column : {0, 1, 64, 121}) {
        const std::int64_t own = 128 + lane.row + half * 8, other = 64 + lane.column + column;
        const std::int64_t i = task.q_first + (kOwnsQueries ? own : other) * task.q_step;
        const std::int64_t j = task.k_first + (kOwnsQueries ? other : own) * task.k_step;
        EXPECT_EQ(alibi(half, column), 0.25F * static_cast<float>(std::abs(j - i - task.diagonal))) << half << " " << column;
      }
    }
  };
  check.template operator()<true>();
  check.template operator()<false>();
}

INSTANTIATE_TEST_SUITE_P(Kernels, SoftcapForward, ::testing::ValuesIn(emulated_attend_kernels()),
                         kernels::testing::kernel_name);
INSTANTIATE_TEST_SUITE_P(Kernels, DropoutForward, ::testing::ValuesIn(emulated_attend_kernels()),
                         kernels::testing::kernel_name);
INSTANTIATE_TEST_SUITE_P(Kernels, DropoutBackward, ::testing::ValuesIn(emulated_attend_backward_kernels()),
                         kernels::testing::kernel_name);

}  // namespace
}  // namespace ringspan::cuda
