#include "ringspan/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/int128.h"
#include "pattern/validate.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

template <typename... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw InvalidArgument(fmt::format(format, std::forward<Args>(args)...));
}

void validate_shapes(const Problem& p) {
  require(p.batch >= 1 && p.batch <= internal::kMaxTokens, "batch ({}) must be in [1, {}]", p.batch, internal::kMaxTokens);
  for (const auto& [name, tokens] : {std::pair{"tokens_q", p.tokens_q}, std::pair{"tokens_k", p.tokens_k}}) {
    require(tokens >= 0 && tokens <= internal::kMaxTokens, "{} ({}) must be in [0, {}]", name, tokens, internal::kMaxTokens);
  }
  for (const auto& [name, heads] : {std::pair{"heads", p.heads}, std::pair{"kv_heads", p.kv_heads}}) {
    require(heads >= 1 && heads <= internal::kMaxHeads, "{} ({}) must be in [1, {}]", name, heads, internal::kMaxHeads);
  }
  require(p.heads % p.kv_heads == 0, "heads ({}) must be a multiple of kv_heads ({})", p.heads, p.kv_heads);
  for (const auto& [name, dim] : {std::pair{"head_dim", p.head_dim}, std::pair{"head_dim_v", p.head_dim_v}}) {
    require(dim >= 1 && dim <= 256, "{} ({}) must be in [1, 256]", name, dim);
  }
  require(p.dtype == DType::float32 || p.dtype == DType::bfloat16 || p.dtype == DType::float16,
          "dtype ({}) must be float32, bfloat16 or float16", static_cast<int>(p.dtype));
  // Sums of bytes over a caller's tensors, an arena and a state per branch are 64-bit.
  const Int128 rows = Int128{p.batch} * std::max(p.tokens_q, p.tokens_k) * p.heads;
  const Int128 bytes = rows * std::max(p.head_dim, p.head_dim_v) * 4;
  require(bytes <= (Int128{1} << 56) && bytes * p.pattern.states() <= (Int128{1} << 59),
          "batch ({}) x tokens ({}) x heads ({}) x head_dim ({}) is more than 2^54 elements, or 2^57 with a state per branch",
          p.batch, std::max(p.tokens_q, p.tokens_k), p.heads, std::max(p.head_dim, p.head_dim_v));
}

void validate_offsets(const char* name, const std::vector<std::int32_t>& offsets, const char* tokens_name,
                      std::int64_t tokens) {
  require(offsets.front() == 0, "{}[0] ({}) must be 0", name, offsets.front());
  for (std::size_t d = 1; d < offsets.size(); ++d) {
    require(offsets[d] >= offsets[d - 1], "{} must ascend: {}[{}] ({}) is below {}[{}] ({})", name, name, d, offsets[d], name,
            d - 1, offsets[d - 1]);
  }
  require(offsets.back() == tokens, "{} must end at {} ({}), not at {}", name, tokens_name, tokens, offsets.back());
}

void validate_documents(const Problem& p) {
  if (!p.pattern.documents) {
    require(p.cu_seqlens_q.empty(), "cu_seqlens_q is given, but the pattern has no documents");
    require(p.cu_seqlens_k.empty(), "cu_seqlens_k is given, but the pattern has no documents");
    return;
  }
  require(!p.cu_seqlens_q.empty(), "the pattern has documents, but cu_seqlens_q is empty");
  require(p.lengths_q.empty() && p.lengths_k.empty() && p.starts_k.empty(),
          "{} cannot be used together with documents: put them into cu_seqlens",
          !p.lengths_q.empty()   ? "lengths_q"
          : !p.lengths_k.empty() ? "lengths_k"
                                 : "starts_k");
  validate_offsets("cu_seqlens_q", p.cu_seqlens_q, "tokens_q", p.tokens_q);
  if (p.cu_seqlens_k.empty()) {
    require(p.tokens_k == p.tokens_q,
            "cu_seqlens_k is empty, so cu_seqlens_q holds for keys too and tokens_k ({}) must equal tokens_q ({})", p.tokens_k,
            p.tokens_q);
    return;
  }
  validate_offsets("cu_seqlens_k", p.cu_seqlens_k, "tokens_k", p.tokens_k);
  require(p.cu_seqlens_k.size() == p.cu_seqlens_q.size(),
          "cu_seqlens_k has {} documents, cu_seqlens_q has {}; they must be as many", p.cu_seqlens_k.size() - 1,
          p.cu_seqlens_q.size() - 1);
}

