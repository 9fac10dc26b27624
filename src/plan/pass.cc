// The rank's own rows, the parts that travel, and what comes first in a pass.
#include "plan/pass.h"

#include <algorithm>

#include "plan/cost.h"

namespace ringspan::internal {

std::int64_t Setting::largest_chunk() const {
  std::int64_t rows = 0;
  if (options.host_tensors) {  // both sides do
    for (const auto* shards : {&shards_q, &shards_k}) {
      for (const Shard& shard : *shards) rows = std::max(rows, shard.rows);
    }
    return rows;
  }
  for (const Shard& shard : options.strategy == Strategy::pass_q ? shards_q : shards_k) rows = std::max(rows, shard.rows);
  return rows;
}

// No two neighbouring parts of a cut fit into one bucket, so that there are fewer than twice as many as full ones.
std::int64_t Setting::last_stage() const {
  const std::int64_t rows = largest_chunk();
  if (options.host_tensors) {
    const auto pieces = [&](const std::vector<Shard>& shards) {
      std::int64_t most = 1;
      for (const Shard& shard : shards) most = std::max(most, (shard.rows + bucket_rows - 1) / bucket_rows);
      return most;
    };
    const Int128 q = pieces(shards_q), k = pieces(shards_k);
    return saturated(ranks() == 1 ? (options.backward ? 2 : 1) * q * k + 1
                                  : (options.backward ? 2 * q * k * ranks() + q + k : (q * k * ranks() + q)) + 3);
  }
  if (ranks() == 1 || rows == 0) return 0;
  return (2 * ((rows + bucket_rows - 1) / bucket_rows) - 1) * (ranks() - 1) + 2;
}

const RingRoutes& Setting::ring_routes() const {
  std::call_once(shared_->once, [&] { shared_->ring_routes.emplace(*lowering, shards_q, shards_k); });
  return *shared_->ring_routes;
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

void PassBuilder::make_own_tensors(HeadRange heads) {
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
}

void PassBuilder::make_own(HeadRange heads) {
  make_own_tensors(heads);
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
      RowItem item = row_item(box);
      item.heads = clip(box.heads, heads.begin, heads.end);
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
    for (int s = 0; s < setting_.states; ++s) fill(before, own_q_, part(TensorKind::m, s), kMinusInfinity, state_heads_);
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

}  // namespace ringspan::internal
