#include "plan/from_host.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "base/check.h"

namespace ringspan::internal {
namespace {

constexpr std::int64_t kSlotAlignment = 64;

}  // namespace

void place(std::vector<Entry>& entries, const Slot& slot, std::span<const Part> parts) {
  for (std::size_t index = 0; index < parts.size(); ++index) {
    std::int64_t row = 0;
    for (Entry& entry : entries) {
      set_loc(entry, parts[index], {slot.views[index], row, 1});
      row += entry.box.positions.count;
    }
  }
}

std::vector<Entry> rows_of(const Piece& piece) {
  std::vector<Entry> entries(piece.rows.size());
  for (std::size_t index = 0; index < entries.size(); ++index) entries[index].box = piece.rows[index].box;
  return entries;
}

std::vector<Piece> FromHost::cut(std::span<const Entry> rows) const {
  std::vector<Piece> pieces;
  std::int64_t room = 0;
  for (const Entry& whole : rows) {
    const Progression& positions = whole.box.positions;
    for (std::int64_t begin = 0; begin < positions.count;) {
      if (room == 0) {
        pieces.emplace_back();
        room = pass_.setting().bucket_rows;
      }
      const std::int64_t count = std::min(room, positions.count - begin);
      Entry part = whole;
      part.box.positions = {positions.at(begin), positions.stride, count};
      for (Loc* loc : {&part.q, &part.d_out, &part.o, &part.lse, &part.dlse, &part.dq, &part.k, &part.v, &part.dk, &part.dv}) {
        loc->row0 += begin * loc->step;
      }
      pieces.back().rows.push_back(std::move(part));
      begin += count;
      room -= count;
    }
  }
  return pieces;
}

Slot FromHost::make_slot(RegionId region, int side, std::span<const Part> parts) {
  const Problem& problem = pass_.problem();
  const int heads = side == kQueries ? problem.heads : problem.kv_heads;
  const Box box{0, problem.batch, heads_progression(heads), {0, 1, sides_[side].most_rows}};
  Slot slot;
  std::int64_t offset = 0;
  for (const Part& part : parts) {
    slot.views.push_back(builder_.arena_view(region, offset, part, box));
    offset += (box.rows() * part.width * size_of(part.dtype) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  }
  builder_.grow(region, offset);
  return slot;
}

// The pieces of this rank, with where they are, and those of the others.
void FromHost::cut_all(int index) {
  Side& side = sides_[index];
  side.pieces = cut(index == kQueries ? pass_.own_q() : pass_.own_k());
  const auto count = [&side](const std::vector<Piece>& pieces) {
    side.most_pieces = std::max(side.most_pieces, static_cast<std::int64_t>(pieces.size()));
    for (const Piece& piece : pieces) {
      std::int64_t rows = 0;
      for (const Entry& entry : piece.rows) rows += entry.box.positions.count;
      side.most_rows = std::max(side.most_rows, rows);
    }
  };
  count(side.pieces);
  if (is_alone()) return;
  const Problem& problem = pass_.problem();
  for (const Shard& shard : index == kQueries ? pass_.setting().shards_q : pass_.setting().shards_k) {
    std::vector<Entry> rows;
    for (const Progression& positions : shard.pieces) {
      if (positions.empty()) continue;
      rows.emplace_back();
      rows.back().box = {0, problem.batch, heads_progression(index == kQueries ? problem.heads : problem.kv_heads), positions};
    }
    side.of_ranks.push_back(cut(rows));
    count(side.of_ranks.back());
  }
}

void FromHost::make_side(int index, const char* name) {
  cut_all(index);
  Side& side = sides_[index];
  side.parts = index == kKeys ? pass_.key_inputs() : std::vector{pass_.part(TensorKind::q)};
  if (index == kQueries && pass_.is_backward()) {
    for (const TensorKind kind : {TensorKind::d_out, TensorKind::o, TensorKind::lse, TensorKind::dlse}) {
      side.parts.push_back(pass_.part(kind));
    }
  }
  const std::size_t slots = std::min<std::size_t>(side.pieces.size(), 2);  // a lone piece never leaves its slot
  for (std::size_t slot = 0; slot < (is_alone() ? slots : 2); ++slot) {
    side.regions[slot] = builder_.region(std::string(name) + " " + std::to_string(slot), Component::buckets);
    const bool stays = slot < slots && (index == kQueries || pass_.is_backward() || is_alone());
    if (stays) side.slots[slot] = make_slot(side.regions[slot], index, side.parts);
  }
}

// dlse may be missing: then nothing is copied over these zeros.
void FromHost::clear_dlse() {
  const Side& side = sides_[kQueries];
  const Part dlse = side.parts.back();
  RINGSPAN_CHECK(dlse.kind == TensorKind::dlse);
  for (const Slot* slot : std::initializer_list<const Slot*>{&side.slots[0], &side.slots[1], &own_extra_}) {
    if (slot->views.empty() || side.most_rows == 0) continue;
    Entry whole;
    whole.box = {0, pass_.problem().batch, heads_progression(pass_.problem().heads), {0, 1, side.most_rows}};
    whole.dlse = {slot->views.back(), 0, 1};
    pass_.fill(builder_.stage(0).before, {&whole, 1}, dlse, 0.0F, pass_.all_heads());
  }
}

void FromHost::copy(std::vector<Launch>& where, std::span<const Entry> from, std::span<const Entry> to,
                    std::span<const Part> parts) {
  for (const Part& part : parts) {
    std::vector<RowItem> items;
    for (std::size_t index = 0; index < from.size(); ++index) {
      const Box& box = from[index].box;
      RowItem item = row_item(box);
      item.operands[0] = ref(loc_of(from[index], part), box, box.positions);
      item.operands[1] = ref(loc_of(to[index], part), box, box.positions);
      items.push_back(item);
    }
    builder_.rows(where, LaunchKind::copy, items, part.width);
  }
}

// The slot that has the piece, or the one that the latest step does not use.
int FromHost::slot_for(const Side& side, std::int64_t piece) const {
  for (const int slot : {0, 1}) {
    if (side.held[slot] == piece) return slot;
  }
  return 1 - side.latest;
}

// During the stage before the step's.
void FromHost::bring(Side& side, std::int64_t piece, int slot) {
  side.latest = slot;
  if (side.held[slot] == piece) return;
  side.held[slot] = piece;
  const Piece& rows = side.pieces[static_cast<std::size_t>(piece)];
  std::vector<Entry> arriving = rows_of(rows);
  place(arriving, side.slots[slot], side.parts);
  copy(builder_.stage(stage_ - 1).copies, rows.rows, arriving, side.parts);
}

std::vector<Entry> FromHost::staying_rows(int staying, const Outcome& outcome, std::int64_t stays, int slot) const {
  const Side& side = sides_[staying];
  std::vector<Entry> rows = rows_of(side.pieces[static_cast<std::size_t>(stays)]);
  place(rows, side.slots[slot], side.parts);
  place(rows, outcome.sums_at, outcome.sums);
  if (staying == kQueries) place(rows, delta_at_, delta_);
  return rows;
}

// What a step launches, in the stage of the latest one. `queries` are those whose delta this step needs and nobody has made
// yet.
void FromHost::compute(int staying, const Outcome& outcome, std::span<const Entry> staying_rows, std::span<const Entry> queries,
                       std::span<const AttendItem> items, bool first) {
  std::vector<Launch>& compute = builder_.stage(stage_).compute;
  for (const Part& sum : outcome.sums) {
    const bool guarded = sum.kind == TensorKind::l || sum.kind == TensorKind::acc;  // by m
    if (!first || guarded) continue;
    pass_.fill(compute, staying_rows, sum, sum.kind == TensorKind::m ? kMinusInfinity : 0.0F, pass_.all_heads());
  }
  if (pass_.is_backward() && !queries.empty()) {
    const std::vector<Part> parts{pass_.part(TensorKind::d_out), pass_.part(TensorKind::o), pass_.part(TensorKind::delta),
                                  pass_.part(TensorKind::dlse)};
    builder_.rows(compute, LaunchKind::delta, pass_.over(queries, parts, pass_.all_heads()), pass_.problem().head_dim_v);
    if (staying == kQueries && pass_.problem().sinks) pass_.add_sink_gradient(compute, queries);
  }
  builder_.attend(compute, pass_.is_backward(), items);
}

// A piece that stays and that nothing passed by: what it becomes without.
void FromHost::step_alone(int staying, const Outcome& outcome, std::int64_t stays) {
  Side& side = sides_[staying];
  const int slot = slot_for(side, stays);
  bring(side, stays, slot);
  const std::vector<Entry> rows = staying_rows(staying, outcome, stays, slot);
  compute(staying, outcome, rows, staying == kQueries ? std::span<const Entry>(rows) : std::span<const Entry>(), {}, true);
}

// One piece that stays against one that passes. False where they have nothing to do with each other: then nothing happens.
bool FromHost::step(int staying, const Outcome& outcome, std::int64_t stays, std::int64_t passes, bool first) {
  Side& stay = sides_[staying];
  Side& pass = sides_[1 - staying];
  const int stay_slot = slot_for(stay, stays);
  const int pass_slot = slot_for(pass, passes);
  const std::vector<Entry> rows = staying_rows(staying, outcome, stays, stay_slot);
  std::vector<Entry> passing_rows = rows_of(pass.pieces[static_cast<std::size_t>(passes)]);
  place(passing_rows, pass.slots[pass_slot], pass.parts);
  if (staying == kKeys) place(passing_rows, delta_at_, delta_);
  const std::vector<Entry>& queries = staying == kQueries ? rows : passing_rows;
  const std::vector<AttendItem> items =
      pass_.attend_items(queries, staying == kQueries ? passing_rows : rows, pass_.all_heads());
  if (items.empty()) return false;
  ++stage_;
  bring(stay, stays, stay_slot);
  bring(pass, passes, pass_slot);
  const bool needs_delta = first || staying == kKeys;
  compute(staying, outcome, rows, needs_delta ? std::span<const Entry>(queries) : std::span<const Entry>(), items, first);
  return true;
}

// What stayed becomes a result, which is copied out while the next step is computed.
void FromHost::finish(const Piece& piece, const Outcome& outcome) {
  Stage& next = builder_.stage(stage_ + 1);
  std::vector<Entry> sums = rows_of(piece);
  place(sums, outcome.sums_at, outcome.sums);
  std::vector<Entry> results = sums;
  place(results, outcome.results_at, outcome.results);
  if (pass_.is_backward()) {
    copy(next.before, sums, results, outcome.results);
  } else {
    const std::vector<Part> parts{pass_.part(TensorKind::m), pass_.part(TensorKind::l), pass_.part(TensorKind::acc),
                                  pass_.part(TensorKind::o), pass_.part(TensorKind::lse)};
    pass_.finalize_own(next.before, results, parts);
  }
  copy(next.copies, results, piece.rows, outcome.results);
}

FromHost::Outcome FromHost::make_outcome(int staying) {
  Outcome outcome;
  if (!pass_.is_backward()) {
    outcome.sums = {pass_.part(TensorKind::m), pass_.part(TensorKind::l), pass_.part(TensorKind::acc)};
    outcome.results = {pass_.part(TensorKind::lse), pass_.part(TensorKind::o)};
  } else {
    for (const TensorKind kind :
         staying == kQueries ? std::vector{TensorKind::dq} : std::vector{TensorKind::dk, TensorKind::dv}) {
      outcome.sums.push_back(pass_.part_float32(kind));
      outcome.results.push_back(pass_.part(kind));
    }
  }
  outcome.sums_at = make_slot(sums_, staying, outcome.sums);
  outcome.results_at = make_slot(results_, staying, outcome.results);
  return outcome;
}

void FromHost::loop(int staying) {
  const Outcome outcome = make_outcome(staying);
  const auto staying_count = static_cast<std::int64_t>(sides_[staying].pieces.size());
  const auto passing_count = static_cast<std::int64_t>(sides_[1 - staying].pieces.size());
  for (std::int64_t stays = 0; stays < staying_count; ++stays) {
    bool first = true;
    for (std::int64_t passes = 0; passes < passing_count; ++passes) {
      if (step(staying, outcome, stays, passes, first)) first = false;
    }
    if (first) {
      ++stage_;
      step_alone(staying, outcome, stays);
    }
    finish(sides_[staying].pieces[static_cast<std::size_t>(stays)], outcome);
  }
}

void FromHost::write() {
  pass_.make_own_tensors(pass_.all_heads());
  make_side(kQueries, "queries");
  make_side(kKeys, "keys");
  const bool backward = pass_.is_backward();
  sums_ = builder_.region(backward ? "gradients" : "m, l, acc", backward ? Component::gradients : Component::state);
  results_ = builder_.region("results", Component::staging);
  const auto run = [&](int staying) { is_alone() ? loop(staying) : loop_over_ranks(staying); };
  if (!backward) return run(kQueries);
  delta_ = {pass_.part(TensorKind::delta)};
  delta_at_ = make_slot(builder_.region("delta", Component::state), kQueries, delta_);
  if (!is_alone()) {
    const std::vector<Part> extra{pass_.part(TensorKind::o), pass_.part(TensorKind::dlse)};
    own_extra_ = make_slot(builder_.region("o, dlse of own queries", Component::buckets), kQueries, extra);
  }
  clear_dlse();
  const bool has_sinks = pass_.problem().sinks;
  const RegionId sink_gradient = has_sinks ? pass_.make_sink_gradient() : -1;
  run(kQueries);
  const Int128 pairs = builder_.program().pairs;
  run(kKeys);
  builder_.program().pairs = pairs;  // each was visited twice
  if (!has_sinks) return;
  const std::int64_t row_bytes = std::int64_t{8} * pass_.problem().heads;
  ++stage_;
  builder_.sink_exchange(stage_, pass_.rank(), pass_.setting().ranks(), sink_gradient, row_bytes);
  pass_.sum_sinks(is_alone() ? stage_ : stage_ + 1);
}

void stage_from_host(PassBuilder& pass) { FromHost(pass).write(); }

}  // namespace ringspan::internal
