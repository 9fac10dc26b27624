// FusedAttention: a library's attention that gives final rows in one call, on a stream of the device: cuDNN's (cudnn_fused.cc),
// what the program brings (provided_fused.h), and an emulated one (emulated_fused.cc), which computes in float32 on the CPU,
// checks its arguments as strictly as cuDNN and writes over its workspace, so that all that leads to a call is tested where
// there is no GPU.
//
// o = softmax(scale q k^T) v over the keys inside the band, lse = max + log(sum), natural, scale included; all tensors are 16
// bits but lse. Backward recomputes probabilities from lse and delta from o. Rows that see no key are not allowed.
//
// Cost: a shape is prepared when it is first asked about (execution plans are built: up to seconds), and kept. A call only
// enqueues. Thread safety: one thread at a time.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "exec/device.h"
#include "plan/fuse.h"

namespace ringspan::cuda {

// From one batch item, head, row to the next, in elements; the last dimension is dense. Of a dimension of one the stride is
// what a dense tensor would have: (batch, rows, heads, width), lse (batch, heads, rows).
struct FusedStrides {
  std::int64_t batch = 0, head = 0, row = 0;
  auto operator<=>(const FusedStrides&) const = default;
};

struct FusedShape {
  DType dtype = DType::bfloat16;
  bool backward = false, deterministic = true;
  std::int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0;
  int head_dim = 0, head_dim_v = 0;
  float scale = 1.0F;
  // Query t sees key u where low <= u - t <= high.
  std::int64_t low = 0, high = 0;
  bool has_low = false, has_high = false;
  FusedStrides q, k, v, o, lse, d_out, dq, dk, dv;
  auto operator<=>(const FusedShape&) const = default;
};

struct FusedCall {
  FusedShape shape;
  void *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr, *lse = nullptr;
  void *d_out = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  std::byte* workspace = nullptr;
};

class FusedAttention {
 public:
  virtual ~FusedAttention() = default;
  virtual std::string name() const = 0;  // "cudnn"
  // Why a shape cannot be computed, in words; empty: it can.
  virtual std::string refusal(const FusedShape& shape) = 0;
  virtual std::int64_t workspace_bytes(const FusedShape& shape) = 0;
  // A backward pass reads lse only where it is packed, (batch, heads, queries).
  virtual bool reads_packed_lse() const { return false; }
  // Besides its workspace, from an allocator that nobody here asks.
  virtual bool takes_own_memory() const { return false; }
  // Of a shape that is not refused, at addresses that misalignment() accepts.
  virtual void run(const FusedCall& call) = 0;
};

// The call of a task; of a backward pass with the tensors of one.
FusedCall fused_call(const kernels::AttendParams& params, const internal::FusedTask& task, internal::FusedMode mode);

// The strides of an lse that is packed, (batch, heads, queries), and whether a shape has these.
FusedStrides packed_lse(const FusedShape& shape);
inline bool has_packed_lse(const FusedShape& shape) { return shape.lse == packed_lse(shape); }

// What of the strides or addresses a fused kernel does not take; empty: nothing. They load 16 bytes at a time.
std::string misalignment(const FusedCall& call);

// Of the emulated device: on pointers that the host can follow.
std::string emulated_refusal(const FusedShape& shape);
std::int64_t emulated_workspace_bytes(const FusedShape& shape);
void emulate_fused(const FusedCall& call);

}  // namespace ringspan::cuda
