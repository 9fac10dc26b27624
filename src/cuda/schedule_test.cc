#include "cuda/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "cuda/block_parts.h"

namespace ringspan::cuda {
namespace {

using kernels::AttendTask;

AttendTask task(std::int64_t q_first, std::int64_t q_step, std::int64_t q_count, std::int64_t k_first, std::int64_t k_count) {
  AttendTask t;
  t.q_first = q_first, t.q_step = q_step, t.q_count = q_count;
  t.k_first = k_first, t.k_count = k_count;
  t.lo = -1000000, t.hi = 1000000;
  return t;
}

TEST(Schedule, TasksOverTheSameRowsAreOneGroup) {
  const std::vector<AttendTask> tasks{task(0, 1, 100, 0, 50), task(200, 1, 10, 0, 50), task(0, 1, 100, 50, 50)};
  const Schedule schedule = schedule_attend(tasks, Owner::state, 1, 64);
  EXPECT_EQ(schedule.order, (std::vector<std::int64_t>{0, 2, 1}));
  ASSERT_EQ(schedule.waves.size(), 1U);
  EXPECT_EQ(schedule.waves[0].blocks, 2 + 1);
  EXPECT_EQ(schedule.groups[0].task_count, 2);
  EXPECT_EQ(schedule.groups[1].first_block, 2);
}

TEST(Schedule, DisjointProgressionsShareAWave) {
  const std::vector<AttendTask> tasks{task(0, 2, 50, 0, 50), task(1, 2, 50, 0, 50), task(0, 3, 10, 0, 50)};
  const Schedule schedule = schedule_attend(tasks, Owner::state, 1, 64);
  ASSERT_EQ(schedule.waves.size(), 2U);
  EXPECT_EQ(schedule.waves[0].count, 2);
  EXPECT_EQ(schedule.order.back(), 2);
}

// A group that finishes its rows comes after all that touches these rows, also after tasks that come later in the list than the
// first of the group.
TEST(Schedule, WhatFinishesRowsComesLast) {
  float states[2][300] = {}, o = 0.0F;
  const auto with_state = [&](AttendTask t, int state) {
    t.m = {states[state] + t.q_first, 0, t.q_step, 0};
    t.acc = t.m;
    return t;
  };
  const auto finishing = [&](AttendTask t) {
    t.o.data = &o;
    return t;
  };
  const AttendTask whole = with_state(task(0, 1, 100, 0, 50), 0), odd = with_state(task(1, 2, 50, 50, 50), 0);
  const AttendTask other_rows = with_state(task(100, 1, 10, 0, 50), 0), other_state = with_state(task(0, 1, 100, 0, 50), 1);
  {
    const std::vector<AttendTask> tasks{finishing(whole), odd, finishing(whole), finishing(other_rows)};
    const Schedule schedule = schedule_attend(tasks, Owner::state, 1, 64);
    EXPECT_EQ(schedule.order, (std::vector<std::int64_t>{1, 3, 0, 2}));
    ASSERT_EQ(schedule.waves.size(), 2U);
    EXPECT_EQ(schedule.groups.back().task_count, 2);
  }
  const auto scheduled = [](const std::vector<AttendTask>& tasks) { schedule_attend(tasks, Owner::state, 1, 64); };
  EXPECT_NO_THROW(scheduled({finishing(whole), other_rows, finishing(other_state)}));
  EXPECT_THROW(scheduled({finishing(whole), whole}), std::logic_error);
  EXPECT_THROW(scheduled({finishing(whole), odd}), std::logic_error);
  EXPECT_THROW(scheduled({odd, finishing(whole), odd}), std::logic_error);
  EXPECT_THROW(scheduled({finishing(whole), finishing(odd)}), std::logic_error);
}

// Of groups that run at one time those with most work come first, and groups lie along their rows otherwise.
TEST(Schedule, GroupsWithMostWorkComeFirst) {
  std::vector<AttendTask> tasks;  // of each 1,000 rows the even ones take one task more, over as many keys
  for (std::int64_t first = 3000; first >= 0; first -= 1000) {
    tasks.push_back(task(first + 1, 2, 500, first, 1000));
    tasks.push_back(task(first, 2, 500, first, 1000));
    tasks.push_back(task(first, 2, 500, first + 7, 1000));
  }
  const auto firsts = [&](const Schedule& schedule) {
    std::vector<std::int64_t> found;
    for (const Group& group : schedule.groups) {
      found.push_back(tasks[static_cast<std::size_t>(schedule.order[static_cast<std::size_t>(group.first_task)])].q_first);
    }
    return found;
  };
  EXPECT_EQ(firsts(schedule_attend(tasks, Owner::state, 1, 128)),
            (std::vector<std::int64_t>{0, 1000, 2000, 3000, 1, 1001, 2001, 3001}));
  for (AttendTask& each : tasks) each.batch_count = 64;  // 256 blocks of each group
  EXPECT_EQ(firsts(schedule_attend(tasks, Owner::state, 1, 128)),
            (std::vector<std::int64_t>{0, 1, 1000, 1001, 2000, 2001, 3000, 3001}));
}

// Every row of every task is written by one block of each wave at most, tasks that share a row run in list order, and every
// (task, batch item, head, tile) occurs once. Against brute force.
TEST(Schedule, RandomListsKeepTheirOrder) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
    const int group = 1 + static_cast<int>(below(3));
    std::vector<AttendTask> tasks(static_cast<std::size_t>(1 + below(12)));
    for (AttendTask& t : tasks) {
      t = task(below(40), 1 + below(4), below(40), below(40), below(40));
      t.k_step = 1 + below(4);
      t.batch_first = below(3), t.batch_count = 1 + below(2);
      t.head_first = below(4), t.head_step = 1 + below(2), t.head_count = 1 + below(3);
      t.kv_head_first = t.head_first / group;
      if (below(3) == 0) t.q_first = 0, t.q_step = 1, t.q_count = 30, t.head_first = 0, t.head_step = 1, t.head_count = 4;
    }
    for (const Owner owner : {Owner::state, Owner::query_gradients, Owner::key_gradients}) {
      const Schedule schedule = schedule_attend(tasks, owner, group, 16);
      using Row = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // batch item, head, position
      const auto rows_of = [&](const AttendTask& t) {
        std::set<Row> rows;
        for (std::int64_t b = 0; b < t.batch_count; ++b)
          for (std::int64_t h = 0; h < t.head_count; ++h) {
            const std::int64_t head = t.head_first + h * t.head_step;
            const bool keys = owner == Owner::key_gradients;
            for (std::int64_t r = 0; r < (keys ? t.k_count : t.q_count); ++r) {
              rows.insert(
                  {t.batch_first + b, keys ? head / group : head, keys ? t.k_first + r * t.k_step : t.q_first + r * t.q_step});
            }
          }
        return rows;
      };
      std::vector<std::pair<std::int64_t, std::int64_t>> place(tasks.size(), {-1, -1});  // wave, index in order
      std::vector<std::int64_t> group_of(tasks.size(), -1);
      std::size_t ordered = 0;
      for (std::size_t w = 0; w < schedule.waves.size(); ++w) {
        const Wave& wave = schedule.waves[w];
        std::int64_t blocks = 0;
        for (std::int64_t g = wave.first; g < wave.first + wave.count; ++g) {
          const Group& entry = schedule.groups[static_cast<std::size_t>(g)];
          ASSERT_EQ(entry.first_block, blocks);
          ASSERT_EQ(entry.first_task, static_cast<std::int64_t>(ordered));
          for (std::int64_t i = 0; i < entry.task_count; ++i, ++ordered) {
            const auto index = static_cast<std::size_t>(schedule.order[ordered]);
            ASSERT_EQ(place[index].first, -1);
            place[index] = {static_cast<std::int64_t>(w), static_cast<std::int64_t>(ordered)};
            group_of[index] = g;
          }
          const AttendTask& first = tasks[static_cast<std::size_t>(schedule.order[static_cast<std::size_t>(entry.first_task)])];
          blocks += entry.tiles * entry.heads * first.batch_count;
        }
        ASSERT_EQ(wave.blocks, blocks);
      }
      for (std::size_t a = 0; a < tasks.size(); ++a) {
        const bool works = tasks[a].q_count > 0 && tasks[a].k_count > 0;
        ASSERT_EQ(place[a].first >= 0, works) << seed;
        for (std::size_t b = a + 1; b < tasks.size() && works; ++b) {
          if (place[b].first < 0) continue;
          const std::set<Row> rows_a = rows_of(tasks[a]), rows_b = rows_of(tasks[b]);
          const bool shared = std::any_of(rows_a.begin(), rows_a.end(), [&](const Row& row) { return rows_b.count(row) != 0; });
          if (!shared) continue;
          if (group_of[a] == group_of[b]) {
            ASSERT_LT(place[a].second, place[b].second) << seed;
          } else {
            ASSERT_NE(place[a].first, place[b].first) << seed;
          }
        }
      }
    }
  }
}

