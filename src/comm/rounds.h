// Who may use which round numbers of a communicator. Plans count from 0; what the ranks say to each other besides has rounds
// far above, so that a message that went astray between the two is recognised by its number.
#pragma once

#include <cstdint>
#include <string>

namespace ringspan {

inline constexpr std::uint64_t kPlanRounds = 0;  // [0, 2^62): rounds of plans
inline constexpr std::uint64_t kPlanRoundsEnd = std::uint64_t{1} << 62;
inline constexpr std::uint64_t kAgreeRounds = kPlanRoundsEnd;         // 64 of them: agree() before planning
inline constexpr std::uint64_t kPassRounds = kAgreeRounds + 64;       // 64 of them: before each execution
inline constexpr std::uint64_t kNcclRounds = kPassRounds + 64;        // 256 of them: joining NCCL
inline constexpr std::uint64_t kPlanAgreeRounds = kNcclRounds + 256;  // 64 of them: that the plans fit, before any execution
inline constexpr std::uint64_t kDeviceRounds =
    kAgreeRounds + (std::uint64_t{1} << 32);  // up to the next: what goes before messages in memory of devices
inline constexpr std::uint64_t kUserRounds = std::uint64_t{3} << 62;  // [3 * 2^62, 2^64): tools, tests and fronts
inline constexpr std::uint64_t kGreetingRounds = kUserRounds + (std::uint64_t{1} << 32);  // of these, 64: a front before a call

// As errors name it, counted from the start of its range: "round 14", "round 2 of the agreement on the problem".
std::string round_name(std::uint64_t round);

}  // namespace ringspan
