#include "base/quantity.h"

#include <fmt/format.h>

#include <cmath>
#include <initializer_list>
#include <iterator>

namespace ringspan::internal {
namespace {

// From `most` on, four digits would show a whole next unit.
std::string scaled(double value, double base, double most, std::initializer_list<const char*> units, const char* after) {
  auto unit = units.begin();
  while (std::abs(value) >= most && std::next(unit) != units.end()) {
    value /= base;
    ++unit;
  }
  return unit == units.begin() ? fmt::format("{:.0f} {}{}", value, *unit, after)
                               : fmt::format("{:.4g} {}{}", value, *unit, after);
}

}  // namespace

std::string bytes_text(double bytes) { return scaled(bytes, 1024, 1023.5, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"}, ""); }

std::string flops_text(double flops) { return scaled(flops, 1000, 999.95, {"", "K", "M", "G", "T", "P", "E"}, "FLOP"); }

std::string duration_text(Int128 nanoseconds) {
  const auto value = static_cast<double>(nanoseconds);
  constexpr double kHour = 3600e9, kDay = 24 * kHour, kYear = 365.25 * kDay;
  if (nanoseconds < 1000) return fmt::format("{} ns", static_cast<int>(nanoseconds));
  if (nanoseconds < 1'000'000) return fmt::format("{:.4g} us", value / 1e3);
  if (nanoseconds < 1'000'000'000) return fmt::format("{:.4g} ms", value / 1e6);
  if (value < 2 * kHour) return fmt::format("{:.4g} s", value / 1e9);
  if (value < 2 * kDay) return fmt::format("{:.4g} hours", value / kHour);
  if (value < 2 * kYear) return fmt::format("{:.4g} days", value / kDay);
  return fmt::format("{:.4g} years", value / kYear);
}

}  // namespace ringspan::internal
