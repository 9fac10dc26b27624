// Every attend kernel of the list against attention in float64.
#include "kernels/attend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class AttendTest : public KernelTest {};

TEST_P(AttendTest, RandomCases) {
  for (std::uint64_t seed = 1; seed <= kRandomCases; ++seed) {
    CaseGenerator generate(seed);
    const Spec s = generate.spec(dtype());
    World world(s);
    const std::vector<Part> parts = generate.parts(s);
    run_kernel(kernel(), world, parts, 1 + static_cast<int>(seed % 3));
    expect_forward(world, parts, "case " + std::to_string(seed) + ": " + s.describe());
  }
}

TEST_P(AttendTest, SizesAroundTiles) {
  for (const std::int64_t n_q : {0, 1, 5, 6, 7, 95, 96, 97, 193}) {
    for (const std::int64_t n_k : {0, 1, 63, 64, 65, 257}) {
      World world(spec(n_q, n_k, 20));
      const std::vector<Part> parts{world.whole(-kUnbounded, n_k - n_q)};
      run_kernel(kernel(), world, parts);
      expect_forward(world, parts, std::to_string(n_q) + " x " + std::to_string(n_k));
    }
  }
}

TEST_P(AttendTest, HeadDimensions) {
  for (const int d : {1, 3, 16, 31, 64, 80, 96, 112, 128, 160, 192, 200, 224, 255, 256}) {
    for (const int d_v : {d, 257 - d}) {
      Spec s = spec(33, 130, d);
      s.head_dim_v = d_v;
      World world(s);
      const std::vector<Part> parts{world.whole(-40, 97)};
      run_kernel(kernel(), world, parts);
      expect_forward(world, parts, "head_dim " + std::to_string(d) + ", head_dim_v " + std::to_string(d_v));
    }
  }
}

// Longer than any tile in both directions, so that states pass from tile to tile.
TEST_P(AttendTest, LongRows) {
  for (const auto& [n_q, n_k, d] : std::vector<std::tuple<int, int, int>>{{203, 2100, 8}, {30, 1100, 128}, {20, 600, 256}}) {
    Spec s = spec(n_q, n_k, d);
    World world(s);
    const std::vector<Part> parts{world.whole(-kUnbounded, s.n_k - s.n_q)};
    run_kernel(kernel(), world, parts, 2);
    expect_forward(world, parts, "head_dim " + std::to_string(d));
  }
}

// Two keys of which one is a score of 0 to 1 below the other: lse is log(1 + e^-score), for scores that have every fraction
// of an exponent.
TEST_P(AttendTest, FractionsOfAnExponent) {
  constexpr std::int64_t kQueries = 256;  // as many multiples of 1/256, which every dtype holds
  World world(spec(kQueries, 2, 1));
  for (std::int64_t row = 0; row < kQueries; ++row) world.q.set(0, row, 0, 0, static_cast<double>(row) / kQueries);
  world.k.set(0, 0, 0, 0, 0.0), world.k.set(0, 1, 0, 0, -1.0);
  const std::vector<Part> parts{world.whole(-kUnbounded, kUnbounded)};
  run_kernel(kernel(), world, parts);
  for (std::int64_t row = 0; row < kQueries; ++row) {
    const double lse = world.m.get(0, row, 0, 0) + std::log(world.l.get(0, row, 0, 0));
    ASSERT_NEAR(lse, std::log1p(std::exp(-static_cast<double>(row) / kQueries)), 1e-6) << "score " << row << " / 256";
  }
}

// A kernel may flush them meanwhile.
TEST_P(AttendTest, LeavesDenormalNumbersToTheCaller) {
  World world(spec(70, 130));
  run_kernel(kernel(), world, {world.whole(-kUnbounded, kUnbounded)});
  volatile float small = 1e-38F;
  small = small * 0.125F;
  EXPECT_GT(small, 0.0F);
}

