#include "plan/pass.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "kernels/attend.h"
#include "pattern/lower.h"

namespace ringspan::internal {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

Progression heads_progression(int count) { return {0, 1, count}; }
Progression heads_progression(HeadRange heads) { return {heads.begin, 1, heads.end - heads.begin}; }

kernels::AttendShape kernel_shape(const Problem& problem, const PlanOptions& options) {
  kernels::AttendShape shape;
  shape.dtype = problem.dtype;
  shape.head_dim = problem.head_dim;
  shape.head_dim_v = problem.head_dim_v;
  shape.group = problem.group();
  shape.softcap = problem.softcap > 0.0F;
  shape.alibi = problem.alibi;
  shape.dropout = problem.dropout > 0.0F;
  shape.threads = options.threads;
  return shape;
}

}  // namespace

std::int64_t Setting::largest_chunk() const {
  std::int64_t rows = 0;
  for (const Shard& shard : options.strategy == Strategy::pass_q ? shards_q : shards_k) rows = std::max(rows, shard.rows);
  return rows;
}

// No two neighbouring parts of a cut fit into one bucket, so that there are fewer than twice as many as full ones.
std::int64_t Setting::last_stage() const {
  const std::int64_t rows = largest_chunk();
  if (ranks() == 1 || rows == 0) return 0;
  return (2 * ((rows + bucket_rows - 1) / bucket_rows) - 1) * (ranks() - 1) + 2;
}

const RingRoutes& Setting::ring_routes() const {
  if (ring_routes_ == nullptr) ring_routes_ = std::make_shared<const RingRoutes>(*problem, shards_q, shards_k);
  return *ring_routes_;
}

PassBuilder::PassBuilder(const Setting& setting, int rank, bool backward)
    : setting_(setting), rank_(rank), backward_(backward), builder_(*setting.problem) {}

Part PassBuilder::part_float32(TensorKind kind, int state) const {
  int width = 1;
  switch (kind) {
    case TensorKind::q:
    case TensorKind::k:
    case TensorKind::dq:
    case TensorKind::dk:
      width = problem().head_dim;
      break;
    case TensorKind::v:
    case TensorKind::o:
    case TensorKind::d_out:
    case TensorKind::dv:
    case TensorKind::acc:
    case TensorKind::partial_o:
    case TensorKind::o_float32:
      width = problem().head_dim_v;
      break;
    default:
      break;
  }
  return {kind, DType::float32, width, state};
}

Part PassBuilder::part(TensorKind kind, int state) const {
  Part result = part_float32(kind, state);
  switch (kind) {
    case TensorKind::q:
    case TensorKind::k:
    case TensorKind::v:
    case TensorKind::o:
    case TensorKind::d_out:
    case TensorKind::dq:
    case TensorKind::dk:
    case TensorKind::dv:
      result.dtype = problem().dtype;
      break;
    default:
      break;
  }
  return result;
}

std::vector<Part> PassBuilder::key_inputs() const { return {part(TensorKind::k), part(TensorKind::v)}; }

std::vector<Part> PassBuilder::query_inputs() const {
  std::vector<Part> parts;
  if (backward_) {
    if (!problem().replicated_q) parts.push_back(part(TensorKind::lse));
    for (int s = 0; s < setting_.states; ++s) parts.push_back(part(TensorKind::delta, s));
  }
  if (!problem().replicated_q) {
    parts.push_back(part(TensorKind::q));
    if (backward_) parts.push_back(part(TensorKind::d_out));
  }
  return parts;
}

std::vector<Part> PassBuilder::query_results(bool complete) const {
  if (backward_) return {complete ? part(TensorKind::dq) : part_float32(TensorKind::dq)};
  if (complete) return {part(TensorKind::lse), part(TensorKind::o)};
  std::vector<Part> parts;
  for (int s = 0; s < setting_.states; ++s) {
    parts.push_back(part(TensorKind::partial_lse, s));
    parts.push_back(part(TensorKind::partial_o, s));
  }
  return parts;
}

std::vector<Part> PassBuilder::key_results(bool complete) const {
  if (!backward_) return {};
  if (complete) return {part(TensorKind::dk), part(TensorKind::dv)};
  return {part_float32(TensorKind::dk), part_float32(TensorKind::dv)};
}

