// Whole tensors in memory or in a mapped file, and their rows as ranks hold them.
//
// Everything here is bytes and positions; no conversion. Pure but for the writes to a Target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/attention.h"
#include "ringspan/dtype.h"
#include "ringspan/sharding.h"

namespace ringspan::cli {

// Order of the middle dimensions: (batch, tokens, heads, width) or (batch, heads, tokens, width).
enum class Layout : std::uint8_t { bshd, bhsd };

// "bshd" or "bhsd"; throws InvalidArgument.
Layout parse_layout(std::string_view name);

struct TensorShape {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t width = 1;
  DType dtype = DType::float32;
  Layout layout = Layout::bshd;

  std::int64_t bytes() const { return batch * tokens * heads * width * size_of(dtype); }
  // The token dimension is the second (bshd) or third (bhsd) one: so many repeats of (tokens, row_bytes).
  std::int64_t outer() const { return layout == Layout::bshd ? batch : batch * heads; }
  std::int64_t row_bytes() const { return (layout == Layout::bshd ? heads * width : width) * size_of(dtype); }
};

// How many rows of `width` elements lie before that of (batch item, position, head).
inline std::int64_t row_index(const TensorShape& shape, std::int64_t batch, std::int64_t position, std::int64_t head) {
  return shape.layout == Layout::bshd ? (batch * shape.tokens + position) * shape.heads + head
                                      : (batch * shape.heads + head) * shape.tokens + position;
}

// A dense tensor of this shape, as the library takes it.
Tensor as_tensor(std::byte* data, const TensorShape& shape);
ConstTensor as_tensor(const std::byte* data, const TensorShape& shape);

// A whole tensor that is only read: of a mapped file, or of this process.
struct GlobalTensor {
  const std::byte* data = nullptr;
  TensorShape shape;
  bool mapped = false;  // pages of a file: they may be let go of and come back by themselves

  // The row of one (batch item, position, head).
  const std::byte* row(std::int64_t batch, std::int64_t position, std::int64_t head) const {
    return data + row_index(shape, batch, position, head) * shape.width * size_of(shape.dtype);
  }
  void let_go() const;  // of the memory that mapped pages take up
};

// Zeroed memory of its own pages, back to the system when destroyed (so that what a process holds is what is in use).
class Pages {
 public:
  Pages() = default;
  explicit Pages(std::int64_t bytes);  // throws std::bad_alloc
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Where results go: any part of any named tensor, from any thread or forked rank.
class Target {
 public:
  virtual ~Target() = default;
  virtual void write(std::string_view name, std::int64_t offset, const void* data, std::int64_t bytes) = 0;
};

// Calls run(local_offset, global_offset, bytes) for the maximal runs of bytes that a rank's dense (..., rows, ...) copy and the
// whole tensor have in common, in the order of the copy. `shape` is that of the whole tensor.
void for_each_run(const Shard& shard, const TensorShape& shape,
                  const std::function<void(std::int64_t local, std::int64_t global, std::int64_t bytes)>& run);

// The rows of a shard, out of and into a whole tensor.
void gather(const Shard& shard, const GlobalTensor& whole, std::byte* local);
void scatter(const Shard& shard, const TensorShape& shape, const std::byte* local, std::string_view name, Target& target);

}  // namespace ringspan::cli
