// Forward tasks that leave results: o, lse and the states that they become, by every attend kernel of the list.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/attend.h"
#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class AttendResultsTest : public KernelTest {};

// The last of several tasks leaves results: they are what the states would have become, and other rows have their states.
TEST_P(AttendResultsTest, InPlaceOfStates) {
  enum { kOwn, kNone, kInAcc, kWays };  // where o in float32 goes; kInAcc: o as well, where it may
  for (std::uint64_t seed = 1; seed <= kRandomCases; ++seed) {
    CaseGenerator generate(seed);
    Spec s = generate.spec(dtype());
    s.sinks = seed % 2 == 0;
    World plain(s), finished(s);
    std::vector<Part> parts = generate.parts(s);
    run_kernel(kernel(), plain, parts, 1);
    const Part& last = parts.back();
    parts.back().results = true;
    const std::string what = "case " + std::to_string(seed) + ": " + s.describe();
    const int way = static_cast<int>(seed / 2 % kWays);
    run_kernel(kernel(), finished, parts, 1 + static_cast<int>(seed % 3), [&](AttendTask& task) {
      if (task.o.data == nullptr) return;
      if (way == kNone) task.o32 = {};
      if (way == kInAcc) task.o32 = task.acc;
      if (way == kInAcc && dtype() == DType::float32) task.o = task.acc, task.o32 = {};
    });
    const Tensor& o = way == kInAcc && dtype() == DType::float32 ? finished.acc : finished.o;
    const auto among = [](std::int64_t x, std::int64_t first, std::int64_t step, std::int64_t count) {
      return x >= first && (x - first) % step == 0 && (x - first) / step < count;
    };
    const bool works = last.k_count > 0 && last.lo <= last.hi;  // others are nobody's task: plans have none
    plain.acc.for_each([&](auto b, auto r, auto h, auto e) {
      const bool is_last = among(b, last.batch_first, 1, last.batch_count) &&
                           among(r, last.q_row, last.q_stride, last.q_count) &&
                           among(h, last.head_first, last.head_step, last.head_count);
      const double m = plain.m.get(b, r, h, 0);
      if (!is_last) {
        ASSERT_EQ(finished.m.get(b, r, h, 0), m) << what;
        ASSERT_TRUE(m == -kInfinity || finished.acc.get(b, r, h, e) == plain.acc.get(b, r, h, e)) << what;
        ASSERT_TRUE(&o == &finished.acc || std::isnan(o.get(b, r, h, e))) << what;
        return;
      }
      if (!works) return;
      const double sink = s.sinks ? finished.sinks[static_cast<std::size_t>(h)] : -kInfinity;
      const double top = std::max(m, sink);
      double lse = -kInfinity, value = 0.0;
      if (top != -kInfinity) {
        const double l = m == -kInfinity ? 0.0 : plain.l.get(b, r, h, 0) * std::exp(m - top);
        lse = top + std::log(l + std::exp(sink - top));
        if (m != -kInfinity) value = plain.acc.get(b, r, h, e) * std::exp(m - top) / std::exp(lse - top) * s.output_scale;
      }
      const double near = 2e-6 * std::abs(value) + 1e-37, unit = dtype() == DType::bfloat16 ? 0.008 : 0.001;
      const double rounded = dtype() == DType::float32 ? near : near + unit * std::abs(value) + 6e-8;
      EXPECT_NEAR(o.get(b, r, h, e), value, rounded) << what;
      if (way != kNone && &o == &finished.o) {
        EXPECT_NEAR((way == kOwn ? finished.o32 : finished.acc).get(b, r, h, e), value, near) << what;
      }
      if (lse == -kInfinity) {
        EXPECT_EQ(finished.lse.get(b, r, h, 0), lse) << what;
      } else {
        EXPECT_NEAR(finished.lse.get(b, r, h, 0), lse, 1e-6 * (1.0 + std::abs(lse))) << what;
      }
    });
  }
}

TEST_P(AttendResultsTest, WithoutStates) {
  for (std::uint64_t seed = 1; seed <= kRandomCases; ++seed) {
    CaseGenerator generate(seed);
    Spec s = generate.spec(dtype());
    s.sinks = seed % 2 == 0;
    World with(s), without(s);
    std::vector<Part> parts{generate.parts(s).front()};
    parts.front().results = true;
    ASSERT_LE(parts.front().k_count, kernel().keys_without_state(with.params(3).shape));
    run_kernel(kernel(), with, parts, 1);
    run_kernel(kernel(), without, parts, 3, [](AttendTask& task) { task.m = task.l = task.acc = {}; });
    for (const auto tensor : {&World::o, &World::o32, &World::lse}) {
      EXPECT_EQ((without.*tensor).bytes(), (with.*tensor).bytes()) << seed << ": " << s.describe();
    }
  }
}

