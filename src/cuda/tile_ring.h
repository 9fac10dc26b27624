// TileRing: buffers between roles (warpgroup.h, "Roles"), used in turn: of tiles between those who copy and those who multiply,
// of tasks between those who find them out and all others. Each has two barriers: "full", at which every thread that fills it
// arrives twice, for what it has stored and for its copies, and "empty", at which every warp that reads it arrives when it does
// not any more. Each role keeps a ring of its own and walks over the same tiles in the same order.
#pragma once

#include "cuda/warpgroup.h"

namespace ringspan::cuda {

template <int kBuffers>
class TileRing {
 public:
  static constexpr int kBarrierBytes = 2 * kBuffers * 8;

  explicit RINGSPAN_DEVICE TileRing(std::uint32_t barriers) : barriers_(barriers) {}

  // By one thread, before anything else.
  template <typename M>
  RINGSPAN_DEVICE void init(M& m, int filling_threads, int reading_warps) const {
    for (int buffer = 0; buffer < kBuffers; ++buffer) {
      m.init_barrier(full(buffer), 2 * filling_threads);
      m.init_barrier(empty(buffer), reading_warps * M::kArrivalsOfWarp);
    }
  }

  // Of the tile that is next, or `ahead` tiles later.
  RINGSPAN_DEVICE int buffer(int ahead = 0) const { return (tile_ + ahead) % kBuffers; }

  // Where the bytes of the tile that is next are counted.
  RINGSPAN_DEVICE std::uint32_t full() const { return full(buffer()); }

  // Who fills: the buffer is free; what is in it is stored, and its copies have begun.
  template <typename M>
  RINGSPAN_DEVICE void acquire(M& m) const {
    m.wait(empty(buffer()), 1 - phase(0));
  }
  template <typename M>
  RINGSPAN_DEVICE void publish(M& m) {
    m.arrive_when_copied(full(buffer()));
    m.arrive_threads(full(buffer()));
    ++tile_;
  }

  // At its end: nothing that it has begun is under way any more.
  template <typename M>
  RINGSPAN_DEVICE void finish(M& m) const {
    for (int ahead = 0; ahead < kBuffers; ++ahead) m.wait(empty(buffer(ahead)), 1 - phase(ahead));
  }

  // Who reads: the tile has arrived (fence_async() has to follow, but where TMA has written it); it is not
  // needed any more.
  template <typename M>
  RINGSPAN_DEVICE void wait(M& m, int ahead = 0) const {
    m.wait(full(buffer(ahead)), phase(ahead));
  }
  template <typename M>
  RINGSPAN_DEVICE void release(M& m) {
    m.arrive_warps(empty(buffer()));
    ++tile_;
  }

 private:
  RINGSPAN_DEVICE std::uint32_t full(int buffer) const { return barriers_ + static_cast<std::uint32_t>(buffer) * 16; }
  RINGSPAN_DEVICE std::uint32_t empty(int buffer) const { return full(buffer) + 8; }
  RINGSPAN_DEVICE int phase(int ahead) const { return (tile_ + ahead) / kBuffers % 2; }

  std::uint32_t barriers_;
  int tile_ = 0;  // those before it were published, or released
};

}  // namespace ringspan::cuda
