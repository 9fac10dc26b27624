#include "plan/fuse.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "base/arithmetic.h"

namespace ringspan::internal {
namespace {

Progression part(const Progression& p, std::int64_t first, std::int64_t count) { return {p.at(first), p.stride, count}; }

bool overlap(const Progression& a, const Progression& b) { return !intersect(a, b).empty(); }
bool overlap(std::int64_t first, std::int64_t count, std::int64_t other_first, std::int64_t other_count) {
  return first < other_first + other_count && other_first < first + count;
}

// What the problem asks for that a fused call does not do.
std::string problem_refusal(const PlanData& data, Pass pass) {
  const Problem& p = data.problem;
  std::string refusal = fused_problem_refusal(data);
  if (!refusal.empty()) return refusal;
  if (p.sinks) return "fused calls have no sinks";
  if (p.pattern.output_scale() != 1.0F) return "it does not scale the output, which the head_groups dialect divides";
  const Program& program = pass == Pass::forward ? data.forward : data.backward;
  for (const Stage& stage : program.stages) {
    if (!stage.rounds.empty()) return "rows come from other ranks and are merged";
  }
  for (const AttendItem& item : program.attend_items) {
    if (item.slice.state != 0) return "branches with a softmax of their own are merged";
    for (const int operand : {kQ, kK, kV}) {
      if (program.views[static_cast<std::size_t>(item.operands[operand].view)].in_arena) return "rows are packed in the arena";
    }
  }
  return {};
}

std::string overlap_refusal(const std::vector<Slice>& slices, int group, Pass pass) {
  for (std::size_t i = 0; i < slices.size(); ++i) {
    for (std::size_t j = i + 1; j < slices.size(); ++j) {
      const Slice& a = slices[i];
      const Slice& b = slices[j];
      if (!overlap(a.batch_first, a.batch_count, b.batch_first, b.batch_count)) continue;
      if (overlap(a.heads, b.heads) && overlap(a.q, b.q))
        return "some queries take more than one call, whose results are merged";
      if (pass == Pass::backward && overlap(fused_kv_heads(a, group), fused_kv_heads(b, group)) && overlap(a.k, b.k)) {
        return "some keys are read by more than one call, whose gradients are added";
      }
    }
  }
  return {};
}

// Writes a program whose operands are the caller's tensors.
class FusedBuilder {
 public:
  FusedBuilder(const PlanData& data, Pass pass)
      : data_(data), backward_(pass == Pass::backward), source_(backward_ ? data.backward : data.forward) {
    program_.pairs = source_.pairs;
    program_.visited_slices = source_.visited_slices;
    const Problem& p = data.problem;
    const auto add = [&](TensorKind kind, DType dtype, int width, int heads) {
      View view;
      view.kind = kind;
      view.dtype = dtype;
      view.width = width;
      view.heads = {0, 1, heads};
      views_[static_cast<std::size_t>(kind)] = static_cast<std::int32_t>(program_.views.size());
      program_.views.push_back(view);
    };
    add(TensorKind::q, p.dtype, p.head_dim, p.heads);
    add(TensorKind::k, p.dtype, p.head_dim, p.kv_heads);
    add(TensorKind::v, p.dtype, p.head_dim_v, p.kv_heads);
    add(TensorKind::o, p.dtype, p.head_dim_v, p.heads);
    add(TensorKind::lse, DType::float32, 1, p.heads);
    if (!backward_) return;
    add(TensorKind::d_out, p.dtype, p.head_dim_v, p.heads);
    add(TensorKind::dq, p.dtype, p.head_dim, p.heads);
    add(TensorKind::dk, p.dtype, p.head_dim, p.kv_heads);
    add(TensorKind::dv, p.dtype, p.head_dim_v, p.kv_heads);
  }

  // `slice` is the item's without rows that see nothing.
  void add(const AttendItem& item, const Slice& slice) {
    AttendItem fused;
    fused.slice = slice;
    const RowRef q = moved(item.operands[kQ], item.slice.q, slice.q);
    const RowRef k = moved(item.operands[kK], item.slice.k, slice.k);
    const auto query = [&](TensorKind kind) { return RowRef{view(kind), q.row, q.step}; };
    const auto key = [&](TensorKind kind) { return RowRef{view(kind), k.row, k.step}; };
    fused.operands[kQ] = query(TensorKind::q);
    fused.operands[kK] = key(TensorKind::k);
    fused.operands[kV] = key(TensorKind::v);
    fused.operands[kOut] = query(TensorKind::o);
    fused.operands[kLse] = query(TensorKind::lse);
    if (backward_) {
      fused.operands[kDOut] = query(TensorKind::d_out);
      fused.operands[kDq] = query(TensorKind::dq);
      fused.operands[kDk] = key(TensorKind::dk);
      fused.operands[kDv] = key(TensorKind::dv);
    }
    program_.attend_items.push_back(fused);
    query_rows_ += slice.batch_count * slice.heads.count * slice.q.count;
    key_rows_ += slice.batch_count * fused_kv_heads(slice, data_.problem.group()).count * slice.k.count;
  }

