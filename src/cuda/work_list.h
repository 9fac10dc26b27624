// WorkList: two warps of a block that find out what there is to do (work_ring.h).
//
// Cost: a division or two per row of a task, one atomic addition to memory per block, none where all blocks are resident, and
// some times the latency of the device's memory per group, and per task where a group has several: what the block before had
// too is not looked up again.
#pragma once

#include "cuda/work_ring.h"

namespace ringspan::cuda {

// The tasks of a resident's blocks, one after the other. Blocks own queries, of query head `head` of their tasks, or keys, of
// kv head `head`; these rows stay where they are (kBeginsRows) where the next task has the same ones.
//
// What outlasts a task is in shared memory: registers are few.
template <typename P, typename M, Owner kOwner>
class WorkList {
 public:
  using Task = kernels::AttendTask;
  using Work = TaskWork<P>;
  static constexpr bool kOwnsQueries = kOwner != Owner::key_gradients;

  RINGSPAN_DEVICE WorkList(M& m, const AttendArguments& arguments, WorkRing ring, Asked asked, WorkSlots<P>& slots, int first,
                           int residents)
      : m_(m), arguments_(arguments), ring_(ring), asked_(asked), slots_(slots), first_(first), residents_(residents) {}

  RINGSPAN_DEVICE void run() {
    m_.each([&](int thread) {
      if (thread < WorkSlots<P>::kSlots * Work::kWarps) slots_.is_spoilt[thread / Work::kWarps][thread % Work::kWarps] = false;
      if (thread == 0) slots_.spoilt_count = 0;
    });
    m_.sync();
    while (publish_next()) {
    }
    ring_.finish(m_);
  }

 private:
  // The next task, into the next slot; false where there is none, which is told too. The one before is still in the other slot.
  RINGSPAN_DEVICE bool publish_next() {
    m_.note(Phase::wait_for_slot);
    ring_.acquire(m_);
    note_spoilt(ring_.buffer());
    Work& work = slots_.work[ring_.buffer()];
    const Work& before = slots_.work[ring_.buffer(1)];
    bool is_new_group = false;
    if (index_ == 0) {
      if (has_begun_) asked_.wait(m_);
      m_.note(Phase::enter);
      int again = 0;
      const int block = next_block(again);
      if (block >= arguments_.blocks) {
        m_.each([&](int thread) {
          if (thread == 0) work.flags = Work::kOver;
        });
        ring_.publish(m_);
        return false;
      }
      is_new_group = !has_begun_ || block >= M::uniform(slots_.group_end) || is_before_group(block);
      if (is_new_group) enter_group(block);
      has_begun_ = true;
      m_.each([&](int thread) {
        if (thread != 0) return;
        const BlockWork place = work_in(slots_.group, slots_.group_number, block);
        work.block = block;
        work.again = again;
        work.batch = static_cast<int>(place.batch);
        work.head = static_cast<int>(place.head);
        work.first_row = static_cast<int>(place.tile);  // for now
      });
    }
    const Group& group = slots_.group;
    if (index_ == 0 && !is_new_group && group.task_count == 1) {
      copy_tasks(work, before, before.task, before.places);
    } else {
      copy_tasks(work, before, arguments_.tasks[group.first_task + index_], arguments_.places[group.first_task + index_]);
    }
    m_.note(Phase::look_at_rows);
    const Task& task = work.task;
    const RowsOfBlock of =
        index_ == 0 ? own_rows(group, work) : RowsOfBlock{before.batch, before.head, before.first_row, before.rows};
    const kernels::IndexRange heads = heads_of(task, of.head);
    const std::int64_t count = kOwnsQueries ? task.k_count : task.q_count;
    m_.each([&](int thread) {
      without_[thread][0] = 0;
      RINGSPAN_UNROLL  // reads of lse and delta side by side
          for (int part = 0; part < P::kRows / M::kThreads; ++part) {
        const int row = thread + part * M::kThreads;
        kernels::IndexRange range{};
        if (row < of.count && !heads.empty()) range = columns_of_row(task, of.first + row);
        work.begin[row] = static_cast<int>(range.begin < count ? range.begin : count);
        work.end[row] = static_cast<int>(range.end < count ? range.end : count);
        const bool without = !has_statistics(work, before, of, row);
        if (without) without_[thread][0] = 1;
        work.seen[row] = (index_ != 0 && before.seen[row]) || (!range.empty() && !without);
      }
    });
    const bool without = m_.sync_any(without_);
    m_.note(Phase::tell);
    m_.each([&](int thread) {  // threads of different warps
      if (thread == 0) {
        if (index_ != 0) work.block = before.block, work.again = before.again;
        work.batch = of.batch;
        work.head = of.head;
        work.first_row = of.first;
        work.rows = of.count;
        work.heads_begin = static_cast<int>(heads.begin);
        work.heads_end = static_cast<int>(heads.end);
        work.walk = walk_of(work, task, count, heads, of.count);
        work.flags = (without ? Work::kWithout : 0) | flags_of(work, before, group.task_count);
      } else if (thread == 32) {
        work.first = place_of(work.places.first, of.batch);
        work.second = place_of(work.places.second, of.batch);
      }
    });
    m_.sync();
    ring_.publish(m_);
    index_ = index_ + 1 == group.task_count ? 0 : index_ + 1;
    return true;
  }