std::vector<Entry> PassBuilder::pieces_as_entries(const Shard& shard, int heads) const {
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
    if (shard.pieces[i].empty()) continue;
    Entry entry;
    entry.box = {0, problem().batch, heads_progression(heads), shard.pieces[i]};
    entries.push_back(entry);
  }
  return entries;
}

void PassBuilder::make_own(HeadRange heads) {
  state_heads_ = heads;
  const Shard& shard_q = setting_.shards_q[static_cast<std::size_t>(rank_)];
  const Shard& shard_k = setting_.shards_k[static_cast<std::size_t>(rank_)];
  own_q_ = pieces_as_entries(shard_q, problem().heads);
  own_k_ = pieces_as_entries(shard_k, problem().kv_heads);
  const auto caller = [&](Entry& entry, TensorKind kind, std::int64_t row0, std::int64_t step) {
    const Part p = part(kind);
    const int h = is_key_side(kind) ? problem().kv_heads : problem().heads;
    set_loc(entry, p, {builder_.caller_view(kind, p.dtype, p.width, heads_progression(h)), row0, step});
  };
  std::int64_t row = 0;
  for (Entry& entry : own_q_) {
    const Progression& positions = entry.box.positions;
    const std::int64_t row0 = problem().replicated_q ? positions.first : row;
    const std::int64_t step = problem().replicated_q ? positions.stride : 1;
    for (TensorKind kind : {TensorKind::q, TensorKind::o, TensorKind::lse}) caller(entry, kind, row0, step);
    if (backward_) {
      for (TensorKind kind : {TensorKind::d_out, TensorKind::dlse, TensorKind::dq}) caller(entry, kind, row0, step);
    }
    row += positions.count;
  }
  row = 0;
  for (Entry& entry : own_k_) {
    for (TensorKind kind : {TensorKind::k, TensorKind::v}) caller(entry, kind, row, 1);
    if (backward_) {
      for (TensorKind kind : {TensorKind::dk, TensorKind::dv}) caller(entry, kind, row, 1);
    }
    row += entry.box.positions.count;
  }
  make_own_forward(heads);
  if (backward_) make_own_backward();
}

// State of the rank's own rows. Component `saved`: o per state (torchscale) and o in float32 (16-bit training), which the
// accumulator becomes when it is normalised; both programs place it alike because they ask for it first and alike.
void PassBuilder::make_own_forward(HeadRange heads) {
  std::int64_t rows = 0;
  for (const Entry& entry : own_q_) rows += entry.box.positions.count;
  const Box all{0, problem().batch, heads_progression(heads), {0, 1, rows}};
  const std::int64_t scalars = all.rows() * 4;
  const std::int64_t vectors = scalars * problem().head_dim_v;
  if (rows == 0 || all.heads.empty()) return;
  const int states = setting_.states;
  const bool saved = states > 1 || setting_.keeps_o_float32();
  const bool in_place = states == 1 && problem().dtype == DType::float32;  // acc lives in the caller's o
  if (backward_ && !saved) return;
  RegionId acc = -1;
  if (!in_place) {
    acc = builder_.region(states > 1 ? "o per branch" : "acc",
                          saved && setting_.options.backward ? Component::saved : Component::state, vectors * states);
  }
  const RegionId stats = backward_ ? -1 : builder_.region("m, l", Component::state, 2 * scalars * states);
  for (int s = 0; s < states; ++s) {
    const Part acc_part = part(TensorKind::acc, s);
    const std::int32_t acc_view = in_place ? -1 : builder_.arena_view(acc, vectors * s, acc_part, all);
    std::int32_t m_view = -1;
    std::int32_t l_view = -1;
    if (!backward_) {
      m_view = builder_.arena_view(stats, 2 * scalars * s, part(TensorKind::m, s), all);
      l_view = builder_.arena_view(stats, 2 * scalars * s + scalars, part(TensorKind::l, s), all);
    }
    std::int64_t row = 0;
    for (Entry& entry : own_q_) {
      set_loc(entry, acc_part, in_place ? entry.o : Loc{acc_view, row, 1});
      if (!backward_) {
        set_loc(entry, part(TensorKind::m, s), {m_view, row, 1});
        set_loc(entry, part(TensorKind::l, s), {l_view, row, 1});
      }
      row += entry.box.positions.count;
    }
  }
}

