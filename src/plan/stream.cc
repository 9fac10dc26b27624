// Streaming: the rows of one side visit the ranks that read them, bucket by bucket (bucket-major), straight from their owner
// (exchange, pass-Q) or relayed round the ring. Results return straight to the owner, which moves no more rows than a
// travelling sum would: that one carries the union of what the ranks so far have read, this one only what each has.
//
// A bucket is the next bucket_rows rows of what moves, not of the owner's shard: a rank that reads every 64th row of a chunk
// gets them in one message. With p ranks, hop h = 1 .. p - 1 of bucket b is received in stage s = b (p - 1) + h - 1, computed
// in s + 1, its result returned in s + 2 and taken in before s + 3. Two slots per direction suffice: a slot is received into
// every other stage.
//
// No rank is more than a stage ahead of its neighbours, so that every two stages should take all ranks equally long. Under a
// causal mask, zigzag chunks make equal work of different numbers of rows, and of the two halves of a chunk. So lists that
// travel at the same time make equally many buckets, some of them empty, and those of a ring take turns between both halves;
// what one stage has too much of, the next has too little of, since neighbouring owners begin with different ones.
#include <algorithm>
#include <array>

#include "base/arithmetic.h"
#include "base/check.h"
#include "plan/pass.h"
#include "plan/route.h"

namespace ringspan::internal {
namespace {

using Buckets = std::vector<std::vector<Box>>;
const std::vector<Box> kNoBoxes;

// What this rank does at one hop of one direction, bucket by bucket.
struct Hop {
  int from = 0;    // the neighbour that brings `incoming` ...
  int source = 0;  // ... whose rows these are
  int to = 0;      // who gets `outgoing` ...
  int reader = 0;  // ... and who, at this hop, reads this rank's own rows
  Buckets incoming;
  Buckets outgoing;
  Buckets mine;    // of incoming: what this rank reads
  Buckets theirs;  // of own rows: what the reader reads, and returns results for

  static const std::vector<Box>& at(const Buckets& buckets, std::int64_t bucket) {
    return bucket < static_cast<std::int64_t>(buckets.size()) ? buckets[static_cast<std::size_t>(bucket)] : kNoBoxes;
  }
};

class Stream {
 public:
  Stream(PassBuilder& pass, bool key_side, bool relay)
      : pass_(pass),
        builder_(pass.builder()),
        key_side_(key_side),
        returns_(!key_side || pass.is_backward()),
        relay_(relay),
        ranks_(pass.problem().ranks),
        directions_(relay ? kDirections : 1) {}

  void write();

 private:
  int at(int distance) const { return ((pass_.rank() + distance) % ranks_ + ranks_) % ranks_; }
  std::vector<Box> reads(int reader, int owner);
  std::int64_t bucket_rows() const;
  void make_direct();
  void make_relayed();
  void hop(std::int64_t bucket, int direction, int h);
  void send_on(std::int64_t stage, std::int64_t bucket, int direction, int h);
  void visit(std::int64_t stage, int direction, int source, const std::vector<Box>& mine, std::vector<Entry> incoming);
  void visit_of_keys(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                     const std::vector<Entry>& incoming);
  void visit_of_queries(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                        std::vector<Entry> incoming);
  void take_results(std::int64_t stage, std::int64_t bucket, int direction, const Hop& hop);
  RegionId lazy(RegionId& region, const char* name, Component component);