  // The number of the resident's next block, or one beyond the last; `again` as in TaskWork.
  RINGSPAN_DEVICE int next_block(int& again) {
    int block = next_spoilt(again);
    if (block >= 0) return block;
    block = has_begun_ ? next_new_block() : first_;
    if (block < arguments_.blocks) return block;
    ring_.finish(m_);  // what is still multiplied may have to be taken in again
    for (int slot = 0; slot < WorkSlots<P>::kSlots; ++slot) note_spoilt(slot);
    block = next_spoilt(again);
    return block >= 0 ? block : static_cast<int>(arguments_.blocks);
  }

  // What warps have said of a slot's block, whose buffer is free.
  RINGSPAN_DEVICE void note_spoilt(int slot) {
    static_assert(Work::kWarps == 8);
    const auto said = *reinterpret_cast<const std::uint64_t*>(slots_.is_spoilt[slot]);
    if (M::uniform(said != 0 ? 1 : 0) == 0) return;
    m_.sync();
    m_.each([&](int thread) {
      if (thread != 0) return;
      int warps = 0;
      RINGSPAN_NO_UNROLL
      for (int warp = 0; warp < Work::kWarps; ++warp) {
        if (slots_.is_spoilt[slot][warp]) warps |= 1 << warp;
        slots_.is_spoilt[slot][warp] = false;
      }
      slots_.spoilt_block[slots_.spoilt_count] = slots_.work[slot].block;
      slots_.spoilt_warps[slots_.spoilt_count++] = warps;
    });
    m_.sync();
  }
  // One of these blocks, -1 where there is none.
  RINGSPAN_DEVICE int next_spoilt(int& again) {
    const int count = M::uniform(slots_.spoilt_count);
    if (count == 0) return -1;
    const int block = M::uniform(slots_.spoilt_block[count - 1]);
    again = M::uniform(slots_.spoilt_warps[count - 1]);
    m_.sync();
    m_.each([&](int thread) {
      if (thread == 0) slots_.spoilt_count = count - 1;
    });
    return block;
  }

  // One that nobody has had.
  RINGSPAN_DEVICE int next_new_block() {
    if (arguments_.blocks <= residents_ || has_had_all_) return static_cast<int>(arguments_.blocks);
    m_.each([&](int thread) {
      if (thread == 0) slots_.taken = residents_ + M::fetch_add(arguments_.taken, 1);
    });
    m_.sync();
    const int block = M::uniform(slots_.taken);
    has_had_all_ = block >= arguments_.blocks;
    if (has_had_all_) reset_counter(block);
    return block;
  }