// Every tile of every column has its block, and of columns that run together the tile with most work comes first.
TEST(Schedule, BlocksOfHeavyTilesComeFirst) {
  AttendTask task;
  task.batch_count = 2, task.head_count = 6, task.head_step = 1;
  task.q_count = 1000, task.k_count = 20'000, task.q_step = task.k_step = 1;
  task.lo = -30'000, task.hi = 30'000;
  for (const auto& [owner, group, together] :
       {std::tuple{Owner::state, 1, 3}, std::tuple{Owner::state, 2, 6}, std::tuple{Owner::key_gradients, 2, 6}}) {
    const Schedule schedule = schedule_attend({&task, 1}, owner, group, 128);
    ASSERT_EQ(schedule.groups.size(), 1U);
    const Group& only = schedule.groups[0];
    EXPECT_EQ(only.together, together);
    AttendArguments arguments;
    arguments.groups = &only, arguments.group_count = 1;
    std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> found;
    std::int64_t tile = 0, share = 0;
    for (std::int64_t block = 0; block < schedule.waves[0].blocks; ++block) {
      const BlockWork work = find_work(arguments, block);
      ASSERT_TRUE(found.insert({work.tile, work.head, work.batch}).second);
      const std::int64_t now = (work.batch * only.heads + work.head) / together;
      ASSERT_TRUE(now > share || (now == share && work.tile >= tile)) << block;
      tile = work.tile, share = now;
    }
    EXPECT_EQ(static_cast<std::int64_t>(found.size()), only.tiles * only.heads * 2);
    EXPECT_EQ(std::get<0>(*found.rbegin()), only.tiles - 1);
  }
}

