// The oracle: attention and its gradients from the formulas, one pair after the other, in float64.
//
// Scores, probabilities and gradients of everything a Problem can ask for: multiplicities, scale, softcap, ALiBi, sinks,
// dropout, the head_groups output scale, the detached weights of torchscale, dlse, any strides. The same computation is also
// done the way a plain eager implementation in the storage dtype would do it (Arithmetic::naive: float32 sums inside each
// matrix product; scores, probabilities, outputs and their gradients rounded to the dtype), because a kernel is judged by the
// error of that one (oracle/compare.h).
//
// Cost: dense() 2 (d + d_v) flops per pair forward, 6 d + 6 d_v with backward; memory O(batch inputs + pairs of one head class)
// in 5 bytes per pair. sampled() recomputes what the sampled rows depend on and nothing else. Pure; thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ringspan/problem.h"

namespace ringspan::oracle {

// A (batch, tokens, heads, width) tensor in the caller's memory; strides in elements, the last dimension dense.
struct View {
  const void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

// Dense (batch, tokens, heads, width).
View contiguous_view(const void* data, DType dtype, std::int64_t tokens, std::int64_t heads, std::int64_t width);

// One float32 per (batch, head, token), dense: lse and dlse.
struct Inputs {
  View q, k, v;
  View d_out;                           // only for backward
  const float* d_lse = nullptr;         // (batch, heads, tokens_q), optional
  const float* sinks = nullptr;         // (heads), with Problem::sinks
  const float* alibi_slopes = nullptr;  // slope of (b, h): alibi_slopes[b * alibi_batch_stride + h], with Problem::alibi
  std::int64_t alibi_batch_stride = 0;
  // The computation that is judged took delta = rowsum(do . o) from an o stored in 16 bits (PlanOptions::keep_o_float32 off):
  // only the error bounds of the gradients depend on it.
  bool rounded_o = false;
  // True where the pair is dropped; only called when Problem::dropout > 0. Where it is empty oracle/dropout.h decides.
  std::function<bool(std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j, int state)> dropped;
};

enum class Arithmetic : std::uint8_t { exact, naive };

// Rows of `width` values each, and for every row how far a correct float32-accumulating computation may be off at least,
// whatever the naive one does: derived from eps, the number of terms and the norms of what is summed. (Only of the exact
// arithmetic.)
struct Tensor {
  std::int64_t width = 1;
  std::vector<double> values;
  std::vector<double> floors;
  std::int64_t rows() const { return static_cast<std::int64_t>(values.size()) / width; }
};

struct Result {
  Tensor o;       // (batch, tokens_q, heads, head_dim_v)
  Tensor lse;     // (batch, heads, tokens_q)
  Tensor dq;      // (batch, tokens_q, heads, head_dim)
  Tensor dk;      // (batch, tokens_k, kv_heads, head_dim)
  Tensor dv;      // (batch, tokens_k, kv_heads, head_dim_v)
  Tensor dsinks;  // (heads)
};

Result dense(const Problem& problem, const Inputs& inputs, Arithmetic arithmetic, bool backward);

// A row of one tensor: a query head for o, lse and dq; a kv head for dk and dv.
struct Row {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t position = 0;
};

// An o and an lse (batch, heads, tokens_q) that were computed.
struct Given {
  View o;
  const float* lse = nullptr;
  float lse_of(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i) const {
    return lse[(batch * problem.heads + head) * problem.tokens_q + i];
  }
};

// The rows in the order given: o, lse, dq of `queries`, dk and dv of `keys`; dsinks stays empty.
//
// With `given`, dk and dv are the sums of what the queries that see a key make of their o and lse computed: one pair per query,
// where otherwise each query takes a whole row. Only for problems of one state, and without `queries`. Of the rows that are not
// finite two per key and head are recomputed, so that a wrong NaN of o or lse excuses none of dk or dv; others count once
// float64 is not finite either.
Result sampled(const Problem& problem, const Inputs& inputs, Arithmetic arithmetic, bool backward, std::span<const Row> queries,
               std::span<const Row> keys, const Given* given = nullptr);

struct SinkSums {
  Tensor dsinks;                // (heads)
  std::vector<Row> not_finite;  // of each head the first query whose part is NaN or infinite
};

// dsinks, a sum over all queries, from an o and an lse (batch, heads, tokens_q) that were computed: in float64, without
// recomputing them. The floors hold for a computation that took the same lse, and the same o or one of float32 that o was
// rounded from. Cost: O(batch tokens_q heads head_dim_v).
SinkSums dsinks_of_outputs(const Problem& problem, const Inputs& inputs, const View& o, const float* lse);

}  // namespace ringspan::oracle
