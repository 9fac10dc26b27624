#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace {
std::atomic<long> allocations{0};
}  // namespace

// Counts allocations of the whole program: parallel_for must make none.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace ringspan {
namespace {

const auto no_progress = [] {};

// Threads of the program's: each call brings new ones.
void run_on_new_threads(void*, void (*run)(void*), void* argument, int threads) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, argument);
  run(argument);
  for (std::thread& other : others) other.join();
}

struct Threads {
  const char* name;
  CallerThreads caller{};
};

using Param = std::tuple<int, Threads>;

class ThreadPoolTest : public testing::TestWithParam<Param> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  CallerThreads caller() const { return std::get<1>(GetParam()).caller; }
};

TEST_P(ThreadPoolTest, RunsEveryIndexOnce) {
  ThreadPool pool(size(), caller());
  EXPECT_EQ(pool.size(), size());
  for (const std::int64_t count : {0, 1, 2, 3, 7, 100, 1000}) {
    std::vector<int> runs(static_cast<std::size_t>(count), 0);  // plain ints: a double run is also a race under TSan
    pool.parallel_for(
        count,
        [&](std::int64_t index, int thread) {
          ASSERT_GE(thread, 0);
          ASSERT_LT(thread, pool.size());
          ++runs[static_cast<std::size_t>(index)];
        },
        no_progress);
    for (const int n : runs) ASSERT_EQ(n, 1);
  }
}

TEST_P(ThreadPoolTest, ThreadNumberIsExclusive) {
  ThreadPool pool(size(), caller());
  std::vector<std::int64_t> scratch(static_cast<std::size_t>(size()), 0);  // raced on, if two threads shared a number
  for (int repeat = 0; repeat < 200; ++repeat) {
    pool.parallel_for(20, [&](std::int64_t, int thread) { ++scratch[static_cast<std::size_t>(thread)]; }, no_progress);
  }
  std::int64_t sum = 0;
  for (const std::int64_t n : scratch) sum += n;
  EXPECT_EQ(sum, 200 * 20);
}

TEST_P(ThreadPoolTest, ManyShortJobsSeeTheirOwnBody) {
  ThreadPool pool(size(), caller());
  for (int job = 0; job < 3000; ++job) {
    std::vector<int> seen(5, -1);
    pool.parallel_for(5, [&](std::int64_t index, int) { seen[static_cast<std::size_t>(index)] = job; }, no_progress);
    for (const int value : seen) ASSERT_EQ(value, job);
  }
}

TEST_P(ThreadPoolTest, AllocatesNothing) {
  // Of the program's threads only the calling one, as to start others allocates.
  const auto on_calling_thread = [](void*, void (*run)(void*), void* argument, int) { run(argument); };
  ThreadPool pool(size(), caller().run_on == nullptr ? CallerThreads{} : CallerThreads{on_calling_thread, nullptr});
  std::atomic<std::int64_t> sum{0};
  const auto body = [&](std::int64_t index, int) { sum += index; };
  pool.parallel_for(50, body, no_progress);
  const long before = allocations.load();
  for (int repeat = 0; repeat < 100; ++repeat) pool.parallel_for(50, body, no_progress);
  EXPECT_EQ(allocations.load(), before);
}

TEST_P(ThreadPoolTest, ProgressRunsOnTheCallerOnly) {
  ThreadPool pool(size(), caller());
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> progressed{false};
  int calls = 0;  // not atomic: a call from another thread is a race
  pool.parallel_for(
      64,
      [&](std::int64_t, int thread) {
        while (thread != 0 && !progressed.load()) std::this_thread::yield();
      },
      [&] {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        ++calls;
        progressed = true;
      });
  EXPECT_GT(calls, 0);
}

TEST_P(ThreadPoolTest, ProgressThatThrowsEndsTheJobOnceBodiesReturned) {
  ThreadPool pool(size(), caller());
  std::atomic<bool> thrown{false};
  std::atomic<int> inside{0};
  std::atomic<int> begun{0};
  const auto body = [&](std::int64_t, int thread) {
    ++inside;
    ++begun;
    while (thread != 0 && !thrown.load()) std::this_thread::yield();
    --inside;
  };
  const auto failing_progress = [&] {
    thrown = true;
    throw std::runtime_error("rank 1/2: no sign of life");
  };
  EXPECT_THROW(pool.parallel_for(1000000, body, failing_progress), std::runtime_error);
  EXPECT_EQ(inside.load(), 0);
  EXPECT_LT(begun.load(), 1000000);
  begun = 0;
  pool.parallel_for(8, body, no_progress);  // and the pool still works
  EXPECT_EQ(begun.load(), 8);
}

TEST_P(ThreadPoolTest, BodyMayPassOnWhatProgressThrew) {
  ThreadPool pool(size(), caller());
  std::atomic<bool> thrown{false};
  const auto body = [&](std::int64_t, int thread) {
    while (thread != 0 && !thrown.load()) std::this_thread::yield();
    if (thread != 0) return;
    thrown = true;
    throw std::runtime_error("from progress");
  };
  EXPECT_THROW(pool.parallel_for(1000, body, no_progress), std::runtime_error);
}

INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPoolTest,
                         testing::Combine(testing::Values(1, 2, 3, 8),
                                          testing::Values(Threads{"own"}, Threads{"callers", {run_on_new_threads, nullptr}})),
                         [](const testing::TestParamInfo<Param>& each) {
                           return std::get<1>(each.param).name + std::to_string(std::get<0>(each.param));
                         });

// A thread that is only beginning when a process forks holds locks of the run-time library, in the child for ever.
void wait_for_all_threads(ThreadPool& pool) {
  std::atomic<int> arrived{0};
  const auto meet = [&](std::int64_t, int) {
    ++arrived;
    while (arrived < pool.size()) std::this_thread::yield();
  };
  pool.parallel_for(pool.size(), meet, no_progress);
}