TEST_P(AttendTest, MaskedKeysHaveNoInfluence) {
  // Each query sees a band of keys; all others, also those in the same tiles, hold NaN or infinities for that query.
  struct Case {
    std::int64_t lo, hi;
    float dropout;
  };
  for (const auto& [lo, hi, dropout] :
       {Case{-kUnbounded, 40, 0.0F}, {-7, 40, 0.0F}, {0, 0, 0.0F}, {55, kUnbounded, 0.0F}, {-7, 40, 0.3F}}) {
    Spec s = spec(130, 300, 24);
    s.dropout = dropout;
    World clean(s), planted(s);
    if (!kernel().supports(clean.params(1).shape)) continue;
    const std::vector<Part> parts{clean.whole(lo, hi)};
    run_kernel(kernel(), clean, parts);
    const double bad[] = {std::nan(""), kInfinity, -kInfinity};
    for (std::int64_t key = 0; key < 300; ++key) {
      if (key % 3 == 0 || (key > 20 && key < 150)) continue;
      for (int e = 0; e < 24; ++e) {
        planted.k.set(0, key, 0, e, bad[(key + e) % 3]);
        planted.v.set(0, key, 0, e, bad[(key + e + 1) % 3]);
      }
    }
    run_kernel(kernel(), planted, parts);
    int compared = 0;
    for (std::int64_t row = 0; row < 130; ++row) {
      bool sees_bad = false;
      for (std::int64_t key = 0; key < 300; ++key) {
        sees_bad = sees_bad || (key - row >= lo && key - row <= hi && std::isnan(planted.k.get(0, key, 0, 0) * 0.0));
      }
      if (!sees_bad) {
        ++compared;
        EXPECT_EQ(planted.m.get(0, row, 0, 0), clean.m.get(0, row, 0, 0)) << row;
        EXPECT_EQ(planted.l.get(0, row, 0, 0), clean.l.get(0, row, 0, 0)) << row;
        for (int e = 0; e < 24; ++e) ASSERT_EQ(planted.acc.get(0, row, 0, e), clean.acc.get(0, row, 0, e)) << row;
      } else {
        EXPECT_TRUE(std::isnan(planted.l.get(0, row, 0, 0))) << "a visible NaN must show: row " << row;
      }
    }
    EXPECT_TRUE(lo != hi || compared > 20) << compared;
  }
}

TEST_P(AttendTest, VisibleNanShowsInItsRowsOnly) {
  World world(spec(70, 70, 16));
  world.v.set(0, 30, 0, 5, std::nan(""));
  run_kernel(kernel(), world, {world.whole(-kUnbounded, 0)});
  for (std::int64_t row = 0; row < 70; ++row) {
    EXPECT_EQ(std::isnan(world.acc.get(0, row, 0, 5)), row >= 30) << row;
    EXPECT_FALSE(std::isnan(world.acc.get(0, row, 0, 4))) << row;
    EXPECT_TRUE(std::isfinite(world.l.get(0, row, 0, 0))) << row;
  }
}

// Also where only its last bit tells it from an infinity, or rounding would carry into its sign.
TEST_P(AttendTest, VisibleNanOfAnyBitsShows) {
  const std::uint32_t infinity = dtype() == DType::float32 ? 0x7f800000 : dtype() == DType::bfloat16 ? 0x7f80 : 0x7c00;
  const std::uint32_t ones = dtype() == DType::float32 ? 0x7fffffff : 0x7fff;
  for (const std::uint32_t bits : {infinity + 1, ones, ones + 1 + infinity + 1, ones + 1 + ones}) {
    World world(spec(70, 70, 16));
    std::memcpy(static_cast<std::byte*>(world.v.at(0, 30, 0)) + 5 * size_of(dtype()), &bits,
                static_cast<std::size_t>(size_of(dtype())));
    run_kernel(kernel(), world, {world.whole(-kUnbounded, 0)});
    for (std::int64_t row = 0; row < 70; ++row)
      EXPECT_EQ(std::isnan(world.acc.get(0, row, 0, 5)), row >= 30) << std::hex << bits << std::dec << ", row " << row;
  }
}

