#include "plan/route.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "base/arithmetic.h"
#include "base/check.h"
#include "plan/near.h"

namespace ringspan::internal {
namespace {

const std::vector<Box> kNothing;

// Shards of queries that lie one after the other in the order of the ranks: which ranks have some of a range.
class InOrder {
 public:
  explicit InOrder(std::span<const Shard> shards) {
    std::int64_t end = 0;
    for (const Shard& shard : shards) {
      for (const Progression& piece : shard.pieces) {
        if (piece.first < end) return;
        end = piece.end();
      }
      begins_.push_back(shard.pieces.empty() ? end : shard.pieces.front().first);
      ends_.push_back(end);
    }
    holds_ = true;
  }

  bool holds() const { return holds_; }
  int first_after(std::int64_t begin) const {
    return static_cast<int>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  }
  int last_before(std::int64_t end) const {
    return static_cast<int>(std::lower_bound(begins_.begin(), begins_.end(), end) - begins_.begin()) - 1;
  }

 private:
  bool holds_ = false;
  std::vector<std::int64_t> begins_, ends_;  // by rank; of none, where the shard before ends
};

// What the readers of one owner's rows read, evaluated when asked for.
class Readers {
 public:
  Readers(const Lowering& lowering, std::span<const Shard> shards_q, const InOrder& order, const Shard& owned, int owner)
      : lowering_(lowering), shards_q_(shards_q), keys_{owned.pieces}, owner_(owner), list_of_(shards_q.size() / kPage + 1) {
    for (const Progression& piece : keys_.pieces) rows_ += piece.count * lowering.problem().batch * lowering.problem().kv_heads;
    find_near(order);
  }

  const std::vector<Box>& at(int distance) {
    std::vector<std::int32_t>& page = list_of_[static_cast<std::size_t>(distance) / kPage];
    if (page.empty()) page.assign(kPage, -1);
    std::int32_t& list = page[static_cast<std::size_t>(distance) % kPage];
    if (list < 0) {
      const std::size_t reader = (static_cast<std::size_t>(owner_) + static_cast<std::size_t>(distance)) % shards_q_.size();
      list = keep(keys_read(lowering_, {shards_q_[reader].pieces}, {0, lowering_.problem().heads}, keys_).boxes);
      ++evaluated_;
    }
    return lists_[static_cast<std::size_t>(list)];
  }
  const std::vector<Box>& at(int direction, int hop) { return at(direction == 0 ? hop : ranks() - hop); }
  // The farthest of at most `hop` hops at which anything may be read; 0: none.
  int farthest(int direction, int hop) const {
    if (hop < 1) return 0;
    if (direction == 0) {
      const auto after = std::partition_point(near_.begin(), near_.end(), [&](const Near& near) { return near.first <= hop; });
      return after == near_.begin() ? 0 : std::min(hop, std::prev(after)->last);
    }
    const int least = ranks() - hop;
    const auto from = std::partition_point(near_.begin(), near_.end(), [&](const Near& near) { return near.last < least; });
    return from == near_.end() ? 0 : ranks() - std::max(least, from->first);
  }
  const std::vector<Progression>& pieces() const { return keys_.pieces; }
  std::int64_t rows() const { return rows_; }
  std::int64_t evaluated() const { return evaluated_; }

 private:
  static constexpr std::size_t kPage = 512;

  // Distances upwards, first to last.
  struct Near {
    int first = 0;
    int last = 0;
  };

  int ranks() const { return static_cast<int>(shards_q_.size()); }

  // One lowering of all queries against the owner's keys tells which readers may read any.
  void find_near(const InOrder& order) {
    if (keys_.empty() || ranks() < 2) return;
    if (!order.holds()) {
      near_.push_back({1, ranks() - 1});
      return;
    }
    std::vector<Near> found;
    const auto add = [&](int first, int last) {
      if (first <= last && (found.empty() || first < found.back().first || last > found.back().last)) {
        found.push_back({first, last});
      }
    };
    const Problem& problem = lowering_.problem();
    for (const Hull& keys : hulls(keys_.pieces)) {
      lowering_.for_each_slice({0, problem.tokens_q, keys.begin, keys.end, 0, problem.heads}, [&](const Slice& slice) {
        const int first = order.first_after(slice.q.first), last = order.last_before(slice.q.end());
        add(std::max(first, owner_ + 1) - owner_, last - owner_);
        add(first - owner_ + ranks(), std::min(last, owner_ - 1) - owner_ + ranks());
      });
    }
    std::sort(found.begin(), found.end(), [](const Near& a, const Near& b) { return a.first < b.first; });
    for (const Near& near : found) {
      if (near_.empty() || near.first > near_.back().last + 1) near_.push_back(near);
      near_.back().last = std::max(near_.back().last, near.last);
    }
  }

  // Neighbours often read the same: there are far fewer lists than readers.
  std::int32_t keep(std::vector<Box> boxes) {
    const std::size_t recent = lists_.size() < 2 ? 0 : lists_.size() - 2;
    for (std::size_t i = recent; i < lists_.size(); ++i) {
      if (lists_[i] == boxes) return static_cast<std::int32_t>(i);
    }
    lists_.push_back(std::move(boxes));
    return static_cast<std::int32_t>(lists_.size() - 1);
  }

  const Lowering& lowering_;
  std::span<const Shard> shards_q_;
  Rows keys_;
  int owner_;
  std::int64_t rows_ = 0;
  std::vector<Near> near_;                          // disjoint, in order
  std::vector<std::vector<std::int32_t>> list_of_;  // by distance, page by page, once one of it is asked for; -1: not evaluated
  std::deque<std::vector<Box>> lists_;              // references to them stay valid
  std::int64_t evaluated_ = 0;
};

// The union of what readers read, piece by piece of the owner's shard.
class Union {
 public:
  explicit Union(const std::vector<Progression>& pieces) : pieces_(pieces), ranges_(pieces), sets_(pieces.size()) {}

  void add(std::span<const Box> boxes) {
    for (const Box& box : boxes) {
      const std::int64_t first = box.positions.first;
      ranges_.find(first, first + 1, near_);
      for (const std::size_t i : near_) {
        if (pieces_[i].contains(first)) sets_[i].add(box);
      }
    }
  }
  std::vector<Box> boxes() const {
    std::vector<Box> all;
    for (const BoxSet& set : sets_) {
      const std::vector<Box> boxes = set.boxes();
      all.insert(all.end(), boxes.begin(), boxes.end());
    }
    return all;
  }

