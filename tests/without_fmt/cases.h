// Every kind of format string of the library, rendered by the <fmt/format.h> that the including file was compiled with.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

template <typename T>
T random_number(std::mt19937_64& random) {
  for (;;) {
    const std::uint64_t bits = random();
    T x;
    static_assert(sizeof x <= sizeof bits);
    __builtin_memcpy(&x, &bits, sizeof x);
    if (x == x) return x;
  }
}

template <typename T>
void floating_cases(std::vector<std::string>& out, T x) {
  out.push_back(fmt::format("{} {:f} {:g} {:.4g} {:.0f} {:.1f} {:.3f}", x, x, x, x, x, x, x));
  if (std::isfinite(x)) out.push_back(fmt::format("{:12g}|", x));  // {fmt} 9 pads infinities on the other side
}

std::vector<std::string> rendered() {
  std::vector<std::string> out;
  std::mt19937_64 random(20261121);
  for (int i = 0; i < 5000; ++i) {
    const std::uint64_t bits = random() >> (random() % 64);
    const auto number = static_cast<std::int64_t>(bits);
    out.push_back(
        fmt::format("{} {} {:x} {:016x} {:#018x} {:6}|{:d} {:#x}", number, -number, bits, bits, bits, number, number, bits));
    floating_cases(out, random_number<double>(random));
    floating_cases(out, random_number<float>(random));
    floating_cases(out, static_cast<double>(number) / 1024);
    out.push_back(fmt::format("{:a}", static_cast<double>(number) / 1024));
  }
  for (const double x : {0.0, -0.0, 1.0, 0.1, 1e-4, 9.9999e-5, 1e15, 1e16, 123456789012345678.0, 1e100, 5e-324}) {
    floating_cases(out, x);
    floating_cases(out, static_cast<float>(x));
    if (x != 5e-324) out.push_back(fmt::format("{:a}", x));
  }
  using Limits = std::numeric_limits<double>;
  for (const double x : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::max(), Limits::min()})
    floating_cases(out, x);
  using Whole = std::numeric_limits<std::int64_t>;
  out.push_back(
      fmt::format("{} {} {} {}", Whole::min(), Whole::max(), std::int8_t{-5}, std::numeric_limits<std::uint64_t>::max()));
  const std::string text = "text";
  const char* const letters = "letters";
  out.push_back(fmt::format("{}{{}}{} {:6}|{} {} {:3}|{}", text, letters, std::string_view("view"), 'c', true, 'c', false));
  out.push_back(fmt::format("{} {}", fmt::join(std::vector<int>{1, 2, 3}, ", "), fmt::join(std::vector<std::string>{}, "&")));
  out.push_back(fmt::format("{}", fmt::ptr(reinterpret_cast<const int*>(0x7f00'1234))));
  out.push_back(fmt::format("{:>{}}|{:>{}}|{:{}}|{:>6}|{:{}}", '^', 5, "text", std::size_t{9}, text, 7, text, 12, 8));
  out.push_back(fmt::format("{0} {1} {0} {1:6}", 1, 2));
  std::string to;
  fmt::format_to(std::back_inserter(to), "{:6} {}", 7, text);
  out.push_back(to);
  return out;
}

}  // namespace
