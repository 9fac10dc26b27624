// Streaming: the rows of one side visit the ranks that read them, bucket by bucket (bucket-major), straight from their owner
// (exchange, pass-Q) or relayed round the ring. Results return straight to the owner, which moves no more rows than a
// travelling sum would: that one carries the union of what the ranks so far have read, this one only what each has.
//
// With p ranks, hop h = 1 .. p - 1 of bucket b is received in stage s = b (p - 1) + h - 1, computed in s + 1, its result
// returned in s + 2 and taken in before s + 3. Two slots per direction suffice: a slot is received into every other stage.
#include <algorithm>
#include <array>

#include "base/check.h"
#include "plan/pass.h"

namespace ringspan::internal {
namespace {

constexpr int kDirections = 2;  // up (to rank + 1) and down
int sign(int direction) { return direction == 0 ? 1 : -1; }

class Stream {
 public:
  Stream(PassBuilder& pass, bool key_side, bool relay)
      : pass_(pass), builder_(pass.builder()), key_side_(key_side), relay_(relay), ranks_(pass.problem().ranks) {}

  void write();

 private:
  // How one chunk travels: what each hop carries, and which readers it serves in that direction.
  struct Route {
    std::array<std::vector<std::vector<Box>>, kDirections> hops;
    std::vector<int> direction;  // by distance upwards, 1 .. p - 1
  };

  int at(int distance) const { return ((pass_.rank() + distance) % ranks_ + ranks_) % ranks_; }
  Rows chunk(int owner, std::int64_t bucket) const;
  const std::vector<Box>& reads(int reader, int owner, std::int64_t bucket);
  Route direct(int owner, std::int64_t bucket);
  Route relayed(int owner, std::int64_t bucket);
  void make_routes(std::int64_t bucket);
  void hop(std::int64_t bucket, int direction, int h);
  void send_on(std::int64_t stage, int direction, int h);
  void visit(std::int64_t stage, int direction, int source, std::int64_t bucket, std::vector<Entry> incoming);
  void visit_of_keys(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                     const std::vector<Entry>& incoming);
  void visit_of_queries(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                        std::vector<Entry> incoming);
  void take_results(std::int64_t stage, int direction, int h, std::int64_t bucket);
  RegionId lazy(RegionId& region, const char* name, Component component);

