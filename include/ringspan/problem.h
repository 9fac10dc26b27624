// A Problem: everything that decides the mathematical result and how it is spread over ranks; no data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/dtype.h"
#include "ringspan/pattern.h"
#include "ringspan/sharding.h"

namespace ringspan {

// Tensors are (batch, tokens, heads, head_dim). Query head h reads kv head h / (heads / kv_heads).
// Score of (i, j): s = scale * q_i . k_j; then softcap * tanh(s / softcap); then - slope_h * |j - i - diagonal|; then the
// pattern; then the softmax with one extra logit sink_h; then dropout on the probabilities.
struct Problem {
  std::int64_t batch = 1;
  std::int64_t tokens_q = 0;  // n_q over all ranks, per batch item
  std::int64_t tokens_k = 0;  // n_k
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 64;    // of q and k, 1..256
  int head_dim_v = 64;  // of v and o, 1..256
  DType dtype = DType::float32;
  Pattern pattern{};

  // documents: offsets into the tokens, int32, ascending from 0 to tokens, documents + 1 of them; both sides have the same
  // number of documents. An empty cu_seqlens_k means the same as cu_seqlens_q.
  std::vector<std::int32_t> cu_seqlens_q{};
  std::vector<std::int32_t> cu_seqlens_k{};
  // A length per batch item (0..tokens); empty: all tokens. Rows past an item's length are padding: nobody attends them,
  // they attend nobody (o = 0, lse = -inf, gradients 0). Not together with documents.
  std::vector<std::int64_t> lengths_q{};
  std::vector<std::int64_t> lengths_k{};  // empty: all keys, whatever lengths_q says
  // The first key of each batch item, which then has those from starts_k[b] to starts_k[b] + lengths_k[b] (empty lengths_k: to
  // the end); empty: 0. Keys before it are padding. Not together with documents.
  std::vector<std::int64_t> starts_k{};

  float scale = 0.0F;    // 0: 1 / sqrt(head_dim)
  float softcap = 0.0F;  // 0: off; else at least 2^-126, the smallest normal float32
  bool alibi = false;    // slopes are given at execution, float32 (heads) or (batch, heads)
  bool sinks = false;    // sinks are given at execution, float32 (heads)
  float dropout = 0.0F;  // probability of dropping, 0 <= p < 1
  std::uint64_t seed = 0;

  int ranks = 1;
  Sharding sharding_q{};
  Sharding sharding_k{};      // contiguous unless set, whatever sharding_q is
  bool replicated_q = false;  // every rank passes the whole q (and do) and receives the whole o, lse, dq

  float effective_scale() const;
  int group() const { return heads / kv_heads; }

  // Throws InvalidArgument or Unsupported; messages name the field, its value and what was expected.
  void validate() const;

  bool operator==(const Problem&) const = default;
};

}  // namespace ringspan
