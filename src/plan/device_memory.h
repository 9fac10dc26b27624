// What a rank that computes on a device needs besides the caller's tensors and the arena, and the place of messages in pinned
// host memory. Pure. Cost: O(stages), and O(transfers log transfers) for messages.
//
// src/cuda allocates and src/exec lays out what is booked here, so that forecast and allocation are one number.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan_data.h"

namespace ringspan::internal {

inline constexpr int kTaskListBlocks = 2;                      // take turns, on the host and on the device
inline constexpr std::int64_t kLeastTaskListBytes = 64 << 10;  // of a block: passes of a few tasks each, over many tensors
inline constexpr std::int64_t kTaskListAlignment = 16;         // of each list in a block: small copies arrive sooner
inline constexpr std::int64_t kTaskGroupBytes = 48;            // of a group of attend tasks, see cuda/arguments.h
inline constexpr std::int64_t kTaskPlacesBytes = 32;           // of an attend task, see cuda/tile_maps.h

// Of one block: for a pass that sends so many tasks, and as large as the lists of either pass of a plan.
std::int64_t task_list_bytes(std::int64_t row_tasks, std::int64_t attend_tasks, std::int64_t launches);
std::int64_t task_list_bytes(const PlanData& data);

// A part of the arena that messages lie in, and its place in the mirror.
struct MessagePart {
  std::int64_t begin = 0, end = 0;  // in the arena
  std::int64_t offset = 0;          // in the mirror, a multiple of 64
};
// Of both passes: disjoint, ascending. Transfers that overlap in the arena share their part.
std::vector<MessagePart> message_parts(const Program& forward, const Program& backward);
std::int64_t mirror_bytes(const std::vector<MessagePart>& parts);

// Lines of Plan::memory(), the same for both passes; none of a plan for the CPU.
std::vector<MemoryLine> device_memory(const PlanData& data);

// The same plan, booked for a device: without what kernels of the CPU need. Throws Unsupported where it names any.
PlanData plan_for_device(const PlanData& data, bool device_messages);

}  // namespace ringspan::internal