  // Each resident asks once too often; who was the last of all to ask leaves the counter as the next launch needs it.
  RINGSPAN_DEVICE void reset_counter(int block) {
    if (block - residents_ != static_cast<int>(arguments_.blocks) - 1) return;
    m_.each([&](int thread) {
      if (thread == 0) *arguments_.taken = 0;
    });
  }

  // Threads look at groups one behind the other, from the one before on: many looks at the device's memory take as long as one.
  // Nobody looks at the group before any more.
  RINGSPAN_DEVICE void enter_group(int block) {
    int from = has_begun_ && !is_before_group(block) ? M::uniform(slots_.group_number) : 0;
    m_.sync();
    do {
      m_.each([&](int thread) {
        const int number = from + thread;
        without_[thread][0] = 0;
        if (number >= arguments_.group_count || first_block(number) > block || first_block(number + 1) <= block) return;
        slots_.group_number = number;
        slots_.group_end = static_cast<int>(first_block(number + 1));
        without_[thread][0] = 1;
      });
      from += M::kThreads;
    } while (!m_.sync_any(without_));
    const Group& group = arguments_.groups[M::uniform(slots_.group_number)];
    m_.each([&](int thread) { copy_words(slots_.group, group, thread); });
    m_.sync();
  }
  RINGSPAN_DEVICE bool is_before_group(int block) const {
    return block < M::uniform(static_cast<int>(slots_.group.first_block));
  }
  RINGSPAN_DEVICE std::int64_t first_block(int group) const {
    return group < arguments_.group_count ? arguments_.groups[group].first_block : arguments_.blocks;
  }

  template <typename T>
  RINGSPAN_DEVICE void copy_words(T& to, const T& from, int thread) const {
    using Word = std::uint64_t;
    static_assert(sizeof(T) % sizeof(Word) == 0);
    RINGSPAN_NO_UNROLL
    for (int word = thread; word < static_cast<int>(sizeof(T) / sizeof(Word)); word += M::kThreads) {
      reinterpret_cast<Word*>(&to)[word] = reinterpret_cast<const Word*>(&from)[word];
    }
  }
  // What is looked up in a task is looked up in shared memory: in that of the device each word takes as long as all of them.
  RINGSPAN_DEVICE void copy_tasks(Work& work, const Work& before, const Task& task, const TaskPlaces& places) {
    m_.each([&](int thread) {
      copy_words(work.task, task, thread);
      copy_words(work.places, places, thread);
      copy_words(work.first_task, index_ == 0 ? task : before.first_task, thread);
    });
    m_.sync();
  }

  // The rows of a block that has just been entered, whose tile is in first_row.
  RINGSPAN_DEVICE RowsOfBlock own_rows(const Group& group, const Work& work) const {
    // The most work first: under a causal mask the last queries, and the first keys.
    const int first = (kOwnsQueries ? group.tiles - 1 - work.first_row : work.first_row) * P::kRows;
    const std::int64_t left = (kOwnsQueries ? work.task.q_count : work.task.k_count) - first;
    return {work.batch, work.head, first, left < P::kRows ? static_cast<int>(left) : P::kRows};
  }

  RINGSPAN_DEVICE TileWalk<P> walk_of(const Work& work, const Task& task, std::int64_t count, const kernels::IndexRange& heads,
                                      int rows) const {
    const auto range_of = [&](int row) { return kernels::IndexRange{work.begin[row], work.end[row]}; };
    return TileWalk<P>::of(range_of(0), range_of(rows - 1), count, kOwnsQueries ? kv_head(task, heads.begin) : heads.begin);
  }
  // Of an operand on the other side, for a batch item. There may be no maps after all (device_tensor_maps.h).
  RINGSPAN_DEVICE TilePlace place_of(TilePlace place, int batch) const {
    if (place.map >= arguments_.maps.count) place.map = -1;
    if (place.map >= 0) place.item += batch * arguments_.maps.maps[place.map].item_step;
    return place;
  }

