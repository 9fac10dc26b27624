// 128-bit counts: n^2 pairs times heads overflow 64 bits at a billion tokens.
#pragma once

#include <cstdint>
#include <string>

namespace ringspan {

__extension__ using Int128 = __int128;

std::string to_string(Int128 value);

}  // namespace ringspan