// delta for all heads (its owner computes it); float32 gradients in the arena where the caller's are 16-bit.
void PassBuilder::make_own_backward() {
  std::int64_t rows_q = 0;
  for (const Entry& entry : own_q_) rows_q += entry.box.positions.count;
  const Box all{0, problem().batch, heads_progression(problem().heads), {0, 1, rows_q}};
  if (rows_q > 0) {
    const RegionId region = builder_.region("delta", Component::state, all.rows() * 4 * setting_.states);
    for (int s = 0; s < setting_.states; ++s) {
      const Part delta = part(TensorKind::delta, s);
      const std::int32_t view = builder_.arena_view(region, all.rows() * 4 * s, delta, all);
      std::int64_t row = 0;
      for (Entry& entry : own_q_) {
        set_loc(entry, delta, {view, row, 1});
        row += entry.box.positions.count;
      }
    }
  }
  if (problem().dtype == DType::float32) return;
  const auto accumulate = [&](std::vector<Entry>& entries, TensorKind kind, const char* name, HeadRange heads) {
    std::int64_t rows = 0;
    for (const Entry& entry : entries) rows += entry.box.positions.count;
    const Box box{0, problem().batch, heads_progression(heads), {0, 1, rows}};
    if (rows == 0 || box.heads.empty()) return;
    const Part p = part_float32(kind);
    const RegionId region = builder_.region(name, Component::gradients, box.rows() * 4 * p.width);
    const std::int32_t view = builder_.arena_view(region, 0, p, box);
    std::int64_t row = 0;
    for (Entry& entry : entries) {
      set_loc(entry, p, {view, row, 1});
      row += entry.box.positions.count;
    }
  };
  accumulate(own_q_, TensorKind::dq, "dq", all_heads());
  accumulate(own_k_, TensorKind::dk, "dk", {0, problem().kv_heads});
  accumulate(own_k_, TensorKind::dv, "dv", {0, problem().kv_heads});
}

std::vector<RowItem> PassBuilder::over(std::span<const Entry> entries, std::span<const Part> parts, HeadRange heads,
                                       Which which) const {
  std::vector<RowItem> items;
  for (const Entry& entry : entries) {
    for (const Box& box : parts_of(entry.box, which)) {
      RowItem item;
      item.batch_first = box.batch_first;
      item.batch_count = box.batch_count;
      item.heads = clip(box.heads, heads.begin, heads.end);
      item.rows = box.positions.count;
      if (item.heads.empty()) continue;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].width > 0) item.operands[i] = ref(loc_of(entry, parts[i]), entry.box, box.positions);
      }
      items.push_back(item);
    }
  }
  return items;
}

std::vector<Box> PassBuilder::parts_of(const Box& box, Which which) const {
  const std::vector<std::int64_t>& lengths = problem().lengths_q;
  if (which == Which::all || lengths.empty()) return which == Which::padding ? std::vector<Box>{} : std::vector<Box>{box};
  std::vector<Box> boxes;
  for (std::int64_t batch = box.batch_first; batch < box.batch_first + box.batch_count; ++batch) {
    const std::int64_t length = lengths[static_cast<std::size_t>(batch)];
    const Progression positions =
        which == Which::real ? clip(box.positions, 0, length) : clip(box.positions, length, problem().tokens_q);
    if (!positions.empty()) boxes.push_back({batch, 1, box.heads, positions});
  }
  return boxes;
}

// {m, l, acc, o, lse, o in float32} of own rows.
void PassBuilder::finalize_own(std::vector<Launch>& where, std::span<const Entry> entries, std::span<const Part> parts) {
  const float scale = problem().pattern.output_scale();
  const int width = problem().head_dim_v;
  const bool sinks = problem().sinks;
  builder_.rows(where, LaunchKind::finalize, over(entries, parts, state_heads_, sinks ? Which::real : Which::all), width, scale,
                sinks);
  if (sinks)
    builder_.rows(where, LaunchKind::finalize, over(entries, parts, state_heads_, Which::padding), width, scale, false);
}

