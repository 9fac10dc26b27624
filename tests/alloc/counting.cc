#include "alloc/counting.h"

#include <execinfo.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace {

std::atomic<bool> counting{false};
std::atomic<std::int64_t> count{0};
std::atomic<std::int64_t> bytes{0};
constexpr int kFrames = 24;
void* frames[kFrames];
std::atomic<int> frame_count{0};

void note(std::size_t size) {
  if (!counting.load(std::memory_order_relaxed)) return;
  bytes += static_cast<std::int64_t>(size);
  if (count.fetch_add(1) == 0) frame_count = backtrace(frames, kFrames);
}

void* allocate(std::size_t size, std::size_t alignment) {
  note(size);
  return alignment == 0 ? __libc_malloc(size) : __libc_memalign(alignment, size);
}

void* allocate_or_throw(std::size_t size, std::size_t alignment = 0) {
  void* memory = allocate(size == 0 ? 1 : size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" {

void* malloc(std::size_t size) { return allocate(size, 0); }
void free(void* memory) { __libc_free(memory); }
void* calloc(std::size_t n, std::size_t size) {
  note(n * size);
  return __libc_calloc(n, size);
}
void* realloc(void* memory, std::size_t size) {
  note(size);
  return __libc_realloc(memory, size);
}
void* memalign(std::size_t alignment, std::size_t size) { return allocate(size, alignment); }
void* aligned_alloc(std::size_t alignment, std::size_t size) { return allocate(size, alignment); }
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  *memory = allocate(size, alignment);
  return *memory == nullptr ? ENOMEM : 0;
}
void* mmap(void* address, std::size_t length, int protection, int flags, int file, off_t offset) {
  note(length);
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, file, offset));
}

}  // extern "C"

void* operator new(std::size_t size) { return allocate_or_throw(size); }
void* operator new[](std::size_t size) { return allocate_or_throw(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { __libc_free(memory); }
void operator delete[](void* memory) noexcept { __libc_free(memory); }
void operator delete(void* memory, std::size_t) noexcept { __libc_free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { __libc_free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { __libc_free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { __libc_free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { __libc_free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { __libc_free(memory); }

namespace ringspan::testing {

void start_counting() {
  void* warm_up[2];
  backtrace(warm_up, 2);  // its first call allocates
  count = 0;
  bytes = 0;
  frame_count = 0;
  counting = true;
}

void stop_counting() { counting = false; }

Allocations counted() {
  Allocations result{count, bytes, {}};
  const int known = frame_count;
  char** symbols = known > 0 ? backtrace_symbols(frames, known) : nullptr;
  for (int index = 0; symbols != nullptr && index < known; ++index) result.first += std::string("\n    ") + symbols[index];
  __libc_free(symbols);
  return result;
}

}  // namespace ringspan::testing
