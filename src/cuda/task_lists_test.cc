#include "cuda/task_lists.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "cuda/counting_runtime.h"
#include "cuda/gpu_device.h"

namespace ringspan::cuda {
namespace {

using kernels::AttendTask;
using kernels::RowTask;

// Whose copies are made, and which may capture.
class ListRuntime final : public testing::CountingRuntime {
 public:
  using CountingRuntime::CountingRuntime;
  bool is_capturing() override { return capturing; }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    CountingRuntime::copy(to, from, bytes);
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void copy_at_once(void* to, const void* from, std::int64_t bytes) override {
    ++at_once;
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void wait(Event event, FunctionRef<void()> progress) override {
    waited.push_back(event);
    progress();
  }
  bool capturing = false;
  int at_once = 0;
  std::vector<Event> waited;
};

class Lists : public ::testing::Test {
 protected:
  static AttendTask task(std::uintptr_t address) {
    AttendTask t;
    t.q_count = t.k_count = 100;
    t.lo = -1000, t.hi = 1000;
    t.q.data = reinterpret_cast<void*>(address);
    return t;
  }
  static kernels::AttendShape shape(int head_dim) {
    kernels::AttendShape s;
    s.dtype = DType::bfloat16;
    s.head_dim = s.head_dim_v = head_dim;
    return s;
  }
  static internal::Bindings bindings_of(const AttendTask& t) {
    internal::Bindings bindings;
    bindings[internal::TensorKind::q].data = static_cast<std::byte*>(t.q.data);
    return bindings;
  }
  // Of a tensor at the task's q.
  const AttendLists& attend(const AttendTask& t, Owner owner = Owner::state, TileKernel kernel = TileKernel::wgmma) {
    return attend(t, bindings_of(t), owner, kernel);
  }
  const AttendLists& attend(const AttendTask& t, const internal::Bindings& bindings, Owner owner = Owner::state,
                            TileKernel kernel = TileKernel::wgmma) {
    const auto tasks = [&] {
      ++made_;
      return std::span<const AttendTask>(&t, 1);
    };
    const AttendLists& sent = lists_.attend(kernel, owner, shape(64), {&launch_, &bindings, true, true, tasks});
    EXPECT_EQ(sent.waves.size(), 1U);
    EXPECT_EQ(*sent.tasks, t);
    EXPECT_EQ(sent.groups->task_count, 1);
    EXPECT_EQ(*sent.taken, 0);
    EXPECT_EQ(sent.places != nullptr, kernel == TileKernel::wgmma);
    return sent;
  }
  // A block of `count` of these lists.
  void reserve(int count) {
    lists_.reserve(count * (static_cast<std::int64_t>(sizeof(AttendTask)) + internal::kTaskGroupBytes +
                            internal::kTaskPlacesBytes + 16 + 32));
  }

