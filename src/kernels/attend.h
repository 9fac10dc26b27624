// The kernel contract of attend and attend_backward.
//
// Forward. For every task, every batch item b and query head h of it, every query i of q and key j of k with
// lo <= j - i <= hi:
//     s = score(b, h, i, j)                                    scale, softcap, ALiBi (see Problem)
//     the row state (m, l, acc) of (b, h, i), float32, takes the pair in:
//         m' = max(m, s);  l' = l e^(m - m') + e^(s - m');  acc' = acc e^(m - m') + drop(b, h, i, j, state) e^(s - m') v_j
//     or leaves m where it is, m' = m, if s is above it by ln 8 at most.
// m = -inf is the identity, whatever l and acc hold; rows without a pair keep their state bit for bit. Where only NaN was seen,
// m becomes 0, so that it stays. A key that a query may not see never influences it, whatever bits it holds (NaN and inf
// included). drop is 0 or 1 / (1 - dropout), 1 without dropout.
// A task with results (o.data set) is the last to touch its rows, and leaves these in place of their states, also of rows
// without a pair: with the sink of the head, if there are any, taken in first, o = output_scale acc / l and lse = m + log l, or
// 0 and -inf where l = 0. o may be where acc is.
// Such a task may come without states (m.data == nullptr), where it is the first to touch its rows, too, and has no more keys
// than keys_without_state.
// To kernels of devices, several tasks of a call may have the same rows with the same results: together they are the last (and
// without states the first) to touch them. Backward likewise several that write the same rows.
//
// Backward. With the final lse of the row, delta = rowsum(do . o) and c = output_scale:
//     p = min(1, e^(s - lse));  dp = c drop (do_i . v_j);  ds = p (dp - delta) ds/d(scale q k)
//     dv_j += c drop p do_i;  dq_i += scale ds k_j;  dk_j += scale ds q_i          float32 accumulators
// A task may be for dq only, or for dk and dv only: what it is not for is null, in all tasks of a call alike.
// With writes_dq (writes_dk_dv) no task touches these rows but those of the call that write the same ones: dq (dk and dv) are
// in the storage dtype, and are written instead of added to, zeros where a row has no pair; only to kernels that say so. Rows
// with lse = -inf contribute nothing. (s
// <= lse holds but for rounding, which at |s| = 1e8 would make e^(s - lse) e^8.)
//
// All the tasks of one call are computed as if one after the other: the bits depend on the list and on the tile sizes, never on
// the number of threads. Running cannot fail. No allocation: scratch is passed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/function_ref.h"
#include "base/thread_pool.h"
#include "kernels/tile_sizes.h"
#include "ringspan/dtype.h"

namespace ringspan::kernels {

// Rows of one operand: element strides; `data` is at (first batch item, first row, first head) of the task. The last
// dimension is dense.
struct Rows {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;  // from one query head of the task to the next
  bool operator==(const Rows&) const = default;
};

// Rows of a key-side operand: `data` is at kv head `head_first` of the store; kv head x is at
// data + (x - head_first) / head_step * head_stride.
struct KeyRows {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  bool operator==(const KeyRows&) const = default;
};

struct AttendTask {
  std::int64_t batch_first = 0;  // global, for dropout and ALiBi
  std::int64_t batch_count = 1;
  std::int64_t head_first = 0;  // query heads head_first + t * head_step, t < head_count; kv head = query head / group
  std::int64_t head_step = 1;
  std::int64_t head_count = 1;
  std::int64_t kv_head_first = 0;  // of the key-side store, see KeyRows
  std::int64_t kv_head_step = 1;
  std::int64_t q_first = 0, q_step = 1, q_count = 0;  // global positions
  std::int64_t k_first = 0, k_step = 1, k_count = 0;
  std::int64_t lo = 0, hi = 0;  // band on j - i (may be unbounded: kNoLow, kNoHigh of pattern/slice.h)
  std::int64_t diagonal = 0;    // ALiBi
  int state = 0;                // only a part of the dropout key here; the state views below are already the right ones

