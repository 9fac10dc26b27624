// The JSON header of a safetensors file: text <-> tensors. Private to io.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace ringspan::io {

struct Header {
  std::vector<TensorInfo> tensors;  // in the order of their data; offsets from the start of the file
  Metadata metadata;
};

// `text` starts at byte 8 and the data follows it; every check throws InvalidArgument beginning with `path`.
Header parse_header(const std::string& path, std::string_view text, std::int64_t file_bytes);

// The bytes in front of the data: length and JSON, padded so that the data is aligned to 8; tensors are laid out by falling
// element size, so that each is aligned to its element. `tensors` receives the layout.
std::string make_header(const std::string& path, std::span<const TensorSpec> specs, const Metadata& metadata,
                        std::vector<TensorInfo>& tensors);

}  // namespace ringspan::io
