#include "cuda/gpu_device.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <memory>

#include "cuda/select_device.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

TEST(GpuDevice, ShowsLifeBeforeEachShapeThatItsLibraryIsAskedAbout) {
  const std::unique_ptr<internal::Device> device = make_device("cuda-emulated", nullptr, 1);
  alignas(16) static std::array<std::byte, 4096> memory;
  kernels::AttendParams params;
  params.shape.dtype = DType::bfloat16;
  params.shape.head_dim = params.shape.head_dim_v = 16;
  params.scale = 1.0F;
  internal::FusedTask task;
  for (kernels::Rows* rows : {&task.task.q, &task.o, &task.task.lse}) *rows = {memory.data(), 256, 16, 16};
  for (kernels::KeyRows* rows : {&task.task.k, &task.task.v})
    rows->data = memory.data(), rows->batch_stride = 256, rows->row_stride = rows->head_stride = 16;
  task.task.batch_count = task.task.head_count = 1;
  task.task.q_count = task.task.k_count = 4;
  task.task.lo = -8, task.task.hi = 8;
  const std::array<internal::FusedTask, 3> tasks{task, task, task};
  int shown = 0;
  device->show_life_by([&] { ++shown; });
  EXPECT_EQ(device->ask_fused(params, tasks, {}).refusal, "");
  EXPECT_EQ(shown, 3);
  device->show_life_by([] { throw CommError("gone"); });
  EXPECT_THROW(device->ask_fused(params, tasks, {}), CommError);
}

}  // namespace
}  // namespace ringspan::cuda
