// Arena: the one block of scratch memory of a rank, the caller's or ours.
//
// Cost: one allocation at most, in the constructor; pages of an owned arena are touched only when first used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "exec/device.h"

namespace ringspan::internal {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;

  // Uses `given` where it is not empty: at least `bytes` long and aligned to kAlignment, otherwise InvalidArgument; none
  // to be had: OutOfBudget. With a device, memory of that device; it must live longer.
  Arena(std::int64_t bytes, std::span<std::byte> given, Device* device = nullptr);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  bool owned_ = false;
  Device* device_ = nullptr;
};

// Throws InvalidArgument unless `given` may serve as an arena of `bytes` bytes (an empty span may: it means "allocate").
void check_arena(std::int64_t bytes, std::span<const std::byte> given);

}  // namespace ringspan::internal