TEST_P(AttendTest, VisibleNanOfAKeyShowsThroughEveryOption) {
  for (int option = 0; option < 8; ++option) {
    Spec s = spec(40, 50, 16);
    if ((option & 1) != 0) s.softcap = 5.0F;
    if ((option & 2) != 0) s.alibi_slope = 0.1F;
    if ((option & 4) != 0) s.dropout = 0.2F;
    World world(s);
    world.k.set(0, 30, 0, 5, std::nan(""));
    run_kernel(kernel(), world, {world.whole(-kUnbounded, 0)});
    for (std::int64_t row = 0; row < 40; ++row) {
      EXPECT_EQ(std::isnan(world.l.get(0, row, 0, 0)), row >= 30) << row << " option " << option;
    }
  }
}

TEST_P(AttendTest, RowsWithoutKeysKeepTheirBits) {
  // Queries at odd positions, keys at multiples of four, band 0..1: every other row sees one key, the others none.
  Spec s = spec(100, 60, 16);
  s.k_step = 4;
  World world(s);
  world.m.fill(0.75), world.l.fill(3.0), world.acc.fill(-0.0);
  const std::vector<std::byte> acc = world.acc.bytes();
  run_kernel(kernel(), world, {world.whole(0, 1)});
  int without = 0;
  for (std::int64_t row = 0; row < s.n_q; ++row) {
    const bool sees = row % 4 == 0 || row % 4 == 3;
    if (sees) continue;
    ++without;
    EXPECT_EQ(world.m.get(0, row, 0, 0), 0.75);
    EXPECT_EQ(world.l.get(0, row, 0, 0), 3.0);
    for (int e = 0; e < 16; ++e) ASSERT_TRUE(std::signbit(world.acc.get(0, row, 0, e))) << row;
  }
  EXPECT_EQ(without, 50);
  World none(s);
  none.m.fill(0.75), none.l.fill(3.0), none.acc.fill(-0.0);
  run_kernel(kernel(), none, {none.whole(1000, 2000), none.whole(2, 1)});
  EXPECT_EQ(none.acc.bytes(), acc);
}

// Few queries before every key: what they had stays, and becomes their result once.
TEST_P(AttendTest, FewQueriesBeforeEveryKey) {
  const Spec s = spec(4, 70, 16);
  World none(s);
  const std::vector<std::byte> l = none.l.bytes(), acc = none.acc.bytes();
  const Part nothing = none.whole(-kUnbounded, -100);
  run_kernel(kernel(), none, {nothing});
  EXPECT_EQ(none.l.bytes(), l);
  EXPECT_EQ(none.acc.bytes(), acc);
  World plain(s), finished(s);
  run_kernel(kernel(), plain, {plain.whole()});
  Part last = nothing;
  last.results = true;
  run_kernel(kernel(), finished, {finished.whole(), last}, 1, [&](AttendTask& task) {
    if (task.o.data == nullptr) return;
    task.o32 = task.acc;
    if (dtype() == DType::float32) task.o = task.acc, task.o32 = {};
  });
  plain.acc.for_each([&](auto b, auto r, auto h, auto e) {
    const double o = plain.acc.get(b, r, h, e) / plain.l.get(b, r, h, 0);
    EXPECT_NEAR(finished.acc.get(b, r, h, e), o, 1e-6 * (1 + std::abs(o))) << r << ' ' << e;
  });
}

TEST_P(AttendTest, HugeLogits) {
  // Far beyond the largest float16 (65,504), still far inside float32.
  for (const double magnitude : {30.0, 300.0, 3000.0}) {
    Spec s = spec(50, 140, 32);
    s.magnitude = magnitude, s.scale = 1.0F;
    World world(s);
    const std::vector<Part> parts{world.whole(-kUnbounded, 90)};
    run_kernel(kernel(), world, parts);
    expect_forward(world, parts, "magnitude " + std::to_string(magnitude));
  }
}

