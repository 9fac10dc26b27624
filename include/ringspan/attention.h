// Attention: executes a plan on the caller's tensors.
//
//   auto world = ringspan::make_thread_world(4);               // or forked processes, or your own Communicator
//   ringspan::Attention attention(problem, options, *world[r]);
//   attention.forward({.q = q, .k = k, .v = v, .o = o, .lse = lse});
//   attention.backward({.q = q, .k = k, .v = v, .o = o, .lse = lse, .d_out = d_out, .dq = dq, .dk = dk, .dv = dv});
//
// Tensors hold this rank's shard: (batch, local tokens, heads, head_dim), local tokens in the order of Shard::positions();
// with replicated_q the query-side tensors (q, o, lse, d_out, dlse, dq) hold all tokens on every rank. Any strides with a
// dense last dimension; data aligned to its element. lse is (batch, heads, local tokens), float32, natural logarithm.
// Nothing is allocated inside forward and backward; all scratch memory is one arena of plan().arena_bytes() bytes.
// What a pass writes (o, lse and what `saved` names; dq, dk, dv and dsinks) may share no element with anything else that is
// passed to it, nor with the arena; views that interleave in one allocation are fine. What it only reads may overlap. Refused
// are only an output that may overlap itself, as its strides do not nest (each dimension steps over all that smaller ones
// span), and one that starts where something else that is passed starts; nothing else of this is checked. One execution at a
// time per Attention and per communicator. Before ranks agree nothing is written; where a pass fails later, its outputs hold
// nothing of use, and the attention is over. backward() belongs to the latest forward() (the arena keeps what Plan::memory
// calls "saved"), unless both are given memory for it, or restore_saved() gave back what an earlier one had kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ringspan/communicator.h"
#include "ringspan/plan.h"
#include "ringspan/threads.h"

