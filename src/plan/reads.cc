#include "plan/reads.h"

#include <algorithm>
#include <numeric>

namespace ringspan::internal {
namespace {

constexpr std::size_t kFew = 8;  // hulls or members: not worth an index

// A slice's rows are named exactly by at most this many progressions; beyond, all of its keys are taken.
constexpr std::int64_t kMaxParts = 64;

Slice transposed(const Slice& slice) {
  Slice result = slice;
  std::swap(result.q, result.k);
  result.lo = -slice.hi;
  result.hi = -slice.lo;
  return result;
}

// The keys of a normalized slice that have a query. After normalization all keys do, except where the queries are spaced
// wider than the band: then they are the keys at each distance of the band from a query, or those near each query. Returns
// how many keys without a query are among them.
std::int64_t keys_with_partner(const Slice& slice, std::vector<Progression>& out) {
  const std::int64_t stride_q = slice.q.count > 1 ? slice.q.stride : 1;
  const std::int64_t stride_k = slice.k.count > 1 ? slice.k.stride : 1;
  const bool all = slice.q.count <= 1 || slice.k.count == 1 || slice.hi - slice.lo + 1 >= stride_q || stride_k % stride_q == 0;
  if (all) {
    out.push_back(slice.k);
    return 0;
  }
  const std::int64_t step = std::gcd(stride_q, stride_k);  // of the distances that occur, lo being the first
  const std::int64_t distances = (slice.hi - slice.lo) / step + 1;
  const auto at_distance = [&](std::int64_t index) {
    return ringspan::intersect(slice.k, {slice.q.first + slice.lo + index * step, stride_q, slice.q.count});
  };
  const auto add = [&](const Progression& keys) {
    if (!keys.empty()) out.push_back(keys);
  };
  if (distances <= kMaxParts) {
    for (std::int64_t d = 0; d < distances; ++d) add(at_distance(d));
    return 0;
  }
  if (slice.q.count <= kMaxParts) {
    for (std::int64_t i = 0; i < slice.q.count; ++i) add(clip(slice.k, slice.q.at(i) + slice.lo, slice.q.at(i) + slice.hi + 1));
    return 0;
  }
  std::int64_t keys = 0;
  for (std::int64_t d = 0; d < distances; ++d) keys += at_distance(d).count;
  out.push_back(slice.k);
  return slice.k.count - keys;
}

Reads rows_read(const Lowering& lowering, const Rows& queries, HeadRange heads, const Rows& keys, bool key_side) {
  const int group = lowering.problem().group();
  Reads reads;
  if (queries.empty() || keys.empty() || heads.begin >= heads.end) return reads;
  const std::vector<Progression>& owned = key_side ? keys.pieces : queries.pieces;
  const std::vector<Progression>& others = key_side ? queries.pieces : keys.pieces;
  std::vector<BoxSet> sets(owned.size());
  std::vector<Progression> positions;
  Pieces own_pieces(owned), other_pieces(others);
  const auto visit = [&](const Slice& found, const Hull& own_hull, const Hull& other_hull) {
    ++reads.visited_slices;
    const Slice slice = key_side ? found : transposed(found);  // the owned side is k
    const std::vector<Progression> head_sets =
        key_side ? kv_heads_of(slice.heads, group) : std::vector<Progression>{slice.heads};
    for (const std::size_t i : own_pieces.near(own_hull, slice.k)) {
      const Slice mine = restrict_k(slice, owned[i]);
      if (mine.k.empty()) continue;
      positions.clear();
      std::int64_t excess = 0;
      for (const std::size_t other : other_pieces.near(other_hull, mine.q)) {
        const Slice part = normalize(restrict_q(mine, others[other]));
        if (part.q.count > 0 && part.k.count > 0) excess += keys_with_partner(part, positions);
      }
      for (const Progression& head_set : head_sets) reads.excess_rows += excess * slice.batch_count * head_set.count;
      for (const Progression& progression : positions) {
        for (const Progression& head_set : head_sets) {
          sets[i].add({slice.batch_first, slice.batch_count, head_set, progression});
        }
      }
    }
  };
  const Pieces &of_keys = key_side ? own_pieces : other_pieces, &of_queries = key_side ? other_pieces : own_pieces;
  for_each_slice_between(
      lowering, of_keys.hulls(), of_queries.hulls(), false, heads,
      [&](const Slice& slice, const Hull& k, const Hull& q) { visit(slice, key_side ? k : q, key_side ? q : k); });
  for (const BoxSet& set : sets) {
    const std::vector<Box> boxes = set.boxes();
    reads.boxes.insert(reads.boxes.end(), boxes.begin(), boxes.end());
    reads.excess_rows += set.excess_rows();
  }
  return reads;
}

}  // namespace

std::vector<Hull> hulls(std::span<const Progression> pieces) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].empty()) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return pieces[a].first < pieces[b].first; });
  std::vector<Hull> result;
  for (const std::size_t i : order) {
    if (result.empty() || pieces[i].first > result.back().end) result.push_back({pieces[i].first, pieces[i].end(), {}});
    result.back().end = std::max(result.back().end, pieces[i].end());
    result.back().members.push_back(i);
  }
  return result;
}

