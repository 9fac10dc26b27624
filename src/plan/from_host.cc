// Staging of a rank whose tensors lie in host memory: pieces of its queries and keys are copied to slots on the device,
// computed, and the results copied back. Nothing on the device grows with the tokens but the lists of tasks.
//
// A piece is the next bucket_rows rows of a side. Forward, each piece of queries keeps its state on the device while the pieces
// of keys that it reads pass by. Backward does so twice: pieces of queries stay for dq while keys pass by, then pieces of keys
// stay for dk and dv while queries pass by. A step is one piece of queries against one of keys. Step t is computed in stage
// t + 1; its pieces are copied in during stage t, into the slots that step t - 1 does not use, unless they are there already;
// results of a piece that stayed are put together before stage t + 2 and copied out during it. So every side has two slots, and
// accumulators and results one place each.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "plan/pass.h"

namespace ringspan::internal {
namespace {

constexpr std::int64_t kSlotAlignment = 64;

struct Piece {
  std::vector<Entry> rows;  // as the caller's tensors have them
};

// Room for a piece: a region, and for each part where its rows begin in it.
struct Slot {
  std::vector<std::int32_t> views;
};

class FromHost {
 public:
  explicit FromHost(PassBuilder& pass) : pass_(pass), builder_(pass.builder()) {}
  void write();

 private:
  enum : int { kQueries, kKeys, kSides };
  static constexpr std::int64_t kNone = -1;

  // The slots of a side, and which pieces are in them.
  struct Side {
    std::vector<Piece> pieces;
    std::int64_t most_rows = 0;
    std::vector<Part> parts;
    Slot slots[2];
    std::int64_t held[2] = {kNone, kNone};
    int latest = 1;  // the slot that the latest step used
  };
  // What a piece that stays becomes.
  struct Outcome {
    std::vector<Part> sums, results;  // accumulators, and what they are copied out as
    Slot sums_at, results_at;
  };

  std::vector<Piece> cut(std::span<const Entry> rows) const;
  void make_side(int side, const char* name);
  Slot make_slot(RegionId region, int side, std::span<const Part> parts);
  void clear_dlse();
  void loop(int staying);
  Outcome make_outcome(int staying);
  bool step(int staying, const Outcome& outcome, std::int64_t stays, std::int64_t passes, bool first);
  void finish(const Piece& piece, const Outcome& outcome);
  int slot_for(const Side& side, std::int64_t piece) const;
  void bring(Side& side, std::int64_t piece, int slot);
  void copy(std::vector<Launch>& where, std::span<const Entry> from, std::span<const Entry> to, std::span<const Part> parts);

