// BlockQueue: which blocks of a launch a resident block of threads runs, with roles (warpgroup.h). There are as many residents
// as the device runs at a time: each begins with the block of its own number and takes the next one that nobody has while it
// still copies for this one. So what the next block needs is on its way while the last one's results leave.
//
// Two slots of shared memory for numbers, with barriers like those of tiles. Cost: one atomic addition to memory per block,
// none where all blocks are resident. Which resident runs a block does not show in its results.
#pragma once

#include "cuda/arguments.h"
#include "cuda/tile_ring.h"

namespace ringspan::cuda {

class BlockQueue {
 public:
  static constexpr int kSlots = 2;
  static constexpr int kBarrierBytes = TileRing<kSlots>::kBarrierBytes;
  static constexpr int kBytes = kBarrierBytes + kSlots * 4;

  // slots: behind the barriers.
  RINGSPAN_DEVICE BlockQueue(std::uint32_t barriers, int* slots) : ring_(barriers), slots_(slots) {}

  // By one thread, before anything else.
  template <typename M>
  RINGSPAN_DEVICE void init(M& m, int copying_threads, int multiplying_warps) const {
    ring_.init(m, copying_threads, multiplying_warps);
  }

  // The side that copies: takes a block and tells the other side. At or above arguments.blocks: there are no more.
  template <typename M>
  RINGSPAN_DEVICE int take(M& m, const AttendArguments& arguments, int residents) {
    if (arguments.blocks <= residents) return residents;
    int* const slot = slots_ + ring_.buffer();
    ring_.acquire(m);
    m.each([&](int thread) {
      if (thread == 0) *slot = residents + M::fetch_add(arguments.taken, 1);
    });
    m.sync();
    const int block = M::uniform(*slot);
    ring_.publish(m);
    return block;
  }

  // The side that multiplies.
  template <typename M>
  RINGSPAN_DEVICE int next(M& m, const AttendArguments& arguments, int residents) {
    if (arguments.blocks <= residents) return residents;
    ring_.wait(m);
    const int block = M::uniform(slots_[ring_.buffer()]);
    ring_.release(m);
    return block;
  }

 private:
  TileRing<kSlots> ring_;
  int* slots_;
};

}  // namespace ringspan::cuda
