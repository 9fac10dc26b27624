// What a block of threads with roles (warpgroup.h) has to do, task by task: found out once, by two warps that do nothing else
// (work_list.h), and told to those who copy and those who multiply through shared memory. It takes thousands of cycles, chains
// of reads and of instructions that run once per task and are fetched anew each time: nobody waits for that, since it happens
// while the task before is copied and multiplied.
//
// A launch has as many blocks of threads as the device runs at a time, its residents. Each begins with the block of its own
// number and takes the next one that nobody has when those who copy ask for it, some tiles before the end of the one before,
// not earlier, so that no one waits for a resident with more to do. Which resident runs a block does not show in its results.
//
// A block whose sums come out NaN or infinite is taken in again, and only then are values that a masked or dropped pair may
// meet looked at (checked_tile.h): nobody waits for looks that find nothing. Warps whose sums were finite have stored theirs,
// and store nothing then.
#pragma once

#include "cuda/block_parts.h"
#include "cuda/copy_tile.h"
#include "cuda/tile_ring.h"
#include "cuda/tile_walk.h"

namespace ringspan::cuda {

// A task as a block takes it in, in shared memory.
template <typename P>
struct TaskWork {
  enum Flag : int {
    kBegins = 1,      // the first task of its block
    kEnds = 2,        // the last one
    kBeginsRows = 4,  // has rows of its own side that the task before does not have
    kEndsRows = 8,    // the task after it has others
    kWithout = 16,    // backward: a row that the block owns has lse = -inf
    kOver = 32,       // none: the resident has nothing more to do
    kLooks = 64,      // the block is taken in again
    // The last tile's weights meet its values beside the first scores of the task after it, which has the same rows; and the
    // task before has left such weights.
    kLeavesWeights = 128,
    kHasWeights = 256,
  };
  static constexpr int kWarps = P::kThreads / 32;  // that multiply
  kernels::AttendTask task, first_task;            // copies: it, and the first one of the block
  int flags;
  int block;                             // its number
  int again;                             // where it is taken in again, for which warps, by bit
  int batch, head;                       // of the tasks' batch items, and of their heads (WorkList)
  int first_row, rows;                   // that the block owns
  int heads_begin, heads_end;            // the task's query heads that it takes in
  TileWalk<P> walk;                      // of the first of these heads
  TaskPlaces places;                     // a copy
  TilePlace first, second;               // these, of the batch item
  int begin[P::kRows], end[P::kRows];    // which rows of the other side each row sees
  bool seen[P::kRows];                   // whether a row has seen any, in the tasks so far
  float lse[P::kRows], delta[P::kRows];  // of queries that the block owns, in backward

  // Rows of an operand on the other side, with `width` elements each.
  template <typename Operand>
  RINGSPAN_DEVICE TileRows<typename P::Element> tile_rows(const Operand& operand, const TileWalk<P>& over, int tile,
                                                          int width) const {
    return {view_of<const typename P::Element>(operand, batch, over.head), over.first(tile), over.valid(tile), width};
  }

  RINGSPAN_DEVICE VisibleColumns visible(int thread, int first_column) const {
    VisibleColumns columns{};
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + half * 8;
      clip({begin[row], end[row]}, first_column, P::kCols, half, columns);
    }
    return columns;
  }
};

// A barrier by which the side that copies asks for the next block.
class Asked {
 public:
  explicit RINGSPAN_DEVICE Asked(std::uint32_t barrier) : barrier_(barrier) {}

  // By one thread, before anything else.
  template <typename M>
  RINGSPAN_DEVICE void init(M& m, int copying_warps) const {
    m.init_barrier(barrier_, copying_warps * M::kArrivalsOfWarp);
  }
  template <typename M>
  RINGSPAN_DEVICE void ask(M& m) const {
    m.arrive_warps(barrier_);
  }
  template <typename M>
  RINGSPAN_DEVICE void wait(M& m) {
    m.wait(barrier_, phase_);
    phase_ = 1 - phase_;
  }

 private:
  std::uint32_t barrier_;
  int phase_ = 0;
};

// The slots; the group of the block that was entered last; and on its way from one thread of those who find to all, a block's
// number. Of each slot's block, where warps say that their sums are not finite; and the blocks which that was said of, of which
// there are as many as slots at most.
template <typename P>
struct WorkSlots {
  static constexpr int kSlots = 2;
  TaskWork<P> work[kSlots];
  Group group;
  int group_number, group_end;  // which it is; the first block that it does not have
  int taken;
  int spoilt_count;
  int spoilt_block[kSlots], spoilt_warps[kSlots];
  alignas(8) bool is_spoilt[kSlots][TaskWork<P>::kWarps];
};
using WorkRing = TileRing<2>;

// By those who copy: copy(work) of each task, until there is none.
template <typename P, typename M, typename Copy>
RINGSPAN_DEVICE void copy_each_task(M& m, WorkRing& ring, const WorkSlots<P>& slots, Copy&& copy) {
  for (bool over = false; !over;) {
    m.note(Phase::wait_for_task);
    ring.wait(m);
    const TaskWork<P>& work = slots.work[ring.buffer()];
    over = (M::uniform(work.flags) & TaskWork<P>::kOver) != 0;
    if (!over) copy(work);
    ring.release(m);
  }
}

}  // namespace ringspan::cuda