  PassBuilder& pass_;
  ProgramBuilder& builder_;
  Side sides_[kSides];
  RegionId sums_ = -1, results_ = -1;
  std::vector<Part> delta_;  // none forward
  Slot delta_at_;
  std::int64_t stage_ = 0;  // in which the latest step is computed
};

// Places `parts` of the entries in a slot, one entry's rows after the other's.
void place(std::vector<Entry>& entries, const Slot& slot, std::span<const Part> parts) {
  for (std::size_t index = 0; index < parts.size(); ++index) {
    std::int64_t row = 0;
    for (Entry& entry : entries) {
      set_loc(entry, parts[index], {slot.views[index], row, 1});
      row += entry.box.positions.count;
    }
  }
}

// The rows of a piece, and nothing of the caller's tensors.
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

void FromHost::make_side(int index, const char* name) {
  Side& side = sides_[index];
  side.pieces = cut(index == kQueries ? pass_.own_q() : pass_.own_k());
  for (const Piece& piece : side.pieces) {
    std::int64_t rows = 0;
    for (const Entry& entry : piece.rows) rows += entry.box.positions.count;
    side.most_rows = std::max(side.most_rows, rows);
  }
  side.parts = index == kKeys ? pass_.key_inputs() : std::vector{pass_.part(TensorKind::q)};
  if (index == kQueries && pass_.is_backward()) {
    for (const TensorKind kind : {TensorKind::d_out, TensorKind::o, TensorKind::lse, TensorKind::dlse}) {
      side.parts.push_back(pass_.part(kind));
    }
  }
  const std::size_t slots = std::min<std::size_t>(side.pieces.size(), 2);  // a lone piece never leaves its slot
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const RegionId region = builder_.region(std::string(name) + " " + std::to_string(slot), Component::buckets);
    side.slots[slot] = make_slot(region, index, side.parts);
  }
}

// dlse may be missing: then nothing is copied over these zeros.
void FromHost::clear_dlse() {
  const Side& side = sides_[kQueries];
  const Part dlse = side.parts.back();
  RINGSPAN_CHECK(dlse.kind == TensorKind::dlse);
  for (const Slot& slot : side.slots) {
    if (slot.views.empty()) continue;
    Entry whole;
    whole.box = {0, pass_.problem().batch, heads_progression(pass_.problem().heads), {0, 1, side.most_rows}};
    whole.dlse = {slot.views.back(), 0, 1};
    pass_.fill(builder_.stage(0).before, {&whole, 1}, dlse, 0.0F, pass_.all_heads());
  }
}

void FromHost::copy(std::vector<Launch>& where, std::span<const Entry> from, std::span<const Entry> to,
                    std::span<const Part> parts) {
  for (const Part& part : parts) {
    std::vector<RowItem> items;
    for (std::size_t index = 0; index < from.size(); ++index) {
      const Box& box = from[index].box;
      RowItem item;
      item.batch_first = box.batch_first;
      item.batch_count = box.batch_count;
      item.heads = box.heads;
      item.rows = box.positions.count;
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

// One piece that stays against one that passes, or against none. False where they have nothing to do with each other: then
// nothing happens.
bool FromHost::step(int staying, const Outcome& outcome, std::int64_t stays, std::int64_t passes, bool first) {
  Side& stay = sides_[staying];
  Side& pass = sides_[1 - staying];
  const int stay_slot = slot_for(stay, stays);
  const int pass_slot = slot_for(pass, passes);
  std::vector<Entry> staying_rows = rows_of(stay.pieces[static_cast<std::size_t>(stays)]);
  place(staying_rows, stay.slots[stay_slot], stay.parts);
  place(staying_rows, outcome.sums_at, outcome.sums);
  std::vector<Entry> passing_rows;
  if (passes != kNone) {
    passing_rows = rows_of(pass.pieces[static_cast<std::size_t>(passes)]);
    place(passing_rows, pass.slots[pass_slot], pass.parts);
  }
  std::vector<Entry>& queries = staying == kQueries ? staying_rows : passing_rows;
  place(queries, delta_at_, delta_);
  const std::vector<AttendItem> items =
      pass_.attend_items(queries, staying == kQueries ? passing_rows : staying_rows, pass_.all_heads());
  if (items.empty() && passes != kNone) return false;
  ++stage_;
  bring(stay, stays, stay_slot);
  if (passes != kNone) bring(pass, passes, pass_slot);
  std::vector<Launch>& compute = builder_.stage(stage_).compute;
  for (const Part& sum : outcome.sums) {
    if (first) pass_.fill(compute, staying_rows, sum, sum.kind == TensorKind::m ? kMinusInfinity : 0.0F, pass_.all_heads());
  }
  if (pass_.is_backward() && (first || staying == kKeys)) {
    const std::vector<Part> parts{pass_.part(TensorKind::d_out), pass_.part(TensorKind::o), pass_.part(TensorKind::delta),
                                  pass_.part(TensorKind::dlse)};
    builder_.rows(compute, LaunchKind::delta, pass_.over(queries, parts, pass_.all_heads()), pass_.problem().head_dim_v);
    if (staying == kQueries && pass_.problem().sinks) pass_.add_sink_gradient(compute, queries);
  }
  builder_.attend(compute, pass_.is_backward(), items);
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
    if (first) step(staying, outcome, stays, kNone, true);
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
  if (!backward) return loop(kQueries);
  delta_ = {pass_.part(TensorKind::delta)};
  delta_at_ = make_slot(builder_.region("delta", Component::state), kQueries, delta_);
  clear_dlse();
  if (pass_.problem().sinks) pass_.make_sink_gradient();
  loop(kQueries);
  const Int128 pairs = builder_.program().pairs;
  loop(kKeys);
  builder_.program().pairs = pairs;  // each was visited twice
  if (pass_.problem().sinks) pass_.sum_sinks(stage_ + 1);
}

}  // namespace

void stage_from_host(PassBuilder& pass) { FromHost(pass).write(); }

}  // namespace ringspan::internal
