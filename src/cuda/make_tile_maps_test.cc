#include "cuda/make_tile_maps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace ringspan::cuda {
namespace {

using kernels::AttendTask;

// A tensor of 16-bit elements, (tokens, heads, 64), at an address that nobody reads.
constexpr int kHeads = 4, kDim = 64, kRow = kHeads * kDim;
char* address(std::int64_t element) { return reinterpret_cast<char*>(std::uintptr_t{1} << 32) + element * 2; }

AttendTask task_at(std::int64_t first_row, std::int64_t rows, std::int64_t step = 1) {
  AttendTask task;
  task.head_count = kHeads;
  task.batch_count = 2;
  task.q_count = task.k_count = rows;
  task.q = {address(first_row * kRow), 1000 * kRow, step * kRow, kDim};
  task.k = {address((1 << 20) + first_row * kRow), 1000 * kRow, step * kRow, kDim};
  task.d_out = {address((2 << 20) + first_row * kRow), 1000 * kRow, step * kRow, kDim};
  task.v = {address((3 << 20) + 8 + first_row * kRow), 1000 * kRow, step * kRow, kDim};
  return task;
}
kernels::AttendShape shape_of(int group = 1) {
  kernels::AttendShape shape;
  shape.dtype = DType::bfloat16;
  shape.head_dim = shape.head_dim_v = kDim;
  shape.group = group;
  return shape;
}

template <typename Operand>
TilePlace place_of(const TileMaps& maps, const AttendTask& task, const Operand& operand, int width = kDim) {
  return place_in(maps, {operand.data, operand.row_stride, operand.head_stride, operand.batch_stride, task.k_count,
                         task.head_count, task.batch_count, width});
}

TEST(TileMaps, TasksOfOneTensorShareAMap) {
  const std::vector<AttendTask> documents{task_at(300, 200), task_at(100, 50), task_at(900, 100), task_at(150, 150)};
  const TileMaps maps = tile_maps_of(shape_of(), documents, Owner::state);
  ASSERT_EQ(maps.count, 4) << "k and v, each [100, 500) and [900, 1000)";
  EXPECT_TRUE(maps.complete);
  EXPECT_EQ(maps.maps[0].begin, documents[1].k.data) << "the first one in memory";
  EXPECT_EQ(maps.maps[0].rows, 400);
  EXPECT_EQ(maps.maps[0].heads, kHeads);
  EXPECT_EQ(maps.maps[0].batches, 2);
  EXPECT_EQ(maps.maps[0].width, kDim);
  for (const AttendTask& task : documents) {
    const bool is_apart = &task == &documents[2];
    const TilePlace k = place_of(maps, task, task.k);
    const TilePlace v = place_of(maps, task, task.v);
    EXPECT_EQ(k.map, is_apart ? 2 : 0);
    EXPECT_EQ(v.map, is_apart ? 3 : 1);
    const void* const begin = documents[is_apart ? 2 : 1].k.data;
    EXPECT_EQ(k.row, (static_cast<char*>(task.k.data) - static_cast<const char*>(begin)) / (2 * kRow));
    EXPECT_EQ(v.row, k.row);
    EXPECT_EQ(place_of(maps, task, task.k, kDim / 2).map, -1) << "another width";
    EXPECT_EQ(place_of(maps, task, task.d_out).map, -1) << "not of this pass";
  }
}

// Where there are more runs of rows than maps, those with the smallest gaps share one, in which that gap is nobody's.
TEST(TileMaps, TheNearestShareAMapWhereThereIsNoRoom) {
  const std::vector<AttendTask> documents{task_at(900, 50), task_at(0, 100),   task_at(110, 90),
                                          task_at(205, 95), task_at(500, 300), task_at(2000, 9)};
  const TileMaps maps = tile_maps_of(shape_of(), documents, Owner::state);
  ASSERT_EQ(maps.count, TileMaps::kMost);
  EXPECT_FALSE(maps.complete);
  std::vector<bool> dense;
  for (const AttendTask& task : documents) {
    const TilePlace k = place_of(maps, task, task.k), v = place_of(maps, task, task.v);
    ASSERT_GE(k.map, 0);
    ASSERT_GE(v.map, 0);
    EXPECT_EQ(v.dense, k.dense);
    dense.push_back(k.dense);
  }
  EXPECT_EQ(dense, (std::vector<bool>{true, false, false, false, true, true}));
}

// Tensors that lie whole rows apart are not taken for one, wherever they were allocated, while there is room.
TEST(TileMaps, TensorsApartHaveMapsOfTheirOwn) {
  for (const std::int64_t apart : {64, 65, 1000, -64, -65, -1000}) {
    AttendTask task = task_at(2000, 64);
    task.v = task.k;
    task.v.data = static_cast<char*>(task.k.data) + apart * kRow * 2;
    const TileMaps maps = tile_maps_of(shape_of(), {&task, 1}, Owner::state);
    EXPECT_TRUE(maps.complete) << apart;
    EXPECT_EQ(maps.count, std::abs(apart) == 64 ? 1 : 2) << apart;
    EXPECT_GE(place_of(maps, task, task.v).map, 0) << apart;
  }
}

// Of many tasks whose rows are apart: no more than a sort.
TEST(TileMaps, ManyTasks) {
  std::vector<AttendTask> tasks;
  for (std::int64_t index = 0; index < 100'000; ++index) tasks.push_back(task_at(index * 7919 % 100'000 * 3, 2));
  const TileMaps maps = tile_maps_of(shape_of(), tasks, Owner::state);
  EXPECT_FALSE(maps.complete);
  for (std::size_t index = 0; index < tasks.size(); index += 997) {
    EXPECT_GE(place_of(maps, tasks[index], tasks[index].k).map, 0);
    EXPECT_GE(place_of(maps, tasks[index], tasks[index].v).map, 0);
  }
}

