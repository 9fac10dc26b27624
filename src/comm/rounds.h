// Who may use which round numbers of a communicator. Plans count from 0; what the ranks say to each other besides has rounds
// far above, so that a message that went astray between the two is recognised by its number.
#pragma once

#include <cstdint>

namespace ringspan {

inline constexpr std::uint64_t kPlanRounds = 0;  // [0, 2^62): rounds of plans
inline constexpr std::uint64_t kPlanRoundsEnd = std::uint64_t{1} << 62;
inline constexpr std::uint64_t kAgreeRounds = kPlanRoundsEnd;           // 64 of them: agree() before planning
inline constexpr std::uint64_t kFingerprintRounds = kAgreeRounds + 64;  // 64 of them: before each execution
inline constexpr std::uint64_t kUserRounds = std::uint64_t{3} << 62;    // [3 * 2^62, 2^64): tools and tests

}  // namespace ringspan