TEST_P(AttendTest, ScoresOfMinusInfinityHaveNoWeight) {
  // k . q overflows to -inf for the even keys; rows that see only such keys stay empty and never become NaN.
  if (dtype() == DType::float16) GTEST_SKIP() << "float16 operands cannot overflow float32";
  struct Operands {
    double q, k;
    float scale;
  };
  for (const Operands operands : {Operands{1e30, -1e30, 0.5F}, {1e19, -2.5e18, 2.0F}}) {  // the product, or scale times it
    Spec s = spec(40, 40, 8);
    s.scale = operands.scale;
    World world(s);
    world.q.fill(operands.q);
    for (std::int64_t key = 0; key < 40; ++key) {
      for (int e = 0; e < 8; ++e) world.k.set(0, key, 0, e, key % 2 == 0 ? operands.k : 0.0);
    }
    Part evens = world.whole();
    evens.k_stride = 2, evens.k_count = 20, evens.q_count = 20;
    Part all = world.whole();
    all.q_row = 20, all.q_count = 20;
    run_kernel(kernel(), world, {evens, all});
    for (std::int64_t row = 0; row < 40; ++row) {
      EXPECT_EQ(world.m.get(0, row, 0, 0), row < 20 ? -kInfinity : 0.0) << operands.scale << ", " << row;
      EXPECT_EQ(world.l.get(0, row, 0, 0), row < 20 ? 0.0 : 20.0) << operands.scale << ", " << row;
      EXPECT_FALSE(std::isnan(world.acc.get(0, row, 0, 3))) << operands.scale << ", " << row;
    }
  }
}

TEST_P(AttendTest, MaximaThatDoNotMoveKeepTheirBits) {
  Spec s = spec(70, 90, 32);
  s.scale = 0.3F;
  World world(s);
  run_kernel(kernel(), world, {world.whole()});
  std::vector<double> before;
  for (std::int64_t row = 0; row < s.n_q; ++row) before.push_back(world.m.get(0, row, 0, 0));
  for (int again = 0; again < 3; ++again) run_kernel(kernel(), world, {world.whole()});
  for (std::int64_t row = 0; row < s.n_q; ++row)
    EXPECT_EQ(world.m.get(0, row, 0, 0), before[static_cast<std::size_t>(row)]) << row;
}

TEST_P(AttendTest, MaximaThatMoveWithTheKeys) {
  // Scores that rise from key to key by up to 0.2, fall, or stay, by row: a maximum moves in every part of the keys, or never.
  for (const std::int64_t hi : {kUnbounded, std::int64_t{500}}) {
    Spec s = spec(90, 600, 16);
    s.scale = 1.0F;
    World world(s);
    for (std::int64_t row = 0; row < s.n_q; ++row) world.q.set(0, row, 0, 0, static_cast<double>(row % 5 - 2));
    for (std::int64_t key = 0; key < s.n_k; ++key) world.k.set(0, key, 0, 0, 0.1 * static_cast<double>(key));
    const std::vector<Part> parts{world.whole(-kUnbounded, hi)};
    run_kernel(kernel(), world, parts);
    expect_forward(world, parts, "hi " + std::to_string(hi));
  }
}

TEST_P(AttendTest, WeightsThatAreRoundedAlikeDoNotShow) {
  // Keys that are 1.5 above the first 64, for which a kernel may leave a maximum where it is, all have a weight of e^1.5 then,
  // which is 3 in 1,000 more than it is rounded to in 8 bits.
  World world(spec(90, 400, 16));
  world.q.fill(0.5), world.k.fill(0.75), world.v.fill(1.0);
  for (std::int64_t key = 0; key < 64; ++key) {
    for (int e = 0; e < 16; ++e) world.k.set(0, key, 0, e, 0.0);
  }
  run_kernel(kernel(), world, {world.whole()});
  for (std::int64_t row = 0; row < 90; ++row)
    EXPECT_NEAR(world.acc.get(0, row, 0, 3) / world.l.get(0, row, 0, 0), 1.0, 5e-4) << row;
}