  Program finish() {
    const Problem& p = data_.problem;
    Stage stage;
    stage.name = "fused";
    if (query_rows_ < p.batch * p.heads * query_rows()) {
      if (backward_) {
        fill(stage, TensorKind::dq, 0.0F);
      } else {
        fill(stage, TensorKind::o, 0.0F);
        fill(stage, TensorKind::lse, -std::numeric_limits<float>::infinity());
      }
    }
    if (backward_ && key_rows_ < p.batch * p.kv_heads * data_.shard_k.rows) {
      fill(stage, TensorKind::dk, 0.0F);
      fill(stage, TensorKind::dv, 0.0F);
    }
    Launch launch;
    launch.kind = backward_ ? LaunchKind::fused_backward : LaunchKind::fused;
    launch.count = static_cast<std::int64_t>(program_.attend_items.size());
    launch.width = p.head_dim_v;
    if (launch.count > 0) stage.compute.push_back(launch);
    if (!stage.compute.empty()) program_.stages.push_back(std::move(stage));
    return std::move(program_);
  }

 private:
  std::int32_t view(TensorKind kind) const { return views_[static_cast<std::size_t>(kind)]; }
  std::int64_t query_rows() const { return data_.problem.replicated_q ? data_.problem.tokens_q : data_.shard_q.rows; }

  void fill(Stage& stage, TensorKind kind, float value) {
    const View& target = program_.views[static_cast<std::size_t>(view(kind))];
    RowItem item;
    item.batch_count = data_.problem.batch;
    item.heads = target.heads;
    item.rows = is_key_side(kind) ? data_.shard_k.rows : query_rows();
    item.operands[0] = {view(kind), 0, 1};
    Launch launch;
    launch.kind = LaunchKind::fill;
    launch.first = static_cast<std::int64_t>(program_.row_items.size());
    launch.count = 1;
    launch.width = target.width;
    launch.value = value;
    if (item.batch_count * item.rows == 0) return;
    program_.row_items.push_back(item);
    stage.compute.push_back(launch);
  }