namespace ringspan {

// (batch, tokens, heads, dim) with strides in elements; dim is dense.
struct Tensor {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};
struct ConstTensor {
  const void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  ConstTensor() = default;
  ConstTensor(const void* pointer, std::int64_t batch, std::int64_t token, std::int64_t head)
      : data(pointer), batch_stride(batch), token_stride(token), head_stride(head) {}
  ConstTensor(const Tensor& tensor)  // NOLINT(google-explicit-constructor)
      : ConstTensor(tensor.data, tensor.batch_stride, tensor.token_stride, tensor.head_stride) {}
};

// The strides of a dense (batch, tokens, heads, dim) tensor.
Tensor dense_bshd(void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim);
ConstTensor dense_bshd(const void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim);
// The same for memory laid out as (batch, heads, tokens, dim); also an lse (dim = 1).
Tensor dense_bhsd(void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim);
ConstTensor dense_bhsd(const void* data, std::int64_t tokens, std::int64_t heads, std::int64_t dim);

struct ForwardTensors {
  ConstTensor q{}, k{}, v{};
  Tensor o{};
  Tensor lse{};                         // float32, dim 1
  const float* alibi_slopes = nullptr;  // (heads) or, with a batch stride, (batch, heads)
  std::int64_t alibi_batch_stride = 0;
  const float* sinks = nullptr;  // (heads)
  // Where what backward() reads is kept, instead of the arena: as many bytes as Attention::saved() has, aligned to 64, memory
  // of the device; empty: in the arena, until the next forward().
  std::span<std::byte> saved{};
};

struct BackwardTensors {
  ConstTensor q{}, k{}, v{};
  ConstTensor o{};  // not read, and may be null, where forward() kept it in float32 (PlanOptions::keep_o_float32)
  ConstTensor lse{};
  ConstTensor d_out{};
  ConstTensor dlse{};  // optional (data == nullptr): float32 like lse
  Tensor dq{}, dk{}, dv{};
  const float* alibi_slopes = nullptr;
  std::int64_t alibi_batch_stride = 0;
  const float* sinks = nullptr;
  float* dsinks = nullptr;             // (heads), summed over all ranks; required with sinks
  std::span<const std::byte> saved{};  // what the forward pass was given
};

struct ExecuteOptions {
  Communicator::Seconds deadline{30.0};  // of silence from a peer
  bool fake_device = false;              // run launches on the fake asynchronous device (tests)
  std::uint64_t fake_device_seed = 1;
  bool overlap = true;  // false: a stage computes only after its messages arrived (a synchronous ring)
  bool trace = false;   // record a time line
  // Where it runs (ringspan/device.h); tensors, slopes, sinks and a given arena are memory of this device. On a device
  // forward() and backward() return when everything is enqueued on `stream` (a cudaStream_t; null: one of its own;
  // the default stream is cudaStreamLegacy), see wait().
  std::string device = "cpu";
  void* stream = nullptr;
  // False: a library's fused attention may compute where one call gives a row's final result, which may give other bits in
  // every run. It promises less about NaN and infinities in keys that a query may not see, computes delta from o as it is
  // rounded, and has no gradient through lse (docs/cuda.md). On the CPU it makes no difference.
  bool deterministic = true;
  // Threads of the program's that the rank's kernels run on, PlanOptions::threads at once, instead of threads of their own. No
  // bit of a result depends on it.
  CallerThreads caller_threads{};
};

// What the latest pass did that was not refused.
struct PassStats {
  double seconds = 0;          // from the call to its return: on a device until everything is enqueued
  double waiting_seconds = 0;  // of which: nothing to compute, waiting for peers
  std::int64_t sent_bytes = 0;
  std::int64_t received_bytes = 0;
};

// Keeps a reference to the communicator and a view of a given arena: both must outlive it. One that was moved from may only be
// assigned to or destroyed. All ranks make the attentions of one communicator, and call them, in the same order; where they
// call different ones, all throw CommError before any row moves.
class Attention {
 public:
  // Collective: agrees on the problem and options with the other ranks, field by field, then plans. An error on one rank is
  // raised on all. `arena`: plan().arena_bytes() bytes aligned to 64, or empty: allocated here, once.
  Attention(const Problem& problem, const PlanOptions& options, Communicator& communicator, ExecuteOptions execute = {});
  // Uses a plan made before; collective as above. On a device a plan for the CPU is booked anew: plan() then tells what it
  // needs there (the same steps, and no kernel scratch).
  Attention(const Plan& plan, Communicator& communicator, ExecuteOptions execute = {}, std::span<std::byte> arena = {});
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) noexcept;

  const Plan& plan() const;
  void forward(const ForwardTensors& tensors);
  void backward(const BackwardTensors& tensors);
  // In place of forward() or backward(), on a rank that has no tensors to pass: takes part in the agreement of the ranks with
  // `error`, so that all of them throw it (or that of a lower rank) instead of waiting, and the attention stays usable.
  [[noreturn]] void refuse(Pass pass, const std::exception_ptr& error);
  // Returns when everything that forward() and backward() enqueued is done; on the CPU, at once.
  void wait();
  // What backward() reads of forward() besides tensors, as it lies in the arena (memory of the device); empty where nothing is
  // kept. Copied away after a forward() and given back later, it lets several forward() run before their backward(), as the
  // layers of a model do. ForwardTensors::saved does the same without a copy.
  std::span<const std::byte> saved() const;
  void restore_saved(std::span<const std::byte> saved);
  // saved() copied to as many bytes of memory of the device. There, both copies are enqueued like passes.
  void copy_saved(std::span<std::byte> target);
  // The seed of dropout in the passes that follow, instead of the problem's. It must be the same on all ranks, else the pass
  // throws CommError, and in a forward pass and its backward pass, which is not checked.
  void set_seed(std::uint64_t seed);
  // ExecuteOptions::deadline of the passes that follow. Throws InvalidArgument where it is not positive.
  void set_deadline(Communicator::Seconds deadline);
  const PassStats& stats(Pass pass) const;
  // Time line of the latest passes as Chrome trace JSON (ExecuteOptions::trace).
  std::string trace_json() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringspan
