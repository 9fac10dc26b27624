// Common parts of progressions: what is in the same ones of them. And the heads on the key side of a task. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ringspan/sharding.h"

namespace ringspan::internal {

// Strides that come together later than this are not compared.
inline constexpr std::int64_t kMostPeriod = 16;

// Each progression in parts, of which any two, of whichever progressions, are equal or share nothing; as few as can easily be.
// Nothing where their strides come together too seldom, or too many overlap. Cost: O(parts of all), times a logarithm.
std::optional<std::vector<std::vector<Progression>>> common_parts(std::span<const Progression> all);

// The kv heads of query heads, `group` of which share one; nothing where there are others between them.
std::optional<Progression> written_kv_heads(const Progression& heads, int group);
// Those of the query heads that read the kv heads, a part of theirs; several progressions where these have others between them.
std::vector<Progression> query_heads_of(const Progression& heads, const Progression& kv_heads, int group);

}  // namespace ringspan::internal
