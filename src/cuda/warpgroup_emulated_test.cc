// What the programs for warpgroups have of their own, emulated: tiles that the hardware copies, and scores that are scaled
// late. That their results are right is tested with everything else (attend_test.cc, attend_gradient_test.cc).
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/emulation.h"
#include "cuda/make_tile_maps.h"
#include "kernels/attend_harness.h"

namespace ringspan::cuda {
namespace {

using kernels::testing::kUnbounded;
using kernels::testing::Part;
using kernels::testing::Spec;
using kernels::testing::Tensor;
using kernels::testing::World;

std::vector<kernels::AttendKernel> warpgroups_of(std::span<const kernels::AttendKernel> kernels) {
  std::vector<kernels::AttendKernel> list;
  for (const kernels::AttendKernel& kernel : kernels) {
    if (kernel.name.find("wgmma") != std::string_view::npos) list.push_back(kernel);
  }
  return list;
}

// Shards whose keys begin and end within tiles, a window and a dilated view, over all heads and batch items.
Spec spec_of(const kernels::AttendKernel& kernel) {
  Spec s;
  s.dtype = kernels::testing::dtype_of(kernel);
  s.rows_inner = s.dtype == DType::float16;
  s.head_dim = s.dtype == DType::float16 ? 72 : 64, s.head_dim_v = 64;
  s.batch = 2, s.kv_heads = 2, s.group = 2, s.n_q = 80, s.n_k = 300;
  return s;
}
std::vector<Part> parts_of(const World& world) {
  Part first = world.whole(-kUnbounded, 0);
  first.k_count = 150;
  Part second = world.whole(-130, 200);
  second.k_row = 150, second.k_count = 150;
  Part dilated = world.whole();
  dilated.q_row = 9, dilated.q_count = 70;
  dilated.k_row = 7, dilated.k_stride = 2, dilated.k_count = 140;
  return {first, second, dilated};
}

int mapped(World& world, Owner owner) {
  const std::vector<kernels::AttendTask> tasks = world.tasks(parts_of(world));
  return tile_maps_of(world.params(1).shape, tasks, owner).count;
}

void expect_same(const Tensor& a, const Tensor& b, const char* name) {
  a.for_each([&](auto batch, auto row, auto head, auto e) {
    const double x = a.get(batch, row, head, e), y = b.get(batch, row, head, e);
    ASSERT_TRUE(x == y || (x != x && y != y)) << name << " row " << row << " head " << head << ": " << x << ", " << y;
  });
}

class WarpgroupForwardTest : public ::testing::TestWithParam<kernels::AttendKernel> {};
class WarpgroupBackwardTest : public ::testing::TestWithParam<kernels::AttendKernel> {};

// Rows 3 elements apart from each other have no map, rows 16 apart have one.
TEST_P(WarpgroupForwardTest, MappedTilesGiveTheSameBits) {
  Spec s = spec_of(GetParam());
  World threads(s);
  s.gap = 16;
  World hardware(s);
  ASSERT_EQ(mapped(threads, Owner::state), 0);
  ASSERT_EQ(mapped(hardware, Owner::state), 4) << "k and v, two row strides";
  for (World* world : {&threads, &hardware}) run_kernel(GetParam(), *world, parts_of(*world));
  expect_forward(hardware, parts_of(hardware), s.describe());
  expect_same(threads.m, hardware.m, "m");
  expect_same(threads.l, hardware.l, "l");
  expect_same(threads.acc, hardware.acc, "acc");
}

TEST_P(WarpgroupBackwardTest, MappedTilesGiveTheSameBits) {
  Spec s = spec_of(GetParam());
  World threads(s);
  s.gap = 16;
  World hardware(s);
  for (const Owner owner : {Owner::query_gradients, Owner::key_gradients}) {
    ASSERT_EQ(mapped(threads, owner), 0);
    ASSERT_EQ(mapped(hardware, owner), owner == Owner::key_gradients ? 2 : 4) << "queries have one row stride";
  }
  const auto rows = exact_attention(hardware, parts_of(hardware));
  for (World* world : {&threads, &hardware}) {
    set_final_rows(*world, rows);
    run_kernel(GetParam(), *world, parts_of(*world));
  }
  expect_backward(hardware, parts_of(hardware), s.describe());
  expect_same(threads.dq, hardware.dq, "dq");
  expect_same(threads.dk, hardware.dk, "dk");
  expect_same(threads.dv, hardware.dv, "dv");
}

// Walks over more tiles than there are buffers, in more blocks than are resident.
std::vector<Spec> long_walks_of(const kernels::AttendKernel& kernel) {
  std::vector<Spec> specs;
  for (const int head_dim : {64, 128}) {
    Spec s = spec_of(kernel);
    s.gap = 16;
    s.head_dim = s.head_dim_v = head_dim;
    s.batch = 1, s.kv_heads = 1, s.n_q = 400, s.n_k = 1000;
    specs.push_back(s);
  }
  return specs;
}
std::vector<Part> long_parts(const World& world) {
  Part first = world.whole(-kUnbounded, 400), second = world.whole();
  first.k_count = 700;
  second.k_row = 700, second.k_count = 300;
  return {first, second};
}

TEST_P(WarpgroupForwardTest, LongWalks) {
  for (const Spec& s : long_walks_of(GetParam())) {
    World world(s);
    run_kernel(GetParam(), world, long_parts(world));
    expect_forward(world, long_parts(world), s.describe());
  }
}

TEST_P(WarpgroupBackwardTest, LongWalks) {
  for (const Spec& s : long_walks_of(GetParam())) {
    World world(s);
    set_final_rows(world, exact_attention(world, long_parts(world)));
    run_kernel(GetParam(), world, long_parts(world));
    expect_backward(world, long_parts(world), s.describe());
  }
}

// Documents that end within a tile, whose rest the hardware fills with rows of the next one: NaN there.
Spec documents_of(const kernels::AttendKernel& kernel) {
  Spec s = spec_of(kernel);
  s.gap = 16;
  return s;
}
std::vector<Part> documents(const World& world) {
  Part first = world.whole(), second = world.whole();
  first.q_count = 40, first.k_count = 150;
  second.q_row = 40, second.q_count = 40, second.k_row = 150, second.k_count = 150;
  return {first, second};
}
void expect_same_before(const Tensor& a, const Tensor& b, std::int64_t end, const char* name) {
  bool has_nan = false;
  a.for_each([&](auto batch, auto row, auto head, auto e) {
    const double x = a.get(batch, row, head, e), y = b.get(batch, row, head, e);
    if (row < end) {
      ASSERT_EQ(x, y) << name << " row " << row << " head " << head;
    } else {
      has_nan = has_nan || y != y;
    }
  });
  EXPECT_TRUE(has_nan) << name << " of who sees it";
}

TEST_P(WarpgroupForwardTest, WhatFollowsADocumentHasNoInfluence) {
  World clean(documents_of(GetParam())), other(documents_of(GetParam()));
  ASSERT_TRUE(tile_maps_of(clean.params(1).shape, clean.tasks(documents(clean)), Owner::state).complete);
  other.v.set(0, 150, 0, 3, std::nan(""));
  other.v.set(1, 151, 1, 0, std::nan(""));
  for (World* world : {&clean, &other}) run_kernel(GetParam(), *world, documents(*world));
  expect_same_before(clean.acc, other.acc, 40, "acc");
}

TEST_P(WarpgroupBackwardTest, WhatFollowsADocumentHasNoInfluence) {
  World clean(documents_of(GetParam())), other(documents_of(GetParam()));
  const auto rows = exact_attention(clean, documents(clean));
  for (World* world : {&clean, &other}) set_final_rows(*world, rows);
  for (std::int64_t batch = 0; batch < 2; ++batch) {
    other.k.set(batch, 150, 0, 3, std::nan(""));
    other.q.set(batch, 40, 0, 1, std::nan(""));
    other.d_out.set(batch, 41, 1, 2, std::nan(""));
  }
  for (const Owner owner : {Owner::query_gradients, Owner::key_gradients}) {
    ASSERT_TRUE(tile_maps_of(clean.params(1).shape, clean.tasks(documents(clean)), owner).complete);
  }
  for (World* world : {&clean, &other}) run_kernel(GetParam(), *world, documents(*world));
  expect_same_before(clean.dq, other.dq, 40, "dq");
  expect_same_before(clean.dk, other.dk, 150, "dk");
  expect_same_before(clean.dv, other.dv, 150, "dv");
}

// A block with a row whose sums are NaN is taken in again (work_ring.h), its other warps' rows are not: what they stored the
// first time would be added to. Two launches over the same rows, each several blocks.
Spec several_blocks_of(const kernels::AttendKernel& kernel) {
  Spec s = spec_of(kernel);
  s.gap = 16;
  s.batch = 1, s.kv_heads = 1, s.n_q = 280, s.n_k = 200;
  return s;
}
void run_twice(const kernels::AttendKernel& kernel, World& world) {
  run_kernel(kernel, world, {world.whole(-kUnbounded, 0)});
  run_kernel(kernel, world, {world.whole(1, kUnbounded)});
}
void expect_same_but(const Tensor& a, const Tensor& b, std::int64_t bad, const char* name) {
  a.for_each([&](auto batch, auto row, auto head, auto e) {
    const double x = a.get(batch, row, head, e), y = b.get(batch, row, head, e);
    if (row == bad) {
      ASSERT_TRUE(std::isnan(y)) << name << " row " << row << " head " << head;
    } else {
      ASSERT_EQ(x, y) << name << " row " << row << " head " << head;
    }
  });
}

TEST_P(WarpgroupForwardTest, RowsThatWereFiniteAreTakenInOnce) {
  World clean(several_blocks_of(GetParam())), other(several_blocks_of(GetParam()));
  for (std::int64_t head = 0; head < 2; ++head) other.q.set(0, 150, head, 5, std::nan(""));
  for (World* world : {&clean, &other}) run_twice(GetParam(), *world);
  expect_same_but(clean.acc, other.acc, 150, "acc");
}

TEST_P(WarpgroupBackwardTest, RowsThatWereFiniteAreTakenInOnce) {
  World clean(several_blocks_of(GetParam())), bad_query(several_blocks_of(GetParam())), bad_key(several_blocks_of(GetParam()));
  const auto rows = exact_attention(clean, {clean.whole()});
  for (std::int64_t head = 0; head < 2; ++head) bad_query.q.set(0, 150, head, 5, std::nan(""));
  bad_key.k.set(0, 140, 0, 5, std::nan(""));
  for (World* world : {&clean, &bad_query, &bad_key}) {
    set_final_rows(*world, rows);
    run_twice(GetParam(), *world);
  }
  expect_same_but(clean.dq, bad_query.dq, 150, "dq");
  expect_same_but(clean.dk, bad_key.dk, 140, "dk");
  expect_same_but(clean.dv, bad_key.dv, 140, "dv");
}

// Maxima are of products, where the scale allows it; a state of before has them in natural units.
TEST_P(WarpgroupForwardTest, AnyScale) {
  for (const float scale : {0.4F, -0.3F, 1e-20F, -1e-20F, 0x1p-40F, 0x1p+40F}) {
    Spec s;
    s.dtype = kernels::testing::dtype_of(GetParam());
    s.n_q = 130, s.n_k = 400;
    s.scale = scale;
    s.magnitude = std::abs(scale) > 1.0F ? 0x1p-20 : 1.0;
    World world(s);
    std::vector<Part> parts{world.whole(-kUnbounded, 0), world.whole(1, kUnbounded)};
    run_kernel(GetParam(), world, {parts[0]});
    run_kernel(GetParam(), world, {parts[1]});
    expect_forward(world, parts, s.describe() + " scale " + std::to_string(scale));
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, WarpgroupForwardTest, ::testing::ValuesIn(warpgroups_of(emulated_attend_kernels())),
                         kernels::testing::kernel_name);
INSTANTIATE_TEST_SUITE_P(Kernels, WarpgroupBackwardTest, ::testing::ValuesIn(warpgroups_of(emulated_attend_backward_kernels())),
                         kernels::testing::kernel_name);

}  // namespace
}  // namespace ringspan::cuda
