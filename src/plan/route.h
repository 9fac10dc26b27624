// Routes: how the rows of an owner reach their readers round the ring. What a route carries follows from the problem alone,
// so that it is found once and is the same for every rank, pass and bucket size. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "plan/reads.h"

namespace ringspan::internal {

inline constexpr int kDirections = 2;  // up (to rank + 1) and down
constexpr int sign(int direction) { return direction == 0 ? 1 : -1; }

// The hops of one direction, nearest first: every hop up to `last_hop` carries `boxes`, those of later legs a part of them.
struct Leg {
  int last_hop = 0;
  std::vector<Box> boxes;
};

class Route {
 public:
  // What hop h (1 = from the owner to its neighbour) carries; empty beyond the last reader.
  const std::vector<Box>& carried(int direction, int hop) const;
  // Whether the reader at that many hops is served in that direction.
  bool serves(int direction, int hop) const;

 private:
  friend class RingRoutes;
  int up_ = 0;    // readers at 1 .. up_ hops upwards are served upwards
  int down_ = 0;  // and those at 1 .. down_ hops downwards downwards; up_ + down_ = ranks - 1
  std::array<std::vector<Leg>, kDirections> legs_;
};

// Cost: per owner one lowering for the queries of all ranks, where these lie in the order of the ranks, and one evaluation of
// what is read for each reader that this shows; fewer where all of a chunk is read from afar.
class RingRoutes {
 public:
  // Key-side rows of all ranks, to the ranks whose queries read them.
  RingRoutes(const Lowering& lowering, std::span<const Shard> shards_q, std::span<const Shard> shards_k);
  const Route& of(int owner) const { return routes_[static_cast<std::size_t>(owner)]; }
  // For how many pairs of owner and reader it was evaluated what is read.
  std::int64_t evaluated() const { return evaluated_; }

 private:
  std::vector<Route> routes_;
  std::int64_t evaluated_ = 0;
};

// Cuts rows into consecutive parts of at most `rows` (batch, position, head) rows, at positions; a position of one box stays
// whole. No two neighbouring parts fit into one.
std::vector<std::vector<Box>> cut(std::span<const Box> boxes, std::int64_t rows);

// The same of the first half of the boxes and of the second, and their parts in turns; phase 1: the second half first. Fewer
// than twice rows_of_all / rows, rounded up, as with cut(), which it is where that cannot be.
std::vector<std::vector<Box>> cut_in_turns(std::span<const Box> boxes, std::int64_t rows, int phase);

// Makes `count` parts of fewer, with empty ones evenly between them; phase 1: an empty one first.
std::vector<std::vector<Box>> spread(std::vector<std::vector<Box>> parts, std::size_t count, int phase);

// The rows that are in both lists of disjoint boxes, as disjoint boxes.
std::vector<Box> common(std::span<const Box> a, std::span<const Box> b);

}  // namespace ringspan::internal
