// Items that pass on rows in order, also where progress fails.
#include "kernels/turnstile.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/thread_pool.h"

namespace ringspan::kernels {
namespace {

// It ends after the item before it, whose counter it gives back for a later one.
TEST(Turnstile, AnItemWhoseProgressFailsWaitsForTheOneBefore) {
  constexpr int kThreads = 2;
  alignas(64) std::byte memory[1024];
  ASSERT_LE(Turnstile::bytes(kThreads), static_cast<std::int64_t>(sizeof memory));
  Turnstile turnstile(memory, kThreads);
  ThreadPool pool(1);
  const auto none = [] {};
  const auto failing = [] { throw std::runtime_error("rank 1/2: no sign of life"); };
  const Context quiet{pool, nullptr, none}, lost{pool, nullptr, failing};
  Progress of_first(quiet, 0);
  std::optional<Turnstile::Item> first(std::in_place, turnstile, 0, of_first);
  std::atomic<bool> failed{false}, ended{false};
  std::thread other([&] {
    Progress of_second(lost, 0);
    try {
      Turnstile::Item second(turnstile, 1, of_second);
      try {
        second.pass(10);
      } catch (const std::runtime_error&) {
        failed = true;
        throw;
      }
    } catch (const std::runtime_error&) {
    }
    ended = true;
  });
  while (!failed) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // progress fails again meanwhile
  EXPECT_FALSE(ended);
  first.reset();
  other.join();
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace ringspan::kernels