  const PlanData& data_;
  bool backward_;
  const Program& source_;
  Program program_;
  std::array<std::int32_t, kCallerTensors> views_{};
  std::int64_t query_rows_ = 0, key_rows_ = 0;
};

}  // namespace

std::optional<IndexedSlice> index_slice(const Slice& slice) {
  IndexedSlice result{slice, {}, false};
  Slice& s = result.slice;
  if (s.batch_count == 0 || s.heads.empty() || s.q.empty() || s.k.empty()) {
    result.empty = true;
    return result;
  }
  // Of a single row the step is free.
  const std::int64_t step = s.q.count > 1 ? s.q.stride : s.k.count > 1 ? s.k.stride : 1;
  const std::int64_t least = s.k.first - s.q.last();
  const std::int64_t most = s.k.last() - s.q.first;
  if (s.hi < least || s.lo > most) {
    result.empty = true;
    return result;
  }
  if (s.lo <= least && s.hi >= most) return result;  // all pairs
  if (s.q.count > 1 && s.k.count > 1 && s.q.stride != s.k.stride) return std::nullopt;
  const std::int64_t shift = s.q.first - s.k.first;
  std::int64_t low = ceil_div(std::max(s.lo, least) + shift, step);
  std::int64_t high = floor_div(std::min(s.hi, most) + shift, step);
  const std::int64_t q_first = std::max<std::int64_t>(0, -high);
  const std::int64_t q_end = std::min(s.q.count, s.k.count - low);
  const std::int64_t k_first = std::max<std::int64_t>(0, low);
  const std::int64_t k_end = std::min(s.k.count, s.q.count + high);
  if (low > high || q_first >= q_end || k_first >= k_end) {
    result.empty = true;
    return result;
  }
  s.q = part(s.q, q_first, q_end - q_first);
  s.k = part(s.k, k_first, k_end - k_first);
  low += q_first - k_first;
  high += q_first - k_first;
  result.band = {low, high, low > 1 - s.q.count, high < s.k.count - 1};
  if (!result.band.has_low) result.band.low = 0;
  if (!result.band.has_high) result.band.high = 0;
  return result;
}

std::int64_t fused_group(const Progression& heads, int group) {
  std::int64_t each = 1;
  while (each < heads.count && heads.at(each) / group == heads.first / group) ++each;
  if (heads.count % each != 0) return 0;
  const std::int64_t step = each < heads.count ? heads.at(each) / group - heads.first / group : 0;
  for (std::int64_t t = 0; t < heads.count; ++t) {
    if (heads.at(t) / group != heads.first / group + t / each * step) return 0;
  }
  return each;
}

Progression fused_kv_heads(const Slice& slice, int group) {
  const std::int64_t each = fused_group(slice.heads, group);
  const std::int64_t first = slice.heads.first / group;
  const std::int64_t count = slice.heads.count / each;
  return {first, count > 1 ? slice.heads.at(each) / group - first : 1, count};
}

RowRef moved(const RowRef& ref, const Progression& from, const Progression& to) {
  const std::int64_t skipped = from.count > 1 ? (to.first - from.first) / from.stride : 0;
  return {ref.view, ref.row + skipped * ref.step, ref.step};
}

std::string fused_problem_refusal(const PlanData& data) {
  const Problem& p = data.problem;
  if (p.dtype == DType::float32) return "it is for 16-bit tensors";
  if (p.softcap != 0.0F) return "fused calls have no softcap";
  // They take a row's maximum before they scale: with a negative scale that is its minimum, and weights overflow.
  if (p.effective_scale() < 0.0F) return "fused calls have no negative scale";
  if (p.alibi) return "fused calls have no ALiBi";
  if (p.dropout != 0.0F) return "dropout of a library has another generator";
  if (data.options.host_tensors) return "tensors stream from the host and are merged piece by piece";
  return {};
}

FusedProgram fuse(const PlanData& data, Pass pass) {
  FusedProgram result;
  result.refusal = problem_refusal(data, pass);
  if (!result.refusal.empty()) return result;
  const Program& source = pass == Pass::forward ? data.forward : data.backward;
  const auto items = static_cast<std::int64_t>(source.attend_items.size());
  if (items > kMostFusedCalls) {
    result.refusal = fmt::format("it would take {} calls, more than {}", items, kMostFusedCalls);
    return result;
  }
  FusedBuilder builder(data, pass);
  std::vector<Slice> slices;
  for (const AttendItem& item : source.attend_items) {
    const std::optional<IndexedSlice> indexed = index_slice(item.slice);
    if (!indexed) result.refusal = "a band is over queries and keys of different steps";
    if (fused_group(item.slice.heads, data.problem.group()) == 0)
      result.refusal = "query heads of a call share kv heads unevenly";
    if (!result.refusal.empty()) return result;
    if (indexed->empty) continue;
    slices.push_back(indexed->slice);
    builder.add(item, indexed->slice);
  }
  result.refusal = overlap_refusal(slices, data.problem.group(), pass);
  if (result.refusal.empty()) result.program = builder.finish();
  return result;
}

void set_fused_workspace(Program* program, std::int64_t bytes) {
  std::erase_if(program->regions, [](const Region& region) { return region.component == Component::scratch; });
  std::int64_t end = 0;
  for (const Region& region : program->regions) end = std::max(end, region.offset + (region.bytes + 63) / 64 * 64);
  const std::int64_t offset = (end + 255) / 256 * 256;
  program->scratch_offset = offset;
  program->arena_bytes = bytes == 0 ? end : offset + (bytes + 63) / 64 * 64;
  if (bytes > 0) program->regions.push_back({"fused workspace", Component::scratch, offset, bytes});
}

std::int64_t fused_workspace_bytes(const Program& program) {
  std::int64_t bytes = 0;
  for (const Region& region : program.regions) bytes += region.component == Component::scratch ? region.bytes : 0;
  return bytes;
}

bool is_fused(const Program& program) {
  return std::any_of(program.stages.begin(), program.stages.end(), [](const Stage& stage) {
    return std::any_of(stage.compute.begin(), stage.compute.end(), [](const Launch& launch) { return is_fused(launch.kind); });
  });
}

}  // namespace ringspan::internal
