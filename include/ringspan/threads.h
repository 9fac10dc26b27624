// CallerThreads: threads that the program has anyway, for a rank's kernels to run on instead of threads of the library's own.
//
// Threads of OpenMP look for work for milliseconds after a parallel region, and keep others from their cores meanwhile: behind
// an operation of PyTorch a short pass on threads of its own takes up to 2.6 times as long (docs/performance_history.md).
#pragma once

namespace ringspan {

struct CallerThreads {
  // Calls run(argument) on up to `threads` threads at once, one of which is the calling one, and returns when all calls have
  // returned; must not throw. Fewer calls, or calls one after the other, only take longer: what they leave undone the calling
  // thread does afterwards. What is computed does not depend on them. Null: threads of the library's own.
  void (*run_on)(void* context, void (*run)(void* argument), void* argument, int threads) = nullptr;
  void* context = nullptr;
};

}  // namespace ringspan
