#include "text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "ringspan/error.h"

namespace ringspan::cli {
namespace {

constexpr double kLargest = 9.0e18;  // just below 2^63

template <typename T>
bool parse_whole(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr std::array<Unit, 17> kUnits{Unit{"B", 1},
                                      Unit{"k", 1e3},
                                      Unit{"kB", 1e3},
                                      Unit{"KiB", 1024.0},
                                      Unit{"M", 1e6},
                                      Unit{"MB", 1e6},
                                      Unit{"MiB", 1048576.0},
                                      Unit{"G", 1e9},
                                      Unit{"GB", 1e9},
                                      Unit{"GiB", 1073741824.0},
                                      Unit{"T", 1e12},
                                      Unit{"TB", 1e12},
                                      Unit{"TiB", 1099511627776.0},
                                      Unit{"P", 1e15},
                                      Unit{"PB", 1e15},
                                      Unit{"PiB", 1125899906842624.0},
                                      Unit{"", 1}};

}  // namespace

std::int64_t parse_integer(std::string_view option, std::string_view text) {
  std::int64_t value = 0;
  if (!parse_whole(text, value)) throw InvalidArgument(fmt::format("{} ({}) must be a whole number", option, text));
  return value;
}

std::uint64_t parse_seed(std::string_view option, std::string_view text) {
  std::uint64_t value = 0;
  if (!parse_whole(text, value))
    throw InvalidArgument(fmt::format("{} ({}) must be a whole number in [0, 2^64)", option, text));
  return value;
}

double parse_real(std::string_view option, std::string_view text) {
  double value = 0;
  if (!parse_whole(text, value) || !std::isfinite(value))
    throw InvalidArgument(fmt::format("{} ({}) must be a number", option, text));
  return value;
}

std::int64_t parse_bytes(std::string_view option, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view suffix = text.substr(static_cast<std::size_t>(end - text.data()));
  while (suffix.starts_with(' ')) suffix.remove_prefix(1);
  const auto* unit =
      std::find_if(kUnits.begin(), kUnits.end(), [&](const Unit& u) { return equal_ignoring_case(u.name, suffix); });
  const bool number = error == std::errc() && value >= 0;  // not NaN
  if (!number || unit == kUnits.end() || value * unit->bytes > kLargest) {
    throw InvalidArgument(fmt::format("{} ({}) must be a number of bytes, such as 8GiB, 512MiB or 1000000", option, text));
  }
  return static_cast<std::int64_t>(std::llround(value * unit->bytes));
}

std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view text) {
  std::vector<std::int64_t> values;
  while (true) {
    const std::size_t comma = std::min(text.find(','), text.size());
    std::int64_t value = 0;
    if (!parse_whole(text.substr(0, comma), value)) {
      throw InvalidArgument(fmt::format("{} must be whole numbers separated by commas, but entry {} is '{}'", option,
                                        values.size(), text.substr(0, comma)));
    }
    values.push_back(value);
    if (comma == text.size()) return values;
    text.remove_prefix(comma + 1);
  }
}

std::string seconds_text(double seconds) {
  if (seconds >= 120) return fmt::format("{} min {:02} s", std::llround(seconds) / 60, std::llround(seconds) % 60);
  if (seconds >= 1) return fmt::format("{:.3g} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} us", seconds * 1e6);
}

std::string count_text(std::int64_t count) {
  const std::string digits = std::to_string(count);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    const bool separated = i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-';
    if (separated) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string rate_text(double per_second, std::string_view unit) {
  constexpr std::array<std::string_view, 5> kPrefixes{"", "k", "M", "G", "T"};
  std::size_t prefix = 0;
  while (per_second >= 1000 && prefix + 1 < kPrefixes.size()) {
    per_second /= 1000;
    ++prefix;
  }
  return fmt::format("{:.3g} {}{}/s", per_second, kPrefixes[prefix], unit);
}

std::string percent_text(double share) { return fmt::format("{:.1f} %", 100 * share); }

std::string counted(std::int64_t count, std::string_view thing) {
  return fmt::format("{} {}{}", count_text(count), thing, count == 1 ? "" : "s");
}

std::string printable(std::string text, char kept) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0xff; };
    if (byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0) text[i] = text[i + 1] = '?';  // U+0080 to U+009f
    const bool keeps = kept != '\0' && text[i] == kept;
    if ((byte(i) < 0x20 && !keeps) || byte(i) == 0x7f) text[i] = '?';
  }
  return text;
}

}  // namespace ringspan::cli
