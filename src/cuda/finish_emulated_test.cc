// Blocks that finish their rows, emulated, against blocks that leave states and the finalize launch after them: the same bits.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "cuda/emulation.h"
#include "cuda/row_layout.h"
#include "kernels/attend_harness.h"

namespace ringspan::cuda {
namespace {

using kernels::testing::kUnbounded;
using kernels::testing::Part;
using kernels::testing::Spec;
using kernels::testing::Tensor;
using kernels::testing::World;

class Finish : public ::testing::TestWithParam<kernels::AttendKernel> {};

void finalize(World& world) {
  const auto operand = [](Tensor& x, DType dtype) {
    return kernels::Operand{x.at(0, 0, 0), dtype, x.batch_stride, x.row_stride, x.head_stride};
  };
  kernels::RowTask task;
  task.batch_count = world.spec.batch, task.row_count = world.spec.n_q, task.head_count = world.spec.heads();
  task.operands[0] = operand(world.m, DType::float32), task.operands[1] = operand(world.l, DType::float32);
  task.operands[2] = operand(world.acc, DType::float32), task.operands[3] = operand(world.o, world.spec.dtype);
  task.operands[4] = operand(world.lse, DType::float32), task.operands[5] = operand(world.o32, DType::float32);
  const kernels::AttendParams params = world.params(1);
  const std::int64_t first_block = 0;
  RowArguments arguments;
  arguments.op = RowOp::finalize;
  arguments.width = world.spec.head_dim_v;
  arguments.value = params.output_scale, arguments.sinks = params.sinks;
  arguments.tasks = &task, arguments.first_blocks = &first_block, arguments.task_count = 1;
  const std::int64_t rows = task.batch_count * task.row_count * task.head_count;
  emulate_rows(arguments, (rows + rows_per_block(arguments.width) - 1) / rows_per_block(arguments.width));
}

// Of rows that see no key at all, keys of the first task only, and of both; through runs of 16 bytes and element by element.
TEST_P(Finish, GivesTheBitsOfTheLaunch) {
  struct Widths {
    int head_dim, head_dim_v;
    std::int64_t gap;
  };
  for (const auto& [head_dim, head_dim_v, gap] : {Widths{64, 64, 0}, {40, 37, 3}, {128, 128, 8}, {72, 100, 4}, {32, 36, 4}}) {
    Spec s;
    s.dtype = kernels::testing::dtype_of(GetParam());
    s.batch = 2, s.kv_heads = 1, s.group = 3, s.n_q = 140, s.n_k = 150;
    s.head_dim = head_dim, s.head_dim_v = head_dim_v, s.gap = gap;
    s.output_scale = 0.5F, s.sinks = head_dim != 40;
    World plain(s), finished(s);
    const std::vector<std::byte> acc = finished.acc.bytes(), m = finished.m.bytes();
    Part first = plain.whole(-kUnbounded, -20), second = first;
    first.k_count = 60;
    second.k_row = 60, second.k_count = 90;
    run_kernel(GetParam(), plain, {first, second});
    finalize(plain);
    first.results = second.results = true;
    run_kernel(GetParam(), finished, {first, second});
    EXPECT_EQ(finished.o.bytes(), plain.o.bytes()) << s.describe();
    EXPECT_EQ(finished.o32.bytes(), plain.o32.bytes()) << s.describe();
    EXPECT_EQ(finished.lse.bytes(), plain.lse.bytes()) << s.describe();
    EXPECT_EQ(finished.acc.bytes(), acc) << "a state was written: " << s.describe();
    EXPECT_EQ(finished.m.bytes(), m) << "a state was written: " << s.describe();
  }
}

// What is 0 times an accumulator is not an empty row: of factors that a large sink makes 0, and of output_scale = 0.
TEST_P(Finish, KeepsNanTimesZero) {
  for (const auto& [sink, output_scale] : std::vector<std::pair<float, float>>{{200.0F, 1.0F}, {0.5F, 0.0F}}) {
    Spec s;
    s.dtype = kernels::testing::dtype_of(GetParam());
    s.n_q = 20, s.n_k = 40, s.head_dim = s.head_dim_v = 32;
    s.output_scale = output_scale, s.sinks = true;
    World launched(s), finished(s);
    for (World* const world : {&launched, &finished}) {
      world->sinks[0] = sink;
      world->v.set(0, 0, 0, 3, std::nan(""));
      Part part = world->whole(-kUnbounded, -5);  // the first five rows see no key
      part.results = world == &finished;
      run_kernel(GetParam(), *world, {part});
      if (!part.results) finalize(*world);
      world->o.for_each([&](auto b, auto r, auto h, auto e) {
        const double o = world->o.get(b, r, h, e);
        EXPECT_TRUE(r >= 5 && e == 3 ? std::isnan(o) : o == 0.0)
            << o << " in row " << r << ", column " << e << (part.results ? "" : " of the launch");
      });
      EXPECT_EQ(world->lse.get(0, 0, 0, 0), sink);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Finish, ::testing::ValuesIn(emulated_attend_kernels()), kernels::testing::kernel_name);

}  // namespace
}  // namespace ringspan::cuda