  PassBuilder& pass_;
  ProgramBuilder& builder_;
  bool key_side_;
  bool returns_;  // results go back to the owner
  bool relay_;
  int ranks_;
  int directions_;
  std::array<std::vector<Hop>, kDirections> hops_;        // by hop - 1
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

// Rows of `owner` that travel to `reader`.
std::vector<Box> Stream::reads(int reader, int owner) {
  const Setting& setting = pass_.setting();
  const auto& queries = setting.shards_q[static_cast<std::size_t>(key_side_ ? reader : owner)].pieces;
  const auto& keys = setting.shards_k[static_cast<std::size_t>(key_side_ ? owner : reader)].pieces;
  Reads found = key_side_ ? keys_read(pass_.lowering(), {queries}, pass_.all_heads(), {keys})
                          : queries_reading(pass_.lowering(), {queries}, pass_.all_heads(), {keys});
  builder_.program().visited_slices += found.visited_slices;
  if (reader == pass_.rank()) builder_.program().excess_rows += found.excess_rows;
  return std::move(found.boxes);
}

std::int64_t Stream::bucket_rows() const {
  const Problem& problem = pass_.problem();
  return pass_.setting().bucket_rows * problem.batch * (key_side_ ? problem.kv_heads : problem.heads);
}

// Hop h is the exchange with the ranks h above and below. What two ranks send each other makes equally many buckets.
void Stream::make_direct() {
  std::vector<Buckets> from(static_cast<std::size_t>(ranks_)), to = from;  // by distance upwards
  for (int h = 1; h < ranks_; ++h) {
    Buckets &in = from[static_cast<std::size_t>(h)], &out = to[static_cast<std::size_t>(h)];
    in = cut(reads(pass_.rank(), at(h)), bucket_rows());
    out = cut(reads(at(h), pass_.rank()), bucket_rows());
    const std::size_t count = std::max(in.size(), out.size());
    in = spread(std::move(in), count, at(h) % 2);
    out = spread(std::move(out), count, pass_.rank() % 2);
  }
  for (int h = 1; h < ranks_; ++h) {
    Hop hop;
    hop.from = hop.source = at(-h);
    hop.to = hop.reader = at(h);
    hop.incoming = hop.mine = std::move(from[static_cast<std::size_t>(ranks_ - h)]);
    hop.outgoing = std::move(to[static_cast<std::size_t>(h)]);
    if (returns_) hop.theirs = hop.outgoing;
    hops_[0].push_back(std::move(hop));
  }
}

// The buckets of a direction are cut from what its first hop carries; later hops carry a part of each.
void Stream::make_relayed() {
  RINGSPAN_CHECK(key_side_);
  const RingRoutes& routes = pass_.setting().ring_routes();
  const auto parts = [](const std::vector<Box>& boxes, const Buckets& buckets, const std::vector<Box>& all) {
    if (boxes == all) return buckets;
    Buckets parts_of(boxes.empty() ? 0 : buckets.size());
    for (std::size_t b = 0; b < parts_of.size(); ++b) parts_of[b] = common(boxes, buckets[b]);
    return parts_of;
  };
  const Route& own = routes.of(pass_.rank());
  // Of all owners; only those of the sources of this rank are needed, but all count.
  std::vector<std::array<Buckets, kDirections>> lists(static_cast<std::size_t>(ranks_));
  std::size_t count = 0;
  for (int owner = 0; owner < ranks_; ++owner) {
    for (std::size_t d = 0; d < kDirections; ++d) {
      Buckets& list = lists[static_cast<std::size_t>(owner)][d];
      list = cut_in_turns(routes.of(owner).carried(static_cast<int>(d), 1), bucket_rows(), owner % 2);
      count = std::max(count, list.size());
    }
  }
  const auto buckets_of = [&](int owner, int direction) {
    return spread(lists[static_cast<std::size_t>(owner)][static_cast<std::size_t>(direction)], count, owner % 2);
  };
  for (int direction = 0; direction < kDirections; ++direction) {
    const std::vector<Box>& own_rows = own.carried(direction, 1);
    const Buckets own_buckets = buckets_of(pass_.rank(), direction);
    Buckets onward = own_buckets;  // what goes out at the next hop
    for (int h = 1; h < ranks_; ++h) {
      Hop hop;
      hop.from = at(-sign(direction));
      hop.to = at(sign(direction));
      hop.source = at(-sign(direction) * h);
      hop.reader = at(sign(direction) * h);
      hop.outgoing = std::move(onward);
      const Route& route = routes.of(hop.source);
      const std::vector<Box>& all = route.carried(direction, 1);
      const std::vector<Box>& carried = route.carried(direction, h);
      onward.clear();
      if (!carried.empty()) {
        const Buckets buckets = buckets_of(hop.source, direction);
        hop.incoming = parts(carried, buckets, all);
        if (h + 1 < ranks_) onward = parts(route.carried(direction, h + 1), buckets, all);
        if (route.serves(direction, h)) hop.mine = parts(reads(pass_.rank(), hop.source), buckets, all);
      }
      if (returns_ && own.serves(direction, h)) hop.theirs = parts(reads(hop.reader, pass_.rank()), own_buckets, own_rows);
      hops_[static_cast<std::size_t>(direction)].push_back(std::move(hop));
    }
  }
}

// Sends what this hop carries: own rows (packed), or what the hop before brought (as it lies, where all of it goes on).
void Stream::send_on(std::int64_t stage, std::int64_t bucket, int direction, int h) {
  const auto d = static_cast<std::size_t>(direction);
  const Hop& hop = hops_[d][static_cast<std::size_t>(h - 1)];
  const std::vector<Box>& carried = Hop::at(hop.outgoing, bucket);
  if (carried.empty()) return;
  const std::vector<Part> parts = key_side_ ? pass_.key_inputs() : pass_.query_inputs();
  const bool own = !relay_ || h == 1;
  const int source = own ? pass_.rank() : hops_[d][static_cast<std::size_t>(h - 2)].source;
  if (!own && builder_.program().bundles[static_cast<std::size_t>(previous_bundle_[d])].boxes == carried) {
    builder_.send(stage, 0, hop.to, slots_[direction][(stage + 1) % 2], previous_bundle_[d], source, TransferOp::copy);
    return;
  }
  const std::int32_t bundle = builder_.bundle(carried, parts);
  if (builder_.bundle_bytes(bundle) == 0) return;
  const RegionId staging = lazy(staging_[direction], direction == 0 ? "staging" : "staging, down", Component::staging);
  const std::vector<Entry>& from = own ? (key_side_ ? pass_.own_k() : pass_.own_q()) : previous_[d];
  pass_.pack(builder_.stage(stage, "send").before, from, bundle, staging);
  builder_.send(stage, 0, hop.to, staging, bundle, source, TransferOp::copy);
}

void Stream::hop(std::int64_t bucket, int direction, int h) {
  const std::int64_t stage = bucket * (ranks_ - 1) + h - 1;
  const auto d = static_cast<std::size_t>(direction);
  const Hop& hop = hops_[d][static_cast<std::size_t>(h - 1)];
  send_on(stage, bucket, direction, h);
  take_results(stage, bucket, direction, hop);
  previous_[d].clear();
  previous_bundle_[d] = -1;
  const std::vector<Box>& incoming = Hop::at(hop.incoming, bucket);
  if (incoming.empty()) return;
  const std::int32_t bundle = builder_.bundle(incoming, key_side_ ? pass_.key_inputs() : pass_.query_inputs());
  const RegionId slot = lazy(slots_[direction][stage % 2], direction == 0 ? "slot" : "slot, down", Component::buckets);
  builder_.receive(stage, 0, hop.from, slot, bundle, hop.source, TransferOp::copy);
  previous_[d] = builder_.place(bundle, slot);
  previous_bundle_[d] = bundle;
  visit(stage, direction, hop.source, Hop::at(hop.mine, bucket), previous_[d]);
}

void Stream::visit(std::int64_t stage, int direction, int source, const std::vector<Box>& mine, std::vector<Entry> incoming) {
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
  for_each_near(std::span<const Entry>(gradients), std::span<const Entry>(incoming),
                [&](const Entry& gradient, const Entry& in) {
                  Entry entry;
                  entry.box = intersect(in.box, gradient.box);
                  if (is_empty(entry.box)) return;
                  const auto narrowed = [&](const Entry& from, const Loc& loc) {
                    const RowRef at = ref(loc, from.box, entry.box.positions);
                    return Loc{at.view, at.row, at.step};
                  };
                  entry.k = narrowed(in, in.k);
                  entry.v = narrowed(in, in.v);
                  entry.dk = narrowed(gradient, gradient.dk);
                  entry.dv = narrowed(gradient, gradient.dv);
                  keys.push_back(entry);
                });
  builder_.attend(compute, true, pass_.attend_items(pass_.own_q(), keys, pass_.all_heads()));
  builder_.send(stage + 2, 1, source, region, bundle, source, TransferOp::add);
}

void Stream::visit_of_queries(std::int64_t stage, int direction, int source, const std::vector<Box>& mine,
                              std::vector<Entry> queries) {
  RINGSPAN_CHECK(!relay_ && queries.size() == mine.size());
  if (pass_.problem().replicated_q) pass_.use_replicated(queries);
  std::vector<Launch>& compute = builder_.stage(stage + 1).compute;
  const std::int32_t bundle = builder_.bundle(mine, pass_.query_results(false));
  const RegionId region =
      lazy(results_[direction][(stage + 1) % 2], pass_.is_backward() ? "dq of visitors" : "partial o, lse of visitors",
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

// What the reader at this hop computed from own rows comes back two stages after they got there.
void Stream::take_results(std::int64_t stage, std::int64_t bucket, int direction, const Hop& hop) {
  const std::vector<Box>& theirs = Hop::at(hop.theirs, bucket);
  if (theirs.empty()) return;
  const std::vector<Part> parts = key_side_ ? pass_.key_results(false) : pass_.query_results(false);
  const TransferOp op = key_side_ || pass_.is_backward() ? TransferOp::add : TransferOp::merge;
  const std::int32_t bundle = builder_.bundle(theirs, parts);
  const RegionId region = lazy(returned_[direction], "returned", Component::staging);
  builder_.receive(stage + 2, 1, hop.reader, region, bundle, pass_.rank(), op);
  pass_.take_in(builder_.stage(stage + 3, "take in").before, builder_.place(bundle, region), parts, op,
                key_side_ ? pass_.own_k() : pass_.own_q());
}

void Stream::write() {
  pass_.make_own(pass_.all_heads());
  pass_.begin(0);
  builder_.attend(builder_.stage(0, "own rows").compute, pass_.is_backward(),
                  pass_.attend_items(pass_.own_q(), pass_.own_k(), pass_.all_heads()));
  if (relay_) {
    make_relayed();
  } else {
    make_direct();
  }
  std::size_t buckets = 0;
  for (const std::vector<Hop>& hops : hops_) {
    for (const Hop& hop : hops) buckets = std::max({buckets, hop.incoming.size(), hop.outgoing.size(), hop.theirs.size()});
  }
  for (std::int64_t bucket = 0; bucket < static_cast<std::int64_t>(buckets); ++bucket) {
    for (int direction = 0; direction < directions_; ++direction) {
      for (int h = 1; h < ranks_; ++h) hop(bucket, direction, h);
    }
  }
  // What follows may be collective.
  const std::int64_t last = pass_.setting().last_stage();
  RINGSPAN_CHECK(static_cast<std::int64_t>(buckets) * (ranks_ - 1) + 2 <= last || buckets == 0);
  pass_.end(last);
}

}  // namespace

void stage_exchange(PassBuilder& pass) { Stream(pass, true, false).write(); }
void stage_ring(PassBuilder& pass) { Stream(pass, true, true).write(); }
void stage_pass_q(PassBuilder& pass) { Stream(pass, false, false).write(); }

}  // namespace ringspan::internal
