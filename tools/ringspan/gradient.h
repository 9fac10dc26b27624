// The gradient that `run` and `bench` feed into the backward pass: of a file, ones, or normal numbers drawn per element from
// (seed, index), so that they do not depend on ranks, sharding or layout.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tensors.h"

namespace ringspan::cli {

// --grad FILE | random:SEED | ones
struct GradientSpec {
  enum class Kind : std::uint8_t { none, ones, random, file };
  Kind kind = Kind::none;
  std::uint64_t seed = 0;
  std::string file;
  bool wanted() const { return kind != Kind::none; }
};
GradientSpec parse_gradient(const std::string& text);

// Standard normal number of one element; index counts in (batch, tokens, heads, width) order.
float normal(std::uint64_t seed, std::uint64_t index);

// Fills the rows of a shard, dense in `shape.layout`, with ones or normal numbers rounded to the dtype of the shape. Ends with
// Interrupted where the program was.
void fill_ones(const Shard& shard, const TensorShape& shape, std::byte* local);
void fill_normal(std::uint64_t seed, const Shard& shard, const TensorShape& shape, std::byte* local);

}  // namespace ringspan::cli
