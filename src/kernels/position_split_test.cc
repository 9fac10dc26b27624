#include "kernels/position_split.h"

#include <gtest/gtest.h>

#include <vector>

namespace ringspan::kernels {
namespace {

std::vector<AttendTask> task_of(std::int64_t first, std::int64_t count, std::int64_t step = 1) {
  AttendTask task{};
  task.q_first = first, task.q_count = count, task.q_step = step;
  return {task};
}

TEST(PositionSplit, CoversEveryPositionOnceFromTheLastToTheFirst) {
  for (const std::int64_t count : {1, 191, 192, 383, 384, 1000, 4096, 100000}) {
    for (const int threads : {1, 2, 3, 8}) {
      const auto tasks = task_of(17, count, 3);
      const PositionSplit split(tasks, 1, threads, 192);
      const std::int64_t last = 17 + (count - 1) * 3;
      std::int64_t end = split.at(0).last;
      EXPECT_GE(end, last);
      for (std::int64_t i = 0; i < split.count(); ++i) {
        EXPECT_EQ(split.at(i).last, end);
        EXPECT_LE(split.at(i).first, split.at(i).last);
        end = split.at(i).first - 1;
      }
      EXPECT_EQ(end + 1, 17) << count << " rows, " << threads << " threads";
    }
  }
}

TEST(PositionSplit, GivesEveryThreadAsManyItemsTwoAtLeast) {
  const auto tasks = task_of(0, 1 << 20);
  for (std::int64_t units = 1; units <= 40; ++units) {
    for (int threads = 2; threads <= 16; ++threads) {
      const std::int64_t items = units * PositionSplit(tasks, units, threads, 192).count();
      EXPECT_EQ(items % threads, 0) << units << " units, " << threads << " threads";
      EXPECT_GE(items, 2 * threads);
    }
  }
}

TEST(PositionSplit, CutsShortRangesLess) {
  EXPECT_EQ(PositionSplit(task_of(0, 4096), 1, 2, 192).count(), 4);
  EXPECT_EQ(PositionSplit(task_of(0, 16384), 1, 2, 192).count(), 8);
  EXPECT_EQ(PositionSplit(task_of(0, 400), 1, 2, 192).count(), 2);
  EXPECT_EQ(PositionSplit(task_of(0, 100), 1, 2, 192).count(), 1);
  EXPECT_EQ(PositionSplit(task_of(0, 1 << 20), 1, 1, 192).count(), 1);
  EXPECT_EQ(PositionSplit({}, 1, 2, 192).count(), 1);
}

}  // namespace
}  // namespace ringspan::kernels
