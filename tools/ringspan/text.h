// Numbers and names as people and programs write and read them. Pure. Parsing throws InvalidArgument that names the option and
// the value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/quantity.h"

namespace ringspan::cli {

using internal::bytes_text;

// Whole numbers only; `option` is named in errors: "--ranks (x) must be a whole number".
std::int64_t parse_integer(std::string_view option, std::string_view text);
// [0, 2^64)
std::uint64_t parse_seed(std::string_view option, std::string_view text);
double parse_real(std::string_view option, std::string_view text);
// "8GiB", "512MiB", "1.5GB", "4096"; B, kB, KiB, MB, MiB, GB, GiB, TB, TiB, in any case.
std::int64_t parse_bytes(std::string_view option, std::string_view text);
// "0,100,250"
std::vector<std::int64_t> parse_integers(std::string_view option, std::string_view text);

std::string seconds_text(double seconds);                         // "1.23 s", "45.6 ms", "3 min 20 s"
std::string count_text(std::int64_t count);                       // "1,048,576"
std::string rate_text(double per_second, std::string_view unit);  // "12.3 Gflop/s", "1.20 Mtokens/s"
std::string percent_text(double share);                           // "12.3 %"
std::string counted(std::int64_t count, std::string_view thing);  // "1 rank", "1,024 ranks"

// What a hostile file or argument says must not control the terminal: without control characters, of which one may be kept
// ('\0': none).
std::string printable(std::string text, char kept = '\0');

// Of nlohmann's types, which stay out of headers: names of files need not be UTF-8.
template <typename Json>
std::string json_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace ringspan::cli
