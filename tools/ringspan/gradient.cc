#include "gradient.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "base/float16.h"
#include "ringspan/error.h"
#include "text.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

// SplitMix64's finalizer: a bijection that mixes all bits.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

void store(DType dtype, float value, std::byte* to) {
  if (dtype == DType::float32) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value);
  std::memcpy(to, &bits, sizeof bits);
}

// value(index) for every element of the shard; index as in normal().
template <typename Value>
void fill(const Shard& shard, const TensorShape& shape, std::byte* local, Value value) {
  const bool bshd = shape.layout == Layout::bshd;
  const std::int64_t size = size_of(shape.dtype);
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::size_t piece = 0; piece < shard.pieces.size(); ++piece) {
      for (std::int64_t k = 0; k < shard.pieces[piece].count; ++k) {
        throw_if_interrupted();
        const std::int64_t row = shard.offsets[piece] + k;
        const std::int64_t position = shard.pieces[piece].at(k);
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          const std::int64_t at = bshd ? (b * shard.rows + row) * shape.heads + h : (b * shape.heads + h) * shard.rows + row;
          const std::int64_t index = (b * shape.tokens + position) * shape.heads + h;
          for (std::int64_t c = 0; c < shape.width; ++c) {
            store(shape.dtype, value(static_cast<std::uint64_t>(index * shape.width + c)),
                  local + (at * shape.width + c) * size);
          }
        }
      }
    }
  }
}

}  // namespace

GradientSpec parse_gradient(const std::string& text) {
  GradientSpec spec;
  constexpr std::string_view kRandom = "random:";
  if (text == "ones") {
    spec.kind = GradientSpec::Kind::ones;
  } else if (text.starts_with(kRandom)) {
    spec.kind = GradientSpec::Kind::random;
    spec.seed = parse_seed("--grad random:SEED", text.substr(kRandom.size()));
  } else if (text.empty() || text == "random") {
    throw InvalidArgument("--grad (" + text + ") must be a file, random:SEED or ones");
  } else {
    spec.kind = GradientSpec::Kind::file;
    spec.file = text;
  }
  return spec;
}

float normal(std::uint64_t seed, std::uint64_t index) {
  constexpr double kUnit = 0x1p-53;
  const std::uint64_t key = mix(seed + 0x9e3779b97f4a7c15U);
  const std::uint64_t a = mix(key ^ (2 * index + 1));
  const std::uint64_t b = mix(key + (2 * index + 2) * 0x9e3779b97f4a7c15U);
  const double u = (static_cast<double>(a >> 11) + 1.0) * kUnit;  // (0, 1]
  const double v = static_cast<double>(b >> 11) * kUnit;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));  // Box and Muller
}

void fill_ones(const Shard& shard, const TensorShape& shape, std::byte* local) {
  fill(shard, shape, local, [](std::uint64_t) { return 1.0F; });
}

void fill_normal(std::uint64_t seed, const Shard& shard, const TensorShape& shape, std::byte* local) {
  fill(shard, shape, local, [seed](std::uint64_t index) { return normal(seed, index); });
}

}  // namespace ringspan::cli
