// FromHost: staging of ranks whose tensors lie in host memory (from_host.cc has one rank, from_host_ranks.cc several). Pieces
// of its queries and keys are copied to slots on the device, computed, and the results copied back. Nothing on the device grows
// with the tokens but the lists of tasks. Pure. Cost: a step for each piece of queries against each of keys, in backward twice.
//
// A piece is the next bucket_rows rows of a side. Forward, each piece of queries keeps its state on the device while the pieces
// of keys that it reads pass by. Backward does so twice: pieces of queries stay for dq while keys pass by, then pieces of keys
// stay for dk and dv while queries pass by. A step is one piece of queries against one of keys. Step t is computed in stage
// t + 1; its pieces are copied in during stage t, into the slots that step t - 1 does not use, unless they are there already;
// results of a piece that stayed are put together before stage t + 2 and copied out during it. So every side has two slots, and
// accumulators and results one place each.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/pass.h"

namespace ringspan::internal {

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
    std::vector<std::vector<Piece>> of_ranks;  // only with several; without locations
    std::int64_t most_pieces = 0;              // of a rank
    std::int64_t most_rows = 0;
    RegionId regions[2] = {-1, -1};
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

  bool is_alone() const { return pass_.setting().ranks() == 1; }
  std::vector<Piece> cut(std::span<const Entry> rows) const;
  void cut_all(int side);
  void make_side(int side, const char* name);
  Slot make_slot(RegionId region, int side, std::span<const Part> parts);
  void clear_dlse();
  void loop(int staying);
  Outcome make_outcome(int staying);
  bool step(int staying, const Outcome& outcome, std::int64_t stays, std::int64_t passes, bool first);
  void step_alone(int staying, const Outcome& outcome, std::int64_t stays);
  std::vector<Entry> staying_rows(int staying, const Outcome& outcome, std::int64_t stays, int slot) const;
  void compute(int staying, const Outcome& outcome, std::span<const Entry> staying_rows, std::span<const Entry> queries,
               std::span<const AttendItem> items, bool first);
  void finish(const Piece& piece, const Outcome& outcome);
  int slot_for(const Side& side, std::int64_t piece) const;
  void bring(Side& side, std::int64_t piece, int slot);
  void copy(std::vector<Launch>& where, std::span<const Entry> from, std::span<const Entry> to, std::span<const Part> parts);

  // Several ranks.
  void loop_over_ranks(int staying);
  void begin_visits(int staying);
  Reads reads(int staying, int reader, std::int64_t stays, int owner, std::int64_t passes) const;
  std::vector<bool> find_readers(int staying, std::int64_t stays, std::int64_t passes) const;
  void bring_own_visitor(int staying, std::int64_t passes);
  bool visit(int staying, const Outcome& outcome, std::int64_t stays, std::int64_t passes, int hop, bool first);
  std::int32_t visitor_bundle(int owner, std::int64_t piece);
  const std::vector<Entry>& visitor_rows(int owner, std::int64_t piece, RegionId region);

  PassBuilder& pass_;
  ProgramBuilder& builder_;
  Side sides_[kSides];
  RegionId sums_ = -1, results_ = -1;
  std::vector<Part> delta_;  // none forward
  Slot delta_at_;
  std::int64_t stage_ = 0;  // in which the latest step is computed

  // Of pieces that pass by all ranks, in this half of the pass.
  int passing_ = kKeys;
  std::vector<Part> visitor_parts_;
  std::map<std::pair<int, std::int64_t>, std::int32_t> visitor_bundles_;                // by owner and piece
  std::map<std::tuple<int, std::int64_t, RegionId>, std::vector<Entry>> visitor_rows_;  // and region
  RegionId own_region_[kSides] = {-1, -1};                                              // the own piece
  std::int64_t own_visitor_ = kNone;                                                    // which one it is
  Slot own_extra_;                                                                      // o and dlse of own queries
};

// Places `parts` of the entries in a slot, one entry's rows after the other's.
void place(std::vector<Entry>& entries, const Slot& slot, std::span<const Part> parts);
// The rows of a piece, and nothing of the caller's tensors.
std::vector<Entry> rows_of(const Piece& piece);

}  // namespace ringspan::internal
