// Simulate: all ranks of a plan as threads of this process, on whole tensors: what N processes would compute, with the same
// messages. Rows are copied into each rank's shard and back.
//
// Cost: a copy of the tensors, the ranks' arenas, N threads. `saved` holds what each rank keeps for backward, one after the
// other.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ringspan/attention.h"
#include "ringspan/transports.h"

namespace ringspan::python {

void simulate_forward(const std::vector<Plan>& plans, const ForwardTensors& whole, std::span<std::byte> saved);
void simulate_backward(const std::vector<Plan>& plans, const BackwardTensors& whole, std::span<const std::byte> saved);

// The same on tensors that are sharded already, by rank, where `execute` says: all of it is memory of that device, and the
// results are there when this returns.
void simulate_forward(const std::vector<Plan>& plans, const std::vector<ForwardTensors>& shards, std::span<std::byte> saved,
                      const ExecuteOptions& execute);
void simulate_backward(const std::vector<Plan>& plans, const std::vector<BackwardTensors>& shards,
                       std::span<const std::byte> saved, const ExecuteOptions& execute);

}  // namespace ringspan::python
