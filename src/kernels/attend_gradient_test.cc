// Every attend_backward kernel of the list against attention in float64.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class AttendBackwardTest : public KernelTest {
 protected:
  void run_and_check(World& world, const std::vector<Part>& parts, const std::string& what, int threads = 1) {
    set_final_rows(world, exact_attention(world, parts));
    run_kernel(kernel(), world, parts, threads);
    expect_backward(world, parts, what);
  }
};

TEST_P(AttendBackwardTest, RandomCases) {
  for (std::uint64_t seed = 1; seed <= kRandomCases; ++seed) {
    CaseGenerator generate(seed);
    const Spec s = generate.spec(dtype());
    World world(s);
    run_and_check(world, generate.parts(s), "case " + std::to_string(seed) + ": " + s.describe(),
                  1 + static_cast<int>(seed % 3));
  }
}

TEST_P(AttendBackwardTest, SizesAroundTiles) {
  for (const std::int64_t n_q : {0, 1, 5, 6, 7, 63, 64, 65, 193}) {
    for (const std::int64_t n_k : {0, 1, 5, 64, 65, 191, 192, 193, 257}) {
      World world(spec(n_q, n_k, 20));
      run_and_check(world, {world.whole(-kUnbounded, n_k - n_q)}, std::to_string(n_q) + " x " + std::to_string(n_k));
    }
  }
}

TEST_P(AttendBackwardTest, HeadDimensions) {
  for (const int d : {1, 3, 16, 31, 64, 80, 96, 112, 128, 160, 192, 200, 255, 256}) {
    for (const int d_v : {d, 257 - d}) {
      Spec s = spec(33, 70, d);
      s.head_dim_v = d_v;
      World world(s);
      run_and_check(world, {world.whole(-20, 37)}, "head_dim " + std::to_string(d) + ", head_dim_v " + std::to_string(d_v));
    }
  }
}

TEST_P(AttendBackwardTest, LongRows) {
  Spec s = spec(290, 500, 8);
  s.group = 2;
  World world(s);
  run_and_check(world, {world.whole(-kUnbounded, 220)}, "long rows", 2);
}

TEST_P(AttendBackwardTest, OptionsAcrossTiles) {
  Spec s = spec(150, 500, 16);
  s.q_step = 5, s.k_step = 3, s.q_first = 1000, s.diagonal = 7;
  s.softcap = 8.0F, s.alibi_slope = 0.01F, s.dropout = 0.3F, s.output_scale = 0.5F;
  World world(s);
  run_and_check(world, {world.whole(-kUnbounded, 300)}, s.describe());
}

TEST_P(AttendBackwardTest, MaskedKeysHaveNoInfluence) {
  for (const auto& [lo, hi] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{-kUnbounded, 40}, {-7, 40}, {0, 0}, {55, kUnbounded}}) {
    World clean(spec(130, 300, 24));
    World planted(spec(130, 300, 24));
    const std::vector<Part> parts{clean.whole(lo, hi)};
    const DenseResult truth = exact_attention(clean, parts);
    set_final_rows(clean, truth), set_final_rows(planted, truth);
    run_kernel(kernel(), clean, parts);
    const double bad[] = {std::nan(""), kInfinity, -kInfinity};
    const auto is_bad = [](std::int64_t key) { return key % 3 != 0 && (key <= 20 || key >= 150); };
    for (std::int64_t key = 0; key < 300; ++key) {
      for (int e = 0; e < 24 && is_bad(key); ++e) {
        planted.k.set(0, key, 0, e, bad[(key + e) % 3]);
        planted.v.set(0, key, 0, e, bad[(key + e + 1) % 3]);
      }
    }
    run_kernel(kernel(), planted, parts);
    const auto sees = [&](std::int64_t row, std::int64_t key) { return key - row >= lo && key - row <= hi; };
    for (std::int64_t row = 0; row < 130; ++row) {
      bool sees_bad = false;
      for (std::int64_t key = 0; key < 300; ++key) sees_bad = sees_bad || (is_bad(key) && sees(row, key));
      for (int e = 0; e < 24 && !sees_bad; ++e) ASSERT_EQ(planted.dq.get(0, row, 0, e), clean.dq.get(0, row, 0, e)) << row;
      if (sees_bad) {
        EXPECT_TRUE(std::isnan(planted.dq.get(0, row, 0, 0))) << "a visible NaN must show: row " << row;
      }
    }
    // A key that is itself clean gets its gradient from its own queries only, whatever other keys hold.
    for (std::int64_t key = 0; key < 300; ++key) {
      for (int e = 0; e < 24 && !is_bad(key); ++e) {
        ASSERT_EQ(planted.dk.get(0, key, 0, e), clean.dk.get(0, key, 0, e)) << key;
        ASSERT_EQ(planted.dv.get(0, key, 0, e), clean.dv.get(0, key, 0, e)) << key;
      }
    }
  }
}

