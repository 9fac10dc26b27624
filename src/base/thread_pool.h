// ThreadPool: a fixed set of threads for one rank's kernels.
//
// parallel_for(count, body, progress) calls body(index, thread) for every index in [0, count), dealt one by one in ascending
// order; thread is in [0, size()); the calling thread takes part as thread 0. Returns when all are done. All threads have the
// caller's floating-point environment: how to round, and whether denormal numbers are flushed. After each of its own indices,
// and about every 200 microseconds while it waits for others, the caller runs `progress`; an index that takes longer than a
// millisecond should call it itself when thread == 0.
//
// Cost: no allocation after construction; one notify_all per call, none when count is 1 or the pool has one thread. A thread
// with nothing to do, the caller at the end of a call as the others after one, looks for 50 microseconds, and lets others have
// its core meanwhile, before it sleeps. The caller waits only for threads that have begun an index. One caller at a time
// (checked). Body must not throw, except on the calling thread what progress threw: then, as when progress throws between
// indices, no further index is begun, and the exception leaves parallel_for once every running body has returned. Whatever
// throws, all indices before one that was begun are begun: a body may wait for those before it. What is computed must not
// depend on `thread` other than for scratch. A process that is forked from the pool's may use its copy, which starts threads of
// its own then (and throws std::system_error where it cannot), and may destroy it.
//
// With CallerThreads the pool has no threads, except in a forked process, and `caller.run_on` brings those of each call. Then
// the caller looks for the others' end, with `progress` between, and does not sleep; only `run_on` waits for a thread that it
// brings late, which then finds nothing to do.
#pragma once

#include <cstdint>
#include <memory>

#include "base/function_ref.h"
#include "ringspan/threads.h"

namespace ringspan {

class ThreadPool {
 public:
  explicit ThreadPool(int threads, CallerThreads caller = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  void parallel_for(std::int64_t count, FunctionRef<void(std::int64_t, int)> body, FunctionRef<void()> progress);

 private:
  struct State;
  bool forget_forked();
  void run_on_caller(std::int64_t count, FunctionRef<void(std::int64_t, int)> body, FunctionRef<void()> progress);
  int size_;
  CallerThreads caller_;
  std::unique_ptr<State> state_;
};

}  // namespace ringspan
