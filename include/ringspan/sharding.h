// Which rank owns which global positions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan {

// The positions first, first + stride, ..., count of them; stride >= 1.
struct Progression {
  std::int64_t first = 0;
  std::int64_t stride = 1;
  std::int64_t count = 0;

  bool empty() const { return count <= 0; }
  std::int64_t last() const { return first + (count - 1) * stride; }  // only when not empty
  std::int64_t end() const { return empty() ? first : last() + 1; }
  std::int64_t at(std::int64_t index) const { return first + index * stride; }
  bool contains(std::int64_t position) const {
    return count > 0 && position >= first && position <= last() && (position - first) % stride == 0;
  }
  bool operator==(const Progression&) const = default;
};

enum class ShardingKind : std::uint8_t { contiguous, zigzag, striped, block_striped, explicit_lists };

// contiguous     p chunks of n / p positions, the first n mod p one larger; rank r holds chunk r
// zigzag         2p such chunks; rank r holds chunks r and 2p - 1 - r
// striped        rank r holds r, r + p, r + 2p, ...
// block_striped  blocks of `block` positions dealt round robin
// explicit_lists lists[r], disjoint and covering [0, n); positions of a shard are stored in ascending order
struct Sharding {
  ShardingKind kind = ShardingKind::contiguous;
  std::int64_t block = 0;
  std::vector<std::vector<Progression>> lists{};

  // "contiguous", "zigzag", "striped", "block_striped:SIZE", "explicit:0-99;100-199,300-399:2" (first-last[:stride], ranks
  // separated by ';'). Throws InvalidArgument.
  static Sharding parse(std::string_view text);
  std::string to_string() const;
  bool operator==(const Sharding&) const = default;
};

// One rank's part: progressions with disjoint, ascending hulls, stored one after the other: the k-th position of piece i is
// local row offsets[i] + k.
struct Shard {
  std::vector<Progression> pieces{};
  std::vector<std::int64_t> offsets{};
  std::int64_t rows = 0;

  // The global positions in storage order; allocates rows elements.
  std::vector<std::int64_t> positions() const;
};

// The shard of one rank; O(pieces). Throws InvalidArgument where explicit lists are not disjoint and covering.
Shard make_shard(const Sharding& sharding, std::int64_t tokens, int ranks, int rank);

// Throws InvalidArgument unless the sharding is sound for these tokens and ranks; O(tokens) only for explicit lists.
void validate(const Sharding& sharding, std::int64_t tokens, int ranks);

// Copies whole rows between a full tensor and one rank's shard: `row_bytes` bytes per row and `outer` repeats (the batch),
// both sides dense. shard(): full -> local; unshard(): local -> full. Throws InvalidArgument where the shard ends behind
// `tokens`, a count is negative, or pieces and offsets are none that a shard has.
void shard_rows(const Shard& shard, std::int64_t tokens, std::int64_t outer, std::int64_t row_bytes, const void* full,
                void* local);
void unshard_rows(const Shard& shard, std::int64_t tokens, std::int64_t outer, std::int64_t row_bytes, const void* local,
                  void* full);

}  // namespace ringspan