TEST_P(AttendTest, EqualKeysAndOneHot) {
  World equal(spec(20, 100, 16));
  equal.k.fill(0.5);
  run_kernel(kernel(), equal, {equal.whole()});
  expect_forward(equal, {equal.whole()}, "equal keys");
  World hot(spec(20, 100, 16));
  for (int e = 0; e < 16; ++e) hot.k.set(0, 77, 0, e, 200.0 * hot.q.get(0, 3, 0, e));
  run_kernel(kernel(), hot, {hot.whole()});
  expect_forward(hot, {hot.whole()}, "one key dominates");
}

TEST_P(AttendTest, DenormalOperands) {
  Spec s = spec(20, 70, 16);
  s.magnitude = dtype() == DType::float16 ? 1e-7 : 1e-39;
  World world(s);
  run_kernel(kernel(), world, {world.whole()});
  expect_forward(world, {world.whole()}, "denormals");
}

// One key has all the weight but for e^-distance of each of the others.
TEST_P(AttendTest, DenormalProbabilitiesAreZero) {
  if (kernel().name.ends_with("_reference")) GTEST_SKIP() << "computes as the C library does";
  for (const std::string_view device : {"_gpu", "_cuda"}) {
    if (kernel().name.find(device) != std::string_view::npos) GTEST_SKIP() << "denormal numbers are as fast as others there";
  }
  for (const double distance : {80.0, 90.0}) {
    World world(spec(20, 70, 16));
    world.q.fill(0), world.k.fill(0), world.v.fill(dtype() == DType::float16 ? 6e4 : 1e30);
    for (std::int64_t row = 0; row < 20; ++row) world.q.set(0, row, 0, 0, 4);
    for (std::int64_t key = 0; key < 70; ++key) world.k.set(0, key, 0, 0, key == 33 ? 0 : -distance);
    for (int e = 0; e < 16; ++e) world.v.set(0, 33, 0, e, 0);
    run_kernel(kernel(), world, {world.whole()});
    for (std::int64_t row = 0; row < 20; ++row) {
      EXPECT_EQ(world.l.get(0, row, 0, 0), 1) << row;
      EXPECT_EQ(world.acc.get(0, row, 0, 7) > 0, distance == 80) << row << ": " << world.acc.get(0, row, 0, 7);
    }
  }
}

TEST_P(AttendTest, SameBitsForAnyNumberOfThreads) {
  const bool slow = kernel().name.ends_with("_reference");
  for (const std::uint64_t seed : {3, 14, 15}) {
    CaseGenerator generate(seed);
    Spec s = generate.spec(dtype());
    s.batch = 1, s.kv_heads = 1 + seed % 2, s.group = 2;  // fewer units than threads: queries are dealt too
    s.n_q = slow ? 61 : 701, s.n_k = slow ? 53 : 413, s.head_dim = 16, s.head_dim_v = 24;
    std::vector<Part> parts = generate.parts(s);
    parts.push_back(World(s).whole(-kUnbounded, s.k_first - s.q_first + 5));
    World one(s);
    run_kernel(kernel(), one, parts, 1);
    for (const int threads : {2, 3}) {
      World many(s);
      run_kernel(kernel(), many, parts, threads);
      EXPECT_EQ(many.m.bytes(), one.m.bytes()) << threads << " " << s.describe();
      EXPECT_EQ(many.l.bytes(), one.l.bytes()) << threads << " " << s.describe();
      EXPECT_EQ(many.acc.bytes(), one.acc.bytes()) << threads << " " << s.describe();
    }
  }
}

TEST_P(AttendTest, OptionsAcrossTiles) {
  Spec s = spec(110, 600, 16);
  s.q_step = 5, s.k_step = 3, s.q_first = 1000, s.diagonal = 7;
  s.softcap = 8.0F, s.alibi_slope = 0.01F, s.dropout = 0.3F;
  World world(s);
  const std::vector<Part> parts{world.whole(-kUnbounded, 300)};
  run_kernel(kernel(), world, parts);
  expect_forward(world, parts, s.describe());
}

