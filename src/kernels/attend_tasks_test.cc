// Tasks of one call that share keys, or are many: by every attend kernel of the list against attention in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attend.h"
#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

class AttendTasksTest : public KernelTest {};

TEST_P(AttendTasksTest, ManyTasksEqualOne) {
  // Keys in pieces of 1 to 40, as small documents or boxes would be.
  Spec s = spec(90, 600, 40);
  s.kv_heads = 2, s.group = 2;
  World world(s);
  const Part whole = world.whole(-kUnbounded, 510);
  std::vector<Part> parts;
  for (std::int64_t key = 0, size = 1; key < 600; key += size, size = size % 40 + 1) {
    Part part = whole;
    part.k_row = key, part.k_count = std::min(size, 600 - key);
    parts.push_back(part);
  }
  run_kernel(kernel(), world, parts, 2);
  expect_forward(world, {whole}, "pieces");
}

// Tasks whose keys begin at the same row, but are not the same: what is packed for one must not be taken for the next. More
// queries than those for which keys are read in place, and fewer.
TEST_P(AttendTasksTest, TasksThatShareTheirFirstKey) {
  for (const std::int64_t rows : {50, 10}) {
    World world(spec(6 * rows, 400, 16));
    std::vector<Part> parts;
    for (const auto& [count, stride] :
         std::vector<std::pair<int, int>>{{10, 1}, {40, 1}, {40, 2}, {40, 1}, {300, 1}, {300, 1}}) {
      Part part = world.whole();
      part.q_row = static_cast<std::int64_t>(parts.size()) * rows, part.q_count = rows;
      part.k_row = 3, part.k_count = count, part.k_stride = stride;
      parts.push_back(part);
    }
    run_kernel(kernel(), world, parts);
    expect_forward(world, parts, "shared first key, " + std::to_string(rows) + " queries");
  }
}

// Tasks on the same keys with values of their own, and few queries in between, whose keys are read in place: as if each had a
// call to itself.
TEST_P(AttendTasksTest, TasksThatShareTheirKeys) {
  Spec s = spec(256, 71, 16);
  s.head_dim_v = 20;  // no whole vectors
  World together(s), apart(s);
  std::vector<Part> parts;
  for (const auto& [row, count] :
       std::vector<std::pair<int, int>>{{0, 50}, {50, 6}, {56, 50}, {106, 50}, {156, 50}, {206, 50}}) {
    Part part = together.whole();
    part.q_row = row, part.q_count = count, part.k_count = 35;
    parts.push_back(part);
  }
  const auto change = [&](World& world) {
    return [&](AttendTask& task) {
      if (task.q_first == 106) task.v.data = world.v.at(0, 1, 0);
      if (task.q_first == 206) task.v.row_stride *= 2;
    };
  };
  run_kernel(kernel(), together, parts, 1, change(together));
  for (const Part& part : parts) run_kernel(kernel(), apart, {part}, 1, change(apart));
  together.acc.for_each([&](auto b, auto r, auto h, auto e) {
    const double o = apart.acc.get(b, r, h, e) / apart.l.get(b, r, h, 0);
    EXPECT_NEAR(together.acc.get(b, r, h, e) / together.l.get(b, r, h, 0), o, 1e-2 * (1 + std::abs(o))) << r << ' ' << e;
  });
}

// Also more of them than a GPU runs blocks at a time.
TEST_P(AttendTasksTest, ManySmallDocuments) {
  for (const std::int64_t kv_heads : {2, 1}) {
    const std::int64_t rows = kv_heads == 2 ? 1200 : 4800;
    Spec s = spec(rows, rows, 16);
    s.kv_heads = kv_heads;
    World world(s);
    std::vector<Part> parts;
    for (std::int64_t row = 0, size = 1; row < rows; row += size, size = size * 7 % 31 + 1) {
      Part part = world.whole(-kUnbounded, 0);
      part.q_row = part.k_row = row, part.q_count = part.k_count = std::min(size, rows - row);
      parts.push_back(part);
    }
    run_kernel(kernel(), world, parts, 3);
    expect_forward(world, parts, "documents");
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendTasksTest, ::testing::ValuesIn(runnable(RINGSPAN_TEST_ATTEND_KERNELS)), kernel_name);

}  // namespace
}  // namespace ringspan::kernels::testing
