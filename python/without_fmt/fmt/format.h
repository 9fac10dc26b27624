// The part of {fmt} that the library uses, for wheels: `pip install .` needs no headers of the distribution and links no
// libfmt.
//
// Contract: `{}` of integers, bool, char, floating point, text and pointers; [>][#][0][width][.precision] with the types d x
// (integers) and f g a (floating point), the width a number or {}; {0}; join. The output is that of {fmt} 9 (tests/without_fmt
// compares), and a format string that leaves this part, or does not fit its arguments, does not compile. Everything else in the
// project is built with {fmt} itself. Cost: one std::string. Thread safety: no state; locales are not looked at.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace fmt {

struct JoinedText {
  std::string text;
};

namespace detail {

using Value = std::variant<bool, char, std::int64_t, std::uint64_t, float, double, std::string_view, const void*>;

template <typename T>
Value value_of(const T& x) {
  if constexpr (std::same_as<T, bool> || std::same_as<T, char> || std::same_as<T, float> || std::same_as<T, double>) {
    return x;
  } else if constexpr (std::signed_integral<T>) {
    return std::int64_t{x};
  } else if constexpr (std::unsigned_integral<T>) {
    return std::uint64_t{x};
  } else if constexpr (std::same_as<T, JoinedText>) {
    return std::string_view(x.text);
  } else if constexpr (std::same_as<T, const void*>) {
    return x;
  } else {
    return std::string_view(x);
  }
}

enum class Kind { integer, floating, other };

template <typename T>
constexpr Kind kind_of() {
  if constexpr (std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>) return Kind::integer;
  if constexpr (std::floating_point<T>) return Kind::floating;
  return Kind::other;
}

struct Spec {
  int index = -1;       // {0}; or the next argument
  bool right = false;   // '>'
  bool prefix = false;  // '#'
  bool zeros = false;
  int width = 0;
  bool width_is_argument = false;  // {:{}}
  int precision = -1;
  char type = 0;
};

constexpr int number_at(std::string_view text, std::size_t& at) {
  int number = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') number = 10 * number + (text[at++] - '0');
  return number;
}

// The spec behind text[at] == '{'; at ends behind its '}'. Throws, which in a constant expression means: does not compile.
constexpr Spec spec_at(std::string_view text, std::size_t& at) {
  Spec spec;
  if (++at < text.size() && text[at] >= '0' && text[at] <= '9') spec.index = number_at(text, at);
  if (at < text.size() && text[at] == ':') {
    ++at;
    if (at < text.size() && text[at] == '>') spec.right = true, ++at;
    if (at < text.size() && text[at] == '#') spec.prefix = true, ++at;
    if (at < text.size() && text[at] == '0') spec.zeros = true, ++at;
    spec.width = number_at(text, at);
    if (text.substr(at, 2) == "{}") spec.width_is_argument = true, at += 2;
    if (at < text.size() && text[at] == '.') spec.precision = number_at(text, ++at);
    if (at < text.size() && text[at] != '}') spec.type = text[at++];
  }
  if (at >= text.size() || text[at] != '}') throw "a format spec that python/without_fmt does not have";
  ++at;
  return spec;
}

constexpr void check_spec(const Spec& spec, Kind kind) {
  const std::string_view types = kind == Kind::integer ? "dx" : kind == Kind::floating ? "fga" : "";
  if (spec.type != 0 && types.find(spec.type) == types.npos) throw "a format type that does not fit the argument";
  if (kind == Kind::floating && spec.precision >= 0 && spec.type == 0) throw "a precision without a type";
  if (kind != Kind::floating && spec.precision >= 0) throw "a precision of what is not floating point";
  if ((spec.zeros || spec.prefix) && kind != Kind::integer) throw "a flag of what is not an integer";
}

inline std::string digits_of(std::uint64_t x, int base) {
  std::array<char, 24> buffer;
  return {buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), x, base).ptr};
}

inline std::string integer_text(std::uint64_t magnitude, bool negative, const Spec& spec) {
  const int base = spec.type == 'x' ? 16 : 10;
  const std::string head = std::string(negative ? "-" : "") + (spec.prefix && base == 16 ? "0x" : "");
  std::string digits = digits_of(magnitude, base);
  const std::size_t want = static_cast<std::size_t>(spec.zeros ? spec.width : 0);
  if (head.size() + digits.size() < want) digits.insert(0, want - head.size() - digits.size(), '0');
  return head + digits;
}

// The shortest digits that read back as x; decimal for exponents in [-4, 16), as {fmt} has it.
template <typename T>
std::string shortest_text(T x) {
  std::array<char, 64> buffer;
  std::string text(buffer.data(),
                   std::to_chars(buffer.data(), buffer.data() + buffer.size(), x, std::chars_format::scientific).ptr);
  const std::size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return text;
  std::string digits = text.substr(0, e);
  if (digits.size() > 1) digits.erase(1, 1);  // the point
  if (exponent < 0) return "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  const std::size_t whole = static_cast<std::size_t>(exponent) + 1;
  if (digits.size() <= whole) return digits + std::string(whole - digits.size(), '0');
  return digits.insert(whole, 1, '.');
}

