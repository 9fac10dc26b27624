// "did you mean": the known name nearest to a mistyped one.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ringspan::cli {

// "; did you mean --strategy?", or nothing where no known name is near.
std::string did_you_mean(std::string_view typed, std::span<const std::string> known);

}  // namespace ringspan::cli
