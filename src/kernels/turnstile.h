// Turnstile: threads that add to the same rows, always in the same order.
//
// The items of a job are numbered; each walks over rows in ascending order and adds to them. pass(row) returns when the item
// before has left the rows below `row`, so that every row is added to in the order of the items, whoever computes them: the
// bits of one thread, without a partial sum. Items must be begun in ascending order by at most `threads` threads, each one item
// at a time (ThreadPool::parallel_for); then the waiting ends, as an item only waits for those before it.
//
// Cost: spinning, with a yield and a call of progress now and then. No allocation: bytes(threads) of the caller's, aligned
// to 64.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <thread>

#include "kernels/progress.h"

namespace ringspan::kernels {

class Turnstile {
 public:
  static std::int64_t bytes(int threads) { return (threads + 2) * static_cast<std::int64_t>(sizeof(Counter)); }

  Turnstile(std::byte* memory, int threads) : counters_(reinterpret_cast<Counter*>(memory)), count_(threads + 2) {
    for (std::int64_t i = 0; i < count_; ++i) new (counters_ + i) Counter;
    counters_[count_ - 1].left = kAll;  // the item before the first
  }

  // One item, from its beginning to its end, also if that is an exception: nobody waits for what will not come.
  class Item {
   public:
    // The counter was another item's, long ago: the one after that frees it.
    Item(Turnstile& turnstile, std::int64_t index, Progress& progress)
        : progress_(progress), before_(turnstile.of(index - 1)), mine_(turnstile.of(index)) {
      while (mine_.load(std::memory_order_acquire) != kFree) std::this_thread::yield();
    }
    ~Item() {
      try {
        pass(kAll);
      } catch (
          ...) {  // progress failed: the call fails, whatever the rows hold, but the item before has its counter until it ends
        while (before_.load(std::memory_order_acquire) < kAll) std::this_thread::yield();
      }
      before_.store(kFree, std::memory_order_release);
      mine_.store(kAll, std::memory_order_release);
    }
    Item(const Item&) = delete;
    Item& operator=(const Item&) = delete;

    // Waits until the items before have left the rows below `row`.
    void pass(std::int64_t row) {
      for (int spins = 0; before_.load(std::memory_order_acquire) < row; ++spins) {
        if (spins % kSpins != kSpins - 1) continue;
        std::this_thread::yield();
        progress_.tick();
      }
    }
    // This item has left the rows below `row`, which it has passed.
    void leave(std::int64_t row) { mine_.store(row, std::memory_order_release); }

   private:
    static constexpr int kSpins = 256;
    Progress& progress_;
    std::atomic<std::int64_t>&before_, &mine_;
  };

 private:
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max(), kFree = -1;
  struct alignas(64) Counter {
    std::atomic<std::int64_t> left{kFree};
  };
  std::atomic<std::int64_t>& of(std::int64_t index) { return counters_[(index + count_) % count_].left; }

  Counter* counters_;
  std::int64_t count_;
};

}  // namespace ringspan::kernels