TEST_P(AttendTest, DropoutKeepsTheSumOnAverageAndTheNormaliserExactly) {
  Spec s = spec(64, 512, 16);
  s.magnitude = 0.0, s.dropout = 0.25F;
  World world(s);
  world.v.fill(1.0);
  if (!kernel().supports(world.params(1).shape)) GTEST_SKIP();
  run_kernel(kernel(), world, {world.whole()});
  double mean = 0.0;
  for (std::int64_t row = 0; row < 64; ++row) {
    EXPECT_EQ(world.l.get(0, row, 0, 0), 512.0);
    mean += world.acc.get(0, row, 0, 0) / 512.0 / 64.0;
  }
  EXPECT_NEAR(mean, 1.0, 5.0 * std::sqrt(0.25 / 0.75 / (64.0 * 512.0)));
}

// Heads of a group with so few queries that those of all of them would fill one tile, and every other head: each has its own
// slope and drops its own pairs.
TEST_P(AttendTest, FewQueriesOfAGroupWithOptionsOfEachHead) {
  for (const bool alibi : {true, false}) {
    for (const std::int64_t step : {1, 2}) {
      Spec s = spec(5, 70, 16);
      s.group = 4;
      (alibi ? s.alibi_slope : s.dropout) = 0.5F;
      World world(s);
      if (!kernel().supports(world.params(1).shape)) continue;
      Part part = world.whole();
      part.head_step = step, part.head_count = 4 / step;
      run_kernel(kernel(), world, {part});
      expect_forward(world, {part}, s.describe() + " step " + std::to_string(step));
    }
  }
}

TEST_P(AttendTest, DropoutDoesNotDependOnHowTasksAreCut) {
  Spec s = spec(60, 200, 16);
  s.dropout = 0.5F, s.q_first = 17, s.k_first = 3;
  World whole(s);
  if (!kernel().supports(whole.params(1).shape)) GTEST_SKIP();
  run_kernel(kernel(), whole, {whole.whole()});
  World cut(s);
  std::vector<Part> parts;
  for (std::int64_t residue = 0; residue < 3; ++residue) {
    Part part = cut.whole();
    part.k_row = residue, part.k_stride = 3, part.k_count = (199 - residue) / 3 + 1;
    parts.push_back(part);
  }
  run_kernel(kernel(), cut, parts);
  // A kernel may round probabilities to bfloat16, those of CUDA round them to float16, too; one wrong decision changes a result
  // by about 1e-2.
  const bool in_half = dtype() == DType::float16 && (kernel().name.ends_with("_cuda") || kernel().name.ends_with("_gpu"));
  const double tolerance = dtype() == DType::bfloat16 ? 3e-3 : in_half ? 5e-4 : 1e-5;
  whole.acc.for_each([&](auto b, auto r, auto h, auto e) {
    EXPECT_NEAR(whole.acc.get(b, r, h, e) / whole.l.get(b, r, h, 0), cut.acc.get(b, r, h, e) / cut.l.get(b, r, h, 0),
                tolerance);
  });
}

TEST_P(AttendTest, CallsProgressWhileItComputes) {
  const bool slow = kernel().name.ends_with("_reference");
  World world(slow ? spec(100, 300, 64) : spec(1200, 3000, 64));
  const AttendParams params = world.params(1);
  ThreadPool pool(1);
  Scratch scratch(kernel().scratch_bytes(params.shape));
  int calls = 0;
  const auto progress = [&] { ++calls; };
  const std::vector<AttendTask> tasks = world.tasks({world.whole()});
  kernel().run(params, tasks, Context{pool, scratch.data(), progress});
  EXPECT_GT(calls, 0);  // one unit of well over a millisecond on any machine
}

TEST_P(AttendTest, NoTasksNoWork) {
  World world(spec(5, 5));
  run_kernel(kernel(), world, {});
  Part none = world.whole();
  none.head_count = 0;
  Part no_batch = world.whole();
  no_batch.batch_count = 0;
  run_kernel(kernel(), world, {none, no_batch});
  for (std::int64_t row = 0; row < 5; ++row) EXPECT_EQ(world.m.get(0, row, 0, 0), -kInfinity);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_KERNELS)), kernel_name);

}  // namespace
}  // namespace ringspan::kernels::testing
