#include "random_inputs.h"

#include <cmath>

#include "gradient.h"

namespace ringspan::cli {

RandomInputs::RandomInputs(const Problem& p) {
  const auto make = [this](std::uint64_t seed, std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t width,
                           DType dtype) {
    const TensorShape shape{batch, tokens, heads, width, dtype, Layout::bshd};
    pages_.emplace_back(shape.bytes());
    if (tokens > 0) fill_normal(seed, {{{0, 1, tokens}}, {0}, tokens}, shape, pages_.back().data());
    return GlobalTensor{pages_.back().data(), shape};
  };
  inputs_.q = make(1, p.batch, p.tokens_q, p.heads, p.head_dim, p.dtype);
  inputs_.k = make(2, p.batch, p.tokens_k, p.kv_heads, p.head_dim, p.dtype);
  inputs_.v = make(3, p.batch, p.tokens_k, p.kv_heads, p.head_dim_v, p.dtype);
  inputs_.gradient.kind = GradientSpec::Kind::random;
  inputs_.gradient.seed = 4;
  for (int h = 0; h < p.heads; ++h) {
    slopes_.push_back(std::exp2(-8.0F * static_cast<float>(h + 1) / static_cast<float>(p.heads)));
    sinks_.push_back(normal(5, static_cast<std::uint64_t>(h)));
  }
  if (p.alibi) inputs_.alibi_slopes = slopes_.data();
  if (p.sinks) inputs_.sinks = sinks_.data();
}

}  // namespace ringspan::cli