// The mirror image: what a query holds that a key's band excludes never reaches that key. One element of its q, of
// its d_out, or of both.
TEST_P(AttendBackwardTest, MaskedQueriesHaveNoInfluence) {
  constexpr int kWidth = 72;
  for (const auto& [bad_q, bad_d_out] : {std::pair{true, false}, {false, true}, {true, true}}) {
    SCOPED_TRACE(::testing::Message() << (bad_q ? "q " : "") << (bad_d_out ? "d_out" : ""));
    World clean(spec(200, 150, kWidth));
    World planted(spec(200, 150, kWidth));
    const std::int64_t lo = -30, hi = 10;
    const std::vector<Part> parts{clean.whole(lo, hi)};
    const DenseResult truth = exact_attention(clean, parts);
    set_final_rows(clean, truth), set_final_rows(planted, truth);
    run_kernel(kernel(), clean, parts);
    const auto is_bad = [](std::int64_t row) { return row == 40 || row == 41 || row == 120; };
    for (std::int64_t row = 0; row < 200; ++row) {
      if (!is_bad(row)) continue;
      const int e = row == 40 ? 20 : row == 41 ? 45 : 60;
      if (bad_q) planted.q.set(0, row, 0, e, std::nan(""));
      if (bad_d_out) planted.d_out.set(0, row, 0, e, kInfinity);
      if (bad_q && bad_d_out) planted.delta.set(0, row, 0, 0, std::nan(""));
    }
    run_kernel(kernel(), planted, parts);
    int compared = 0;
    for (std::int64_t key = 0; key < 150; ++key) {
      bool seen_by_bad = false;
      for (std::int64_t row = 0; row < 200; ++row)
        seen_by_bad = seen_by_bad || (is_bad(row) && key - row >= lo && key - row <= hi);
      if (seen_by_bad) continue;
      ++compared;
      for (int e = 0; e < kWidth; ++e) {
        ASSERT_EQ(planted.dk.get(0, key, 0, e), clean.dk.get(0, key, 0, e)) << key;
        ASSERT_EQ(planted.dv.get(0, key, 0, e), clean.dv.get(0, key, 0, e)) << key;
      }
    }
    EXPECT_GT(compared, 50);
    for (std::int64_t row = 0; row < 200; ++row) {
      for (int e = 0; e < kWidth && !is_bad(row); ++e)
        ASSERT_EQ(planted.dq.get(0, row, 0, e), clean.dq.get(0, row, 0, e)) << row;
    }
  }
}