  Rows q;        // storage dtype, head_dim
  KeyRows k, v;  // storage dtype, head_dim and head_dim_v
  // forward: in place
  Rows m, l;  // float32, one element per row
  Rows acc;   // float32, head_dim_v
  // forward: results, or none
  Rows o;    // storage dtype, head_dim_v
  Rows o32;  // float32, head_dim_v: the same, or none; may be acc
  Rows lse;  // float32, one element per row; backward reads it
  // backward
  Rows d_out;      // do, storage dtype, head_dim_v
  Rows delta;      // float32, one element per row
  Rows dq;         // float32, head_dim; storage dtype where it is written
  KeyRows dk, dv;  // float32; storage dtype where they are written
  bool writes_dq = false, writes_dk_dv = false;
  bool operator==(const AttendTask&) const = default;
};

// What is the same for all tasks of a call.
struct AttendShape {
  DType dtype = DType::float32;
  int head_dim = 0;
  int head_dim_v = 0;
  int group = 1;  // query heads per kv head
  bool softcap = false, alibi = false, dropout = false;
  int threads = 1;
  TileSize tile{0, 0};  // one that the kernel takes for this shape, see AttendKernel::tile_sizes
};

struct AttendParams {
  AttendShape shape;
  float scale = 1.0F;
  float softcap = 0.0F;
  const float* alibi_slopes = nullptr;  // slope of (b, h): alibi_slopes[b * alibi_batch_stride + h]
  std::int64_t alibi_batch_stride = 0;
  float dropout = 0.0F;
  std::uint64_t seed = 0;
  float output_scale = 1.0F;     // backward, and forward of results
  const float* sinks = nullptr;  // by query head, of results; or none
};

struct Context {
  ThreadPool& pool;
  std::byte* scratch = nullptr;  // scratch_bytes(shape), aligned to 64
  FunctionRef<void()> progress;  // to be called about every millisecond by the calling thread
};

// Only for shapes that it supports may anything of a kernel be called but `supports` and `is_default`: all else may be compiled
// for its instruction set, sizes included.
struct AttendKernel {
  std::string_view name;                 // attend_f32_avx512, attend_backward_bf16_reference, ...
  bool (*supports)(const AttendShape&);  // shape and this machine's instruction set
  std::int64_t (*scratch_bytes)(const AttendShape&);
  void (*run)(const AttendParams&, std::span<const AttendTask>, const Context&);
  TileSizes (*tile_sizes)(const AttendShape&) = [](const AttendShape&) { return TileSizes{}; };  // shape.tile is not looked at
  std::int64_t (*keys_without_state)(const AttendShape&) = [](const AttendShape&) { return std::int64_t{0}; };  // forward
  bool writes_gradients = false;                                                                                // backward
  bool (*is_default)() = [] { return true; };  // on this machine: otherwise used when named
};

// Best first, reference last; every supported shape is supported by the reference.
std::span<const AttendKernel> attend_kernels();
std::span<const AttendKernel> attend_backward_kernels();

// The first default kernel of the list that supports the shape, or the one named (name may be a suffix such as "reference").
// Throws Unsupported naming the shape, or InvalidArgument listing the known names, or the tile sizes that the kernel takes.
const AttendKernel& select_attend(const AttendShape& shape, std::string_view name = {});
const AttendKernel& select_attend_backward(const AttendShape& shape, std::string_view name = {});

// The sizes that a kernel uses for a shape: those of the shape, its own where they are 0; 0 of a kernel without tiles.
TileSize tile_of(const AttendKernel& kernel, const AttendShape& shape);

// The dropout decision: true where the pair is dropped. Counter-based (Philox-4x32-10) on global coordinates.
bool is_dropped(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j,
                int state);

}  // namespace ringspan::kernels