TEST(Schedule, BlocksAreFoundInTheirGroups) {
  for (const std::int64_t count : {1, 2, 3, 7, 40}) {
    std::vector<Group> groups(static_cast<std::size_t>(count));
    std::int64_t blocks = 0;
    for (std::int64_t index = 0; index < count; ++index) {
      Group& group = groups[static_cast<std::size_t>(index)];
      group.first_block = blocks;
      group.tiles = static_cast<std::int32_t>(1 + index * 5 % 4);
      group.heads = group.columns = 2;
      blocks += group.tiles * group.columns;
    }
    AttendArguments arguments;
    arguments.groups = groups.data(), arguments.group_count = count;
    std::int64_t expected = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      if (expected + 1 < count && groups[static_cast<std::size_t>(expected + 1)].first_block == block) ++expected;
      const BlockWork work = find_work(arguments, block);
      ASSERT_EQ(work.group, expected) << count << " groups, block " << block;
      ASSERT_LT(work.tile, groups[static_cast<std::size_t>(expected)].tiles);
    }
  }
}

TEST(Schedule, AccessesThatOverlapAreOrdered) {
  // 0 writes [0, 10), 1 reads [5, 6), 2 reads [5, 6), 3 writes [5, 20), 4 writes [30, 40)
  const std::vector<std::int64_t> waves =
      waves_of({{0, 0, 10, true}, {1, 5, 6, false}, {2, 5, 6, false}, {3, 5, 20, true}, {4, 30, 40, true}}, 5);
  EXPECT_EQ(waves, (std::vector<std::int64_t>{0, 1, 1, 2, 0}));
}

