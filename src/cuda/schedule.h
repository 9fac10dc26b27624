// Schedule: how the tasks of one call become launches of blocks that may run in any order.
//
// Tasks over the same rows make a group, whose blocks take them in one after the other. Groups that may write the same rows
// are put into different waves, in list order; a wave is one launch. So the bits depend on the list alone. A group that ends
// with results stands where its last task does, so that all that touches its rows has run before; a list in which something
// touches them after, or in which two groups write a gradient, is a bug of its maker (std::logic_error). Within a wave, where
// the order is free, groups lie along their rows, and of what runs at one time those with most work come first.
//
// Pure, on the host. Cost: O(tasks log tasks) and the pairs of tasks whose ranges overlap.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/arguments.h"
#include "kernels/attend.h"
#include "kernels/rowwise.h"

namespace ringspan::cuda {

struct Wave {
  std::int64_t first = 0;  // groups (attend) or tasks (rows), first in order
  std::int64_t count = 0;
  std::int64_t blocks = 0;  // attend only
};

struct Schedule {
  std::vector<std::int64_t> order;  // tasks, group after group
  std::vector<Group> groups;        // first_block counts from the begin of the group's wave
  std::vector<Wave> waves;
};

// `tile_rows`: rows of a block.
Schedule schedule_attend(std::span<const kernels::AttendTask> tasks, Owner owner, int group, int tile_rows);

// What a task touches: bytes [begin, end), or of these only some rows.
struct Access {
  std::int64_t owner = 0;  // index of the task
  std::uintptr_t begin = 0, end = 0;
  bool writes = false;
  // Where run_bytes > 0: runs of so many bytes, from the first one on in steps in three dimensions, none of them negative.
  struct Steps {
    std::int64_t bytes = 0, count = 1;
  };
  std::int64_t run_bytes = 0;
  std::array<Steps, 3> steps{};
};
// Whether there is a byte that both touch. Exact but for accesses whose dimensions are nested in different ways, where it may
// be true without one.
bool have_common_bytes(const Access& a, const Access& b);

// For each of `count` owners the wave it may run in: one more than the highest of those before it that it must come after
// (two accesses have common bytes, one of them writes).
std::vector<std::int64_t> waves_of(std::vector<Access> accesses, std::int64_t count);

// Operands of a row operation: elements per row of each, and which are written, a bit per operand.
struct RowOperands {
  std::vector<int> widths;
  unsigned written = 0;
};
RowOperands operands_of(RowOp op, int width);

// The rows of each operand of a task, as bytes; `written` has a bit per operand, `widths` elements per row of each.
void add_accesses(const kernels::RowTask& task, std::int64_t index, unsigned written, std::span<const int> widths,
                  std::vector<Access>& accesses);

}  // namespace ringspan::cuda