  PassBuilder& pass_;
  ProgramBuilder& builder_;
  bool key_side_;
  bool relay_;
  int ranks_;
  std::vector<Route> routes_;                  // of the present bucket, by owner
  std::vector<std::vector<Box>> reads_;        // of the present bucket, reader x owner
  std::vector<bool> reads_known_;
  std::array<std::vector<Entry>, kDirections> previous_;  // what the latest hop brought
  std::array<std::int32_t, kDirections> previous_bundle_{-1, -1};
  RegionId slots_[kDirections][2] = {{-1, -1}, {-1, -1}};
  RegionId staging_[kDirections] = {-1, -1};
  RegionId results_[kDirections][2] = {{-1, -1}, {-1, -1}};
  RegionId returned_[kDirections] = {-1, -1};
  RegionId visiting_state_ = -1;
};

RegionId Stream::lazy(RegionId& region, const char* name, Component component) {
  if (region < 0) region = builder_.region(name, component);
  return region;
}

// Rows [bucket * size, (bucket + 1) * size) of the owner's shard.
Rows Stream::chunk(int owner, std::int64_t bucket) const {
  const Setting& setting = pass_.setting();
  const Shard& shard = (key_side_ ? setting.shards_k : setting.shards_q)[static_cast<std::size_t>(owner)];
  const std::int64_t begin = bucket * setting.bucket_rows;
  const std::int64_t end = begin + setting.bucket_rows;
  Rows rows;
  for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
    const Progression& piece = shard.pieces[i];
    const std::int64_t from = std::max(begin - shard.offsets[i], std::int64_t{0});
    const std::int64_t to = std::min(end - shard.offsets[i], piece.count);
    if (from < to) rows.pieces.push_back({piece.at(from), piece.stride, to - from});
  }
  return rows;
}

const std::vector<Box>& Stream::reads(int reader, int owner, std::int64_t bucket) {
  const auto index = static_cast<std::size_t>(reader * ranks_ + owner);
  if (!reads_known_[index]) {
    const Setting& setting = pass_.setting();
    const auto& others = key_side_ ? setting.shards_q : setting.shards_k;
    const Rows other{others[static_cast<std::size_t>(reader)].pieces};
    const Rows travelling = chunk(owner, bucket);
    Reads found = key_side_ ? keys_read(pass_.problem(), other, pass_.all_heads(), travelling)
                            : queries_reading(pass_.problem(), travelling, pass_.all_heads(), other);
    if (reader == pass_.rank() && owner != reader) builder_.program().excess_rows += found.excess_rows;
    reads_[index] = std::move(found.boxes);
    reads_known_[index] = true;
  }
  return reads_[index];
}

Stream::Route Stream::direct(int owner, std::int64_t bucket) {
  Route route;
  route.direction.assign(static_cast<std::size_t>(ranks_), 0);
  route.hops[0].resize(static_cast<std::size_t>(ranks_ - 1));
  // Only the pairs that this rank is part of are evaluated.
  for (int h = 1; h < ranks_; ++h) {
    const int reader = (owner + h) % ranks_;
    if (owner == pass_.rank() || reader == pass_.rank()) route.hops[0][static_cast<std::size_t>(h - 1)] = reads(reader, owner, bucket);
  }
  return route;
}

// Of three ways - all readers upwards, all downwards, each by the nearer side - the one that moves the fewest rows.
Stream::Route Stream::relayed(int owner, std::int64_t bucket) {
  const std::vector<Progression> pieces = chunk(owner, bucket).pieces;
  Route best;
  std::int64_t best_rows = -1;
  for (int way = 0; way < 3; ++way) {
    Route route;
    route.direction.assign(static_cast<std::size_t>(ranks_), 0);
    for (int distance = 1; distance < ranks_; ++distance) {
      route.direction[static_cast<std::size_t>(distance)] = way == 2 ? (2 * distance > ranks_ ? 1 : 0) : way;
    }
    std::int64_t rows = 0;
    for (int direction = 0; direction < kDirections; ++direction) {
      auto& hops = route.hops[static_cast<std::size_t>(direction)];
      for (int h = ranks_ - 1; h >= 1; --h) {
        const int distance = direction == 0 ? h : ranks_ - h;
        std::vector<std::vector<Box>> lists;
        if (!hops.empty()) lists.push_back(hops.front());
        if (route.direction[static_cast<std::size_t>(distance)] == direction) {
          lists.push_back(reads((owner + distance) % ranks_, owner, bucket));
        }
        std::vector<Box> carried;
        if (lists.size() == 1 || (lists.size() == 2 && lists[0] == lists[1])) {
          carried = lists[0];
        } else {
          carried = unite(lists, pieces);
        }
        rows += row_count(carried);
        if (!carried.empty() || !hops.empty()) hops.insert(hops.begin(), std::move(carried));
      }
    }
    if (best_rows < 0 || rows < best_rows) {
      best_rows = rows;
      best = std::move(route);
    }
  }
  return best;
}

void Stream::make_routes(std::int64_t bucket) {
  reads_.assign(static_cast<std::size_t>(ranks_ * ranks_), {});
  reads_known_.assign(reads_.size(), false);
  routes_.clear();
  for (int owner = 0; owner < ranks_; ++owner) routes_.push_back(relay_ ? relayed(owner, bucket) : direct(owner, bucket));
}

// Sends what hop h carries in this direction: own rows (packed), or what the hop before brought (as it lies, where all of it
// goes on).
void Stream::send_on(std::int64_t stage, int direction, int h) {
  const int source = relay_ ? at(-sign(direction) * (h - 1)) : pass_.rank();
  const auto& hops = routes_[static_cast<std::size_t>(source)].hops[static_cast<std::size_t>(direction)];
  if (static_cast<std::size_t>(h) > hops.size()) return;
  const std::vector<Box>& carried = hops[static_cast<std::size_t>(h - 1)];
  if (carried.empty()) return;
  const std::vector<Part> parts = key_side_ ? pass_.key_inputs() : pass_.query_inputs();
  const int peer = relay_ ? at(sign(direction)) : at(h);
  const auto d = static_cast<std::size_t>(direction);
  const bool own = !relay_ || h == 1;
  if (!own && builder_.program().bundles[static_cast<std::size_t>(previous_bundle_[d])].boxes == carried) {
    builder_.send(stage, 0, peer, slots_[direction][(stage + 1) % 2], previous_bundle_[d], source, TransferOp::copy);
    return;
  }
  const std::int32_t bundle = builder_.bundle(carried, parts);
  if (builder_.bundle_bytes(bundle) == 0) return;
  const RegionId staging = lazy(staging_[direction], direction == 0 ? "staging" : "staging, down", Component::staging);
  const std::vector<Entry>& from = own ? (key_side_ ? pass_.own_k() : pass_.own_q()) : previous_[d];
  pass_.pack(builder_.stage(stage, "send").before, from, bundle, staging);
  builder_.send(stage, 0, peer, staging, bundle, source, TransferOp::copy);
}

void Stream::hop(std::int64_t bucket, int direction, int h) {
  const std::int64_t stage = bucket * (ranks_ - 1) + h - 1;
  send_on(stage, direction, h);
  take_results(stage, direction, h, bucket);
  const int source = at(-sign(direction) * h);
  const auto& hops = routes_[static_cast<std::size_t>(source)].hops[static_cast<std::size_t>(direction)];
  const auto d = static_cast<std::size_t>(direction);
  previous_[d].clear();
  previous_bundle_[d] = -1;
  if (static_cast<std::size_t>(h) > hops.size() || hops[static_cast<std::size_t>(h - 1)].empty()) return;
  const std::int32_t bundle =
      builder_.bundle(hops[static_cast<std::size_t>(h - 1)], key_side_ ? pass_.key_inputs() : pass_.query_inputs());
  const RegionId slot =
      lazy(slots_[direction][stage % 2], direction == 0 ? "slot" : "slot, down", Component::buckets);
  builder_.receive(stage, 0, relay_ ? at(-sign(direction)) : source, slot, bundle, source, TransferOp::copy);
  previous_[d] = builder_.place(bundle, slot);
  previous_bundle_[d] = bundle;
  visit(stage, direction, source, bucket, previous_[d]);
}

void Stream::visit(std::int64_t stage, int direction, int source, std::int64_t bucket, std::vector<Entry> incoming) {
  const auto distance = static_cast<std::size_t>((pass_.rank() - source + ranks_) % ranks_);
  if (routes_[static_cast<std::size_t>(source)].direction[distance] != direction) return;
  const std::vector<Box>& mine = reads(pass_.rank(), source, bucket);
  if (mine.empty()) return;
  builder_.stage(stage + 1, ("from rank " + std::to_string(source)).c_str());
  if (key_side_) {
    visit_of_keys(stage, direction, source, mine, incoming);
  } else {
    visit_of_queries(stage, direction, source, mine, std::move(incoming));
  }
}

void Stream::visit_of_keys(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                           const std::vector<Entry>& incoming) {
  std::vector<Launch>& compute = builder_.stage(stage + 1).compute;
  if (!pass_.is_backward()) {
    builder_.attend(compute, false, pass_.attend_items(pass_.own_q(), incoming, pass_.all_heads()));
    return;
  }
  const std::vector<Part> parts = pass_.key_results(false);
  const std::int32_t bundle = builder_.bundle(mine, parts);
  const RegionId region = lazy(results_[direction][(stage + 1) % 2], "dk, dv of visitors", Component::gradients);
  std::vector<Entry> gradients = builder_.place(bundle, region);
  pass_.add_gradients(gradients, true, region, compute);
  // A task is affine in what came and in what returns: the common refinement of both.
  std::vector<Entry> keys;
  for (const Entry& in : incoming) {
    for (const Entry& gradient : gradients) {
      Entry entry;
      entry.box = intersect(in.box, gradient.box);
      if (is_empty(entry.box)) continue;
      const auto narrowed = [&](const Entry& from, const Loc& loc) {
        const RowRef at = ref(loc, from.box, entry.box.positions);
        return Loc{at.view, at.row, at.step};
      };
      entry.k = narrowed(in, in.k);
      entry.v = narrowed(in, in.v);
      entry.dk = narrowed(gradient, gradient.dk);
      entry.dv = narrowed(gradient, gradient.dv);
      keys.push_back(entry);
    }
  }
  builder_.attend(compute, true, pass_.attend_items(pass_.own_q(), keys, pass_.all_heads()));
  builder_.send(stage + 2, 1, source, region, bundle, source, TransferOp::add);
}

void Stream::visit_of_queries(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                              std::vector<Entry> queries) {
  RINGSPAN_CHECK(!relay_ && queries.size() == mine.size());
  if (pass_.problem().replicated_q) pass_.use_replicated(queries);
  std::vector<Launch>& compute = builder_.stage(stage + 1).compute;
  const std::int32_t bundle = builder_.bundle(mine, pass_.query_results(false));
  const RegionId region = lazy(results_[direction][(stage + 1) % 2],
                               pass_.is_backward() ? "dq of visitors" : "partial o, lse of visitors",
                               pass_.is_backward() ? Component::gradients : Component::staging);
  if (pass_.is_backward()) {
    pass_.add_gradients(queries, false, region, compute);
    builder_.attend(compute, true, pass_.attend_items(queries, pass_.own_k(), pass_.all_heads()));
  } else {
    pass_.add_state(queries, lazy(visiting_state_, "state of visitors", Component::state), compute);
    builder_.attend(compute, false, pass_.attend_items(queries, pass_.own_k(), pass_.all_heads()));
    pass_.finalize_into(compute, queries, bundle, region, false);
  }
  builder_.send(stage + 2, 1, source, region, bundle, source, pass_.is_backward() ? TransferOp::add : TransferOp::merge);
}

// What the reader at hop h computed from this rank's chunk comes back two stages after the chunk got there.
void Stream::take_results(std::int64_t stage, int direction, int h, std::int64_t bucket) {
  if (key_side_ && !pass_.is_backward()) return;
  const int reader = at(sign(direction) * h);
  const auto distance = static_cast<std::size_t>(direction == 0 ? h : ranks_ - h);
  if (routes_[static_cast<std::size_t>(pass_.rank())].direction[distance] != direction) return;
  const std::vector<Box>& theirs = reads(reader, pass_.rank(), bucket);
  if (theirs.empty()) return;
  const std::vector<Part> parts = key_side_ ? pass_.key_results(false) : pass_.query_results(false);
  const TransferOp op = key_side_ || pass_.is_backward() ? TransferOp::add : TransferOp::merge;
  const std::int32_t bundle = builder_.bundle(theirs, parts);
  const RegionId region = lazy(returned_[direction], "returned", Component::staging);
  builder_.receive(stage + 2, 1, reader, region, bundle, pass_.rank(), op);
  pass_.take_in(builder_.stage(stage + 3, "take in").before, builder_.place(bundle, region), parts, op,
                key_side_ ? pass_.own_k() : pass_.own_q());
}

void Stream::write() {
  pass_.make_own(pass_.all_heads());
  pass_.begin(0);
  builder_.attend(builder_.stage(0, "own rows").compute, pass_.is_backward(),
                  pass_.attend_items(pass_.own_q(), pass_.own_k(), pass_.all_heads()));
  const Setting& setting = pass_.setting();
  std::int64_t rows = 0;
  for (const Shard& shard : key_side_ ? setting.shards_k : setting.shards_q) rows = std::max(rows, shard.rows);
  const std::int64_t buckets = ranks_ > 1 ? (rows + setting.bucket_rows - 1) / setting.bucket_rows : 0;
  for (std::int64_t bucket = 0; bucket < buckets; ++bucket) {
    make_routes(bucket);
    for (int direction = 0; direction < (relay_ ? kDirections : 1); ++direction) {
      for (int h = 1; h < ranks_; ++h) hop(bucket, direction, h);
    }
  }
  // The same stage on every rank, whatever it had to do: what follows may be collective.
  pass_.end(buckets > 0 ? buckets * (ranks_ - 1) + 2 : 0);
}

}  // namespace

void stage_exchange(PassBuilder& pass) { Stream(pass, true, false).write(); }
void stage_ring(PassBuilder& pass) { Stream(pass, true, true).write(); }
void stage_pass_q(PassBuilder& pass) { Stream(pass, false, false).write(); }

}  // namespace ringspan::internal
