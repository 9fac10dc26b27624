// Handshake: before they plan, ranks make sure that they were given the same problem and options.
//
// Cost: ceil(log2 p) messages of some kilobytes per rank, see comm/agree.h. Collective.
#pragma once

#include <cstdint>
#include <exception>

#include "ringspan/communicator.h"
#include "ringspan/plan.h"

namespace ringspan::internal {

// Agrees field by field on everything that decides the plan; threads, the names of kernels and their tiles may differ, and the
// memory budget and the tuned rows of a bucket become the smallest ones of all ranks, the overhead that the budget leaves room
// for the largest. options.device is what this rank computes on. Returns the options to plan with. Throws,
// on all ranks: CommError that names the first field that differs, with two ranks and their values, or the error of the lowest
// rank whose own problem is invalid. The communicator stays usable.
PlanOptions agree_on_problem(Communicator& communicator, const Problem& problem, const PlanOptions& options,
                             Communicator::Seconds deadline);

// For a rank that cannot even make a problem, or a plan, of its arguments: takes part in the agreement of the others, which
// begins with `first_round`, with its error, so that all ranks throw it (or that of a lower rank). agree_on_problem():
// kAgreeRounds; agree_on_plan(): kPlanAgreeRounds; joining NCCL: kNcclRounds.
[[noreturn]] void refuse(Communicator& communicator, const std::exception_ptr& own_error, Communicator::Seconds deadline,
                         std::uint64_t first_round);

// That plans fit together, which may have been made apart; nullptr with the error of a rank that has none. Returns a number
// that no other attention of the communicator has, the same on all ranks. Throws, on all ranks, the error of the lowest rank
// that has one, or CommError that names the first difference.
std::uint64_t agree_on_plan(Communicator& communicator, const Plan* plan, const std::exception_ptr& own_error,
                            Communicator::Seconds deadline);

// Throws InvalidArgument unless the deadline is positive; a rank that was given another one still takes part with
// usable_deadline(), to say so.
void check_deadline(Communicator::Seconds deadline);
Communicator::Seconds usable_deadline(Communicator::Seconds deadline);

}  // namespace ringspan::internal
