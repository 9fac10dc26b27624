// MessageMirror: host memory for the parts of a device's arena that messages lie in, since a communicator moves host memory.
//
// Its parts and size are the plan's (plan/device_memory.h), no larger than the slots that messages lie in. Cost: one
// allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exec/device.h"
#include "plan/device_memory.h"

namespace ringspan::internal {

class MessageMirror {
 public:
  // Holds every transfer of the programs; both may be empty.
  MessageMirror(Device& device, const Program& forward, const Program& backward);
  ~MessageMirror();
  MessageMirror(const MessageMirror&) = delete;
  MessageMirror& operator=(const MessageMirror&) = delete;

  std::byte* at(std::int64_t arena_offset) const;

 private:
  Device& device_;
  std::vector<MessagePart> parts_;
  std::byte* data_ = nullptr;
};

}  // namespace ringspan::internal
