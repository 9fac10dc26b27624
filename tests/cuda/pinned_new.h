// For test programs that run kernels on a GPU over whatever memory a test has: operator new gives pinned host memory, which the
// GPU reaches at the same addresses. Include it in one source file of the program; call use_pinned_memory() first.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace ringspan::testing {

// Blocks of powers of two from one allocation; freed blocks are kept in lists by size.
class PinnedPool {
 public:
  // False where there is no device.
  bool open(std::size_t bytes) {
    void* data = nullptr;
    if (cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) return false;
    const std::lock_guard lock(mutex_);
    begin_ = next_ = static_cast<std::byte*>(data);
    end_ = begin_ + bytes;
    return true;
  }
  bool is_open() const { return begin_ != nullptr; }
  void* take(std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock(mutex_);
    int size = 6;
    while ((std::size_t{1} << size) < bytes || (std::size_t{1} << size) < alignment) ++size;
    if (begin_ == nullptr || size > 40) return nullptr;
    if (free_[size] != nullptr) {
      Node* node = free_[size];
      free_[size] = node->next;
      return node;
    }
    // A header of the block's own alignment holds its size.
    const std::size_t block = std::size_t{1} << size;
    auto address = (reinterpret_cast<std::uintptr_t>(next_) + 64 + block - 1) / block * block;
    if (address + block > reinterpret_cast<std::uintptr_t>(end_)) return nullptr;
    next_ = reinterpret_cast<std::byte*>(address + block);
    *reinterpret_cast<int*>(address - 64) = size;
    return reinterpret_cast<void*>(address);
  }
  bool give_back(void* data) {
    if (data < begin_ || data >= end_) return false;
    const std::lock_guard lock(mutex_);
    const int size = *reinterpret_cast<int*>(static_cast<std::byte*>(data) - 64);
    auto* node = static_cast<Node*>(data);
    node->next = free_[size];
    free_[size] = node;
    return true;
  }

 private:
  struct Node {
    Node* next;
  };
  std::mutex mutex_;
  std::byte *begin_ = nullptr, *end_ = nullptr, *next_ = nullptr;
  Node* free_[41] = {};
};

inline PinnedPool pinned_pool;

inline void* pinned_or_plain(std::size_t bytes, std::size_t alignment) {
  if (void* data = pinned_pool.take(bytes, alignment)) return data;
  if (pinned_pool.is_open()) {
    std::fprintf(stderr, "the pinned memory of this program is used up: a GPU cannot read %zu bytes\n", bytes);
    std::abort();
  }
  void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
inline void free_pinned_or_plain(void* data) noexcept {
  if (data != nullptr && !pinned_pool.give_back(data)) std::free(data);
}

}  // namespace ringspan::testing

void* operator new(std::size_t bytes) { return ringspan::testing::pinned_or_plain(bytes, 64); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return ringspan::testing::pinned_or_plain(
      bytes, static_cast<std::size_t>(alignment) < 64 ? 64 : static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept { ringspan::testing::free_pinned_or_plain(data); }
void operator delete(void* data, std::size_t) noexcept { ringspan::testing::free_pinned_or_plain(data); }
void operator delete(void* data, std::align_val_t) noexcept { ringspan::testing::free_pinned_or_plain(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { ringspan::testing::free_pinned_or_plain(data); }