 private:
  const std::vector<Progression>& pieces_;
  Ranges ranges_;
  std::vector<BoxSet> sets_;
  std::vector<std::size_t> near_;
};

// Legs from the last reader back to the owner: a hop carries what the readers from there on read.
std::vector<Leg> legs_to(Readers& readers, int direction, int hops) {
  std::vector<Leg> legs;
  Union carried(readers.pieces());
  std::int64_t rows = 0;
  const std::vector<Box>* added = &kNothing;  // neighbours often read the same
  for (int hop = hops; rows < readers.rows() && (hop = readers.farthest(direction, hop)) > 0; --hop) {
    const std::vector<Box>& reads = readers.at(direction, hop);
    if (reads.empty() || reads == *added || (!legs.empty() && reads == legs.back().boxes)) continue;
    carried.add(reads);
    added = &reads;
    std::vector<Box> boxes = carried.boxes();
    const std::int64_t now = row_count(boxes);
    if (now == rows) continue;
    rows = now;
    legs.push_back({hop, std::move(boxes)});
  }
  std::reverse(legs.begin(), legs.end());
  return legs;
}

std::int64_t rows_moved(std::span<const Leg> legs) {
  std::int64_t rows = 0;
  int hop = 0;
  for (const Leg& leg : legs) {
    rows += row_count(leg.boxes) * (leg.last_hop - hop);
    hop = leg.last_hop;
  }
  return rows;
}

// A bound of rows_moved(legs_to(...)) from below, without their unions: what a reader reads travels all the way to it.
std::int64_t least_rows_moved(Readers& readers, int direction, int hops) {
  std::int64_t rows = 0;
  for (int hop = hops; (hop = readers.farthest(direction, hop)) > 0 && readers.rows() * hop > rows; --hop) {
    rows = std::max(rows, row_count(readers.at(direction, hop)) * hop);
  }
  return rows;
}

}  // namespace

const std::vector<Box>& Route::carried(int direction, int hop) const {
  for (const Leg& leg : legs_[static_cast<std::size_t>(direction)]) {
    if (hop <= leg.last_hop) return leg.boxes;
  }
  return kNothing;
}

bool Route::serves(int direction, int hop) const { return hop <= (direction == 0 ? up_ : down_); }

RingRoutes::RingRoutes(const Lowering& lowering, std::span<const Shard> shards_q, std::span<const Shard> shards_k) {
  const int ranks = lowering.problem().ranks;
  const InOrder order(shards_q);
  std::vector<Readers> readers;
  readers.reserve(shards_k.size());
  for (int owner = 0; owner < ranks; ++owner)
    readers.emplace_back(lowering, shards_q, order, shards_k[static_cast<std::size_t>(owner)], owner);
  // Of three ways - all readers upwards, all downwards, each by the nearer side - the one that moves the fewest rows; among
  // equals the first. One for all owners: were they to differ, some ranks would be visited from both sides in one stage, and
  // from none in another. The last way is looked at first, since it often rules out the others at a glance.
  std::int64_t best_rows = std::numeric_limits<std::int64_t>::max();
  for (const int up : {ranks / 2, 0, ranks - 1}) {
    const std::array<int, kDirections> hops{up, ranks - 1 - up};
    std::int64_t rows = 0;
    for (Readers& of : readers) rows += least_rows_moved(of, 0, hops[0]) + least_rows_moved(of, 1, hops[1]);
    if (rows > best_rows) continue;
    rows = 0;
    std::vector<Route> routes(readers.size());
    for (std::size_t owner = 0; owner < routes.size() && rows <= best_rows; ++owner) {
      Route& route = routes[owner];
      route.up_ = hops[0];
      route.down_ = hops[1];
      for (int direction = 0; direction < kDirections; ++direction) {
        const auto d = static_cast<std::size_t>(direction);
        route.legs_[d] = legs_to(readers[owner], direction, hops[d]);
        rows += rows_moved(route.legs_[d]);
      }
    }
    if (rows > best_rows) continue;
    best_rows = rows;
    routes_ = std::move(routes);
  }
  for (const Readers& of : readers) evaluated_ += of.evaluated();
}

std::vector<std::vector<Box>> cut(std::span<const Box> boxes, std::int64_t rows) {
  std::vector<std::vector<Box>> parts;
  std::int64_t left = 0;
  for (const Box& box : boxes) {
    const std::int64_t per_position = box.batch_count * box.heads.count;
    RINGSPAN_CHECK(per_position <= rows);
    for (std::int64_t done = 0; done < box.positions.count;) {
      if (left < per_position) {
        parts.emplace_back();
        left = rows;
      }
      const std::int64_t count = std::min(left / per_position, box.positions.count - done);
      Box part = box;
      part.positions = {box.positions.at(done), box.positions.stride, count};
      parts.back().push_back(part);
      left -= count * per_position;
      done += count;
    }
  }
  return parts;
}

std::vector<std::vector<Box>> cut_in_turns(std::span<const Box> boxes, std::int64_t rows, int phase) {
  const std::int64_t all = row_count(boxes);
  std::size_t middle = 0;
  for (std::int64_t first = 0; 2 * first < all; ++middle) first += boxes[middle].rows();
  std::vector<std::vector<Box>> halves[] = {cut(boxes.first(middle), rows), cut(boxes.subspan(middle), rows)};
  const std::size_t counts[] = {halves[0].size(), halves[1].size()};
  if (counts[1] == 0 || static_cast<std::int64_t>(counts[0] + counts[1]) >= 2 * ceil_div(all, rows)) return cut(boxes, rows);
  std::vector<std::vector<Box>> parts;
  for (std::size_t next[] = {0, 0}; parts.size() < counts[0] + counts[1];) {
    // The half of which a smaller share has been taken.
    const std::size_t shares[] = {next[0] * counts[1], next[1] * counts[0]};
    const auto half = static_cast<std::size_t>(shares[0] == shares[1] ? phase : shares[0] > shares[1] ? 1 : 0);
    parts.push_back(std::move(halves[half][next[half]++]));
  }
  return parts;
}

std::vector<std::vector<Box>> spread(std::vector<std::vector<Box>> parts, std::size_t count, int phase) {
  if (parts.empty() || parts.size() >= count) return parts;
  std::vector<std::vector<Box>> all(count);
  const std::size_t shift = phase == 0 ? 0 : 1;
  for (std::size_t i = 0; i < parts.size(); ++i) all[(2 * i + shift) * count / (2 * parts.size())] = std::move(parts[i]);
  return all;
}

std::vector<Box> common(std::span<const Box> a, std::span<const Box> b) {
  std::vector<Box> boxes;
  for_each_near(b, a, [&](const Box& y, const Box& x) {
    const Box both = intersect(x, y);
    if (!is_empty(both)) boxes.push_back(both);
  });
  return boxes;
}

}  // namespace ringspan::internal
