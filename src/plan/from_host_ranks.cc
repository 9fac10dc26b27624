// Several ranks, each with its shard on its host: the pieces of all ranks pass by.
//
// The owner copies a piece to its device, computes with it and sends it from there straight to each rank whose piece reads of
// it, one after the other. What stays is what results are owned with (queries forward and for dq, keys for dk and dv), so that
// no partial result travels. Steps are numbered alike on all ranks, also those in which a rank has nothing to do: with p ranks,
// the step of a piece that stays, a piece that passes and hop h has number (stays * pieces + passes) * p + h, and in it a rank
// computes with the piece of the rank h before it. A piece is received during the stage before its step's, into the two slots
// which in the other half of backward hold the pieces of that side that stay.
#include <algorithm>

#include "plan/from_host.h"

namespace ringspan::internal {

void FromHost::begin_visits(int staying) {
  passing_ = 1 - staying;
  visitor_parts_ = passing_ == kKeys ? pass_.key_inputs() : pass_.query_inputs();
  visitor_bundles_.clear();
  visitor_rows_.clear();
  own_visitor_ = kNone;
  for (Side& side : sides_) {  // what the other half of the pass has left there
    side.held[0] = side.held[1] = kNone;
    side.latest = 1;
  }
  if (own_region_[passing_] < 0) {
    own_region_[passing_] = builder_.region(passing_ == kKeys ? "own keys" : "own queries", Component::buckets);
  }
}

std::int32_t FromHost::visitor_bundle(int owner, std::int64_t piece) {
  const auto [found, is_new] = visitor_bundles_.try_emplace({owner, piece}, -1);
  if (is_new) {
    std::vector<Box> boxes;
    const auto& pieces = sides_[passing_].of_ranks[static_cast<std::size_t>(owner)];
    for (const Entry& entry : pieces[static_cast<std::size_t>(piece)].rows) boxes.push_back(entry.box);
    found->second = builder_.bundle(std::move(boxes), visitor_parts_);
  }
  return found->second;
}

const std::vector<Entry>& FromHost::visitor_rows(int owner, std::int64_t piece, RegionId region) {
  const auto [found, is_new] = visitor_rows_.try_emplace({owner, piece, region});
  if (is_new) found->second = builder_.place(visitor_bundle(owner, piece), region);
  return found->second;
}

// What the piece of one rank that stays has to do with the piece of another that passes. Both ask, with the same answer.
Reads FromHost::reads(int staying, int reader, std::int64_t stays, int owner, std::int64_t passes) const {
  const auto& stay = sides_[staying].of_ranks[static_cast<std::size_t>(reader)];
  const auto& pass = sides_[passing_].of_ranks[static_cast<std::size_t>(owner)];
  if (stays >= static_cast<std::int64_t>(stay.size()) || passes >= static_cast<std::int64_t>(pass.size())) return {};
  const auto rows = [](const Piece& piece) {
    Rows positions;
    for (const Entry& entry : piece.rows) positions.pieces.push_back(entry.box.positions);
    return positions;
  };
  const Rows staying_rows = rows(stay[static_cast<std::size_t>(stays)]);
  const Rows passing_rows = rows(pass[static_cast<std::size_t>(passes)]);
  if (staying == kQueries) return keys_read(pass_.lowering(), staying_rows, pass_.all_heads(), passing_rows);
  return queries_reading(pass_.lowering(), passing_rows, pass_.all_heads(), staying_rows);
}

// By hop: whether the rank so far behind this one has a piece that stays and reads of this rank's piece that passes.
std::vector<bool> FromHost::find_readers(int staying, std::int64_t stays, std::int64_t passes) const {
  const int ranks = pass_.setting().ranks();
  std::vector<bool> readers(static_cast<std::size_t>(ranks));
  if (passes >= static_cast<std::int64_t>(sides_[passing_].pieces.size())) return readers;
  for (int hop = 0; hop < ranks; ++hop) {
    const int reader = (pass_.rank() + hop) % ranks;
    readers[static_cast<std::size_t>(hop)] = !reads(staying, reader, stays, pass_.rank(), passes).boxes.empty();
  }
  return readers;
}

// From the host into a message, whether it travels or not; the delta that readers need of queries is made here.
void FromHost::bring_own_visitor(int staying, std::int64_t passes) {
  if (own_visitor_ == passes) return;
  own_visitor_ = passes;
  const Piece& piece = sides_[passing_].pieces[static_cast<std::size_t>(passes)];
  std::vector<Entry> arriving = visitor_rows(pass_.rank(), passes, own_region_[passing_]);
  std::vector<Part> copied;
  for (const Part& part : visitor_parts_) {
    if (part.kind != TensorKind::delta) copied.push_back(part);
  }
  copy(builder_.stage(stage_ - 1).copies, piece.rows, arriving, copied);
  if (staying == kQueries) return;
  const std::vector<Part> extra{pass_.part(TensorKind::o), pass_.part(TensorKind::dlse)};
  place(arriving, own_extra_, extra);
  copy(builder_.stage(stage_ - 1).copies, piece.rows, arriving, extra);
  const std::vector<Part> parts{pass_.part(TensorKind::d_out), pass_.part(TensorKind::o), pass_.part(TensorKind::delta),
                                pass_.part(TensorKind::dlse)};
  builder_.rows(builder_.stage(stage_).before, LaunchKind::delta, pass_.over(arriving, parts, pass_.all_heads()),
                pass_.problem().head_dim_v);
}

// One piece that stays against what the rank `hop` before this one has to show.
bool FromHost::visit(int staying, const Outcome& outcome, std::int64_t stays, std::int64_t passes, int hop, bool first) {
  const int ranks = pass_.setting().ranks(), owner = (pass_.rank() + ranks - hop) % ranks;
  const Reads found = reads(staying, pass_.rank(), stays, owner, passes);
  if (found.boxes.empty()) return false;
  RegionId region = own_region_[passing_];
  if (hop > 0) {
    region = sides_[passing_].regions[stage_ % 2];
    const Bundle& bundle = builder_.program().bundles[static_cast<std::size_t>(visitor_bundle(owner, passes))];
    builder_.program().excess_rows += row_count(bundle.boxes) - row_count(found.boxes) + found.excess_rows;
    builder_.receive(stage_ - 1, 0, owner, region, visitor_bundle(owner, passes), owner, TransferOp::copy);
  }
  const std::vector<Entry>& visitors = visitor_rows(owner, passes, region);
  Side& stay = sides_[staying];
  const int slot = slot_for(stay, stays);
  bring(stay, stays, slot);
  const std::vector<Entry> rows = staying_rows(staying, outcome, stays, slot);
  const bool has_queries = staying == kQueries;
  const std::vector<AttendItem> items =
      pass_.attend_items(has_queries ? rows : visitors, has_queries ? visitors : rows, pass_.all_heads());
  compute(staying, outcome, rows, first && has_queries ? std::span<const Entry>(rows) : std::span<const Entry>(), items, first);
  return true;
}

void FromHost::loop_over_ranks(int staying) {
  const Outcome outcome = make_outcome(staying);
  begin_visits(staying);
  const int ranks = pass_.setting().ranks();
  const Side& stay = sides_[staying];
  const auto own = static_cast<std::int64_t>(stay.pieces.size());
  for (std::int64_t stays = 0; stays < stay.most_pieces; ++stays) {
    bool first = true;
    for (std::int64_t passes = 0; passes < sides_[passing_].most_pieces; ++passes) {
      const std::vector<bool> readers = find_readers(staying, stays, passes);
      for (int hop = 0; hop < ranks; ++hop) {
        ++stage_;
        if (hop == 0 && std::find(readers.begin(), readers.end(), true) != readers.end()) bring_own_visitor(staying, passes);
        if (hop > 0 && readers[static_cast<std::size_t>(hop)]) {
          builder_.send(stage_ - 1, 0, (pass_.rank() + hop) % ranks, own_region_[passing_],
                        visitor_bundle(pass_.rank(), passes), pass_.rank(), TransferOp::copy);
        }
        if (visit(staying, outcome, stays, passes, hop, first)) first = false;
      }
    }
    ++stage_;  // for those whose piece nobody had anything for; counted by all
    if (stays >= own) continue;
    if (first) step_alone(staying, outcome, stays);
    finish(stay.pieces[static_cast<std::size_t>(stays)], outcome);
  }
}

}  // namespace ringspan::internal
