#include "plan/builder.h"

#include <algorithm>
#include <utility>

#include "base/arithmetic.h"
#include "base/check.h"

namespace ringspan::internal {
namespace {

// True for (batch, head, row) scalars.
bool is_statistic(TensorKind kind) {
  switch (kind) {
    case TensorKind::lse:
    case TensorKind::dlse:
    case TensorKind::delta:
    case TensorKind::m:
    case TensorKind::l:
    case TensorKind::partial_lse:
      return true;
    default:
      return false;
  }
}

}  // namespace

RowRef ref(const Loc& loc, const Box& box, const Progression& positions) {
  if (loc.view < 0) return {};
  const std::int64_t index = (positions.first - box.positions.first) / box.positions.stride;
  const std::int64_t step = positions.count > 1 ? positions.stride / box.positions.stride : 1;
  return {loc.view, loc.row0 + index * loc.step, positions.count > 1 ? step * loc.step : 1};
}

namespace {

// Kinds that travel under another name than the entry's: a partial o is merged, not stored.
Loc* find_loc(Entry& entry, const Part& part) {
  const auto state = static_cast<std::size_t>(part.state);
  const auto at = [state](std::vector<Loc>& list) {
    if (list.size() <= state) list.resize(state + 1);
    return &list[state];
  };
  switch (part.kind) {
    case TensorKind::q:
      return &entry.q;
    case TensorKind::k:
      return &entry.k;
    case TensorKind::v:
      return &entry.v;
    case TensorKind::o:
      return &entry.o;
    case TensorKind::lse:
      return &entry.lse;
    case TensorKind::d_out:
      return &entry.d_out;
    case TensorKind::dlse:
      return &entry.dlse;
    case TensorKind::dq:
      return &entry.dq;
    case TensorKind::dk:
      return &entry.dk;
    case TensorKind::dv:
      return &entry.dv;
    case TensorKind::delta:
      return at(entry.delta);
    case TensorKind::m:
      return at(entry.m);
    case TensorKind::l:
    case TensorKind::partial_lse:
      return at(entry.l);
    case TensorKind::acc:
    case TensorKind::o_float32:
    case TensorKind::partial_o:
      return at(entry.acc);
    case TensorKind::sink_gradient:
      break;
  }
  RINGSPAN_CHECK(false);
  return nullptr;
}

}  // namespace

void set_loc(Entry& entry, const Part& part, Loc loc) { *find_loc(entry, part) = loc; }
const Loc& loc_of(const Entry& entry, const Part& part) { return *find_loc(const_cast<Entry&>(entry), part); }

RegionId ProgramBuilder::region(std::string name, Component component, std::int64_t bytes) {
  program_.regions.push_back({std::move(name), component, 0, bytes});
  return static_cast<RegionId>(program_.regions.size() - 1);
}

void ProgramBuilder::grow(RegionId region, std::int64_t bytes) {
  Region& r = program_.regions[static_cast<std::size_t>(region)];
  r.bytes = std::max(r.bytes, bytes);
}

std::int32_t ProgramBuilder::caller_view(TensorKind kind, DType dtype, int width, Progression heads) {
  const auto found = caller_views_.find(static_cast<int>(kind));
  if (found != caller_views_.end()) return found->second;
  View view;
  view.kind = kind;
  view.dtype = dtype;
  view.width = width;
  view.heads = heads;
  program_.views.push_back(view);
  view_region_.push_back(-1);
  const auto id = static_cast<std::int32_t>(program_.views.size() - 1);
  caller_views_[static_cast<int>(kind)] = id;
  return id;
}

std::int32_t ProgramBuilder::arena_view(RegionId region, std::int64_t offset, const Part& part, const Box& box) {
  View view;
  view.kind = part.kind;
  view.in_arena = true;
  view.dtype = part.dtype;
  view.width = part.width;
  view.offset = offset;
  const std::int64_t rows = box.positions.count;
  const std::int64_t heads = box.heads.count;
  if (is_statistic(part.kind)) {
    view.row_stride = 1;
    view.head_stride = rows;
  } else {
    view.row_stride = heads * part.width;
    view.head_stride = part.width;
  }
  view.batch_stride = rows * heads * part.width;
  view.batch_first = box.batch_first;
  view.heads = box.heads;
  return add_view(view, region);
}

std::int32_t ProgramBuilder::add_view(const View& view, RegionId region) {
  program_.views.push_back(view);
  view_region_.push_back(region);
  return static_cast<std::int32_t>(program_.views.size() - 1);
}

std::vector<bool> ProgramBuilder::regions_with_messages() const {
  std::vector<bool> has_messages(program_.regions.size());
  for (const auto& [region, offset] : transfer_places_) has_messages[static_cast<std::size_t>(region)] = true;
  return has_messages;
}

std::int32_t ProgramBuilder::bundle(std::vector<Box> boxes, std::vector<Part> parts) {
  Bundle bundle{std::move(boxes), std::move(parts), 0};
  const std::int64_t rows = row_count(bundle.boxes);
  for (const Part& part : bundle.parts) bundle.bytes += rows * part.width * size_of(part.dtype);
  program_.bundles.push_back(std::move(bundle));
  return static_cast<std::int32_t>(program_.bundles.size() - 1);
}

std::vector<Entry> ProgramBuilder::place(std::int32_t bundle_id, RegionId region) {
  const Bundle bundle = program_.bundles[static_cast<std::size_t>(bundle_id)];
  grow(region, bundle.bytes);
  std::vector<Entry> entries(bundle.boxes.size());
  for (std::size_t i = 0; i < entries.size(); ++i) entries[i].box = bundle.boxes[i];
  std::int64_t offset = 0;
  for (const Part& part : bundle.parts) {
    for (Entry& entry : entries) {
      set_loc(entry, part, {arena_view(region, offset, part, entry.box), 0, 1});
      offset += entry.box.rows() * part.width * size_of(part.dtype);
    }
  }
  RINGSPAN_CHECK(offset == bundle.bytes);
  return entries;
}

Stage& ProgramBuilder::stage(std::int64_t index, const char* name) {
  Stage& stage = stages_[index];
  if (name != nullptr) stage.name += (stage.name.empty() ? "" : ", ") + std::string(name);
  return stage;
}

void ProgramBuilder::transfer(std::int64_t stage_index, int lane, RegionId region, std::int64_t offset, Transfer transfer) {
  if (transfer.bytes == 0) return;
  grow(region, offset + transfer.bytes);
  transfer.offset = static_cast<std::int64_t>(transfer_places_.size());
  transfer_places_.emplace_back(region, offset);
  const auto number = static_cast<std::uint64_t>(2 * stage_index + lane);
  std::vector<Round>& rounds = stage(stage_index).rounds;
  auto round = std::find_if(rounds.begin(), rounds.end(), [&](const Round& r) { return r.number >= number; });
  if (round == rounds.end() || round->number != number) round = rounds.insert(round, Round{number, {}});
  round->transfers.push_back(transfer);
}

void ProgramBuilder::send(std::int64_t stage, int lane, int peer, RegionId region, std::int32_t bundle, int source,
                          TransferOp op) {
  transfer(stage, lane, region, 0, {true, peer, 0, bundle_bytes(bundle), bundle, source, op});
}

void ProgramBuilder::receive(std::int64_t stage, int lane, int peer, RegionId region, std::int32_t bundle, int source,
                             TransferOp op) {
  transfer(stage, lane, region, 0, {false, peer, 0, bundle_bytes(bundle), bundle, source, op});
}

void ProgramBuilder::sink_exchange(std::int64_t stage, int rank, int ranks, RegionId region, std::int64_t row_bytes) {
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    transfer(stage, 0, region, rank * row_bytes, {true, peer, 0, row_bytes, -1, rank, TransferOp::copy});
    transfer(stage, 0, region, peer * row_bytes, {false, peer, 0, row_bytes, -1, peer, TransferOp::copy});
  }
}

