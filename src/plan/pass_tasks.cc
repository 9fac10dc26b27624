// Tasks, and the rows of other ranks: states and gradients for them, packing them, taking them in.
#include "plan/pass.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "ringspan/error.h"

namespace ringspan::internal {

std::vector<AttendItem> PassBuilder::attend_items(std::span<const Entry> queries, std::span<const Entry> keys,
                                                  HeadRange heads) {
  std::vector<AttendItem> items;
  if (queries.empty() || keys.empty() || heads.begin >= heads.end) return items;
  const auto positions_of = [](std::span<const Entry> entries) {
    std::vector<Progression> positions;
    for (const Entry& entry : entries) positions.push_back(entry.box.positions);
    return positions;
  };
  // Of those near a slice's rows, the ones that hold some of them: most hold other batch items, or rows beside these.
  std::vector<std::size_t> met_queries, met_keys;
  const auto meet = [](std::span<const Entry> entries, const std::vector<std::size_t>& near, const Slice& slice,
                       const Progression& rows, std::vector<std::size_t>& met) {
    met.clear();
    for (const std::size_t index : near) {
      const Box& box = entries[index].box;
      if (box.positions.last() < rows.first || rows.last() < box.positions.first) continue;
      if (box.batch_first + box.batch_count <= slice.batch_first) continue;
      if (slice.batch_first + slice.batch_count <= box.batch_first) continue;
      met.push_back(index);
    }
  };
  Pieces of_queries(positions_of(queries)), of_keys(positions_of(keys));
  for_each_slice_between(lowering(), of_queries.hulls(), of_keys.hulls(), true, heads,
                         [&](const Slice& slice, const Hull& q, const Hull& k) {
                           Program& program = builder_.program();
                           ++program.visited_slices;
                           meet(queries, of_queries.near(q, slice.q), slice, slice.q, met_queries);
                           meet(keys, of_keys.near(k, slice.k), slice, slice.k, met_keys);
                           program.tried_pairs += std::ssize(met_queries) * std::ssize(met_keys);
                           for (const std::size_t key : met_keys) {
                             for (const std::size_t query : met_queries) add_items(slice, queries[query], keys[key], items);
                           }
                         });
  return items;
}

// The pairs of a slice that are between two entries.
void PassBuilder::add_items(const Slice& found, const Entry& query, const Entry& key, std::vector<AttendItem>& items) const {
  const std::int64_t group = problem().group();
  const Progression& kv_heads = key.box.heads;
  if (kv_heads.count == 1 && clip(found.heads, kv_heads.first * group, (kv_heads.first + 1) * group).empty()) return;
  AttendItem item;
  Slice& slice = item.slice;
  slice = restrict_k(found, key.box.positions);
  if (slice.k.empty()) return;
  slice = restrict_q(slice, query.box.positions);
  if (slice.q.empty()) return;
  for (const Box* box : {&query.box, &key.box}) {
    const std::int64_t end = std::min(slice.batch_first + slice.batch_count, box->batch_first + box->batch_count);
    slice.batch_first = std::max(slice.batch_first, box->batch_first);
    slice.batch_count = end - slice.batch_first;
    if (slice.batch_count <= 0) return;
  }
  slice = normalize(slice);
  if (slice.q.empty() || slice.k.empty()) return;
  const auto state = static_cast<std::size_t>(slice.state);
  const auto q_ref = [&](const Loc& loc) { return ref(loc, query.box, slice.q); };
  const auto k_ref = [&](const Loc& loc) { return ref(loc, key.box, slice.k); };
  item.operands[kQ] = q_ref(query.q);
  item.operands[kK] = k_ref(key.k);
  item.operands[kV] = k_ref(key.v);
  if (backward_) {
    item.operands[kDOut] = q_ref(query.d_out);
    item.operands[kLse] = q_ref(query.lse);
    item.operands[kDelta] = q_ref(query.delta.at(state));
    item.operands[kDq] = q_ref(query.dq);
    item.operands[kDk] = k_ref(key.dk);
    item.operands[kDv] = k_ref(key.dv);
  } else {
    item.operands[kM] = q_ref(query.m.at(state));
    item.operands[kL] = q_ref(query.l.at(state));
    item.operands[kAcc] = q_ref(query.acc.at(state));
  }
  for (const Progression& head_set : heads_reading(slice.heads, problem().group(), key.box.heads)) {
    AttendItem part = item;
    part.slice.heads = intersect(head_set, query.box.heads);
    if (!part.slice.heads.empty()) items.push_back(part);
  }
  if (std::ssize(items) + std::ssize(builder_.program().attend_items) > setting_.most_tasks) {
    throw TooManyTasks(
        fmt::format("rank {} would have more than {} tasks in a pass, one for each two pieces of shards that meet; "
                    "larger blocks of block_striped, contiguous or zigzag shards, or fewer tokens make fewer",
                    rank_, setting_.most_tasks));
  }
}

void PassBuilder::add_state(std::vector<Entry>& entries, RegionId region, std::vector<Launch>& fills) {
  std::int64_t offset = 0;
  for (int s = 0; s < setting_.states; ++s) {
    for (TensorKind kind : {TensorKind::m, TensorKind::l, TensorKind::acc}) {
      const Part p = part(kind, s);
      for (Entry& entry : entries) {
        set_loc(entry, p, {builder_.arena_view(region, offset, p, entry.box), 0, 1});
        offset += entry.box.rows() * p.width * 4;
      }
      if (kind == TensorKind::m) fill(fills, entries, p, kMinusInfinity, all_heads());
    }
  }
  builder_.grow(region, offset);
}

void PassBuilder::add_gradients(std::vector<Entry>& entries, bool key_side, RegionId region, std::vector<Launch>& fills) {
  std::int64_t offset = 0;
  const std::vector<TensorKind> kinds = key_side ? std::vector{TensorKind::dk, TensorKind::dv} : std::vector{TensorKind::dq};
  for (TensorKind kind : kinds) {
    const Part p = part_float32(kind);
    for (Entry& entry : entries) {
      set_loc(entry, p, {builder_.arena_view(region, offset, p, entry.box), 0, 1});
      offset += entry.box.rows() * p.width * 4;
    }
    fill(fills, entries, p, 0.0F, all_heads());
  }
  builder_.grow(region, offset);
}

void PassBuilder::use_replicated(std::vector<Entry>& entries) {
  for (Entry& entry : entries) {
    const Progression& positions = entry.box.positions;
    const auto caller = [&](TensorKind kind) {
      const Part p = part(kind);
      set_loc(entry, p,
              {builder_.caller_view(kind, p.dtype, p.width, heads_progression(problem().heads)), positions.first,
               positions.stride});
    };
    caller(TensorKind::q);
    if (!backward_) continue;
    caller(TensorKind::d_out);
    caller(TensorKind::lse);
  }
}

void PassBuilder::pack(std::vector<Launch>& where, std::span<const Entry> sources, std::int32_t bundle, RegionId region) {
  const std::vector<Part> parts = builder_.program().bundles[static_cast<std::size_t>(bundle)].parts;
  const std::vector<Entry> packed = builder_.place(bundle, region);
  for (const Part& p : parts) {
    builder_.rows(where, LaunchKind::copy, rows_between(sources, p, packed, p), p.width);
  }
}

void PassBuilder::take_in(std::vector<Launch>& where, std::span<const Entry> received, std::span<const Part> parts,
                          TransferOp op, std::span<const Entry> destinations) {
  if (op != TransferOp::merge) {
    const LaunchKind kind = op == TransferOp::add ? LaunchKind::add : LaunchKind::copy;
    for (const Part& p : parts) builder_.rows(where, kind, rows_between(received, p, destinations, p), p.width);
    return;
  }
  for (int s = 0; s < setting_.states; ++s) {
    std::vector<RowItem> items;
    for_each_near(received, destinations, [&](const Entry& source, const Entry& destination) {
      const Box common = intersect(source.box, destination.box);
      if (is_empty(common)) return;
      RowItem item = row_item(common);
      const auto state = static_cast<std::size_t>(s);
      item.operands[0] = ref(source.acc.at(state), source.box, common.positions);  // partial o
      item.operands[1] = ref(source.l.at(state), source.box, common.positions);    // partial lse
      item.operands[2] = ref(destination.m.at(state), destination.box, common.positions);
      item.operands[3] = ref(destination.l.at(state), destination.box, common.positions);
      item.operands[4] = ref(destination.acc.at(state), destination.box, common.positions);
      items.push_back(item);
    });
    builder_.rows(where, LaunchKind::merge, items, problem().head_dim_v);
  }
}

void PassBuilder::finalize_into(std::vector<Launch>& where, std::span<const Entry> states, std::int32_t bundle, RegionId region,
                                bool complete) {
  const std::vector<Entry> results = builder_.place(bundle, region);
  RINGSPAN_CHECK(results.size() == states.size());
  for (int s = 0; s < setting_.states; ++s) {
    std::vector<RowItem> items;
    for (std::size_t i = 0; i < states.size(); ++i) {
      const Entry& from = states[i];
      const Entry& to = results[i];
      const auto state = static_cast<std::size_t>(s);
      RowItem item = row_item(from.box);
      const auto at = [&](const Entry& entry, const Loc& loc) { return ref(loc, entry.box, entry.box.positions); };
      item.operands[0] = at(from, from.m.at(state));
      item.operands[1] = at(from, from.l.at(state));
      item.operands[2] = at(from, from.acc.at(state));
      item.operands[3] = at(to, complete ? to.o : to.acc.at(state));
      item.operands[4] = at(to, complete ? to.lse : to.l.at(state));
      items.push_back(item);
    }
    builder_.rows(where, LaunchKind::finalize, items, problem().head_dim_v, complete ? problem().pattern.output_scale() : 1.0F);
  }
}

}  // namespace ringspan::internal