template <typename T>
std::string floating_text(T x, const Spec& spec) {
  const std::string sign = std::signbit(x) ? "-" : "";
  x = std::abs(x);
  if (!std::isfinite(x)) return sign + (std::isnan(x) ? "nan" : "inf");
  if (spec.type == 0) return sign + shortest_text(x);
  std::array<char, 512> buffer;
  char* const end = buffer.data() + buffer.size();
  if (spec.type == 'a')
    return sign + "0x" + std::string(buffer.data(), std::to_chars(buffer.data(), end, x, std::chars_format::hex).ptr);
  const std::chars_format format = spec.type == 'f' ? std::chars_format::fixed : std::chars_format::general;
  const int precision = spec.precision < 0 ? 6 : spec.precision;
  return sign + std::string(buffer.data(), std::to_chars(buffer.data(), end, double{x}, format, precision).ptr);
}

struct TextOf {
  const Spec& spec;
  std::string operator()(bool x) const { return x ? "true" : "false"; }
  std::string operator()(char x) const { return {x}; }
  std::string operator()(std::int64_t x) const {
    return integer_text(x < 0 ? -static_cast<std::uint64_t>(x) : static_cast<std::uint64_t>(x), x < 0, spec);
  }
  std::string operator()(std::uint64_t x) const { return integer_text(x, false, spec); }
  std::string operator()(float x) const { return floating_text(x, spec); }
  std::string operator()(double x) const { return floating_text(x, spec); }
  std::string operator()(std::string_view x) const { return std::string(x); }
  std::string operator()(const void* x) const { return "0x" + digits_of(reinterpret_cast<std::uintptr_t>(x), 16); }
};

inline void append(std::string& out, const Value& value, const Spec& spec) {
  const std::string text = std::visit(TextOf{spec}, value);
  const std::size_t width = static_cast<std::size_t>(spec.width);
  const std::size_t padding = text.size() < width ? width - text.size() : 0;
  const bool left = std::holds_alternative<std::string_view>(value) || std::holds_alternative<char>(value) ||
                    std::holds_alternative<bool>(value);
  if (spec.right || !left) out.append(padding, ' ');
  out += text;
  if (left && !spec.right) out.append(padding, ' ');
}

struct WidthOf {
  template <typename T>
  int operator()(const T& x) const {
    if constexpr (std::same_as<T, std::int64_t> || std::same_as<T, std::uint64_t>) return static_cast<int>(x);
    return 0;  // no other passes the constructor of BasicFormatString
  }
};

[[gnu::noinline]] inline std::string formatted(std::string_view text, const Value* values) {
  std::string out;
  std::size_t next = 0;
  for (std::size_t at = 0; at < text.size();) {
    if ((text[at] == '{' || text[at] == '}') &&
        text[at + 1] == text[at]) {  // the constructor of BasicFormatString has seen a pair
      out += text[at];
      at += 2;
    } else if (text[at] == '{') {
      Spec spec = spec_at(text, at);
      const Value& value = values[spec.index >= 0 ? static_cast<std::size_t>(spec.index) : next++];
      if (spec.width_is_argument) spec.width = std::visit(WidthOf{}, values[next++]);
      append(out, value, spec);
    } else {
      out += text[at++];
    }
  }
  return out;
}

template <typename... Args>
struct BasicFormatString {
  template <typename Text>
    requires std::convertible_to<const Text&, std::string_view>
  consteval BasicFormatString(const Text& given) : text(given) {  // NOLINT(google-explicit-constructor)
    constexpr std::array<Kind, sizeof...(Args) + 1> kKinds{kind_of<std::remove_cvref_t<Args>>()..., Kind::other};
    std::size_t next = 0, used = 0;
    for (std::size_t at = 0; at < text.size();) {
      const bool twice = at + 1 < text.size() && text[at + 1] == text[at];
      if ((text[at] == '{' || text[at] == '}') && twice) {
        at += 2;
      } else if (text[at] == '}') {
        throw "a '}' without its '{'";
      } else if (text[at] == '{') {
        const Spec spec = spec_at(text, at);
        const std::size_t index = spec.index >= 0 ? static_cast<std::size_t>(spec.index) : next++;
        if (index >= sizeof...(Args)) throw "fewer arguments than the format string names";
        check_spec(spec, kKinds[index]);
        if (spec.width_is_argument && kKinds[next++] != Kind::integer) throw "a width that is not an integer argument";
        used = std::max({used, next, index + 1});
      } else {
        ++at;
      }
    }
    if (used != sizeof...(Args)) throw "more arguments than the format string names";
  }

  std::string_view text;
};

}  // namespace detail

template <typename... Args>
using format_string = detail::BasicFormatString<std::type_identity_t<Args>...>;

template <typename... Args>
std::string format(format_string<Args...> format, Args&&... args) {
  const std::array<detail::Value, sizeof...(Args) + 1> values{detail::value_of<std::decay_t<Args>>(args)...};
  return detail::formatted(format.text, values.data());
}

template <typename Output, typename... Args>
Output format_to(Output output, format_string<Args...> text, Args&&... args) {
  const std::string formatted = format<Args...>(text, static_cast<Args&&>(args)...);
  return std::copy(formatted.begin(), formatted.end(), output);
}

template <typename Range>
JoinedText join(const Range& range, std::string_view separator) {
  JoinedText joined;
  bool first = true;
  for (const auto& item : range) {
    if (!first) joined.text += separator;
    first = false;
    joined.text += format("{}", item);
  }
  return joined;
}

template <typename T>
const void* ptr(const T* pointer) {
  return pointer;
}

}  // namespace fmt
