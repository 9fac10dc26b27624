// Slice: the one form to which every pattern is lowered, and the operations on it. Pure.
//
// A slice says: for every batch item in [batch_first, batch_first + batch_count), every query head in `heads`, query i of
// `q` attends key j of `k` where lo <= j - i <= hi. Positions are global, so restricting a slice never shifts anything.
#pragma once

#include <cstdint>
#include <string>

#include "base/int128.h"
#include "ringspan/sharding.h"

namespace ringspan {

// Bounds that never bind; far enough from the ends of int64 that sums of two do not overflow.
inline constexpr std::int64_t kNoLow = -(std::int64_t{1} << 60);
inline constexpr std::int64_t kNoHigh = std::int64_t{1} << 60;

struct Slice {
  std::int64_t batch_first = 0;
  std::int64_t batch_count = 1;
  Progression heads;  // query heads
  Progression q;
  Progression k;
  std::int64_t lo = kNoLow;
  std::int64_t hi = kNoHigh;
  std::int64_t diagonal = 0;  // of the frame; only ALiBi needs it here
  int state = 0;
  bool operator==(const Slice&) const = default;
};

// The common positions of two progressions (Chinese remainder theorem, 128-bit inside); O(log stride).
Progression intersect(const Progression& a, const Progression& b);
// The part of `a` inside [begin, end).
Progression clip(const Progression& a, std::int64_t begin, std::int64_t end);

// The slice with its queries (keys) restricted. May be empty.
Slice restrict_q(const Slice& slice, const Progression& q);
Slice restrict_k(const Slice& slice, const Progression& k);

// Tightens the band to differences that occur and clips q and k to rows that may have a partner; after it, a slice that
// can be seen to hold no pair has q.count == 0. Idempotent; the set of pairs stays the same.
Slice normalize(const Slice& slice);

// Exact number of (batch, head, i, j) pairs. Closed form: three ranges, the middle one a floor sum; O(log n).
Int128 pair_count(const Slice& slice);
bool is_empty(const Slice& slice);  // pair_count == 0, without counting

std::string to_string(const Progression& progression);  // "3..99:4" first..last:stride, "-" when empty
std::string to_string(const Slice& slice);

}  // namespace ringspan