void ProgramBuilder::rows(std::vector<Launch>& where, LaunchKind kind, std::span<const RowItem> items, int width, float value,
                          bool with_sinks) {
  if (items.empty()) return;
  Launch launch;
  launch.kind = kind;
  launch.first = static_cast<std::int64_t>(program_.row_items.size());
  launch.count = static_cast<std::int64_t>(items.size());
  launch.width = width;
  launch.value = value;
  launch.with_sinks = with_sinks;
  program_.row_items.insert(program_.row_items.end(), items.begin(), items.end());
  where.push_back(launch);
}

void ProgramBuilder::attend(std::vector<Launch>& where, bool backward, std::span<const AttendItem> items) {
  if (items.empty()) return;
  Launch launch;
  launch.kind = backward ? LaunchKind::attend_backward : LaunchKind::attend;
  launch.first = static_cast<std::int64_t>(program_.attend_items.size());
  launch.count = static_cast<std::int64_t>(items.size());
  for (const AttendItem& item : items) program_.pairs += pair_count(item.slice);
  program_.attend_items.insert(program_.attend_items.end(), items.begin(), items.end());
  where.push_back(launch);
}

Program& ProgramBuilder::assemble() {
  for (auto& [index, stage] : stages_) program_.stages.push_back(std::move(stage));
  stages_.clear();
  return program_;
}

