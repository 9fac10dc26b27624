// Numbers as people write and read them. Pure. Parsing throws InvalidArgument that names the option and the value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan::cli {

// Whole numbers only; `option` is named in errors: "--ranks (x) must be a whole number".
std::int64_t parse_integer(std::string_view option, std::string_view text);
double parse_real(std::string_view option, std::string_view text);
// "8GiB", "512MiB", "1.5GB", "4096"; B, kB, KiB, MB, MiB, GB, GiB, TB, TiB, in any case.
std::int64_t parse_bytes(std::string_view option, std::string_view text);
// "0,100,250"
std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view text);

std::string bytes_text(double bytes);                             // "1.50 GiB", "312 B"
std::string seconds_text(double seconds);                         // "1.23 s", "45.6 ms", "3 min 20 s"
std::string count_text(std::int64_t count);                       // "1,048,576"
std::string rate_text(double per_second, std::string_view unit);  // "12.3 Gflop/s", "1.20 Mtokens/s"
std::string percent_text(double share);                           // "12.3 %"

}  // namespace ringspan::cli
