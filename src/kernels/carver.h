// Carver: cuts scratch into arrays aligned to 64 bytes. With a null base it only counts, so that one function describes a
// layout both at plan time and when it is used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringspan::kernels {

class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(std::int64_t count) {
    const std::int64_t offset = bytes_;
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

}  // namespace ringspan::kernels