  internal::Launch launch_;
  int made_ = 0;  // tasks
  testing::RuntimeCounts counts_;
  ListRuntime runtime_{counts_};
  int shown_ = 0;  // signs of life
  TaskLists lists_{runtime_, [this] { ++shown_; }};
};

TEST_F(Lists, TheSameTasksAreMadeAndSentOnce) {
  reserve(10);
  const AttendTask* const sent = attend(task(16)).tasks;
  lists_.begin_pass();
  EXPECT_EQ(attend(task(16)).tasks, sent);
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(counts_.copies, 1);
  EXPECT_EQ(counts_.events, 0);
}

TEST_F(Lists, WhatDiffersInAnythingIsSentAnew) {
  reserve(10);
  internal::Bindings bindings;
  std::byte memory[2] = {};
  int expected = 0;
  const auto expect_anew = [&] {
    attend(task(16), bindings);
    EXPECT_EQ(counts_.copies, ++expected);
    attend(task(16), bindings);
    EXPECT_EQ(counts_.copies, expected);
  };
  expect_anew();
  bindings[internal::TensorKind::dv].data = memory;
  expect_anew();
  bindings[internal::TensorKind::dv].head_stride = 8;
  expect_anew();
  bindings.saved = memory;
  expect_anew();
  attend(task(16), bindings, Owner::query_gradients);
  attend(task(16), bindings, Owner::state, TileKernel::mma);
  EXPECT_EQ(counts_.copies, expected + 2);
  const internal::Launch other;
  const AttendTask one = task(16);
  const auto tasks = [&] { return std::span<const AttendTask>(&one, 1); };
  for (const internal::Launch* launch : {&other, static_cast<const internal::Launch*>(nullptr)}) {
    for (int times = 0; times < 2; ++times) {
      lists_.attend(TileKernel::wgmma, Owner::state, shape(64), {launch, &bindings, true, true, tasks});
    }
  }
  EXPECT_EQ(counts_.copies, expected + 2 + 1 + 2) << "a launch that does not come again is not kept";
}

TEST_F(Lists, RowsAreSentOnceAndOnlyWhereALaunchCannotBringThem) {
  reserve(10);
  std::vector<RowTask> tasks(RowArguments::kShort + 1);
  for (RowTask& task : tasks) task.batch_count = task.row_count = task.head_count = 1;
  const auto copies_after = [&](auto&& call) {
    call();
    return counts_.copies;
  };
  const std::span<const RowTask> all(tasks);
  EXPECT_EQ(copies_after([&] { lists_.rows({RowOp::fill, 1}, all.first(RowArguments::kShort)); }), 0);
  EXPECT_EQ(copies_after([&] { lists_.rows({RowOp::fill, 1}, all); }), 1);
  EXPECT_EQ(copies_after([&] { lists_.rows({RowOp::fill, 1}, all); }), 1);
  EXPECT_EQ(copies_after([&] { lists_.rows({RowOp::fill, 2}, all); }), 2);
  EXPECT_EQ(copies_after([&] { lists_.as_they_are(all.first(1)); }), 3);
  EXPECT_EQ(copies_after([&] { lists_.as_they_are(all.first(1)); }), 3);
}

TEST_F(Lists, ASideIsFilledAgainBehindItsCopies) {
  reserve(2);
  for (const std::uintptr_t address : {16, 32, 48, 64}) attend(task(address));  // two in each side
  EXPECT_EQ(counts_.copies, 4);
  EXPECT_EQ(counts_.events, 1);
  for (const std::uintptr_t address : {64, 16, 32, 48}) attend(task(address));
  EXPECT_EQ(counts_.copies, 4);
  attend(task(80));  // in place of the first two
  EXPECT_EQ(counts_.events, 2);
  EXPECT_EQ(runtime_.waited, (std::vector<Event>{0, 1}));
  EXPECT_EQ(shown_, 2);
  attend(task(48));
  EXPECT_EQ(counts_.copies, 5);
  attend(task(16));
  attend(task(80));
  EXPECT_EQ(counts_.copies, 6);
}

// Else what passes of a library's calls keep, whose launches bring all of their tasks along, would be kept for ever.
TEST_F(Lists, RowsThatAreNotSentGoToo) {
  reserve(10);
  for (std::uintptr_t address = 64; address < 64 * 100; address += 64) {
    std::vector<RowTask> tasks(3);
    for (RowTask& task : tasks) {
      task.batch_count = task.row_count = task.head_count = 1;
      task.operands[0].data = reinterpret_cast<void*>(address);
    }
    lists_.rows({RowOp::fill, 1}, tasks);
  }
  EXPECT_EQ(counts_.copies, 0);
  EXPECT_GT(counts_.events, 5) << "no side was filled, so nothing that is kept there went";
}

TEST_F(Lists, MoreThanASideIsABug) {
  reserve(1);
  const std::vector<AttendTask> tasks(2, task(16));
  const internal::Bindings bindings;
  const auto all = [&] { return std::span<const AttendTask>(tasks); };
  EXPECT_THROW(lists_.attend(TileKernel::wgmma, Owner::state, shape(64), {&launch_, &bindings, true, true, all}),
               std::logic_error);
}

TEST_F(Lists, ACapturedPassKeepsToItself) {
  reserve(2);
  const AttendTask* const outside = attend(task(16)).tasks;
  const AttendTask* captured[2];
  for (const AttendTask*& list : captured) {
    runtime_.capturing = true;
    lists_.begin_pass();
    list = attend(task(16)).tasks;
    EXPECT_NE(attend(task(32)).tasks, list);
    runtime_.capturing = false;
    lists_.begin_pass();
  }
  EXPECT_NE(captured[0], captured[1]);
  EXPECT_NE(captured[0], outside);
  EXPECT_EQ(attend(task(16)).tasks, outside);
  for (const std::uintptr_t address : {48, 64, 80, 96, 112}) attend(task(address));
  EXPECT_EQ(*captured[0], task(16));
  EXPECT_EQ(*captured[1], task(16));
  EXPECT_EQ(runtime_.at_once, 4);
  EXPECT_EQ(counts_.copies, 6);
  reserve(4);
  runtime_.capturing = true;
  lists_.begin_pass();
  for (const std::uintptr_t address : {16, 32, 48, 64}) attend(task(address));
  EXPECT_EQ(*captured[1], task(16));
}

// On a device that is late: many lists through sides with room for two, each found or sent, and each of them the right one.
class ListsOnADevice : public ::testing::TestWithParam<std::uint64_t> {};
TEST_P(ListsOnADevice, AreReadBeforeTheyAreWrittenOver) {
  const std::uint64_t seed = GetParam();
  std::mt19937 random(static_cast<unsigned>(seed));
  GpuDevice device(make_emulated_runtime(seed));
  constexpr int kSets = 7, kTasks = 6, kWidth = 8;
  device.reserve(2 * kTasks * (static_cast<std::int64_t>(sizeof(RowTask)) + 8 + 16));
  constexpr std::int64_t kBytes = kSets * kTasks * kWidth * 4;
  std::byte* const from = device.allocate(kBytes);
  std::byte* const to = device.allocate(kBytes);
  std::vector<float> numbers(kSets * kTasks * kWidth);
  for (std::size_t index = 0; index < numbers.size(); ++index) numbers[index] = static_cast<float>(index);
  device.copy(from, numbers.data(), kBytes);
  const std::vector<float> zeros(numbers.size());
  for (int round = 0; round < 20; ++round) {
    device.copy(to, zeros.data(), kBytes);
    std::vector<float> expected = zeros;
    for (int call = 0; call < 5; ++call) {
      const int set = static_cast<int>(random() % kSets);
      std::vector<RowTask> tasks(kTasks);
      for (int index = 0; index < kTasks; ++index) {
        const std::int64_t offset = std::int64_t{set * kTasks + index} * kWidth;
        RowTask& task = tasks[static_cast<std::size_t>(index)];
        task.batch_count = task.row_count = task.head_count = 1;
        task.operands[0].data = from + offset * 4;
        task.operands[1].data = to + offset * 4;
        std::copy_n(numbers.begin() + offset, kWidth, expected.begin() + offset);
      }
      internal::Launch launch;
      launch.kind = internal::LaunchKind::copy;
      launch.width = kWidth;
      device.begin_pass();
      device.rows(launch, tasks, nullptr);
    }
    std::vector<float> got(numbers.size());
    device.copy(got.data(), to, kBytes);
    device.wait(device.record(), [] {});
    ASSERT_EQ(got, expected) << "round " << round;
  }
  device.release(from);
  device.release(to);
}
INSTANTIATE_TEST_SUITE_P(Seeds, ListsOnADevice, ::testing::Range<std::uint64_t>(1, 6));

}  // namespace
}  // namespace ringspan::cuda