// The threads stay with the parent: the child neither waits for them at the end nor computes without any.
TEST_P(ThreadPoolTest, AForkedProcessHasThreadsOfItsOwn) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer refuses threads after a fork";
#endif
  auto pool = std::make_unique<ThreadPool>(size(), caller());
  const auto sum = [](ThreadPool& used) {
    std::atomic<std::int64_t> total{0};
    used.parallel_for(100, [&](std::int64_t index, int) { total += index; }, no_progress);
    return total.load();
  };
  wait_for_all_threads(*pool);
  EXPECT_EQ(sum(*pool), 4950);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(300);
    const bool right = sum(*pool) == 4950 && sum(*pool) == 4950 && pool->size() == size();
    pool.reset();
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_EQ(sum(*pool), 4950);
}

TEST_P(ThreadPoolTest, AForkedProcessMayEndWithoutUse) {
  auto pool = std::make_unique<ThreadPool>(size(), caller());
  wait_for_all_threads(*pool);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(300);
    pool.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "status " << status;
}

// A program whose threads are busy: none comes, not even the calling one, or one other alone, and more often than asked.
TEST(CallerThreads, TheCallerDoesWhatIsLeftUndone) {
  const auto none = [](void*, void (*)(void*), void*, int) {};
  const auto another = [](void*, void (*run)(void*), void* argument, int threads) {
    std::thread other([&] {
      for (int repeat = 0; repeat < 3 * threads; ++repeat) run(argument);
    });
    other.join();
  };
  for (const CallerThreads caller : {CallerThreads{none, nullptr}, CallerThreads{another, nullptr}}) {
    ThreadPool pool(3, caller);
    std::vector<int> runs(100, 0);
    const auto body = [&](std::int64_t index, int thread) {
      ASSERT_LT(thread, pool.size());
      ++runs[static_cast<std::size_t>(index)];
    };
    pool.parallel_for(100, body, no_progress);
    EXPECT_EQ(runs, std::vector<int>(100, 1));
  }
  ThreadPool pool(3, {none, nullptr});
  EXPECT_THROW(
      pool.parallel_for(10, [](std::int64_t, int) {}, [] { throw std::runtime_error("from progress"); }), std::runtime_error);
}

class TwoThreads : public testing::TestWithParam<CallerThreads> {};

TEST_P(TwoThreads, ProgressRunsWhileWaiting) {
  ThreadPool pool(2, GetParam());
  // Index 1 ends only after progress ran on the caller while it had nothing left to do.
  std::atomic<bool> released{false};
  std::atomic<int> ready{0};
  pool.parallel_for(
      2,
      [&](std::int64_t, int thread) {
        ++ready;
        while (ready.load() < 2) std::this_thread::yield();  // both threads take part
        while (thread != 0 && !released.load()) std::this_thread::yield();
      },
      [&] { released = true; });
  EXPECT_TRUE(released.load());
}

// Progress may fail while the caller waits for the other thread, which is then inside its body.
TEST_P(TwoThreads, ProgressThatThrowsWhileWaiting) {
  ThreadPool pool(2, GetParam());
  std::atomic<bool> thrown{false};
  std::atomic<int> ready{0};
  const auto body = [&](std::int64_t, int thread) {
    ++ready;
    while (ready.load() < 2) std::this_thread::yield();
    while (thread != 0 && !thrown.load()) std::this_thread::yield();
  };
  const auto failing_progress = [&] {
    thrown = true;
    throw std::runtime_error("rank 1/2: no sign of life");
  };
  EXPECT_THROW(pool.parallel_for(2, body, failing_progress), std::runtime_error);
  EXPECT_EQ(ready.load(), 2);
}

// A body may wait for the index before its own, which must be begun even where progress fails.
TEST_P(TwoThreads, ProgressThatThrowsLeavesNoGap) {
  constexpr std::int64_t kCount = 1 << 20;
  ThreadPool pool(2, GetParam());
  std::vector<std::atomic<bool>> begun(kCount);
  std::atomic<bool> both{false}, gap{false};
  const auto body = [&](std::int64_t index, int thread) {
    begun[static_cast<std::size_t>(index)] = true;
    if (thread != 0) both = true;
    while (!both.load()) std::this_thread::yield();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (thread != 0 && index > 0 && !gap.load() && !begun[static_cast<std::size_t>(index - 1)].load()) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > end) gap = true;
    }
  };
  const auto failing_progress = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // meanwhile the other thread is dealt what follows
    throw std::runtime_error("rank 1/2: no sign of life");
  };
  EXPECT_THROW(pool.parallel_for(kCount, body, failing_progress), std::runtime_error);
  EXPECT_FALSE(gap.load());
}

TEST_P(TwoThreads, ComputeAsTheCallerDoes) {
  ThreadPool pool(2, GetParam());
  std::atomic<int> ready{0};
  std::array<std::atomic<int>, 2> rounding{};
  std::fesetround(FE_UPWARD);
  pool.parallel_for(
      2,
      [&](std::int64_t, int thread) {
        rounding[static_cast<std::size_t>(thread)] = std::fegetround();
        ++ready;
        while (ready.load() < 2) std::this_thread::yield();
      },
      no_progress);
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(rounding[0].load(), FE_UPWARD);
  EXPECT_EQ(rounding[1].load(), FE_UPWARD);
}

INSTANTIATE_TEST_SUITE_P(Owners, TwoThreads, testing::Values(CallerThreads{}, CallerThreads{run_on_new_threads, nullptr}));

}  // namespace
}  // namespace ringspan
