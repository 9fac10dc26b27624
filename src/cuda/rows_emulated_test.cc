// The row kernels of this folder, emulated, against those of the CPU: the same bits where nothing is computed but sums of two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "cuda/gpu_device.h"
#include "kernels/attend_world.h"
#include "kernels/rowwise.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

using internal::Launch;
using internal::LaunchKind;
using kernels::Operand;
using kernels::RowTask;

// A pool of memory that random tasks lie in, on the host and on the device: anyhow, or (the parameter) so that all rows begin
// at multiples of four elements.
class Rows : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr std::int64_t kFloats = 300000;

  Rows() : device_(make_emulated_runtime(1)), host_(kFloats), memory_(device_.allocate(kFloats * 4)) {
    device_.reserve(internal::task_list_bytes(1000, 0, 1000));
    std::normal_distribution<float> normal;
    // Finite as pairs of 16 bits too: of a sum of two NaN the bits are anyone's.
    for (float& x : host_) x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(normal(random_)) & ~0x4000U);
    before_ = host_;
    device_.copy(memory_, host_.data(), kFloats * 4);
    device_.wait(device_.record(), [] {});
  }
  ~Rows() override { device_.release(memory_); }

  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(bound)); }

  // An operand of `shape` and `width` in a part of the pool of its own; now and then tasks share one (`offset` given).
  Operand place(const RowTask& shape, int width, DType dtype) {
    Operand operand;
    operand.dtype = dtype;
    const auto placed = [](std::int64_t elements) { return GetParam() ? (elements + 3) / 4 * 4 : elements; };
    operand.head_stride = placed(width + below(3));
    operand.row_stride = placed(operand.head_stride * shape.head_count + below(4));
    operand.batch_stride = placed(operand.row_stride * shape.row_count + below(5));
    const std::int64_t elements = placed(operand.batch_stride * shape.batch_count + width);
    used_ += elements + 8;
    if (used_ >= kFloats) throw std::logic_error("the pool is too small for the test");
    operand.data = host_.data() + used_ - elements - 8;
    return operand;
  }
  RowTask shape() {
    RowTask task;
    task.batch_count = 1 + below(2), task.row_count = 1 + below(40), task.head_count = 1 + below(3);
    task.head_first = below(3), task.head_step = 1 + below(2);
    return task;
  }
  RowTask on_device(RowTask task) const {
    for (Operand& operand : task.operands) {
      if (operand.data == nullptr) continue;
      operand.data = memory_ + (static_cast<float*>(operand.data) - host_.data()) * 4;
    }
    return task;
  }

  // Runs the launch on both sides; returns what the device's memory holds then.
  template <typename OnHost>
  std::vector<float> run(const Launch& launch, const std::vector<RowTask>& tasks, OnHost&& on_host,
                         const float* sinks = nullptr) {
    ThreadPool pool(1);
    const auto progress = [] {};
    std::vector<RowTask> moved;
    for (const RowTask& task : tasks) moved.push_back(on_device(task));
    device_.begin_pass();
    const auto* moved_sinks = sinks == nullptr ? nullptr : reinterpret_cast<float*>(memory_ + (sinks - host_.data()) * 4);
    device_.rows(launch, moved, moved_sinks);
    std::vector<float> result(kFloats);
    device_.copy(result.data(), memory_, kFloats * 4);
    device_.wait(device_.record(), [] {});
    on_host(std::span<const RowTask>(tasks), kernels::Context{pool, nullptr, progress});
    return result;
  }
  void expect_same_bits(const std::vector<float>& result, const char* what) {
    EXPECT_NE(std::memcmp(before_.data(), result.data(), kFloats * 4), 0) << what << " did nothing";
    for (std::int64_t i = 0; i < kFloats; ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(result[static_cast<std::size_t>(i)]),
                std::bit_cast<std::uint32_t>(host_[static_cast<std::size_t>(i)]))
          << what << " at " << i;
    }
  }

  // As close as two orders of the same few operations are.
  void expect_close(const std::vector<float>& result, const char* what) {
    EXPECT_NE(std::memcmp(before_.data(), result.data(), kFloats * 4), 0) << what << " did nothing";
    for (std::size_t i = 0; i < host_.size(); ++i) {
      if (!std::isfinite(host_[i])) {
        ASSERT_TRUE(result[i] == host_[i] || (std::isnan(result[i]) && std::isnan(host_[i]))) << what << " at " << i;
      } else {
        ASSERT_NEAR(result[i], host_[i], 1e-6 * (1.0 + std::abs(host_[i]))) << what << " at " << i;
      }
    }
  }

  std::mt19937_64 random_{5};
  GpuDevice device_;
  std::vector<float> host_, before_;
  std::byte* memory_;
  std::int64_t used_ = 0;
};

constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::float16};

TEST_P(Rows, FillCopyAndAdd) {
  for (const int width : {1, 3, 17, 64, 130, 132}) {
    std::vector<RowTask> tasks;
    for (int index = 0; index < 3; ++index) {
      RowTask task = shape();
      task.row_count = 1 + task.row_count % 6;
      task.operands[0] = place(task, width, kTypes[below(3)]);
      task.operands[1] = place(task, width, kTypes[below(3)]);
      tasks.push_back(task);
    }
    tasks.push_back(tasks[0]);  // the same target again: after the first
    tasks.back().operands[0] = tasks[0].operands[1];
    tasks.back().operands[1] = tasks[0].operands[0];
    Launch launch;
    launch.width = width;
    launch.kind = LaunchKind::add;
    expect_same_bits(run(launch, tasks, [&](auto list, const auto& context) { kernels::add_rows(list, width, context); }),
                     "add");
    std::vector<RowTask> more(tasks.begin(), tasks.end() - 1);  // again and again to the same targets
    for (int index = 0; index < 17; ++index) {
      RowTask task = tasks[static_cast<std::size_t>(index % 3)];
      if (index > 8) task.operands[0] = place(task, width, kTypes[below(3)]);
      more.push_back(task);
    }
    expect_same_bits(run(launch, more, [&](auto list, const auto& context) { kernels::add_rows(list, width, context); }),
                     "several adds");
    launch.kind = LaunchKind::copy;
    expect_same_bits(run(launch, tasks, [&](auto list, const auto& context) { kernels::copy_rows(list, width, context); }),
                     "copy");
    launch.kind = LaunchKind::fill;
    launch.value = -1.5F;
    tasks.resize(1);
    expect_same_bits(
        run(launch, tasks, [&](auto list, const auto& context) { kernels::fill_rows(list, width, -1.5F, context); }), "fill");
  }
}

