// Checks of a Pattern by itself, whatever the problem around it. Pure; O(branches + blocks log blocks) where few blocks share
// rows.
#pragma once

#include <cstdint>

#include "ringspan/pattern.h"
#include "ringspan/sharding.h"

namespace ringspan::internal {

// The most tokens a problem may have, and the largest number in a pattern: sums of a few stay far from the ends of int64.
inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 40;
inline constexpr std::int64_t kMaxOffset = std::int64_t{1} << 48;
inline constexpr std::size_t kMaxBranches = 255;
inline constexpr int kMaxHeads = 1 << 30;  // counts of heads and steps through them are 32-bit
inline constexpr int kMaxRanks = 1 << 20;  // planning one knows the shards of all

// Throws InvalidArgument naming the field, its value and what was expected.
void validate(const Pattern& pattern);

// make_shard() of a sharding that is known to be valid: of p ranks one after the other, in O(pieces) each.
Shard make_valid_shard(const Sharding& sharding, std::int64_t tokens, int ranks, int rank);

}  // namespace ringspan::internal
