// What tests may tell the stand-in for NCCL, and ask it, beside NCCL's own functions; found in the library by name.
#pragma once

#include <cstdint>

// Faults, of one rank, from its n-th group on.
inline constexpr int kStandInNone = 0;
inline constexpr int kStandInStall = 1;       // the group moves no byte until the stand-in is told something else
inline constexpr int kStandInAsyncError = 2;  // ncclCommGetAsyncError tells of a remote error
inline constexpr int kStandInGroupFails = 3;  // ncclGroupEnd fails
inline constexpr int kStandInNeverJoins = 4;  // the communicator stays in progress
inline constexpr int kStandInCannotJoin = 5;  // ncclCommInitRankConfig fails, when this process has had n aborts

// Counts of this process: groups on streams so far, messages in them, aborts, communicators alive, groups that run.
enum StandInCount : int { kStandInGroups, kStandInMessages, kStandInAborts, kStandInLive, kStandInRunning };

extern "C" {
using StandInFault = void(int rank, int kind, int after);
using StandInCountOf = std::int64_t(int what);
}