  RINGSPAN_DEVICE kernels::IndexRange heads_of(const Task& task, int head) const {
    if constexpr (kOwnsQueries) return {head, head + 1};
    const int group = arguments_.params.shape.group;
    const std::int64_t first = std::int64_t{head} * group;
    return kernels::indices_between(task.head_first, task.head_step, task.head_count, first, first + group - 1);
  }
  RINGSPAN_DEVICE int kv_head_of(std::int64_t head) const {  // divisions of 64 bits take long
    const int group = arguments_.params.shape.group;
    return group == 1 ? static_cast<int>(head) : static_cast<int>(head) / group;
  }
  RINGSPAN_DEVICE int kv_head(const Task& task, std::int64_t t) const {
    const int distance = kv_head_of(task.head_first + t * task.head_step) - static_cast<int>(task.kv_head_first);
    return task.kv_head_step <= 1 ? distance : distance / static_cast<int>(task.kv_head_step);
  }
  RINGSPAN_DEVICE kernels::IndexRange columns_of_row(const Task& task, int row) const {
    if constexpr (kOwnsQueries) return kernels::keys_of_row(task, row);
    return kernels::queries_of_key(task, row);
  }
  // lse and delta of a thread's row, where queries are owned in backward; false: it is a row whose lse is -inf.
  RINGSPAN_DEVICE bool has_statistics(Work& work, const Work& before, const RowsOfBlock& of, int thread) const {
    if constexpr (kOwner != Owner::query_gradients) return true;
    float lse = kMinusInfinity, delta = 0.0F;
    if (index_ != 0 && have_same_rows(work.task, before.task)) {
      lse = before.lse[thread];
      delta = before.delta[thread];
    } else if (thread < of.count) {
      lse = *view_of<const float>(work.task.lse, of.batch, of.head).row(of.first + thread);
      delta = *view_of<const float>(work.task.delta, of.batch, of.head).row(of.first + thread);
    }
    work.lse[thread] = lse;
    work.delta[thread] = delta;
    return thread >= of.count || lse != kMinusInfinity;
  }
  RINGSPAN_DEVICE int flags_of(const Work& work, const Work& before, int task_count) const {
    const Task* const tasks = arguments_.tasks + slots_.group.first_task;
    const bool begins = index_ == 0;
    const bool ends = index_ + 1 == task_count;
    const bool begins_rows = begins || !have_same_rows(work.task, before.task);
    const bool ends_rows = ends || !have_same_rows(work.task, tasks[index_ + 1]);
    const bool has_weights = !begins && (before.flags & Work::kLeavesWeights) != 0;
    const bool looks = work.again != 0;
    const bool leaves_weights = (has_weights || work.walk.tiles > 0) && !ends_rows && !looks;
    return (begins ? Work::kBegins : 0) | (ends ? Work::kEnds : 0) | (begins_rows ? Work::kBeginsRows : 0) |
           (ends_rows ? Work::kEndsRows : 0) | (looks ? Work::kLooks : 0) | (has_weights ? Work::kHasWeights : 0) |
           (leaves_weights ? Work::kLeavesWeights : 0);
  }
  // Of two tasks of a group, whether the rows that a block owns are the same in memory.
  RINGSPAN_DEVICE static bool have_same_rows(const Task& a, const Task& b) {
    if constexpr (kOwner == Owner::state) {
      return a.q == b.q;
    } else if constexpr (kOwner == Owner::query_gradients) {
      return a.q == b.q && a.d_out == b.d_out && a.lse == b.lse && a.delta == b.delta;
    } else {
      return a.k == b.k && a.v == b.v && a.kv_head_first == b.kv_head_first && a.kv_head_step == b.kv_head_step;
    }
  }

  M& m_;
  const AttendArguments& arguments_;
  WorkRing ring_;
  Asked asked_;
  WorkSlots<P>& slots_;
  const int first_, residents_;
  bool has_begun_ = false, has_had_all_ = false;
  int index_ = 0;  // of the task in the group
  typename M::template Registers<int, 1> without_;
};

}  // namespace ringspan::cuda