// Rows with lse = -inf contribute nothing, whatever their other operands hold.
void expect_nothing_of_empty_rows(const AttendKernel& kernel, const Spec& s) {
  World world(s);
  const std::vector<Part> parts{world.whole()};
  set_final_rows(world, exact_attention(world, parts));
  for (std::int64_t row = 0; row < 70; row += 3) {
    world.lse.set(0, row, 0, 0, -kInfinity);
    world.delta.set(0, row, 0, 0, std::nan(""));
    for (int e = 0; e < 24; ++e) {
      world.q.set(0, row, 0, e, std::nan(""));
      world.d_out.set(0, row, 0, e, kInfinity);
    }
  }
  World without(s);
  set_final_rows(without, exact_attention(without, parts));
  for (std::int64_t row = 0; row < 70; row += 3) without.lse.set(0, row, 0, 0, -kInfinity);
  world.dq.fill(-0.0), without.dq.fill(-0.0);
  run_kernel(kernel, world, parts);
  run_kernel(kernel, without, parts);
  EXPECT_EQ(world.dk.bytes(), without.dk.bytes());
  EXPECT_EQ(world.dv.bytes(), without.dv.bytes());
  EXPECT_EQ(world.dq.bytes(), without.dq.bytes());
  for (std::int64_t row = 0; row < 70; row += 3) {
    for (int e = 0; e < 24; ++e) ASSERT_TRUE(std::signbit(world.dq.get(0, row, 0, e)) && world.dq.get(0, row, 0, e) == 0.0);
  }
  world.dk.for_each([&](auto b, auto r, auto h, auto e) { ASSERT_TRUE(std::isfinite(world.dk.get(b, r, h, e))); });
}
TEST_P(AttendBackwardTest, EmptyRowsContributeNothing) {
  Spec s = spec(70, 80, 24);
  expect_nothing_of_empty_rows(kernel(), s);
  s.gap = 16;  // what a GPU's hardware copies
  expect_nothing_of_empty_rows(kernel(), s);
}

TEST_P(AttendBackwardTest, RowsWithoutPairsKeepTheirBits) {
  Spec s = spec(100, 60, 16);
  s.k_step = 4;
  World world(s);
  const std::vector<Part> parts{world.whole(0, 1)};
  set_final_rows(world, exact_attention(world, parts));
  world.dq.fill(-0.0), world.dk.fill(-0.0), world.dv.fill(-0.0);
  run_kernel(kernel(), world, parts);
  for (std::int64_t row = 0; row < 100; ++row) {
    if (row % 4 == 0 || row % 4 == 3) continue;
    for (int e = 0; e < 16; ++e)
      ASSERT_TRUE(std::signbit(world.dq.get(0, row, 0, e)) && world.dq.get(0, row, 0, e) == 0.0) << row;
  }
  for (std::int64_t key = 26; key < 60; ++key) {
    for (int e = 0; e < 16; ++e) {
      ASSERT_EQ(world.dk.get(0, key, 0, e), 0.0) << key;
      ASSERT_EQ(world.dv.get(0, key, 0, e), 0.0) << key;
    }
  }
}

TEST_P(AttendBackwardTest, HugeLogits) {
  for (const double magnitude : {30.0, 300.0, 3000.0}) {
    Spec s = spec(50, 140, 32);
    s.magnitude = magnitude, s.scale = 1.0F;
    World world(s);
    run_and_check(world, {world.whole(-kUnbounded, 90)}, "magnitude " + std::to_string(magnitude));
    world.dk.for_each([&](auto b, auto r, auto h, auto e) { ASSERT_TRUE(std::isfinite(world.dk.get(b, r, h, e))); });
  }
}

TEST_P(AttendBackwardTest, SameBitsForAnyNumberOfThreads) {
  const bool slow = kernel().name.ends_with("_reference");
  for (const std::uint64_t seed : {3, 14, 15}) {
    CaseGenerator generate(seed);
    Spec s = generate.spec(dtype());
    s.batch = 1, s.kv_heads = 3, s.group = 1 + static_cast<std::int64_t>(seed % 2);
    s.n_q = slow ? 61 : 201, s.n_k = slow ? 53 : 413, s.head_dim = 16, s.head_dim_v = 24;
    World one(s);
    std::vector<Part> parts = generate.parts(s);
    parts.push_back(one.whole(-kUnbounded, s.k_first - s.q_first + 5));
    const DenseResult truth = exact_attention(one, parts, false);
    set_final_rows(one, truth);
    run_kernel(kernel(), one, parts, 1);
    for (const int threads : {2, 3}) {
      World many(s);
      set_final_rows(many, truth);
      run_kernel(kernel(), many, parts, threads);
      EXPECT_EQ(many.dq.bytes(), one.dq.bytes()) << threads << " " << s.describe();
      EXPECT_EQ(many.dk.bytes(), one.dk.bytes()) << threads << " " << s.describe();
      EXPECT_EQ(many.dv.bytes(), one.dv.bytes()) << threads << " " << s.describe();
    }
  }
}