// What follows an operand in a dense map may be read: that of another operand, with as many heads and batch items.
TEST(TileMaps, AreDenseWithoutGaps) {
  const auto are_dense = [](std::vector<AttendTask> tasks) {
    const TileMaps maps = tile_maps_of(shape_of(), tasks, Owner::state);
    bool dense = true;
    for (int index = 0; index < maps.count; ++index) dense = dense && maps.maps[index].dense;
    EXPECT_EQ(maps.complete, dense);
    return maps.complete;
  };
  EXPECT_TRUE(are_dense({task_at(100, 200)}));
  EXPECT_TRUE(are_dense({task_at(100, 200), task_at(300, 50), task_at(350, 1), task_at(0, 100)}));
  EXPECT_TRUE(are_dense({task_at(100, 200), task_at(150, 20), task_at(200, 300)})) << "they may overlap";
  EXPECT_TRUE(are_dense({task_at(100, 200), task_at(301, 50), task_at(0, 99), task_at(400, 1)})) << "four maps of each";
  EXPECT_FALSE(are_dense({task_at(100, 200), task_at(301, 50), task_at(0, 99), task_at(400, 1), task_at(402, 1)}));
  AttendTask fewer = task_at(300, 50);
  fewer.head_count = 1;
  EXPECT_FALSE(are_dense({task_at(100, 200), fewer}));
}

TEST(TileMaps, BackwardWalksOverQueriesForKeys) {
  const std::vector<AttendTask> tasks{task_at(0, 64)};
  const TileMaps maps = tile_maps_of(shape_of(), tasks, Owner::key_gradients);
  EXPECT_GE(place_of(maps, tasks[0], tasks[0].q).map, 0);
  EXPECT_GE(place_of(maps, tasks[0], tasks[0].d_out).map, 0);
  const TileMaps keys = tile_maps_of(shape_of(), tasks, Owner::query_gradients);
  EXPECT_GE(place_of(keys, tasks[0], tasks[0].k).map, 0);
  EXPECT_EQ(place_of(keys, tasks[0], tasks[0].v).row, 0);
}

TEST(TileMaps, HeadsOfTheKeySide) {
  AttendTask task = task_at(0, 64);
  task.head_first = 8;
  task.head_count = 8;
  task.kv_head_first = 2;  // of heads 2, 3
  const TileMaps maps = tile_maps_of(shape_of(4), {&task, 1}, Owner::state);
  EXPECT_EQ(maps.maps[0].heads, 2);
}

TEST(TileMaps, DilatedViewsHaveMapsOfTheirOwn) {
  std::vector<AttendTask> tasks;
  for (int step = 1; step <= 5; ++step) tasks.push_back(task_at(step, 64, step));
  const TileMaps maps = tile_maps_of(shape_of(), tasks, Owner::state);
  ASSERT_EQ(maps.count, TileMaps::kMost) << "room for four of k and of v";
  for (int step = 1; step <= 5; ++step) {
    const AttendTask& task = tasks[static_cast<std::size_t>(step - 1)];
    EXPECT_EQ(place_of(maps, task, task.k).map >= 0, step <= 4) << step;
    EXPECT_EQ(place_of(maps, task, task.v).map >= 0, step <= 4) << step;
  }
}

