// Progress: calls the context's progress about every half millisecond, from the calling thread only.
#pragma once

#include <chrono>

#include "kernels/attend.h"

namespace ringspan::kernels {

// Clock of one body of ThreadPool::parallel_for; tick() often (it costs a clock read, and nothing on other threads).
class Progress {
 public:
  Progress(const Context& context, int thread) : context_(context), active_(thread == 0) {
    if (active_) last_ = Clock::now();
  }
  void tick() {
    if (!active_) return;
    const Clock::time_point now = Clock::now();
    if (now - last_ < kInterval) return;
    context_.progress();
    last_ = Clock::now();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kInterval{500};
  const Context& context_;
  bool active_;
  Clock::time_point last_;
};

}  // namespace ringspan::kernels
