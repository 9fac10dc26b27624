#include "base/int128.h"

#include <algorithm>

namespace ringspan {

std::string to_string(Int128 value) {
  if (value == 0) return "0";
  __extension__ using UInt128 = unsigned __int128;
  const bool negative = value < 0;
  // Negated as unsigned: the smallest value has no positive counterpart.
  UInt128 magnitude = negative ? UInt128{0} - static_cast<UInt128>(value) : static_cast<UInt128>(value);
  std::string text;
  for (; magnitude > 0; magnitude /= 10) text += static_cast<char>('0' + static_cast<int>(magnitude % 10));
  if (negative) text += '-';
  std::reverse(text.begin(), text.end());
  return text;
}

}  // namespace ringspan
