#include "exec/message_mirror.h"

#include <algorithm>

#include "base/check.h"

namespace ringspan::internal {

MessageMirror::MessageMirror(Device& device, const Program& forward, const Program& backward) : device_(device) {
  for (const Program* program : {&forward, &backward}) {
    for (const Stage& stage : program->stages) {
      for (const Round& round : stage.rounds) {
        for (const Transfer& transfer : round.transfers) {
          parts_.push_back({transfer.offset, transfer.offset + transfer.bytes, 0});
        }
      }
    }
  }
  std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const Part& part : parts_) {
    if (kept > 0 && part.begin < parts_[kept - 1].end) {
      parts_[kept - 1].end = std::max(parts_[kept - 1].end, part.end);
    } else {
      parts_[kept++] = part;
    }
  }
  parts_.resize(kept);
  for (Part& part : parts_) {
    part.offset = bytes_;
    bytes_ += (part.end - part.begin + 63) / 64 * 64;
  }
  if (bytes_ > 0) data_ = device.allocate_host(bytes_);
}

MessageMirror::~MessageMirror() {
  if (data_ != nullptr) device_.release_host(data_);
}

std::byte* MessageMirror::at(std::int64_t arena_offset) const {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), arena_offset,
                                      [](std::int64_t offset, const Part& part) { return offset < part.begin; });
  RINGSPAN_CHECK(after != parts_.begin());
  const Part& part = *std::prev(after);
  RINGSPAN_CHECK(arena_offset < part.end);
  return data_ + part.offset + (arena_offset - part.begin);
}

}  // namespace ringspan::internal