void validate_lengths(const char* name, const std::vector<std::int64_t>& lengths, std::int64_t batch, const char* tokens_name,
                      std::int64_t tokens) {
  if (lengths.empty()) return;
  require(lengths.size() == static_cast<std::size_t>(batch), "{} has {} entries, expected one per batch item ({})", name,
          lengths.size(), batch);
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    require(lengths[b] >= 0 && lengths[b] <= tokens, "{}[{}] ({}) must be in [0, {}], the {}", name, b, lengths[b], tokens,
            tokens_name);
  }
}

void validate_starts(const Problem& p) {
  if (p.starts_k.empty()) return;
  require(p.starts_k.size() == static_cast<std::size_t>(p.batch), "starts_k has {} entries, expected one per batch item ({})",
          p.starts_k.size(), p.batch);
  for (std::size_t b = 0; b < p.starts_k.size(); ++b) {
    const std::int64_t most = p.tokens_k - (p.lengths_k.empty() ? 0 : p.lengths_k[b]);
    require(p.starts_k[b] >= 0 && p.starts_k[b] <= most, "starts_k[{}] ({}) must be in [0, {}], the tokens_k{}", b,
            p.starts_k[b], most, p.lengths_k.empty() ? "" : fmt::format(" less lengths_k[{}]", b));
  }
}

// Blocks start anew in every frame and are cut where it ends; beyond the whole problem they are a mistake.
void validate_blocks(const Problem& p) {
  if (!p.pattern.blocks) return;
  for (std::size_t i = 0; i < p.pattern.blocks->size(); ++i) {
    const Block& block = (*p.pattern.blocks)[i];
    require(block.q_end <= p.tokens_q, "pattern.blocks[{}].q_end ({}) must be at most tokens_q ({})", i, block.q_end,
            p.tokens_q);
    require(block.k_end <= p.tokens_k, "pattern.blocks[{}].k_end ({}) must be at most tokens_k ({})", i, block.k_end,
            p.tokens_k);
  }
}

void validate_scores(const Problem& p) {
  require(std::isfinite(p.scale), "scale ({}) must be finite", p.scale);
  constexpr float kLeast = std::numeric_limits<float>::min();  // kernels take 1 / softcap, which is inf below a quarter of it
  require(p.softcap == 0 || (std::isfinite(p.softcap) && p.softcap >= kLeast),
          "softcap ({}) must be 0, or finite and at least {}, the smallest normal float32", p.softcap, kLeast);
  require(p.dropout >= 0 && p.dropout < 1, "dropout ({}) must be in [0, 1)", p.dropout);
}

void validate_sharding(const char* name, const Sharding& sharding, std::int64_t tokens, int ranks) {
  try {
    validate(sharding, tokens, ranks);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", name, error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(fmt::format("{}: {}", name, error.what()));
  }
}

}  // namespace

float Problem::effective_scale() const {
  return scale != 0.0F ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

void Problem::validate() const {
  validate_shapes(*this);
  internal::validate(pattern);
  validate_documents(*this);
  validate_lengths("lengths_q", lengths_q, batch, "tokens_q", tokens_q);
  validate_lengths("lengths_k", lengths_k, batch, "tokens_k", tokens_k);
  validate_starts(*this);
  validate_blocks(*this);
  validate_scores(*this);
  require(ranks >= 1, "ranks ({}) must be at least 1", ranks);
  require(ranks <= internal::kMaxRanks, "ranks ({}) must be at most {}", ranks, internal::kMaxRanks);
  validate_sharding("sharding_q", sharding_q, tokens_q, ranks);
  validate_sharding("sharding_k", sharding_k, tokens_k, ranks);
}

}  // namespace ringspan
