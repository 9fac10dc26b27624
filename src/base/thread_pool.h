// ThreadPool: a fixed set of threads for one rank's kernels.
//
// parallel_for(count, body) calls body(index, thread) for every index in [0, count), dealt one by one in ascending order;
// thread is in [0, size()); the calling thread takes part as thread 0. Returns when all are done. While it waits or between
// two of its own indices the caller runs `progress`. No allocation after construction. One caller at a time. Body must not
// throw. What is computed must not depend on `thread` other than for scratch.
#pragma once

#include <cstdint>
#include <memory>

#include "base/function_ref.h"

namespace ringspan {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;
  void parallel_for(std::int64_t count, FunctionRef<void(std::int64_t, int)> body, FunctionRef<void()> progress);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ringspan