// One unit, whose key tiles follow each other over the queries: full, narrow and empty rows, between tasks that are not cut.
TEST_P(AttendBackwardTest, SameBitsForAnyNumberOfThreadsWhereKeyTilesAreDealt) {
  const bool slow = kernel().name.ends_with("_reference");
  Spec s = spec(slow ? 40 : 150, slow ? 90 : 1600, 16);
  s.group = 2;
  for (const auto& [lo, hi] : {std::pair{-kUnbounded, s.n_k - s.n_q}, {std::int64_t{200}, std::int64_t{700}}}) {
    World one(s);
    Part small = one.whole();
    small.k_count = 40;
    const std::vector<Part> parts{small, one.whole(lo, hi), small};
    set_final_rows(one, exact_attention(one, parts));
    run_kernel(kernel(), one, parts, 1);
    World many(s);
    many.lse = one.lse, many.delta = one.delta;
    run_kernel(kernel(), many, parts, 2);
    EXPECT_EQ(many.dq.bytes(), one.dq.bytes()) << hi;
    EXPECT_EQ(many.dk.bytes(), one.dk.bytes()) << hi;
    EXPECT_EQ(many.dv.bytes(), one.dv.bytes()) << hi;
  }
}

TEST_P(AttendBackwardTest, ManyTasksEqualOne) {
  Spec s = spec(90, 300, 40);
  s.kv_heads = 2, s.group = 2;
  World world(s);
  const Part whole = world.whole(-kUnbounded, 210);
  std::vector<Part> parts;
  for (std::int64_t key = 0, size = 1; key < 300; key += size, size = size % 40 + 1) {
    Part part = whole;
    part.k_row = key, part.k_count = std::min(size, 300 - key);
    parts.push_back(part);
  }
  set_final_rows(world, exact_attention(world, {whole}));
  run_kernel(kernel(), world, parts, 2);
  expect_backward(world, {whole}, "pieces");
}

TEST_P(AttendBackwardTest, GradientsAreAdded) {
  World once(spec(40, 60, 16));
  const std::vector<Part> parts{once.whole(-kUnbounded, 20)};
  const DenseResult truth = exact_attention(once, parts);
  set_final_rows(once, truth);
  run_kernel(kernel(), once, parts);
  World twice(spec(40, 60, 16));
  set_final_rows(twice, truth);
  run_kernel(kernel(), twice, parts);
  run_kernel(kernel(), twice, parts);
  twice.dk.for_each([&](auto b, auto r, auto h, auto e) {
    EXPECT_NEAR(twice.dk.get(b, r, h, e), 2 * once.dk.get(b, r, h, e), 1e-5);
    EXPECT_NEAR(twice.dv.get(b, r, h, e), 2 * once.dv.get(b, r, h, e), 1e-5);
  });
  twice.dq.for_each(
      [&](auto b, auto r, auto h, auto e) { EXPECT_NEAR(twice.dq.get(b, r, h, e), 2 * once.dq.get(b, r, h, e), 1e-5); });
}