void PassBuilder::fill(std::vector<Launch>& where, std::span<const Entry> entries, const Part& p, float value,
                       HeadRange heads) {
  builder_.rows(where, LaunchKind::fill, over(entries, std::vector<Part>{p}, heads), p.width, value);
}

void PassBuilder::begin(std::int64_t stage_index) {
  std::vector<Launch>& before = builder_.stage(stage_index, "begin").before;
  const HeadRange heads = all_heads();
  if (!backward_) {
    const bool partial_heads = state_heads_.end - state_heads_.begin < problem().heads;
    if (partial_heads) {  // rows that nobody returns have no key
      fill(before, own_q_, part(TensorKind::o), 0.0F, heads);
      fill(before, own_q_, part(TensorKind::lse), kMinusInfinity, heads);
    }
    for (int s = 0; s < setting_.states; ++s) {
      fill(before, own_q_, part(TensorKind::acc, s), 0.0F, state_heads_);
      fill(before, own_q_, part(TensorKind::m, s), kMinusInfinity, state_heads_);
      fill(before, own_q_, part(TensorKind::l, s), 0.0F, state_heads_);
    }
    return;
  }
  const bool saved = setting_.states > 1 || setting_.keeps_o_float32();
  for (int s = 0; s < setting_.states; ++s) {
    const Part o = saved ? part(TensorKind::acc, s) : part(TensorKind::o);
    const std::vector<Part> parts{part(TensorKind::d_out), o, part(TensorKind::delta, s), part(TensorKind::dlse)};
    builder_.rows(before, LaunchKind::delta, over(own_q_, parts, heads), problem().head_dim_v);
  }
  fill(before, own_q_, part(TensorKind::dq), 0.0F, heads);
  const HeadRange kv_heads{0, problem().kv_heads};
  fill(before, own_k_, part(TensorKind::dk), 0.0F, kv_heads);
  fill(before, own_k_, part(TensorKind::dv), 0.0F, kv_heads);
}

std::vector<AttendItem> PassBuilder::attend_items(std::span<const Entry> queries, std::span<const Entry> keys,
                                                  HeadRange heads) {
  std::vector<AttendItem> items;
  if (queries.empty() || keys.empty() || heads.begin >= heads.end) return items;
  const auto positions_of = [](std::span<const Entry> entries) {
    std::vector<Progression> positions;
    for (const Entry& entry : entries) positions.push_back(entry.box.positions);
    return hulls(positions);
  };
  const std::vector<Hull> hulls_k = positions_of(keys);
  for (const Hull& q : positions_of(queries)) {
    for (const Hull& k : hulls_k) {
      for_each_slice(problem(), {q.begin, q.end, k.begin, k.end, heads.begin, heads.end}, [&](const Slice& slice) {
        ++builder_.program().visited_slices;
        for (const std::size_t key : k.members) {
          for (const std::size_t query : q.members) add_items(slice, queries[query], keys[key], items);
        }
      });
    }
  }
  return items;
}

