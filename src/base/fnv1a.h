// FNV-1a, 64 bits: numbers that differ with high probability where bytes do. Not against an adversary.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace ringspan {

inline constexpr std::uint64_t kFnv1aStart = 14695981039346656037U;

// Goes on from the hash of the bytes before.
inline std::uint64_t fnv1a(const void* data, std::size_t bytes, std::uint64_t hash = kFnv1aStart) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 1099511628211U;
  return hash;
}

// As a field of an agreement.
inline std::int64_t fnv1a_field(const void* data, std::size_t bytes) { return std::bit_cast<std::int64_t>(fnv1a(data, bytes)); }

}  // namespace ringspan
