#include "plan/load.h"

#include <algorithm>

#include "plan/pass.h"

namespace ringspan::internal {
namespace {

Load load_of(const Lowering& lowering, const Shard& shard, bool queries) {
  Load load;
  load.rows = shard.rows;
  Restriction range = unrestricted(lowering.problem());
  Pieces pieces(shard.pieces);
  for (const Hull& hull : pieces.hulls()) {
    (queries ? range.q_begin : range.k_begin) = hull.begin;
    (queries ? range.q_end : range.k_end) = hull.end;
    lowering.for_each_slice(range, [&](const Slice& found) {
      for (const std::size_t member : pieces.near(hull, queries ? found.q : found.k)) {
        const Progression& piece = shard.pieces[member];
        const Slice slice = normalize(queries ? restrict_q(found, piece) : restrict_k(found, piece));
        if (slice.q.empty() || slice.k.empty()) continue;
        load.pairs += pair_count(slice);
        load.others += slice.batch_count * slice.heads.count * (queries ? slice.k : slice.q).count;
      }
    });
  }
  return load;
}

}  // namespace

Loads::Loads(const Setting& setting) : ranks_(setting.ranks()), heads_(static_cast<std::size_t>(setting.problem->heads)) {
  const Lowering& lowering = *setting.lowering;
  for (const Shard& shard : setting.shards_q) queries_.push_back(load_of(lowering, shard, true));
  for (const Shard& shard : setting.shards_k) keys_.push_back(load_of(lowering, shard, false));
  lowering.for_each_slice(unrestricted(lowering.problem()), [&](const Slice& slice) {
    const Int128 pairs = pair_count(slice) / slice.heads.count;
    for (std::int64_t i = 0; i < slice.heads.count; ++i) heads_[static_cast<std::size_t>(slice.heads.at(i))] += pairs;
  });
}

Int128 Loads::pairs(const Assignment& assignment) const {
  if (!assignment.computes()) return 0;
  const bool all_heads = assignment.heads.end - assignment.heads.begin == static_cast<int>(heads_.size());
  const bool all_queries = assignment.query_owners.count == ranks_, all_keys = assignment.key_owners.count == ranks_;
  const auto sum = [](const std::vector<Load>& loads, const Progression& owners) {
    Int128 pairs = 0;
    for (std::int64_t i = 0; i < owners.count; ++i) pairs += loads[static_cast<std::size_t>(owners.at(i))].pairs;
    return pairs;
  };
  Int128 pairs = 0;
  if (all_heads && all_keys) return sum(queries_, assignment.query_owners);
  if (all_heads && all_queries) return sum(keys_, assignment.key_owners);
  if (!all_queries || !all_keys) return 0;
  for (int head = assignment.heads.begin; head < assignment.heads.end; ++head) pairs += heads_[static_cast<std::size_t>(head)];
  return pairs;
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