// Where there is no room, views that begin equally far apart share a map: keys of heads that begin with other rows, and,
// backward, queries of every fourth head.
TEST(TileMaps, ViewsThatAreAlikeShareAMap) {
  for (const std::int64_t rows : {63, 64}) {  // of the last view
    std::vector<AttendTask> tasks{task_at(0, 256)};
    tasks.front().q.batch_stride = tasks.front().d_out.batch_stride = 1000 * (kRow + kDim);  // that of a view fits into it
    for (int offset = 0; offset < 4; ++offset) {
      AttendTask task = task_at(offset, offset < 3 ? 64 : rows, 4);
      task.q.data = static_cast<char*>(task.q.data) + offset * kDim * 2;
      task.d_out.data = static_cast<char*>(task.d_out.data) + offset * kDim * 2;
      task.q.head_stride = task.d_out.head_stride = 4 * kDim;
      task.q.batch_stride = task.d_out.batch_stride = 1000 * (kRow + kDim);
      task.head_count = 1, task.head_first = offset;
      tasks.push_back(task);
    }
    for (const Owner owner : {Owner::state, Owner::key_gradients}) {
      const TileMaps maps = tile_maps_of(shape_of(), tasks, owner);
      ASSERT_EQ(maps.count, 4) << "of the whole tensors, and of the views";
      EXPECT_EQ(maps.complete, rows == 64 && owner == Owner::key_gradients) << "heads of keys are counted from the first";
      for (std::size_t index = 1; index < tasks.size(); ++index) {
        const AttendTask& task = tasks[index];
        const bool keys = owner == Owner::state;
        const TilePlace place = keys ? place_of(maps, task, task.k) : place_of(maps, task, task.q);
        ASSERT_GE(place.map, 0);
        const TileMap& map = maps.maps[place.map];
        EXPECT_EQ(map.shifts, 4);
        const std::int64_t item = place.item + (task.batch_count - 1) * map.item_step;  // of the last batch item
        EXPECT_LT(item, map.items());
        const std::int64_t element = place.row * map.row_stride + item * map.item_stride();
        const std::int64_t behind = std::int64_t{task.batch_count - 1} * (keys ? task.k.batch_stride : task.q.batch_stride);
        EXPECT_EQ(static_cast<const char*>(map.begin) + element * 2,
                  static_cast<char*>(keys ? task.k.data : task.q.data) + behind * 2);
      }
    }
  }
}

TEST(TileMaps, OnlyWhatTheHardwareCanTake) {
  const auto maps_of = [](auto change) {
    AttendTask task = task_at(0, 64);
    task.v = task.k;
    change(task.k);
    task.v = task.k;
    return tile_maps_of(shape_of(), {&task, 1}, Owner::state).count;
  };
  using Keys = kernels::KeyRows;
  EXPECT_EQ(maps_of([](Keys&) {}), 1);
  EXPECT_EQ(maps_of([](Keys& k) { k.data = static_cast<char*>(k.data) + 2; }), 0) << "begins at a multiple of 16 bytes";
  EXPECT_EQ(maps_of([](Keys& k) { k.row_stride += 4; }), 0) << "strides are multiples of 16 bytes";
  EXPECT_EQ(maps_of([](Keys& k) { k.head_stride += 4; }), 0);
  EXPECT_EQ(maps_of([](Keys& k) { k.batch_stride += 4; }), 0);
  EXPECT_EQ(maps_of([](Keys& k) { k.row_stride = -k.row_stride; }), 0);
  EXPECT_EQ(maps_of([](Keys& k) { k.head_stride = 0; }), 0) << "heads that are one and the same";
  EXPECT_EQ(maps_of([](Keys& k) { k.batch_stride = std::int64_t{1} << 40; }), 0);
}

TEST(TileMaps, OneHeadOrBatchItemNeedsNoStride) {
  AttendTask task = task_at(0, 64);
  task.head_count = task.batch_count = 1;
  task.k.head_stride = 3;
  task.k.batch_stride = 0;
  EXPECT_GE(place_of(tile_maps_of(shape_of(), {&task, 1}, Owner::state), task, task.k).map, 0);
}

// Beyond the ends of its map an operand would be zeros: a map of one head, whose stride did not matter, is not for two that are
// the same in memory. Likewise batch items, and rows.
TEST(TileMaps, OnlyWhatTheMapHas) {
  const auto covers = [](auto grow) {
    std::vector<AttendTask> tasks{task_at(0, 64), task_at(0, 64)};
    for (AttendTask& task : tasks) {
      task.head_count = task.batch_count = 1;
      task.k.head_stride = task.k.batch_stride = 0;
    }
    grow(tasks[1]);
    const TileMaps maps = tile_maps_of(shape_of(), tasks, Owner::state);
    EXPECT_GE(place_of(maps, tasks[0], tasks[0].k).map, 0);
    const bool covered = place_of(maps, tasks[1], tasks[1].k).map >= 0;
    EXPECT_EQ(maps.complete, covered);
    return covered;
  };
  EXPECT_TRUE(covers([](AttendTask&) {}));
  EXPECT_FALSE(covers([](AttendTask& task) { task.head_count = 2; }));
  EXPECT_FALSE(covers([](AttendTask& task) { task.batch_count = 2; }));
  EXPECT_TRUE(covers([](AttendTask& task) { task.k_count = 200; })) << "the map grows";
  AttendTask task = task_at(0, 64);
  const TileMaps maps = tile_maps_of(shape_of(), {&task, 1}, Owner::state);
  task.k_count = 65;
  EXPECT_EQ(place_of(maps, task, task.k).map, -1);
}

}  // namespace
}  // namespace ringspan::cuda
