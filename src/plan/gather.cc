// Gathering: everything that a rank reads arrives at once, while it computes what it has; then it computes the rest and the
// results go back at once (all-gather, Ulysses, local).
//
//   stage 0  post inputs (lane 0 keys, lane 1 queries); own queries against own keys
//   stage 1  the rest; results are made ready
//   stage 2  post results (lane 0 of queries, lane 1 of keys)
//   stage 3  take them in; finish
#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "plan/pass.h"

namespace ringspan::internal {
namespace {

class Gather {
 public:
  explicit Gather(PassBuilder& pass);
  void write();

 private:
  // The rows of one peer that are here, in the order of the bundle, and what goes back to it.
  struct Guest {
    int owner = 0;
    std::vector<Entry> entries;
    RegionId gradients = -1;  // backward: in float32, as a bundle of them lies
  };

  Rows rows_of(const Progression& owners, bool queries);
  const Rows& rows_at(int reader, bool queries);
  std::vector<Box> reads(int reader, int owner, bool queries, bool count_excess = false);
  void send_inputs();
  void receive_inputs();
  void compute();
  RegionId gradients_for(const Guest& guest, std::int32_t bundle, const std::vector<Part>& parts, const char* name);
  void return_queries();
  void return_keys();
  void take_results();
  RegionId staging_for(const std::vector<Box>& boxes, const std::vector<Part>& parts, const std::vector<Entry>& own);

