// Trace: the time line of the latest passes, in storage set aside when it is made.
//
// Recording allocates nothing and drops what does not fit (it cannot: sized by the plan). Not thread safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan_data.h"

namespace ringspan::internal {

class Trace {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Lane : std::uint8_t { compute, communicate, wait };

  // Disabled traces record nothing.
  Trace(const PlanData& plan, bool enabled);

  void begin_pass(Pass pass);
  // `stage` is the index in the pass's program, -1 for the handshake.
  void add(Lane lane, std::int32_t stage, Clock::time_point begin, Clock::time_point end);

  // Chrome trace format (chrome://tracing, Perfetto): process = rank, thread = lane, microseconds.
  std::string json() const;

 private:
  struct Span {
    Lane lane = Lane::compute;
    std::int32_t stage = -1;
    Clock::time_point begin, end;
  };
  struct PassLine {
    std::vector<Span> spans;
    bool recorded = false;
  };

  const PlanData& plan_;
  bool enabled_;
  Clock::time_point origin_;
  PassLine lines_[2];
  int current_ = 0;
};

}  // namespace ringspan::internal