// The pairs of a slice that are between two entries.
void PassBuilder::add_items(const Slice& found, const Entry& query, const Entry& key, std::vector<AttendItem>& items) const {
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
      fill(fills, entries, p, kind == TensorKind::m ? kMinusInfinity : 0.0F, all_heads());
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
    for (const Entry& destination : destinations) {
      for (const Entry& source : received) {
        const Box common = intersect(source.box, destination.box);
        if (is_empty(common)) continue;
        RowItem item;
        item.batch_first = common.batch_first;
        item.batch_count = common.batch_count;
        item.heads = common.heads;
        item.rows = common.positions.count;
        const auto state = static_cast<std::size_t>(s);
        item.operands[0] = ref(source.acc.at(state), source.box, common.positions);  // partial o
        item.operands[1] = ref(source.l.at(state), source.box, common.positions);    // partial lse
        item.operands[2] = ref(destination.m.at(state), destination.box, common.positions);
        item.operands[3] = ref(destination.l.at(state), destination.box, common.positions);
        item.operands[4] = ref(destination.acc.at(state), destination.box, common.positions);
        items.push_back(item);
      }
    }
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
      RowItem item;
      item.batch_first = from.box.batch_first;
      item.batch_count = from.box.batch_count;
      item.heads = from.box.heads;
      item.rows = from.box.positions.count;
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

void PassBuilder::end(std::int64_t stage) {
  if (backward_) {
    end_backward(stage);
  } else {
    end_forward(stage);
  }
}

void PassBuilder::end_forward(std::int64_t stage_index) {
  std::vector<Launch>& last = builder_.stage(stage_index, "finish").compute;
  const Part o = part(TensorKind::o);
  const Part lse = part(TensorKind::lse);
  const int width = problem().head_dim_v;
  if (setting_.states == 1) {
    const Part none{};
    const bool kept = setting_.keeps_o_float32();
    const std::vector<Part> parts{
        part(TensorKind::m), part(TensorKind::l), part(TensorKind::acc), o, lse, kept ? part(TensorKind::acc) : none};
    finalize_own(last, own_q_, parts);
  } else if (!own_q_.empty()) {
    // The states join into one; then each becomes its branch's o, in place, kept for the backward pass.
    std::int64_t rows = 0;
    for (const Entry& entry : own_q_) rows += entry.box.positions.count;
    const Box all{0, problem().batch, heads_progression(state_heads_), {0, 1, rows}};
    const bool in_place = problem().dtype == DType::float32;
    const std::int64_t scalars = all.rows() * 4;
    const RegionId region = builder_.region("joined state", Component::state, 2 * scalars + (in_place ? 0 : scalars * width));
    const std::int32_t m = builder_.arena_view(region, 0, part(TensorKind::m), all);
    const std::int32_t l = builder_.arena_view(region, scalars, part(TensorKind::l), all);
    const std::int32_t acc = in_place ? -1 : builder_.arena_view(region, 2 * scalars, part(TensorKind::acc), all);
    std::vector<Entry> joined = own_q_;
    std::int64_t row = 0;
    for (Entry& entry : joined) {
      entry.m[0] = {m, row, 1};
      entry.l[0] = {l, row, 1};
      entry.acc[0] = in_place ? entry.o : Loc{acc, row, 1};
      row += entry.box.positions.count;
    }
    fill(last, joined, part(TensorKind::m), kMinusInfinity, state_heads_);
    fill(last, joined, part(TensorKind::l), 0.0F, state_heads_);
    fill(last, joined, part(TensorKind::acc), 0.0F, state_heads_);
    for (int s = 0; s < setting_.states; ++s) {
      const std::vector<Part> from{part(TensorKind::m, s), part(TensorKind::l, s), part(TensorKind::acc, s)};
      const std::vector<Part> to{part(TensorKind::m), part(TensorKind::l), part(TensorKind::acc)};
      std::vector<RowItem> items = over(own_q_, from, state_heads_);
      const std::vector<RowItem> targets = over(joined, to, state_heads_);
      for (std::size_t i = 0; i < items.size(); ++i) {
        std::copy_n(targets[i].operands, 3, items[i].operands + 3);
      }
      builder_.rows(last, LaunchKind::merge_states, items, width);
      const std::vector<Part> branch{part(TensorKind::m, s), part(TensorKind::l, s), part(TensorKind::acc, s),
                                     part(TensorKind::acc, s), part(TensorKind::l, s)};
      builder_.rows(last, LaunchKind::finalize, over(own_q_, branch, state_heads_), width, 1.0F, false);
    }
    const std::vector<Part> parts{part(TensorKind::m), part(TensorKind::l), part(TensorKind::acc), o, lse};
    finalize_own(last, joined, parts);
  }
  if (problem().replicated_q) replicate(stage_index + 1, {lse, o});
}

void PassBuilder::end_backward(std::int64_t stage_index) {
  std::vector<Launch>& last = builder_.stage(stage_index, "finish").compute;
  if (problem().dtype != DType::float32) {
    const auto cast = [&](std::span<const Entry> entries, TensorKind kind, HeadRange heads) {
      // part() finds the float32 rows: they took the place of the caller's in the entry.
      const Part p = part(kind);
      std::vector<RowItem> items = over(entries, std::vector<Part>{p}, heads);
      const int h = is_key_side(kind) ? problem().kv_heads : problem().heads;
      const std::int32_t view = builder_.caller_view(kind, p.dtype, p.width, heads_progression(h));
      std::int64_t row = 0;
      std::size_t i = 0;
      for (const Entry& entry : entries) {
        const bool replicated = problem().replicated_q && !is_key_side(kind);
        if (i < items.size()) {
          items[i].operands[1] =
              replicated ? RowRef{view, entry.box.positions.first, entry.box.positions.stride} : RowRef{view, row, 1};
        }
        ++i;
        row += entry.box.positions.count;
      }
      builder_.rows(last, LaunchKind::copy, items, p.width);
    };
    cast(own_q_, TensorKind::dq, all_heads());
    cast(own_k_, TensorKind::dk, {0, problem().kv_heads});
    cast(own_k_, TensorKind::dv, {0, problem().kv_heads});
  }
  if (problem().sinks) sum_sink_gradients(stage_index + 1);
  if (problem().replicated_q) replicate(stage_index + 3, {part(TensorKind::dq)});
}

// Every rank sends its finished rows to every other one, one peer after the other.
void PassBuilder::replicate(std::int64_t first_stage, std::vector<Part> parts) {
  const int ranks = problem().ranks;
  if (ranks == 1) return;
  const auto entries_of = [&](int rank) {
    std::vector<Entry> entries = pieces_as_entries(setting_.shards_q[static_cast<std::size_t>(rank)], problem().heads);
    for (Entry& entry : entries) {
      for (const Part& p : parts) {
        set_loc(entry, p,
                {builder_.caller_view(p.kind, p.dtype, p.width, heads_progression(problem().heads)), entry.box.positions.first,
                 entry.box.positions.stride});
      }
    }
    return entries;
  };
  const auto boxes_of = [](const std::vector<Entry>& entries) {
    std::vector<Box> boxes;
    for (const Entry& entry : entries) boxes.push_back(entry.box);
    return boxes;
  };
  const std::vector<Entry> mine = entries_of(rank_);
  const std::int32_t own = builder_.bundle(boxes_of(mine), parts);
  const RegionId out = builder_.region("replicated rows, own", Component::staging);
  const RegionId in[2] = {builder_.region("replicated rows 0", Component::staging),
                          builder_.region("replicated rows 1", Component::staging)};
  pack(builder_.stage(first_stage, "replicate").before, mine, own, out);
  for (int t = 1; t < ranks; ++t) {
    const std::int64_t index = first_stage + t - 1;
    const int from = (rank_ - t + ranks) % ranks;
    builder_.send(index, 0, (rank_ + t) % ranks, out, own, rank_, TransferOp::copy);
    const std::vector<Entry> theirs = entries_of(from);
    const std::int32_t bundle = builder_.bundle(boxes_of(theirs), parts);
    builder_.receive(index, 0, from, in[t % 2], bundle, from, TransferOp::copy);
    take_in(builder_.stage(index + 1).before, builder_.place(bundle, in[t % 2]), parts, TransferOp::copy, theirs);
  }
}

void PassBuilder::sum_sink_gradients(std::int64_t stage_index) {
  const int ranks = problem().ranks;
  const std::int64_t row_bytes = std::int64_t{8} * problem().heads;
  const RegionId region = builder_.region("sink gradient", Component::gradients, row_bytes * ranks);
  builder_.set_sink_gradient(region);
  const std::vector<Part> parts{part(TensorKind::lse), part(TensorKind::delta)};
  std::vector<Launch>& compute = builder_.stage(stage_index - 1).compute;
  const std::vector<RowItem> items = over(own_q_, parts, all_heads(), Which::real);
  builder_.rows(compute, LaunchKind::sink_gradient, items, 1);
  builder_.sink_exchange(stage_index, rank_, ranks, region, row_bytes);
  Launch sum;
  sum.kind = LaunchKind::sum_sinks;
  builder_.stage(stage_index + 1).compute.push_back(sum);
}

Program PassBuilder::finish() {
  const kernels::AttendShape shape = kernel_shape(problem(), setting_.options);
  if (!builder_.program().attend_items.empty()) {
    const kernels::AttendKernel& kernel = backward_
                                              ? kernels::select_attend_backward(shape, setting_.options.attend_backward_kernel)
                                              : kernels::select_attend(shape, setting_.options.attend_kernel);
    builder_.set_scratch(builder_.region("kernel scratch", Component::scratch, kernel.scratch_bytes(shape)));
  }
  return builder_.finish();
}

}  // namespace ringspan::internal
