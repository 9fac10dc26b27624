// What the emulated device has for a stream: libraries that enqueue work of their own on a cudaStream_t have a stand-in in
// tests, which enqueues on this. Plain C, since such a library is loaded at run time.
#pragma once

namespace ringspan::cuda {

extern "C" struct EmulatedStream {
  // Runs function(argument) on the stream, after everything that was enqueued before.
  void (*launch)(void* queue, void (*function)(void*), void* argument);
  void* queue;
  void* runtime;  // whose stream it is
};

}  // namespace ringspan::cuda
