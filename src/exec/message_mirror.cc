#include "exec/message_mirror.h"

#include <algorithm>

#include "base/check.h"

namespace ringspan::internal {

MessageMirror::MessageMirror(Device& device, const Program& forward, const Program& backward)
    : device_(device), parts_(message_parts(forward, backward)) {
  if (const std::int64_t bytes = mirror_bytes(parts_); bytes > 0) data_ = device.allocate_host(bytes);
}

MessageMirror::~MessageMirror() {
  if (data_ != nullptr) device_.release_host(data_);
}

std::byte* MessageMirror::at(std::int64_t arena_offset) const {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), arena_offset,
                                      [](std::int64_t offset, const MessagePart& part) { return offset < part.begin; });
  RINGSPAN_CHECK(after != parts_.begin());
  const MessagePart& part = *std::prev(after);
  RINGSPAN_CHECK(arena_offset < part.end);
  return data_ + part.offset + (arena_offset - part.begin);
}

}  // namespace ringspan::internal