// Of which no row sees many, but all together as many as there may be.
TEST_P(AttendResultsTest, WithoutStatesUnderAWindow) {
  const std::int64_t most = kernel().keys_without_state(World(spec(1, 1, 16)).params(2).shape);
  const int n = static_cast<int>(std::min<std::int64_t>(most, kernel().name.ends_with("_reference") ? 300 : 5000));
  World with(spec(n, n, 16)), without(spec(n, n, 16));
  Part part = with.whole(-7, 2);
  part.results = true;
  run_kernel(kernel(), with, {part}, 1);
  run_kernel(kernel(), without, {part}, 1, [](AttendTask& task) { task.m = task.l = task.acc = {}; });
  for (const auto tensor : {&World::o, &World::o32, &World::lse}) {
    EXPECT_EQ((without.*tensor).bytes(), (with.*tensor).bytes()) << n << " keys";
  }
}

// A run of key tiles that is the last for the first query, and for no other: only its result is there already.
TEST_P(AttendResultsTest, OfTheOnlyRowThatEndsWithARun) {
  Spec s = spec(60, 0, 16);
  const TileSizes sizes = kernel().tile_sizes(World(s).params(1).shape);
  if (sizes.step.keys > 0) s.tile.keys = (sizes.least.keys + sizes.step.keys - 1) / sizes.step.keys * sizes.step.keys;
  const std::int64_t tile = sizes.step.keys > 0 ? s.tile.keys : 64;
  s.n_k = 4 * tile + s.n_q;
  for (std::int64_t keys = tile; keys <= 4 * tile; keys += tile) {
    World plain(s), finished(s);
    Part part = plain.whole(-kUnbounded, keys - 1);
    run_kernel(kernel(), plain, {part});
    part.results = true;
    run_kernel(kernel(), finished, {part});
    plain.acc.for_each([&](auto b, auto r, auto h, auto e) {
      const double value = plain.acc.get(b, r, h, e) / plain.l.get(b, r, h, 0);
      ASSERT_NEAR(finished.o32.get(b, r, h, e), value, 1e-6 * std::abs(value) + 1e-37) << keys << " keys, row " << r;
    });
  }
}

// In several runs of key tiles, cut over threads as few queries, and as heads that share a tile.
TEST_P(AttendResultsTest, OfLongRowsAndOfFewQueries) {
  const bool slow = kernel().name.ends_with("_reference");
  for (const auto& [n_q, n_k, d] : std::vector<std::tuple<int, int, int>>{{300, 9000, 64}, {3, 5000, 64}, {40, 4500, 16}}) {
    Spec s = spec(slow ? n_q % 100 + 3 : n_q, slow ? n_k / 20 : n_k, d);
    s.group = 2;
    World plain(s), finished(s);
    Part part = plain.whole(-kUnbounded, s.n_k - s.n_q);
    run_kernel(kernel(), plain, {part}, 2);
    part.results = true;
    run_kernel(kernel(), finished, {part}, 2);
    plain.acc.for_each([&](auto b, auto r, auto h, auto e) {
      const double value = plain.acc.get(b, r, h, e) / plain.l.get(b, r, h, 0);
      ASSERT_NEAR(finished.o32.get(b, r, h, e), value, 1e-6 * std::abs(value) + 1e-37) << s.describe();
      ASSERT_NEAR(finished.lse.get(b, r, h, 0), plain.m.get(b, r, h, 0) + std::log(plain.l.get(b, r, h, 0)), 1e-5);
    });
  }
}

TEST_P(AttendResultsTest, NanOfTheOnlyKeysStays) {
  World world(spec(40, 90, 16));
  for (std::int64_t key = 0; key < 10; ++key) world.k.set(0, key, 0, 3, kNan);
  Part first = world.whole(), second = world.whole();
  first.k_count = 10;
  second.k_row = 10, second.k_count = 80, second.results = true;
  run_kernel(kernel(), world, {first});
  run_kernel(kernel(), world, {second});
  for (std::int64_t row = 0; row < 40; ++row) {
    EXPECT_TRUE(std::isnan(world.lse.get(0, row, 0, 0))) << row;
    EXPECT_TRUE(std::isnan(world.o.get(0, row, 0, 1))) << row;
  }
}

// What is 0 times an accumulator is not an empty row: of factors that a large sink makes 0, and of output_scale = 0.
TEST_P(AttendResultsTest, NanTimesZeroStays) {
  for (const auto& [sink, output_scale] : std::vector<std::pair<float, float>>{{200.0F, 1.0F}, {0.5F, 0.0F}}) {
    for (const bool in_float32 : {true, false}) {
      Spec s = spec(40, 90, 16);
      s.sinks = true, s.output_scale = output_scale;
      World world(s);
      world.sinks[0] = sink;
      world.v.set(0, 0, 0, 3, kNan);
      Part part = world.whole(-kUnbounded, -5);  // the first five rows see no key
      part.results = true;
      run_kernel(kernel(), world, {part}, 1, [&](AttendTask& task) {
        if (!in_float32) task.o32 = {};
      });
      world.o.for_each([&](auto b, auto r, auto h, auto e) {
        const double o = world.o.get(b, r, h, e);
        EXPECT_TRUE(r >= 5 && e == 3 ? std::isnan(o) : o == 0.0) << o << " in row " << r << ", column " << e;
      });
      EXPECT_EQ(world.lse.get(0, 0, 0, 0), sink);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendResultsTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_KERNELS)), kernel_name);

}  // namespace
}  // namespace ringspan::kernels::testing
