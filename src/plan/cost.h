// What a plan costs: the model's time and the memory of a rank. Pure, integer, so that all ranks get the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan_data.h"

namespace ringspan::internal {

// Floating-point operations per pair: forward 2 (d + d_v), backward 2 (3 d + 2 d_v).
std::int64_t flops_per_pair(const Problem& problem, Pass pass);

// flops / F, in nanoseconds. Beyond 64 bits where those of a plan's interface end: plans of any size are compared by it.
Int128 nanoseconds_of(Int128 flops, const CostModel& cost);
// For that interface: the largest of its numbers for all that are larger.
std::int64_t saturated(Int128 value);

// The copies of a pass between host and device, and how much of each stage's is longer than its computing; saturated.
Plan::HostTime host_nanoseconds(const Problem& problem, const Program& program, Pass pass, const CostModel& cost);

// flops / F + received bytes / B + received messages * L + exposed copies, in nanoseconds.
Int128 modelled_nanoseconds(const Problem& problem, const Program& program, Pass pass, const CostModel& cost);

// The caller's tensors of the plan's rank in a pass.
std::vector<MemoryLine> caller_memory(const PlanData& data, Pass pass);

// The larger of both passes where the rank computes: the caller's tensors, the arena, and on a device what lies beside it.
std::int64_t peak_bytes(const PlanData& data);
// The same for the rank with PlanOptions::most_overhead: what a memory budget is compared with, alike on all ranks.
std::int64_t peak_bytes_of_any(const PlanData& data);
// The component that the peak pass spends most on.
MemoryLine dominating(const PlanData& data);

}  // namespace ringspan::internal
