// ProgramBuilder: puts a Program together. Regions are sized while the program is built (a slot is as large as the largest
// bundle put into it) and placed at the end; until then offsets are relative to their region.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/near.h"

namespace ringspan::internal {

inline constexpr std::int64_t kViewAlignment = 64;  // bytes, of each view of the arena

// Where the i-th position of an entry's box is in a view: row0 + i * step.
struct Loc {
  std::int32_t view = -1;
  std::int64_t row0 = 0;
  std::int64_t step = 1;
};

// Rows that are at hand: a box, and for each kind of tensor where its rows are. Index `state` for the kinds that exist once
// per softmax state.
struct Entry {
  Box box;
  Loc q, d_out, o, lse, dlse, dq;     // query side
  std::vector<Loc> m, l, acc, delta;  // query side, one per state
  Loc k, v, dk, dv;                   // key side
};

inline const Box& box_of(const Entry& entry) { return entry.box; }

RowRef ref(const Loc& loc, const Box& box, const Progression& positions);

using RegionId = std::int32_t;

class ProgramBuilder {
 public:
  explicit ProgramBuilder(const Problem& problem) : problem_(problem) {}

  const Problem& problem() const { return problem_; }

  RegionId region(std::string name, Component component, std::int64_t bytes = 0);
  void grow(RegionId region, std::int64_t bytes);

  std::int32_t caller_view(TensorKind kind, DType dtype, int width, Progression heads);
  // Dense rows of `box` at `offset` of a region. Statistics (width 1) are laid out (batch, head, row), else (batch, row, head).
  std::int32_t arena_view(RegionId region, std::int64_t offset, const Part& part, const Box& box);

  std::int32_t bundle(std::vector<Box> boxes, std::vector<Part> parts);
  std::int64_t bundle_bytes(std::int32_t bundle) const { return program_.bundles[static_cast<std::size_t>(bundle)].bytes; }
  // Views of a bundle placed at the start of a region: one entry per box, in order. `set` stores the location of a part.
  std::vector<Entry> place(std::int32_t bundle, RegionId region);

  Stage& stage(std::int64_t index, const char* name = nullptr);
  void send(std::int64_t stage, int lane, int peer, RegionId region, std::int32_t bundle, int source, TransferOp op);
  void receive(std::int64_t stage, int lane, int peer, RegionId region, std::int32_t bundle, int source, TransferOp op);

  // Each rank's row of the sink gradients (float64) goes to every other rank.
  void sink_exchange(std::int64_t stage, int rank, int ranks, RegionId region, std::int64_t row_bytes);

  void rows(std::vector<Launch>& where, LaunchKind kind, std::span<const RowItem> items, int width, float value = 0.0F,
            bool with_sinks = false);
  void attend(std::vector<Launch>& where, bool backward, std::span<const AttendItem> items);

  // Puts the stages in order: what program() has then may still be rewritten.
  Program& assemble();
  // Places the regions (saved ones first) but those that nothing uses, resolves offsets, drops stages that do nothing.
  Program finish();

  Program& program() { return program_; }
  const Program& program() const { return program_; }
  // Of a view in the arena, before finish(): its region, and a view beside it.
  RegionId region_of(std::int32_t view) const { return view_region_[static_cast<std::size_t>(view)]; }
  std::int32_t add_view(const View& view, RegionId region);
  std::int64_t region_bytes(RegionId region) const { return program_.regions[static_cast<std::size_t>(region)].bytes; }
  void resize(RegionId region, std::int64_t bytes) { program_.regions[static_cast<std::size_t>(region)].bytes = bytes; }
  std::vector<bool> regions_with_messages() const;
  void set_scratch(RegionId region) { scratch_ = region; }
  void set_sink_gradient(RegionId region) { sink_gradient_ = region; }

 private:
  void transfer(std::int64_t stage, int lane, RegionId region, std::int64_t offset, Transfer transfer);
  void drop_unused_regions();

  const Problem& problem_;
  Program program_;
  std::map<std::int64_t, Stage> stages_;
  std::vector<RegionId> view_region_;
  std::vector<std::pair<RegionId, std::int64_t>> transfer_places_;  // Transfer::offset indexes it until finish()
  std::map<int, std::int32_t> caller_views_;
  RegionId scratch_ = -1;
  RegionId sink_gradient_ = -1;
};

// Sets the location of a part's rows in an entry.
void set_loc(Entry& entry, const Part& part, Loc loc);
const Loc& loc_of(const Entry& entry, const Part& part);

// Copies (or adds, ...) `parts` of every row that is in both lists, source -> destination; one list of items per part.
// The rows of a box, without operands.
RowItem row_item(const Box& box);

std::vector<RowItem> rows_between(std::span<const Entry> sources, const Part& source_part, std::span<const Entry> destinations,
                                  const Part& destination_part);

}  // namespace ringspan::internal