TEST_P(Rows, MergesAndFinalize) {
  const int width = GetParam() ? 20 : 19;
  const auto f32 = DType::float32;
  RowTask partial = shape();
  partial.row_count = 30;
  const Operand o = place(partial, width, f32), lse = place(partial, 1, f32), m = place(partial, 1, f32),
                l = place(partial, 1, f32), acc = place(partial, width, f32), m2 = place(partial, 1, f32),
                l2 = place(partial, 1, f32), acc2 = place(partial, width, f32), o1 = place(partial, width, DType::bfloat16),
                o2 = place(partial, width, f32);
  const auto set = [&](const Operand& operand, std::int64_t row, float value) {
    static_cast<float*>(operand.data)[row * operand.row_stride] = value;
  };
  for (const Operand& sums : {l, l2}) {
    for (std::int64_t index = 0; index < sums.batch_stride * partial.batch_count; ++index) {
      float& x = static_cast<float*>(sums.data)[index];
      x = 0.5F + std::abs(x);
    }
  }
  constexpr float kNothing = -std::numeric_limits<float>::infinity(), kGarbage = std::numeric_limits<float>::quiet_NaN();
  const auto clear = [&](const Operand& max, const Operand& sum, const Operand& values, std::int64_t row) {
    set(max, row, kNothing), set(sum, row, kGarbage);
    std::fill_n(static_cast<float*>(values.data) + row * values.row_stride, width, kGarbage);
  };
  for (std::int64_t index = 0; index < o1.batch_stride * partial.batch_count; ++index) {
    static_cast<std::uint16_t*>(o1.data)[index] = float_to_bfloat16(0.25F * static_cast<float>(index % 13) - 1.5F);
  }
  for (const std::int64_t row : {0, 3, 4}) clear(m, l, acc, row);
  for (const std::int64_t row : {3, 7}) {
    set(lse, row, kNothing);
    std::fill_n(static_cast<float*>(o.data) + row * o.row_stride, width, kGarbage);
  }
  clear(m, l, acc, 8);  // the first thing that comes is NaN, and stays
  set(lse, 8, kGarbage);
  for (const std::int64_t row : {3, 4}) clear(m2, l2, acc2, row);
  device_.copy(memory_, host_.data(), kFloats * 4);
  device_.wait(device_.record(), [] {});

  const auto with = [&](std::initializer_list<Operand> operands) {
    RowTask task = partial;
    std::copy(operands.begin(), operands.end(), task.operands);
    return task;
  };
  Launch launch;
  launch.width = width;
  launch.kind = LaunchKind::merge;
  const RowTask merge = with({o, lse, m, l, acc});
  expect_close(run(launch, {merge, merge}, [&](auto list, const auto& context) { kernels::merge_rows(list, width, context); }),
               "merge, twice into the same state");
  const RowTask rounded = with({o1, lse, m, l, acc});
  expect_close(run(launch, {rounded}, [&](auto list, const auto& context) { kernels::merge_rows(list, width, context); }),
               "merge of a partial in 16 bits");
  launch.kind = LaunchKind::merge_states;
  expect_close(run(launch, {with({m2, l2, acc2, m, l, acc})},
                   [&](auto list, const auto& context) { kernels::merge_states(list, width, context); }),
               "merge_states");
  launch.kind = LaunchKind::finalize;
  launch.value = 0.5F;
  // lse in the place of m, and o in that of acc; both kinds of o.
  expect_close(run(launch, {with({m, l, acc, o1, m, o2}), with({m2, l2, acc2, acc2, l2, Operand{}})},
                   [&](auto list, const auto& context) { kernels::finalize_rows(list, width, 0.5F, nullptr, context); }),
               "finalize");
}

