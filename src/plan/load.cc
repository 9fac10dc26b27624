#include "plan/load.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "plan/pass.h"

namespace ringspan::internal {
namespace {

// visit(slice): of what the shard's rows have. Returns how many slices were looked at.
template <typename Visit>
std::int64_t for_each_slice_of(const Lowering& lowering, const Shard& shard, bool queries, const Visit& visit) {
  std::int64_t looked_at = 0;
  Restriction range = unrestricted(lowering.problem());
  Pieces pieces(shard.pieces);
  for (const Hull& hull : pieces.hulls()) {
    (queries ? range.q_begin : range.k_begin) = hull.begin;
    (queries ? range.q_end : range.k_end) = hull.end;
    lowering.for_each_slice(range, [&](const Slice& found) {
      ++looked_at;
      for (const std::size_t member : pieces.near(hull, queries ? found.q : found.k)) {
        const Progression& piece = shard.pieces[member];
        const Slice slice = normalize(queries ? restrict_q(found, piece) : restrict_k(found, piece));
        if (!slice.q.empty() && !slice.k.empty()) visit(slice);
      }
    });
  }
  return looked_at;
}

// What `count` ranks have where `known` of them have so much.
Int128 extrapolated(Int128 pairs, std::int64_t known, std::int64_t count) {
  return pairs / known * count + pairs % known * count / known;
}

}  // namespace

std::vector<int> spread_ranks(const std::vector<int>& first, int ranks) {
  std::vector<int> order = first;
  std::vector<bool> is_in(static_cast<std::size_t>(ranks));
  for (const int rank : first) is_in[static_cast<std::size_t>(rank)] = true;
  std::uint64_t place = 0;
  while (order.size() < is_in.size()) {
    place += 0x9e3779b97f4a7c15u;  // multiples of the golden ratio, modulo 1
    const auto rank = static_cast<std::size_t>(((place >> 32) * static_cast<std::uint64_t>(ranks)) >> 32);
    if (!is_in[rank]) order.push_back(static_cast<int>(rank));
    is_in[rank] = true;
  }
  return order;
}

Loads::Loads(const Setting& setting, std::int64_t most_slices)
    : ranks_(setting.ranks()),
      heads_(setting.problem->heads),
      is_known_(static_cast<std::size_t>(ranks_)),
      queries_(is_known_.size()),
      keys_(is_known_.size()) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Int128> heads;
  std::int64_t slices = 0;
  for (const int rank : spread_ranks({}, ranks_)) {
    if (slices >= most_slices) break;
    const auto at = static_cast<std::size_t>(rank);
    is_known_[at] = true;
    ++looked_at_;
    for (const bool queries : {true, false}) {
      Load& load = (queries ? queries_ : keys_)[at];
      slices += for_each_slice_of(
          *setting.lowering, (queries ? setting.shards_q : setting.shards_k)[at], queries, [&](const Slice& slice) {
            const Int128 pairs = pair_count(slice);
            load.pairs += pairs;
            load.others += slice.batch_count * slice.heads.count * (queries ? slice.k : slice.q).count;
            if (queries) heads[{slice.heads.first, slice.heads.stride, slice.heads.count}] += pairs / slice.heads.count;
          });
      (queries ? query_pairs_ : key_pairs_) += load.pairs;
    }
  }
  for (std::size_t rank = 0; rank < is_known_.size(); ++rank)
    queries_[rank].rows = setting.shards_q[rank].rows, keys_[rank].rows = setting.shards_k[rank].rows;
  for (const auto& [of, pairs] : heads) head_pairs_.push_back({{std::get<0>(of), std::get<1>(of), std::get<2>(of)}, pairs});
}

Int128 Loads::sum(const std::vector<Load>& loads, Int128 of_known, const Progression& owners) const {
  Int128 pairs = 0;
  std::int64_t unknown = 0;
  for (std::int64_t i = 0; i < owners.count; ++i) {
    const auto at = static_cast<std::size_t>(owners.at(i));
    pairs += loads[at].pairs;
    unknown += is_known_[at] ? 0 : 1;
  }
  return pairs + (unknown == 0 ? Int128{0} : extrapolated(of_known, looked_at_, unknown));
}

Int128 Loads::pairs(const Assignment& assignment) const {
  if (!assignment.computes()) return 0;
  const HeadRange heads = assignment.heads;
  const bool all_heads = heads.end - heads.begin == heads_;
  const bool all_queries = assignment.query_owners.count == ranks_, all_keys = assignment.key_owners.count == ranks_;
  if (all_heads && all_keys) return sum(queries_, query_pairs_, assignment.query_owners);
  if (all_heads && all_queries) return sum(keys_, key_pairs_, assignment.key_owners);
  if (!all_queries || !all_keys) return 0;
  Int128 pairs = 0;
  for (const HeadPairs& some : head_pairs_) pairs += some.pairs * clip(some.heads, heads.begin, heads.end).count;
  return looked_at_ == ranks_ ? pairs : extrapolated(pairs, looked_at_, ranks_);
}

std::vector<int> Loads::extremes() const {
  std::vector<int> ranks;
  for (const std::vector<Load>* loads : {&queries_, &keys_}) {
    const auto add = [&](auto less) {
      ranks.push_back(static_cast<int>(std::max_element(loads->begin(), loads->end(), less) - loads->begin()));
    };
    add([](const Load& a, const Load& b) { return a.pairs < b.pairs; });
    add([](const Load& a, const Load& b) { return a.rows < b.rows; });
    add([](const Load& a, const Load& b) { return a.others < b.others; });
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace ringspan::internal