// Views that no launch has were planned for what the kernels turned out to keep for themselves.
void ProgramBuilder::drop_unused_regions() {
  std::vector<bool> has_views(program_.regions.size()), used(program_.regions.size());
  const auto mark = [&](std::vector<bool>& regions, RegionId region) {
    if (region >= 0) regions[static_cast<std::size_t>(region)] = true;
  };
  const auto use = [&](const RowRef& ref) {
    if (ref.view >= 0) mark(used, view_region_[static_cast<std::size_t>(ref.view)]);
  };
  for (const RegionId region : view_region_) mark(has_views, region);
  for (const RowItem& item : program_.row_items) std::for_each(std::begin(item.operands), std::end(item.operands), use);
  for (const AttendItem& item : program_.attend_items) std::for_each(std::begin(item.operands), std::end(item.operands), use);
  for (const auto& [region, offset] : transfer_places_) mark(used, region);
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (has_views[i] && !used[i]) program_.regions[i].bytes = 0;
  }
}

Program ProgramBuilder::finish() {
  drop_unused_regions();
  std::int64_t offset = 0;
  for (const bool saved : {true, false}) {
    for (Region& region : program_.regions) {
      if ((region.component == Component::saved) != saved) continue;
      region.offset = offset;
      offset += round_up(region.bytes, kViewAlignment);
    }
  }
  program_.arena_bytes = offset;
  const auto offset_of = [&](RegionId region) { return program_.regions[static_cast<std::size_t>(region)].offset; };
  for (std::size_t i = 0; i < program_.views.size(); ++i) {
    if (view_region_[i] >= 0) program_.views[i].offset += offset_of(view_region_[i]);
  }
  if (scratch_ >= 0) program_.scratch_offset = offset_of(scratch_);
  if (sink_gradient_ >= 0) program_.sink_gradient_offset = offset_of(sink_gradient_);
  for (Stage& stage : program_.stages) {
    for (Round& round : stage.rounds) {
      for (Transfer& t : round.transfers) {
        const auto& [region, relative] = transfer_places_[static_cast<std::size_t>(t.offset)];
        t.offset = offset_of(region) + relative;
      }
    }
  }
  std::erase_if(program_.stages, [](const Stage& stage) {
    return stage.before.empty() && stage.copies.empty() && stage.rounds.empty() && stage.compute.empty();
  });
  std::erase_if(program_.regions, [](const Region& region) { return region.bytes == 0; });
  // A plan is kept for long, and often one per rank.
  program_.views.shrink_to_fit();
  program_.row_items.shrink_to_fit();
  program_.attend_items.shrink_to_fit();
  program_.bundles.shrink_to_fit();
  program_.stages.shrink_to_fit();
  program_.regions.shrink_to_fit();
  return std::move(program_);
}

RowItem row_item(const Box& box) { return {box.batch_first, box.batch_count, box.heads, box.positions.count, {}}; }

std::vector<RowItem> rows_between(std::span<const Entry> sources, const Part& source_part, std::span<const Entry> destinations,
                                  const Part& destination_part) {
  std::vector<RowItem> items;
  for_each_near(sources, destinations, [&](const Entry& source, const Entry& destination) {
    const Box common = intersect(source.box, destination.box);
    if (is_empty(common)) return;
    RowItem item = row_item(common);
    item.operands[0] = ref(loc_of(source, source_part), source.box, common.positions);
    item.operands[1] = ref(loc_of(destination, destination_part), destination.box, common.positions);
    items.push_back(item);
  });
  return items;
}

}  // namespace ringspan::internal
