// Texts that must fit a place of fixed size.
#pragma once

#include <cstddef>
#include <string_view>

namespace ringspan::internal {

// The first `bytes` bytes of a UTF-8 text, or all of it, without a character at the end that is not whole. Of what is not UTF-8
// at most three bytes are lost.
inline std::string_view cut_text(std::string_view text, std::size_t bytes) {
  text = text.substr(0, bytes);
  const auto byte_at = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  std::size_t last = text.size();  // begin of the last character
  while (last > 0 && text.size() - last < 4) {
    if ((byte_at(--last) & 0xC0) != 0x80) break;  // not one that continues
  }
  if (last == text.size()) return text;
  const unsigned char lead = byte_at(last);
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
  return text.size() - last < length ? text.substr(0, last) : text;
}

}  // namespace ringspan::internal