// Rows with and without a state, heads with and without a sink.
TEST_P(Rows, FinalizeWithSinks) {
  const int width = GetParam() ? 24 : 21;
  RowTask task = shape();
  task.row_count = 6, task.head_count = 3, task.head_first = 1, task.head_step = 2;
  for (int index = 0; index < 3; ++index) task.operands[index] = place(task, index == 2 ? width : 1, DType::float32);
  task.operands[3] = place(task, width, DType::float16);
  task.operands[4] = place(task, 1, DType::float32);
  const auto at = [&](int operand, std::int64_t row, std::int64_t head) {
    const Operand& view = task.operands[operand];
    return static_cast<float*>(view.data) + row * view.row_stride + head * view.head_stride;
  };
  for (std::int64_t row = 0; row < 6; ++row) {
    for (std::int64_t head = 0; head < 3; ++head) {
      *at(1, row, head) = row < 3 ? 2.0F : std::numeric_limits<float>::quiet_NaN();
      if (row < 3) continue;
      *at(0, row, head) = -std::numeric_limits<float>::infinity();
      std::fill_n(at(2, row, head), width, std::numeric_limits<float>::quiet_NaN());
    }
  }
  float* const sinks = host_.data() + used_;
  used_ += 8;
  sinks[3] = -std::numeric_limits<float>::infinity();  // of head 1
  sinks[5] = 200.0F;                                   // beside which everything is nothing
  device_.copy(memory_, host_.data(), kFloats * 4);
  device_.wait(device_.record(), [] {});
  Launch launch;
  launch.width = width;
  launch.kind = LaunchKind::finalize;
  launch.value = 0.5F;
  const auto on_host = [&](auto list, const auto& context) { kernels::finalize_rows(list, width, 0.5F, sinks, context); };
  expect_close(run(launch, {task}, on_host, sinks), "finalize with sinks");
  EXPECT_EQ(*at(4, 4, 1), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(*at(4, 4, 2), 200.0F);
}

TEST_P(Rows, Delta) {
  for (const int width : {1, 5, 64, 200}) {
    RowTask task = shape();
    task.row_count = 5;
    task.operands[0] = place(task, width, DType::float32);
    task.operands[1] = place(task, width, DType::float32);
    task.operands[2] = place(task, 1, DType::float32);
    if (width != 5) task.operands[3] = place(task, 1, DType::float32);
    Launch launch;
    launch.kind = LaunchKind::delta;
    launch.width = width;
    const std::vector<float> result =
        run(launch, {task}, [&](auto list, const auto& context) { kernels::delta_rows(list, width, context); });
    for (std::size_t i = 0; i < host_.size(); ++i) ASSERT_NEAR(result[i], host_[i], 1e-4) << width;
  }
}

// Sums of numbers that cancel show in which order they were made.
TEST_P(Rows, DeltaDoesNotDependOnAddresses) {
  for (const int width : {8, 64, 128, 200}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      RowTask task = shape();
      task.row_count = 5;
      std::vector<Operand> d_out, results;
      task.operands[1] = place(task, width, DType::float32);
      for (const std::int64_t shift : {0, 1}) {
        Operand operand = place(task, width, dtype);
        operand.head_stride = width + 8, operand.row_stride = operand.head_stride * task.head_count;
        operand.batch_stride = operand.row_stride * task.row_count;
        used_ += operand.batch_stride * task.batch_count + 8;
        operand.data = host_.data() + (used_ + 3) / 4 * 4 - operand.batch_stride * task.batch_count;
        operand.data = static_cast<std::byte*>(operand.data) + shift * size_of(dtype);
        used_ += 8;
        d_out.push_back(operand);
        results.push_back(place(task, 1, DType::float32));
      }
      std::normal_distribution<float> normal;
      const std::int64_t elements = d_out[0].batch_stride * task.batch_count;
      for (std::int64_t e = 0; e < elements; ++e) {
        const float value = normal(random_) * (e % 3 == 0 ? 1e6F : 1.0F);
        for (const Operand& to : d_out) {
          if (dtype == DType::float32) {
            static_cast<float*>(to.data)[e] = value;
          } else {
            static_cast<std::uint16_t*>(to.data)[e] = float_to_bfloat16(value);
          }
        }
      }
      device_.copy(memory_, host_.data(), kFloats * 4);
      device_.wait(device_.record(), [] {});
      std::vector<RowTask> tasks(2, task);
      for (std::size_t index = 0; index < 2; ++index) {
        tasks[index].operands[0] = d_out[index], tasks[index].operands[2] = results[index];
      }
      Launch launch;
      launch.kind = LaunchKind::delta;
      launch.width = width;
      const std::vector<float> result = run(launch, tasks, [](auto, const auto&) {});
      const auto at = [&](const Operand& operand, std::int64_t b, std::int64_t r, std::int64_t h) {
        const float* const row =
            static_cast<float*>(operand.data) + b * operand.batch_stride + r * operand.row_stride + h * operand.head_stride;
        return std::bit_cast<std::uint32_t>(result[static_cast<std::size_t>(row - host_.data())]);
      };
      for (std::int64_t b = 0; b < task.batch_count; ++b) {
        for (std::int64_t r = 0; r < task.row_count; ++r) {
          for (std::int64_t h = 0; h < task.head_count; ++h) {
            ASSERT_EQ(at(results[0], b, r, h), at(results[1], b, r, h)) << width << " row " << r;
          }
        }
      }
    }
  }
}

TEST_P(Rows, ShapesBeyondTheKernelsAreRefused) {
  kernels::AttendShape shape{DType::float32, 257, 64, 1, false, false, false, 1};
  EXPECT_THROW(device_.check_supported(shape, false, 1), Unsupported);
  shape.head_dim = 256;
  EXPECT_NO_THROW(device_.check_supported(shape, true, std::int64_t{1} << 30));
  EXPECT_THAT([&] { device_.check_supported(shape, true, std::int64_t{1} << 31); },
              ::testing::ThrowsMessage<Unsupported>(::testing::HasSubstr("has 2147483648 queries or keys")));
}

INSTANTIATE_TEST_SUITE_P(Placed, Rows, ::testing::Bool());

}  // namespace
}  // namespace ringspan::cuda
