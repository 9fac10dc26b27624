#include "exec/queue.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/error.h"

namespace ringspan {
namespace {

struct Append {
  std::vector<int>* list;
  int value;
  static void run(void* self) {
    const auto* call = static_cast<Append*>(self);
    call->list->push_back(call->value);
  }
};

// Holds the queue until opened, so that "later" is certain.
struct Gate {
  std::atomic<bool> open{false};
  static void run(void* self) {
    while (!static_cast<Gate*>(self)->open) std::this_thread::yield();
  }
};

class QueueTest : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<Queue> make(std::uint64_t seed) const { return GetParam() ? make_fake_device_queue(seed) : make_cpu_queue(); }
};

TEST_P(QueueTest, EventZeroIsComplete) {
  const auto queue = make(1);
  EXPECT_TRUE(queue->is_complete(0));
  queue->wait(0, [] {});
}

TEST_P(QueueTest, LaunchesRunInOrderAndEventsCoverThem) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    std::vector<int> list;
    std::vector<Append> calls;
    const int count = 3000;  // more than fit into the ring of the fake device
    for (int i = 0; i < count; ++i) calls.push_back({&list, i});
    const auto queue = make(seed);
    Event middle = 0;
    for (int i = 0; i < count; ++i) {
      queue->launch({&Append::run, &calls[static_cast<std::size_t>(i)]});
      if (i == 99) {
        middle = queue->record();
        queue->wait(middle, [] {});
        ASSERT_EQ(list.size(), 100U);
      }
    }
    const Event last = queue->record();
    queue->wait(last, [] {});
    EXPECT_TRUE(queue->is_complete(last));
    EXPECT_TRUE(queue->is_complete(middle));
    ASSERT_EQ(list.size(), static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) ASSERT_EQ(list[static_cast<std::size_t>(i)], i);
  }
}

TEST_P(QueueTest, DestructionEndsAfterTheLastLaunch) {
  std::vector<int> list;
  std::vector<Append> calls(100, {&list, 0});
  {
    const auto queue = make(4);
    for (Append& call : calls) queue->launch({&Append::run, &call});
  }
  EXPECT_EQ(list.size(), 100U);
}

INSTANTIATE_TEST_SUITE_P(Queues, QueueTest, testing::Bool(),
                         [](const auto& suite) { return std::string(suite.param ? "fake_device" : "cpu"); });

TEST(CpuQueueTest, LaunchIsSynchronous) {
  const auto queue = make_cpu_queue();
  EXPECT_EQ(queue->memory_space(), MemorySpace::host);
  std::vector<int> list;
  Append call{&list, 7};
  queue->launch({&Append::run, &call});
  EXPECT_EQ(list, std::vector<int>{7});
}

TEST(FakeDeviceQueueTest, RunsLaterAndWaitMakesProgress) {
  const auto queue = make_fake_device_queue(5);
  EXPECT_EQ(queue->memory_space(), MemorySpace::fake_device);
  Gate gate;
  queue->launch({&Gate::run, &gate});
  const Event event = queue->record();
  EXPECT_FALSE(queue->is_complete(event));
  int calls = 0;
  queue->wait(event, [&] {
    if (++calls == 3) gate.open = true;
  });
  EXPECT_GE(calls, 3);
  EXPECT_TRUE(queue->is_complete(event));
}

TEST(FakeDeviceQueueTest, AnExceptionIsADeviceErrorAndStays) {
  const auto queue = make_fake_device_queue(6);
  std::vector<int> list;
  Append never{&list, 1};
  Gate gate;
  queue->launch({&Gate::run, &gate});
  queue->launch({[](void*) { throw std::runtime_error("out of registers"); }, nullptr});
  queue->launch({&Append::run, &never});
  const Event event = queue->record();
  gate.open = true;
  for (int i = 0; i < 2; ++i) {
    try {
      queue->wait(event, [] {});
      FAIL() << "expected DeviceError";
    } catch (const DeviceError& error) {
      EXPECT_STREQ(error.what(), "launch on the fake device failed: out of registers");
    }
  }
  EXPECT_THROW(queue->launch({&Append::run, &never}), DeviceError);
  EXPECT_THROW(queue->record(), DeviceError);
  EXPECT_THROW(queue->is_complete(event), DeviceError);
  EXPECT_TRUE(list.empty());
}

}  // namespace
}  // namespace ringspan
