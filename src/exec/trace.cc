#include "exec/trace.h"

#include <fmt/format.h>

#include <string_view>

namespace ringspan::internal {
namespace {

constexpr const char* kLaneNames[] = {"compute", "communicate", "wait"};

// Stage names are ours, but a name must never break the file.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out;
}

}  // namespace

Trace::Trace(const PlanData& plan, bool enabled) : plan_(plan), enabled_(enabled), origin_(Clock::now()) {
  if (!enabled) return;
  // Per stage: before, messages, compute, wait; and the handshake.
  lines_[0].spans.reserve(plan.forward.stages.size() * 4 + 1);
  lines_[1].spans.reserve(plan.backward.stages.size() * 4 + 1);
}

void Trace::begin_pass(Pass pass) {
  if (!enabled_) return;
  current_ = pass == Pass::forward ? 0 : 1;
  PassLine& line = lines_[current_];
  line.spans.clear();
  line.recorded = true;
}

void Trace::add(Lane lane, std::int32_t stage, Clock::time_point begin, Clock::time_point end) {
  PassLine& line = lines_[current_];
  if (!enabled_ || line.spans.size() == line.spans.capacity()) return;
  line.spans.push_back({lane, stage, begin, end});
}

std::string Trace::json() const {
  using Microseconds = std::chrono::duration<double, std::micro>;
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  out += fmt::format(R"({{"ph":"M","pid":{0},"name":"process_name","args":{{"name":"rank {0}"}}}})", plan_.rank);
  for (int lane = 0; lane < 3; ++lane) {
    out += fmt::format(
        ",\n"
        R"({{"ph":"M","pid":{},"tid":{},"name":"thread_name","args":{{"name":"{}"}}}})",
        plan_.rank, lane, kLaneNames[lane]);
  }
  for (int pass = 0; pass < 2; ++pass) {
    const PassLine& line = lines_[pass];
    const Program& program = pass == 0 ? plan_.forward : plan_.backward;
    if (!line.recorded) continue;
    const auto event = [&](std::string_view name, int lane, Clock::time_point begin, Clock::time_point end) {
      out += fmt::format(
          ",\n"
          R"({{"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"cat":"{}","name":"{}"}})",
          plan_.rank, lane, Microseconds(begin - origin_).count(), Microseconds(end - begin).count(),
          pass == 0 ? "forward" : "backward", escaped(name));
    };
    for (const Span& span : line.spans) {
      // As views: the common type of a literal and a string would be a temporary string.
      const std::string_view handshake = "handshake";
      const std::string_view name = span.stage < 0 ? handshake : program.stages[static_cast<std::size_t>(span.stage)].name;
      event(name, static_cast<int>(span.lane), span.begin, span.end);
    }
  }
  out += "\n]}\n";
  return out;
}

}  // namespace ringspan::internal
