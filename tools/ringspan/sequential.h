// run --sequential: the ranks of a plan one after the other, in one arena, so that the memory of one rank is all it takes.
//
// Every rank runs its own program of the strategy exchange, unchanged, over a communicator that has no peers: rows of k and v
// that a peer would send are copied from the mapped input, at the positions that the plan names; partial dk and dv that a peer
// would add are added to an accumulator on disk. What other ranks would return to this one is received as zeros, because their
// parts reach the accumulator from their side.
//
// Memory: the arena of the largest rank and one rank's tensors; the mapped rows are let go of while running. dk and dv are
// accumulated in float32, whatever the storage dtype, in a file without a name in the directory of the output.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rank_work.h"

namespace ringspan::cli {

struct SequentialReport {
  WorldReport world;                // seconds: the sum over the ranks
  std::int64_t forecast_bytes = 0;  // of the largest rank: tensors and arena
  std::int64_t peak_bytes = 0;      // resident, beyond what was resident before the first rank, at its peak
};

// Throws Unsupported unless the plan is an exchange over sharded queries. `scratch_directory`: where the accumulator is put.
SequentialReport run_sequentially(const Problem& problem, const PlanOptions& plan, const Inputs& inputs, Layout layout,
                                  const WorldOptions& options, const std::string& scratch_directory, Target& target);

}  // namespace ringspan::cli
