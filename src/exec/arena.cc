#include "exec/arena.h"

#include <fmt/format.h>

#include <new>

#include "ringspan/error.h"

namespace ringspan::internal {

namespace {

std::byte* allocate(std::int64_t bytes) {
  void* const data = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{Arena::kAlignment}, std::nothrow);
  if (data == nullptr) {
    throw OutOfBudget(
        fmt::format("out of memory: the arena needs {} bytes; a rank takes less with more ranks, smaller buckets "
                    "or a memory budget",
                    bytes));
  }
  return static_cast<std::byte*>(data);
}

}  // namespace

void check_arena(std::int64_t bytes, std::span<const std::byte> given) {
  if (given.empty()) return;
  if (static_cast<std::int64_t>(given.size()) < bytes) {
    throw InvalidArgument(fmt::format("arena has {} bytes, but the plan needs {}", given.size(), bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(given.data()) % Arena::kAlignment != 0) {
    throw InvalidArgument(fmt::format("arena ({}) must be aligned to {} bytes", fmt::ptr(given.data()), Arena::kAlignment));
  }
}

Arena::Arena(std::int64_t bytes, std::span<std::byte> given, Device* device) : bytes_(bytes), device_(device) {
  check_arena(bytes, given);
  if (!given.empty()) {
    if (device != nullptr && !device->holds(given.data())) {
      throw InvalidArgument(fmt::format("arena ({}) is not memory of {}", fmt::ptr(given.data()), device->name()));
    }
    data_ = given.data();
    return;
  }
  if (bytes == 0) return;
  data_ = device != nullptr ? device->allocate(bytes) : allocate(bytes);
  owned_ = true;
}

Arena::~Arena() {
  if (!owned_) return;
  if (device_ != nullptr) {
    device_->release(data_);
  } else {
    ::operator delete(data_, std::align_val_t{kAlignment});
  }
}

}  // namespace ringspan::internal