// What the sums would have been rounded to, of all rows of the task, and nothing else.
TEST_P(AttendBackwardTest, WritesGradients) {
  if (!kernel().writes_gradients) GTEST_SKIP() << "adds only";
  for (std::uint64_t seed = 1; seed <= kRandomCases; ++seed) {
    CaseGenerator generate(seed);
    const Spec s = generate.spec(dtype());
    World added(s), written(s);
    std::vector<Part> parts{generate.parts(s).front()};
    const Part& part = parts.front();
    if (part.k_count == 0 || part.q_count == 0 || part.lo > part.hi || part.head_step > s.group) continue;  // no task of a plan
    for (World* world : {&added, &written}) set_final_rows(*world, exact_attention(*world, parts));
    const auto gradient = [&](std::int64_t rows, std::int64_t heads, int width) {
      return Tensor(s.dtype, s.batch, rows, heads, width, s.rows_inner, s.gap);  // NaN everywhere
    };
    Tensor dq = gradient(s.n_q, s.heads(), s.head_dim), dk = gradient(s.n_k, s.kv_heads, s.head_dim);
    Tensor dv = gradient(s.n_k, s.kv_heads, s.head_dim_v);
    run_kernel(kernel(), added, parts);
    run_kernel(kernel(), written, parts, 2, [&](AttendTask& task) {
      task.dq = {dq.at(part.batch_first, part.q_row, part.head_first), dq.batch_stride, dq.row_stride * part.q_stride,
                 dq.head_stride * part.head_step};
      for (const auto& [rows, tensor] : {std::pair{&task.dk, &dk}, {&task.dv, &dv}}) {
        *rows = {tensor->at(part.batch_first, part.k_row, task.kv_head_first), tensor->batch_stride,
                 tensor->row_stride * part.k_stride, tensor->head_stride};
      }
      task.writes_dq = task.writes_dk_dv = true;
    });
    const auto among = [](std::int64_t x, std::int64_t first, std::int64_t step, std::int64_t count) {
      return x >= first && (x - first) % step == 0 && (x - first) / step < count;
    };
    const std::int64_t kv_first = part.head_first / s.group;
    const std::int64_t kv_last = (part.head_first + (part.head_count - 1) * part.head_step) / s.group;
    const auto compare = [&](const Tensor& got, const Tensor& sums, bool keys, const char* name) {
      EXPECT_TRUE(got.gaps_intact()) << name;
      sums.for_each([&](auto b, auto r, auto h, auto e) {
        const bool own = among(b, part.batch_first, 1, part.batch_count) &&
                         (keys ? among(r, part.k_row, part.k_stride, part.k_count) && h >= kv_first && h <= kv_last
                               : among(r, part.q_row, part.q_stride, part.q_count) &&
                                     among(h, part.head_first, part.head_step, part.head_count));
        if (own) {
          ASSERT_EQ(got.get(b, r, h, e), round_to(dtype(), sums.get(b, r, h, e)))
              << name << " " << seed << ": " << s.describe();
        } else {
          ASSERT_TRUE(std::isnan(got.get(b, r, h, e))) << name << " " << seed << ": " << s.describe();
        }
      });
    };
    compare(dq, added.dq, false, "dq");
    compare(dk, added.dk, true, "dk");
    compare(dv, added.dv, true, "dv");
  }
}

TEST_P(AttendBackwardTest, CallsProgressWhileItComputes) {
  const bool slow = kernel().name.ends_with("_reference");
  World world(slow ? spec(100, 200, 64) : spec(800, 3200, 64));
  const AttendParams params = world.params(1);
  world.lse.fill(5.0), world.delta.fill(0.0);
  ThreadPool pool(1);
  Scratch scratch(kernel().scratch_bytes(params.shape));
  int calls = 0;
  const auto progress = [&] { ++calls; };
  const std::vector<AttendTask> tasks = world.tasks({world.whole()});
  kernel().run(params, tasks, Context{pool, scratch.data(), progress});
  EXPECT_GT(calls, 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendBackwardTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_BACKWARD_KERNELS)),
                         kernel_name);

}  // namespace
}  // namespace ringspan::kernels::testing
