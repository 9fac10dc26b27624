// MessageMirror: host memory for the parts of a device's arena that messages lie in, since a communicator moves host memory.
//
// Parts that overlap in the arena share their host memory, so that it is no larger than the slots are. Cost: one allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exec/device.h"
#include "plan/plan_data.h"

namespace ringspan::internal {

class MessageMirror {
 public:
  // Holds every transfer of the programs; both may be empty.
  MessageMirror(Device& device, const Program& forward, const Program& backward);
  ~MessageMirror();
  MessageMirror(const MessageMirror&) = delete;
  MessageMirror& operator=(const MessageMirror&) = delete;

  std::byte* at(std::int64_t arena_offset) const;
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Part {
    std::int64_t begin, end;  // in the arena
    std::int64_t offset;      // here
  };
  Device& device_;
  std::vector<Part> parts_;  // disjoint, ascending
  std::int64_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace ringspan::internal