Pieces::Pieces(std::span<const Progression> pieces) : hulls_(internal::hulls(pieces)) {
  for (std::size_t i = 0; i < hulls_.size(); ++i) {
    if (hulls_[i].members.size() <= kFew) continue;
    std::vector<Progression> members;
    for (const std::size_t member : hulls_[i].members) members.push_back(pieces[member]);
    ranges_.resize(hulls_.size());
    ranges_[i].emplace(std::move(members));
  }
}

const std::vector<std::size_t>& Pieces::near(const Hull& hull, const Progression& positions) {
  const auto index = static_cast<std::size_t>(&hull - hulls_.data());
  if (ranges_.empty() || !ranges_[index]) return hull.members;
  ranges_[index]->find(positions.first, positions.end(), found_);
  for (std::size_t& place : found_) place = hull.members[place];
  return found_;
}

void for_each_slice_between(const Lowering& lowering, std::span<const Hull> outer, std::span<const Hull> inner,
                            bool outer_is_queries, HeadRange heads,
                            FunctionRef<void(const Slice&, const Hull& outer, const Hull& inner)> visit) {
  const auto lower = [&](const Hull& x, bool is_queries, std::int64_t begin, std::int64_t end,
                         FunctionRef<void(const Slice&)> each) {
    Restriction range{x.begin, x.end, begin, end, heads.begin, heads.end};
    if (!is_queries) range = {begin, end, x.begin, x.end, heads.begin, heads.end};
    lowering.for_each_slice(range, each);
  };
  if (outer.size() <= kFew && inner.size() <= kFew) {
    for (const Hull& x : outer) {
      for (const Hull& y : inner) lower(x, outer_is_queries, y.begin, y.end, [&](const Slice& slice) { visit(slice, x, y); });
    }
    return;
  }
  struct Found {
    std::size_t other;
    const Hull* from;
    Slice slice;
  };
  std::vector<Found> found;
  // The slices of one hull, each cut to those hulls of the other list that it has rows of.
  const auto find = [&](const Hull& x, bool is_queries, std::span<const Hull> others) {
    lower(x, is_queries, others.front().begin, others.back().end, [&](const Slice& whole) {
      const Progression& rows = is_queries ? whole.k : whole.q;
      auto y = std::partition_point(others.begin(), others.end(), [&](const Hull& hull) { return hull.end <= rows.first; });
      for (; y != others.end() && y->begin < rows.end(); ++y) {
        const Progression range{y->begin, 1, y->end - y->begin};
        const Slice slice = normalize(is_queries ? restrict_k(whole, range) : restrict_q(whole, range));
        if (!slice.q.empty() && !slice.k.empty()) found.push_back({static_cast<std::size_t>(y - others.begin()), &x, slice});
      }
    });
  };
  const auto sort = [&] {
    std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.other < b.other; });
  };
  if (inner.size() <= kFew) {
    for (const Hull& y : inner) find(y, !outer_is_queries, outer);
    sort();
    for (const Found& each : found) visit(each.slice, outer[each.other], *each.from);
    return;
  }
  for (const Hull& x : outer) {
    found.clear();
    find(x, outer_is_queries, inner);
    sort();
    for (const Found& each : found) visit(each.slice, x, inner[each.other]);
  }
}

Reads keys_read(const Lowering& lowering, const Rows& queries, HeadRange heads, const Rows& keys) {
  return rows_read(lowering, queries, heads, keys, true);
}

Reads queries_reading(const Lowering& lowering, const Rows& queries, HeadRange heads, const Rows& keys) {
  return rows_read(lowering, queries, heads, keys, false);
}

std::vector<Progression> kv_heads_of(const Progression& heads, int group) {
  if (heads.empty()) return {};
  if (heads.count == 1) return {{heads.first / group, 1, 1}};
  if (heads.stride <= group) return {{heads.first / group, 1, heads.last() / group - heads.first / group + 1}};
  if (heads.stride % group == 0) return {{heads.first / group, heads.stride / group, heads.count}};
  // Wider than a group and not a multiple of it: no two heads share a kv head, and every `period`-th one is affine.
  const std::int64_t period = group / std::gcd(heads.stride, std::int64_t{group});
  std::vector<Progression> result;
  for (std::int64_t c = 0; c < std::min(period, heads.count); ++c) {
    result.push_back({heads.at(c) / group, heads.stride * period / group, (heads.count - 1 - c) / period + 1});
  }
  return result;
}

std::vector<Progression> heads_reading(const Progression& heads, int group, const Progression& kv_heads) {
  std::vector<Progression> result;
  if (heads.empty() || kv_heads.empty()) return result;
  if (kv_heads.count == 1 || kv_heads.stride == 1) {
    const Progression part = clip(heads, kv_heads.first * group, (kv_heads.last() + 1) * group);
    if (!part.empty()) result.push_back(part);
    return result;
  }
  for (int c = 0; c < group; ++c) {
    const Progression part = intersect(heads, {kv_heads.first * group + c, kv_heads.stride * group, kv_heads.count});
    if (!part.empty()) result.push_back(part);
  }
  return result;
}

}  // namespace ringspan::internal
