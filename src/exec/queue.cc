#include "exec/queue.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "base/check.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

class CpuQueue final : public Queue {
 public:
  MemorySpace memory_space() const override { return MemorySpace::host; }
  void launch(LaunchCall call) override { call.function(call.argument); }
  Event record() override { return ++recorded_; }
  bool is_complete(Event event) override {
    RINGSPAN_CHECK(event <= recorded_);
    return true;
  }
  void wait(Event event, FunctionRef<void()> /*progress*/) override { RINGSPAN_CHECK(event <= recorded_); }

 private:
  Event recorded_ = 0;
};

// Events are points in the sequence of launches: the event of n launches is complete when the n-th has ended.
class FakeDeviceQueue final : public Queue {
 public:
  explicit FakeDeviceQueue(std::uint64_t seed) : random_(seed), worker_([this] { run(); }) {}

  // As a stream does, ends after everything that was launched.
  ~FakeDeviceQueue() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  MemorySpace memory_space() const override { return MemorySpace::fake_device; }

  void launch(LaunchCall call) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return launched_ - ended_ < kCapacity || failed_; });
    throw_if_failed();
    ring_[launched_ % kCapacity] = call;
    ++launched_;
    lock.unlock();
    changed_.notify_all();
  }

  Event record() override {
    const std::lock_guard lock(mutex_);
    throw_if_failed();
    return launched_;
  }

  bool is_complete(Event event) override {
    const std::lock_guard lock(mutex_);
    RINGSPAN_CHECK(event <= launched_);
    throw_if_failed();
    return event <= ended_;
  }

  void wait(Event event, FunctionRef<void()> progress) override {
    std::unique_lock lock(mutex_);
    RINGSPAN_CHECK(event <= launched_);
    const auto done = [&] { return event <= ended_ || failed_; };
    while (!changed_.wait_for(lock, std::chrono::milliseconds(1), done)) {
      lock.unlock();
      progress();
      lock.lock();
    }
    throw_if_failed();
  }

 private:
  static constexpr std::uint64_t kCapacity = 1024;  // launches in flight

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ended_ < launched_ || closing_; });
      if (ended_ == launched_) return;
      const LaunchCall call = ring_[ended_ % kCapacity];
      const bool skip = failed_;  // after a failure a device runs nothing more
      lock.unlock();
      std::string error;
      if (!skip) error = run_one(call);
      lock.lock();
      ++ended_;
      if (!error.empty()) {
        failed_ = true;
        failure_ = "launch on the fake device failed: " + error;
      }
      changed_.notify_all();
    }
  }

  // The error text; empty when all went well.
  std::string run_one(LaunchCall call) {
    // Mostly at once, sometimes late, now and then later than a message takes.
    const std::uint64_t draw = random_() % 64;
    if (draw < 8) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    if (draw == 63) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 2000));
    try {
      call.function(call.argument);
    } catch (const std::exception& error) {
      return error.what()[0] == '\0' ? "unnamed exception" : error.what();
    } catch (...) {
      return "unknown exception";
    }
    return {};
  }

  void throw_if_failed() const {
    if (failed_) throw DeviceError(failure_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<LaunchCall, kCapacity> ring_;
  std::uint64_t launched_ = 0;
  std::uint64_t ended_ = 0;
  bool closing_ = false;
  bool failed_ = false;
  std::string failure_;
  std::mt19937_64 random_;  // of the worker
  std::thread worker_;      // last: it uses all of the above
};

}  // namespace

std::unique_ptr<Queue> make_cpu_queue() { return std::make_unique<CpuQueue>(); }

std::unique_ptr<Queue> make_fake_device_queue(std::uint64_t seed) { return std::make_unique<FakeDeviceQueue>(seed); }

}  // namespace ringspan
