#include "comm/rounds.h"

#include <fmt/format.h>

namespace ringspan {

std::string round_name(std::uint64_t round) {
  struct Range {
    std::uint64_t first, end;
    const char* name;
  };
  static constexpr Range kRanges[] = {
      {kAgreeRounds, kPassRounds, "of the agreement on the problem"},
      {kPassRounds, kNcclRounds, "of the agreement on the pass"},
      {kNcclRounds, kPlanAgreeRounds, "of joining NCCL"},
      {kPlanAgreeRounds, kPlanAgreeRounds + 64, "of the agreement on the plan"},
      {kDeviceRounds, kUserRounds, "of the greetings before messages of devices"},
      {kGreetingRounds, kGreetingRounds + 64, "of the greeting before the call"},
  };
  for (const Range& range : kRanges) {
    if (round >= range.first && round < range.end) return fmt::format("round {} {}", round - range.first, range.name);
  }
  return round >= kUserRounds ? fmt::format("user round {}", round - kUserRounds) : fmt::format("round {}", round);
}

}  // namespace ringspan
