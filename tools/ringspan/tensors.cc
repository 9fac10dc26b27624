#include "tensors.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "ringspan/error.h"

namespace ringspan::cli {

Layout parse_layout(std::string_view name) {
  if (name == "bshd") return Layout::bshd;
  if (name == "bhsd") return Layout::bhsd;
  throw InvalidArgument(fmt::format("layout ({}) must be bshd (batch, tokens, heads, head_dim) or bhsd", name));
}

Tensor as_tensor(std::byte* data, const TensorShape& shape) {
  return shape.layout == Layout::bshd ? dense_bshd(data, shape.tokens, shape.heads, shape.width)
                                      : dense_bhsd(data, shape.tokens, shape.heads, shape.width);
}

ConstTensor as_tensor(const std::byte* data, const TensorShape& shape) {
  return shape.layout == Layout::bshd ? dense_bshd(static_cast<const void*>(data), shape.tokens, shape.heads, shape.width)
                                      : dense_bhsd(static_cast<const void*>(data), shape.tokens, shape.heads, shape.width);
}

void GlobalTensor::let_go() const {
  if (!mapped || shape.bytes() == 0) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t before = reinterpret_cast<std::uintptr_t>(data) % page;  // from the beginning of the first page
  auto* begin = const_cast<std::byte*>(data) - before;
  ::madvise(begin, before + static_cast<std::uintptr_t>(shape.bytes()),
            MADV_DONTNEED);  // a hint: what it refuses only costs memory
}

Pages::Pages(std::int64_t bytes) : bytes_(bytes) {
  if (bytes <= 0) return;
  void* memory = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
}

Pages::~Pages() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(bytes_));
}

Pages::Pages(Pages&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void for_each_run(const Shard& shard, const TensorShape& shape,
                  const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& run) {
  const std::int64_t row = shape.row_bytes();
  if (row == 0) return;
  for (std::int64_t outer = 0; outer < shape.outer(); ++outer) {
    for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
      const Progression& piece = shard.pieces[i];
      const bool together = piece.stride == 1;
      const std::int64_t runs = together ? (piece.empty() ? 0 : 1) : piece.count;
      for (std::int64_t k = 0; k < runs; ++k) {
        run((outer * shard.rows + shard.offsets[i] + k) * row, (outer * shape.tokens + piece.at(k)) * row,
            (together ? piece.count : 1) * row);
      }
    }
  }
}

void gather(const Shard& shard, const GlobalTensor& whole, std::byte* local) {
  constexpr std::int64_t kAtOnce = 1 << 20;  // mapped bytes that take up memory besides the copy
  std::int64_t pending = 0;
  for_each_run(shard, whole.shape, [&](std::int64_t to, std::int64_t from, std::int64_t bytes) {
    while (bytes > 0) {
      const std::int64_t some = std::min(bytes, kAtOnce);
      std::memcpy(local + to, whole.data + from, static_cast<std::size_t>(some));
      to += some;
      from += some;
      bytes -= some;
      pending += some;
      if (pending < kAtOnce) continue;
      pending = 0;
      whole.let_go();
    }
  });
  whole.let_go();
}

void scatter(const Shard& shard, const TensorShape& shape, const std::byte* local, std::string_view name, Target& target) {
  for_each_run(shard, shape,
               [&](std::int64_t from, std::int64_t to, std::int64_t bytes) { target.write(name, to, local + from, bytes); });
}

}  // namespace ringspan::cli