  PassBuilder& pass_;
  ProgramBuilder& builder_;
  int rank_;
  int ranks_;
  std::vector<Assignment> assignments_;
  const Assignment& mine_;
  bool complete_q_;
  bool complete_k_;
  std::vector<Guest> queries_;
  std::vector<Guest> keys_;
  // Own rows that a peer works with.
  struct Lent {
    int peer = 0;
    bool queries = false;
    std::vector<Box> boxes;
  };
  std::vector<Lent> lent_;
  // What was packed for one peer serves every other one that reads the same rows.
  struct Packed {
    std::vector<Box> boxes;
    std::vector<Part> parts;
    RegionId region;
  };
  std::vector<Packed> packed_;
  // Of the reader that was asked for last.
  struct RowsAt {
    int reader = -1;
    Rows rows;
  };
  std::array<RowsAt, 2> rows_at_;  // keys, queries
};

std::vector<Assignment> assignments_of(const Setting& setting) {
  std::vector<Assignment> assignments;
  const StrategyRow& row = strategy_row(setting.options.strategy);
  for (int rank = 0; rank < setting.ranks(); ++rank) assignments.push_back(row.assign(setting, rank));
  return assignments;
}

Gather::Gather(PassBuilder& pass)
    : pass_(pass),
      builder_(pass.builder()),
      rank_(pass.rank()),
      ranks_(pass.problem().ranks),
      assignments_(assignments_of(pass.setting())),
      mine_(assignments_[static_cast<std::size_t>(rank_)]) {
  // Every computing rank sees all keys, so a row's output is finished where it is computed; where o is kept in float32 or
  // once per branch, or meets a sink (its owner merges it), it returns as a partial result instead. dk and dv are finished if
  // no two ranks share a kv head.
  const Setting& setting = pass.setting();
  complete_q_ = pass.is_backward() || (setting.states == 1 && !setting.keeps_o_float32() && !pass.problem().sinks);
  complete_k_ = true;
  int computing = 0;
  const int group = pass.problem().group();
  for (const Assignment& assignment : assignments_) {
    if (!assignment.computes()) continue;
    ++computing;
    RINGSPAN_CHECK(assignment.key_owners.count == ranks_);
    if (assignment.query_owners.count < ranks_) complete_k_ = false;
    if (assignment.heads.begin % group != 0 || assignment.heads.end % group != 0) complete_k_ = false;
  }
  if (computing == 1) complete_k_ = true;
}

// The rows of several owners, neighbours joined.
Rows Gather::rows_of(const Progression& owners, bool queries) {
  const Problem& problem = pass_.problem();
  Rows rows;
  if (owners.count == ranks_) {
    const std::int64_t tokens = queries ? problem.tokens_q : problem.tokens_k;
    if (tokens > 0) rows.pieces.push_back({0, 1, tokens});
    return rows;
  }
  builder_.program().joined_shards += owners.count;
  const auto& shards = queries ? pass_.setting().shards_q : pass_.setting().shards_k;
  for (std::int64_t i = 0; i < owners.count; ++i) {
    const auto& pieces = shards[static_cast<std::size_t>(owners.at(i))].pieces;
    rows.pieces.insert(rows.pieces.end(), pieces.begin(), pieces.end());
  }
  std::sort(rows.pieces.begin(), rows.pieces.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::size_t kept = 0;
  for (const Progression& piece : rows.pieces) {
    Progression& last = rows.pieces[kept - (kept > 0 ? 1 : 0)];
    if (kept > 0 && last.stride == 1 && piece.stride == 1 && last.end() == piece.first) {
      last.count += piece.count;
    } else {
      rows.pieces[kept++] = piece;
    }
  }
  rows.pieces.resize(kept);
  return rows;
}

// What `reader` computes with.
const Rows& Gather::rows_at(int reader, bool queries) {
  RowsAt& at = rows_at_[queries ? 1 : 0];
  if (at.reader != reader) {
    const Assignment& assignment = assignments_[static_cast<std::size_t>(reader)];
    at = {reader, rows_of(queries ? assignment.query_owners : assignment.key_owners, queries)};
  }
  return at.rows;
}

// The rows of `owner` that `reader` needs for its assignment.
std::vector<Box> Gather::reads(int reader, int owner, bool queries, bool count_excess) {
  const Assignment& assignment = assignments_[static_cast<std::size_t>(reader)];
  if (!assignment.computes() || !(queries ? assignment.query_owners : assignment.key_owners).contains(owner)) return {};
  const Shard& shard = (queries ? pass_.setting().shards_q : pass_.setting().shards_k)[static_cast<std::size_t>(owner)];
  if (shard.pieces.empty()) return {};
  const Rows mine{shard.pieces};
  Reads found = queries ? queries_reading(pass_.lowering(), mine, assignment.heads, rows_at(reader, false))
                        : keys_read(pass_.lowering(), rows_at(reader, true), assignment.heads, mine);
  builder_.program().visited_slices += found.visited_slices;
  if (count_excess) builder_.program().excess_rows += found.excess_rows;
  return std::move(found.boxes);
}

RegionId Gather::staging_for(const std::vector<Box>& boxes, const std::vector<Part>& parts, const std::vector<Entry>& own) {
  for (const Packed& packed : packed_) {
    if (packed.boxes == boxes && packed.parts == parts) return packed.region;
  }
  const RegionId region = builder_.region("staging", Component::staging);
  pass_.pack(builder_.stage(0).before, own, builder_.bundle(boxes, parts), region);
  packed_.push_back({boxes, parts, region});
  return region;
}

void Gather::send_inputs() {
  for (int t = 1; t < ranks_; ++t) {
    const int peer = (rank_ + t) % ranks_;
    for (const bool queries : {false, true}) {
      std::vector<Box> boxes = reads(peer, rank_, queries);
      if (boxes.empty()) continue;
      const std::vector<Part> parts = queries ? pass_.query_inputs() : pass_.key_inputs();
      if (!parts.empty()) {
        const RegionId region = staging_for(boxes, parts, queries ? pass_.own_q() : pass_.own_k());
        builder_.send(0, queries ? 1 : 0, peer, region, builder_.bundle(boxes, parts), rank_, TransferOp::copy);
      }
      lent_.push_back({peer, queries, std::move(boxes)});
    }
  }
}

void Gather::receive_inputs() {
  for (int t = 1; t < ranks_; ++t) {
    const int peer = (rank_ - t + ranks_) % ranks_;
    for (const bool queries : {false, true}) {
      const std::vector<Box> boxes = reads(rank_, peer, queries, true);
      if (boxes.empty()) continue;
      const std::int32_t bundle = builder_.bundle(boxes, queries ? pass_.query_inputs() : pass_.key_inputs());
      const RegionId region = builder_.region(queries ? "queries of a peer" : "keys of a peer", Component::buckets);
      builder_.receive(0, queries ? 1 : 0, peer, region, bundle, peer, TransferOp::copy);
      std::vector<Entry> entries = builder_.place(bundle, region);
      if (queries && pass_.problem().replicated_q) pass_.use_replicated(entries);
      (queries ? queries_ : keys_).push_back({peer, std::move(entries)});
    }
  }
}

void Gather::compute() {
  const HeadRange heads = mine_.heads;
  const bool backward = pass_.is_backward();
  const bool own = mine_.query_owners.contains(rank_);
  std::vector<Launch>& rest = builder_.stage(1, "gathered rows").compute;
  for (Guest& guest : queries_) {
    if (backward) {
      guest.gradients = builder_.region("dq of a peer", Component::gradients);
      pass_.add_gradients(guest.entries, false, guest.gradients, rest);
    } else {
      pass_.add_state(guest.entries, builder_.region("state of a peer", Component::state), rest);
    }
  }
  if (backward) {
    for (Guest& guest : keys_) {
      guest.gradients = builder_.region("dk, dv of a peer", Component::gradients);
      pass_.add_gradients(guest.entries, true, guest.gradients, rest);
    }
  }
  if (own) {
    builder_.attend(builder_.stage(0, "own rows").compute, backward, pass_.attend_items(pass_.own_q(), pass_.own_k(), heads));
  }
  std::vector<Entry> all_queries;
  std::vector<Entry> peer_keys;
  for (const Guest& guest : queries_) all_queries.insert(all_queries.end(), guest.entries.begin(), guest.entries.end());
  for (const Guest& guest : keys_) peer_keys.insert(peer_keys.end(), guest.entries.begin(), guest.entries.end());
  builder_.attend(rest, backward, pass_.attend_items(all_queries, pass_.own_k(), heads));
  if (own) all_queries.insert(all_queries.begin(), pass_.own_q().begin(), pass_.own_q().end());
  builder_.attend(rest, backward, pass_.attend_items(all_queries, peer_keys, heads));
}

// Where gradients go back from: where they were summed, or, in 16 bits, a copy of that.
RegionId Gather::gradients_for(const Guest& guest, std::int32_t bundle, const std::vector<Part>& parts, const char* name) {
  const auto is_sum = [](const Part& part) { return part.dtype == DType::float32; };
  if (std::all_of(parts.begin(), parts.end(), is_sum)) return guest.gradients;
  const RegionId region = builder_.region(name, Component::staging);
  pass_.pack(builder_.stage(1).compute, guest.entries, bundle, region);
  return region;
}

void Gather::return_queries() {
  std::vector<Launch>& rest = builder_.stage(1).compute;
  for (const Guest& guest : queries_) {
    std::vector<Box> boxes;
    for (const Entry& entry : guest.entries) boxes.push_back(entry.box);
    const std::vector<Part> parts = pass_.query_results(complete_q_);
    const std::int32_t bundle = builder_.bundle(boxes, parts);
    constexpr const char* kName = "results for a peer";
    RegionId region = -1;
    if (pass_.is_backward()) {
      region = gradients_for(guest, bundle, parts, kName);
    } else {
      region = builder_.region(kName, Component::staging);
      pass_.finalize_into(rest, guest.entries, bundle, region, complete_q_);
    }
    builder_.send(2, 0, guest.owner, region, bundle, guest.owner, complete_q_ ? TransferOp::copy : TransferOp::merge);
  }
}

void Gather::return_keys() {
  if (!pass_.is_backward()) return;
  for (const Guest& guest : keys_) {
    std::vector<Box> boxes;
    for (const Entry& entry : guest.entries) boxes.push_back(entry.box);
    const std::vector<Part> parts = pass_.key_results(complete_k_);
    const std::int32_t bundle = builder_.bundle(boxes, parts);
    const RegionId region = gradients_for(guest, bundle, parts, "dk, dv for a peer");
    builder_.send(2, 1, guest.owner, region, bundle, guest.owner, complete_k_ ? TransferOp::copy : TransferOp::add);
  }
}

void Gather::take_results() {
  for (const Lent& lent : lent_) {
    const std::vector<Part> parts = lent.queries ? pass_.query_results(complete_q_) : pass_.key_results(complete_k_);
    if (parts.empty()) continue;
    const bool complete = lent.queries ? complete_q_ : complete_k_;
    const TransferOp op = complete ? TransferOp::copy : (lent.queries ? TransferOp::merge : TransferOp::add);
    const std::int32_t bundle = builder_.bundle(lent.boxes, parts);
    const RegionId region = builder_.region("results of a peer", Component::staging);
    builder_.receive(2, lent.queries ? 0 : 1, lent.peer, region, bundle, rank_, op);
    pass_.take_in(builder_.stage(3, "take in").before, builder_.place(bundle, region), parts, op,
                  lent.queries ? pass_.own_q() : pass_.own_k());
  }
}

void Gather::write() {
  // Where a partial result returns, its owner holds the state of all heads; otherwise only of what it computes itself.
  const bool merges = !pass_.is_backward() && !complete_q_;
  const bool saved = pass_.setting().states > 1 || pass_.setting().keeps_o_float32();
  const bool own = mine_.query_owners.contains(rank_);
  pass_.make_own(merges || saved ? pass_.all_heads() : (own ? mine_.heads : HeadRange{0, 0}));
  pass_.begin(0);
  send_inputs();
  if (mine_.computes()) {
    receive_inputs();
    compute();
    return_queries();
    return_keys();
  }
  take_results();
  pass_.end(3);
}

}  // namespace

void stage_gather(PassBuilder& pass) { Gather(pass).write(); }

}  // namespace ringspan::internal
