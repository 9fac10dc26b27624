// Amounts as people read them: four digits and a unit.
#pragma once

#include <string>

#include "base/int128.h"

namespace ringspan::internal {

std::string bytes_text(double bytes);           // "1.5 GiB", "312 B"
std::string flops_text(double flops);           // "18.01 PFLOP"
std::string duration_text(Int128 nanoseconds);  // "250.9 s", "2.085 days"

}  // namespace ringspan::internal