TEST(Schedule, AccessesOfARowTask) {
  float data[100] = {};
  kernels::RowTask rows;
  rows.batch_count = 1, rows.row_count = 5, rows.head_count = 2;
  rows.operands[0] = {data + 50, DType::float32, 0, -10, 4};
  const int widths[] = {3};
  std::vector<Access> accesses;
  add_accesses(rows, 7, 1U, widths, accesses);
  ASSERT_EQ(accesses.size(), 1U);
  EXPECT_EQ(accesses[0].begin, reinterpret_cast<std::uintptr_t>(data + 10));
  EXPECT_EQ(accesses[0].end, reinterpret_cast<std::uintptr_t>(data + 57));
  EXPECT_TRUE(accesses[0].writes);
  EXPECT_EQ(accesses[0].owner, 7);
}

std::set<std::uintptr_t> bytes_of(const Access& access) {
  std::set<std::uintptr_t> bytes;
  const auto& [x, y, z] = access.steps;
  for (std::int64_t i = 0; i < x.count; ++i) {
    for (std::int64_t j = 0; j < y.count; ++j) {
      for (std::int64_t k = 0; k < z.count; ++k) {
        for (std::int64_t e = 0; e < access.run_bytes; ++e) {
          bytes.insert(access.begin + static_cast<std::uintptr_t>(i * x.bytes + j * y.bytes + k * z.bytes + e));
        }
      }
    }
  }
  return bytes;
}

// Rows and heads of every so many of one tensor, as segments with a rate have them, and of two tensors that lie in different
// ways: what has bytes in common is always found, and nothing else is of one tensor.
TEST(Schedule, RowTasksOfOneTensorHaveCommonBytesOrNone) {
  const std::uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  int common = 0, apart = 0;
  for (int number = 0; number < 4000; ++number) {
    const std::int64_t batch = 1 + below(2), rows = 1 + below(12), heads = 1 + below(6), width = 1 + below(5), gap = below(2);
    const bool heads_first = below(2) == 0;
    std::vector<float> data(static_cast<std::size_t>(batch * rows * heads * (width + gap)));
    const auto part = [&](bool by_heads) {
      const auto some = [&](std::int64_t count, std::int64_t& first) {
        const std::int64_t step = 1 + below(4);
        first = below(std::min(step, count));
        const std::int64_t most = (count - first + step - 1) / step;
        return std::pair{step, 1 + below(most)};
      };
      std::int64_t batch_first = 0, row_first = 0, head_first = 0;
      const auto [batch_step, batch_count] = some(batch, batch_first);
      const auto [row_step, row_count] = some(rows, row_first);
      const auto [head_step, head_count] = some(heads, head_first);
      const std::int64_t element = width + gap;
      const std::int64_t row = element * (by_heads ? 1 : heads), head = element * (by_heads ? rows : 1),
                         item = rows * heads * element;
      kernels::RowTask task;
      task.batch_count = batch_count, task.row_count = row_count, task.head_count = head_count;
      task.operands[0] = {data.data() + batch_first * item + row_first * row + head_first * head, DType::float32,
                          batch_step * item, row_step * row, head_step * head};
      std::vector<Access> accesses;
      const int widths[] = {static_cast<int>(width)};
      add_accesses(task, 0, 1U, widths, accesses);
      return accesses.at(0);
    };
    const bool alike = below(4) != 0;
    const Access a = part(heads_first), b = part(alike ? heads_first : !heads_first);
    const std::set<std::uintptr_t> of_a = bytes_of(a), of_b = bytes_of(b);
    const bool expected = std::any_of(of_a.begin(), of_a.end(), [&](std::uintptr_t byte) { return of_b.contains(byte); });
    const bool found = have_common_bytes(a, b);
    ASSERT_EQ(found, have_common_bytes(b, a)) << "seed " << seed << ", number " << number;
    if (expected || alike) {
      ASSERT_EQ(found, expected) << "seed " << seed << ", number " << number;
    }
    (expected ? common : apart) += 1;
  }
  EXPECT_GT(common, 200);
  EXPECT_GT(apart, 200);
}

}  // namespace
}  // namespace ringspan::cuda
