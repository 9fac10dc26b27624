// Tile sizes given to a call: every kernel with every kind of size it takes, against attention in float64.
#include "kernels/tile_sizes.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/attend_harness.h"
#include "ringspan/error.h"

namespace ringspan::kernels::testing {
namespace {

constexpr std::uint64_t kCases = kRandomCases / 4;

// One of the sizes that are taken; 0 (the kernel's own) now and then.
int draw(CaseGenerator& generate, int step, int least, int most) {
  if (step == 0) return 0;
  const int first = (least + step - 1) / step, last = most / step;
  switch (generate.below(6)) {
    case 0:
      return 0;
    case 1:
      return first * step;
    case 2:
      return last * step;
    default:
      return (first + static_cast<int>(generate.below(std::min(last - first, 8) + 1))) * step;
  }
}

TileSize draw(CaseGenerator& generate, const TileSizes& sizes) {
  return {draw(generate, sizes.step.queries, sizes.least.queries, sizes.most.queries),
          draw(generate, sizes.step.keys, sizes.least.keys, sizes.most.keys)};
}

class TileSizesTest : public ::testing::TestWithParam<AttendKernel> {
 protected:
  const AttendKernel& kernel() const { return GetParam(); }
  // Enough rows for several tiles of the smaller sizes.
  Spec spec(CaseGenerator& generate) const {
    Spec s = generate.spec(dtype_of(kernel()));
    s.batch = 1, s.kv_heads = 1;
    if (generate.below(2) == 0) s.n_q = 40 + generate.below(400), s.n_k = 40 + generate.below(600);
    AttendShape shape = World(s).params(1).shape;
    s.tile = draw(generate, kernel().tile_sizes(shape));
    return s;
  }
};
class ForwardTileSizes : public TileSizesTest {};
class BackwardTileSizes : public TileSizesTest {};

TEST_P(ForwardTileSizes, MatchTheDefinitionWithTheSameBitsForAnyNumberOfThreads) {
  for (std::uint64_t seed = 1; seed <= kCases; ++seed) {
    CaseGenerator generate(seed);
    const Spec s = spec(generate);
    World world(s), again(s);
    const std::vector<Part> parts = generate.parts(s);
    const std::string what = "case " + std::to_string(seed) + ": " + s.describe();
    run_kernel(kernel(), world, parts, 1);
    expect_forward(world, parts, what);
    run_kernel(kernel(), again, parts, 3);
    EXPECT_EQ(again.m.bytes(), world.m.bytes()) << what;
    EXPECT_EQ(again.l.bytes(), world.l.bytes()) << what;
    EXPECT_EQ(again.acc.bytes(), world.acc.bytes()) << what;
  }
}

// Keys that are read in place, and cut into parts.
TEST_P(ForwardTileSizes, FewQueries) {
  if (kernel().name.ends_with("_reference")) GTEST_SKIP() << "has no tiles";
  // That fill a half or a quarter of a vector, or are taken one by one; with and without a rest of depths.
  constexpr struct {
    int queries, head_dim;
  } kFewest[] = {{7, 68}, {3, 68}, {7, 72}, {3, 72}, {2, 68}, {1, 41}, {1, 64}};
  for (std::uint64_t seed = 1; seed <= 11; ++seed) {
    CaseGenerator generate(seed);
    Spec s = spec(generate);
    s.alibi_slope = s.dropout = 0.0F;
    s.group = 1 + generate.below(4), s.n_q = 1 + generate.below(48 / s.group), s.n_k = 4200 + generate.below(300);
    if (seed == 1) {  // the most rows in the smallest tile
      s.group = 1, s.n_q = 48;
      s.tile = kernel().tile_sizes(World(s).params(1).shape).least;
    }
    if (seed >= 2 && seed < 2 + std::size(kFewest)) {  // with a last key by itself
      const auto& fewest = kFewest[seed - 2];
      s.group = 1, s.n_q = fewest.queries, s.n_k = 4213, s.head_dim = fewest.head_dim;
      s.softcap = seed % 2 == 0 ? 1.5F : 0.0F;
    }
    World world(s);
    const std::vector<Part> parts{world.whole()};
    run_kernel(kernel(), world, parts, 2);
    expect_forward(world, parts, "case " + std::to_string(seed) + ": " + s.describe());
  }
}

TEST_P(BackwardTileSizes, MatchTheDefinitionWithTheSameBitsForAnyNumberOfThreads) {
  for (std::uint64_t seed = 1; seed <= kCases; ++seed) {
    CaseGenerator generate(seed);
    const Spec s = spec(generate);
    World world(s), again(s);
    const std::vector<Part> parts = generate.parts(s);
    const std::string what = "case " + std::to_string(seed) + ": " + s.describe();
    set_final_rows(world, exact_attention(world, parts));
    again.lse = world.lse, again.delta = world.delta;
    run_kernel(kernel(), world, parts, 1);
    expect_backward(world, parts, what);
    run_kernel(kernel(), again, parts, 3);
    EXPECT_EQ(again.dq.bytes(), world.dq.bytes()) << what;
    EXPECT_EQ(again.dk.bytes(), world.dk.bytes()) << what;
    EXPECT_EQ(again.dv.bytes(), world.dv.bytes()) << what;
  }
}

// What a NaN in a masked key or query must not do depends on how tiles are cut.
TEST_P(BackwardTileSizes, AbsentKeysMayHoldNaN) {
  CaseGenerator generate(5);
  for (int i = 0; i < 4; ++i) {
    Spec s = spec(generate);
    s.n_q = s.n_k = 130, s.q_first = s.k_first = 0, s.q_step = s.k_step = 1;
    World world(s);
    for (std::int64_t e = 0; e < s.head_dim; ++e) world.k.set(0, 129, 0, e, std::numeric_limits<double>::quiet_NaN());
    const std::vector<Part> parts{world.whole(-kUnbounded, -1)};
    set_final_rows(world, exact_attention(world, parts));
    run_kernel(kernel(), world, parts, 1);
    world.dq.for_each(
        [&](auto b, auto r, auto h, auto e) { ASSERT_FALSE(std::isnan(world.dq.get(b, r, h, e))) << s.describe(); });
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, ForwardTileSizes, ::testing::ValuesIn(runnable(attend_kernels())), kernel_name);
INSTANTIATE_TEST_SUITE_P(Kernels, BackwardTileSizes, ::testing::ValuesIn(runnable(attend_backward_kernels())), kernel_name);

TEST(TileSizes, OwnSizesAreAmongThoseTaken) {
  for (const auto kernels : {attend_kernels(), attend_backward_kernels()}) {
    for (const AttendKernel& kernel : runnable(kernels)) {  // sizes, too, are compiled for the instruction set
      for (const int d : {1, 64, 65, 128, 129, 256}) {
        AttendShape shape{dtype_of(kernel), d, d, 1, false, false, false, 2};
        const TileSizes sizes = kernel.tile_sizes(shape);
        const std::int64_t bytes = kernel.scratch_bytes(shape);
        if (sizes.step.queries == 0) {
          EXPECT_TRUE(kernel.name.ends_with("_reference")) << kernel.name;
          continue;
        }
        for (const auto of : {&TileSize::queries, &TileSize::keys}) {
          EXPECT_EQ(sizes.own.*of % (sizes.step.*of), 0) << kernel.name << " " << d;
          EXPECT_LE(sizes.least.*of, sizes.own.*of) << kernel.name << " " << d;
          EXPECT_LE(sizes.own.*of, sizes.most.*of) << kernel.name << " " << d;
        }
        shape.tile = sizes.own;
        EXPECT_EQ(kernel.scratch_bytes(shape), bytes) << kernel.name << " " << d;
        shape.tile = {0, sizes.own.keys + sizes.step.keys};
        EXPECT_EQ(tile_of(kernel, shape).queries, sizes.own.queries);
        EXPECT_EQ(tile_of(kernel, shape).keys, sizes.own.keys + sizes.step.keys);
      }
    }
  }
}

std::string refusal(TileSize tile, const char* name) {
  const AttendShape shape{DType::float32, 64, 64, 1, false, false, false, 1, tile};
  try {
    select_attend(shape, name);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "taken";
}

TEST(TileSizes, OthersAreRefusedByName) {
  EXPECT_EQ(refusal({0, 0}, "portable"), "taken");
  EXPECT_EQ(refusal({102, 288}, "portable"), "taken");
  EXPECT_EQ(refusal({100, 0}, "portable"),
            "the queries of a tile (100) must be 0 or a multiple of 6 from 48 to 384 for kernel 'attend_f32_portable'");
  EXPECT_EQ(refusal({0, 2048}, "portable"),
            "the keys of a tile (2048) must be 0 or a multiple of 32 from 64 to 1024 for kernel 'attend_f32_portable'");
  EXPECT_EQ(refusal({-6, 0}, "portable"),
            "the queries of a tile (-6) must be 0 or a multiple of 6 from 48 to 384 for kernel 'attend_f32_portable'");
  EXPECT_EQ(refusal({96, 0}, "reference"), "the queries of a tile (96) must be 0: kernel 'attend_f32_reference' has no tiles");
}

}  // namespace
}  // namespace ringspan::kernels::testing
