// A fused call per task, whose rows in the storage dtype a row launch takes in.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/arithmetic.h"
#include "plan/builder.h"
#include "plan/fuse.h"

namespace ringspan::internal {
namespace {

constexpr std::int64_t kRegionAlignment = 256;

std::string partials_refusal(const PlanData& data, Pass pass) {
  const Problem& p = data.problem;
  std::string refusal = fused_problem_refusal(data);
  if (!refusal.empty() || pass == Pass::forward) return refusal;
  if (p.pattern.dilated && p.pattern.dilated->dialect == Dialect::torchscale)
    return "branches with a softmax of their own have a delta of their own";
  if (p.pattern.output_scale() != 1.0F) return "delta of a fused call does not know that head_groups divides the output";
  return {};
}

// Whether anything but tasks reads delta: the gradient of sinks, or a message.
bool reads_delta(const Program& program, const Launch& launch) {
  if (launch.kind == LaunchKind::delta || is_attention(launch.kind)) return false;
  for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
    for (const RowRef& ref : program.row_items[static_cast<std::size_t>(index)].operands) {
      if (ref.view >= 0 && program.views[static_cast<std::size_t>(ref.view)].kind == TensorKind::delta) return true;
    }
  }
  return false;
}

bool reads_delta(const Program& program) {
  return std::any_of(program.stages.begin(), program.stages.end(), [&](const Stage& stage) {
    const auto reads = [&](const Launch& launch) { return reads_delta(program, launch); };
    return std::any_of(stage.before.begin(), stage.before.end(), reads) ||
           std::any_of(stage.compute.begin(), stage.compute.end(), reads);
  });
}

class PartialsWriter {
 public:
  PartialsWriter(const PlanData& data, Pass pass)
      : data_(data), backward_(pass == Pass::backward), source_(backward_ ? data.backward : data.forward), program_(source_) {
    program_.attend_items.clear();
    begin_ = round_up(program_.arena_bytes, kRegionAlignment);
    if (!backward_) return;
    View o;  // the caller's, from which a call computes delta
    o.kind = TensorKind::o;
    o.dtype = data.problem.dtype;
    o.width = data.problem.head_dim_v;
    o.heads = {0, 1, data.problem.heads};
    o_view_ = add_view(o);
  }

  // Empty, or why it cannot be.
  std::string write() {
    const bool keeps_delta = reads_delta(source_);
    for (Stage& stage : program_.stages) {
      for (std::vector<Launch>* launches : {&stage.before, &stage.compute}) {
        std::vector<Launch> written;
        for (const Launch& launch : *launches) {
          if (launch.kind == LaunchKind::delta && !keeps_delta) continue;  // calls compute their own
          if (!is_attention(launch.kind)) {
            written.push_back(launch);
            continue;
          }
          std::string refusal = replace(launch, written);
          if (!refusal.empty()) return refusal;
        }
        *launches = std::move(written);
      }
    }
    program_.regions.push_back({"partials", Component::staging, begin_, bytes_});
    program_.arena_bytes = begin_ + round_up(bytes_, kViewAlignment);
    return {};
  }

  Program take() { return std::move(program_); }

 private:
  std::int32_t add_view(const View& view) {
    program_.views.push_back(view);
    return static_cast<std::int32_t>(program_.views.size() - 1);
  }

  std::string replace(const Launch& launch, std::vector<Launch>& written) {
    if (launch.count > kMostFusedCalls)
      return fmt::format("a launch would take {} calls, more than {}", launch.count, kMostFusedCalls);
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const AttendItem& item = source_.attend_items[static_cast<std::size_t>(index)];
      const std::optional<IndexedSlice> indexed = index_slice(item.slice);
      if (!indexed) return "a band is over queries and keys of different steps";
      if (fused_group(item.slice.heads, data_.problem.group()) == 0) return "query heads of a call share kv heads unevenly";
      const View& q = program_.views[static_cast<std::size_t>(item.operands[kQ].view)];
      if (backward_ && q.in_arena) return "queries come from other ranks, without the o that a call computes delta from";
      used_ = 0;
      backward_ ? add_backward(item, *indexed, written) : add_forward(item, *indexed, written);
    }
    return {};
  }

  void add_forward(AttendItem item, const IndexedSlice& indexed, std::vector<Launch>& written) {
    const Slice& whole = item.slice;
    if (item.operands[kM].view < 0) add_state(item, written);
    if (!indexed.empty) add_merged(item, indexed.slice, written);
    if (item.operands[kResult].view < 0) return;
    // The task was to leave results: of all its rows, those that see nothing too.
    RowItem rows = rows_of(whole, whole.heads, whole.q.count);
    const int operands[] = {kM, kL, kAcc, kResult, kResultLse, kResult32};
    for (std::size_t i = 0; i < std::size(operands); ++i) rows.operands[i] = item.operands[operands[i]];
    add_rows(LaunchKind::finalize, rows, data_.problem.head_dim_v, written, data_.problem.pattern.output_scale(),
             data_.problem.sinks);
  }

  // A task alone over its rows has no state: it gets one beside its partials.
  void add_state(AttendItem& item, std::vector<Launch>& written) {
    const Slice& s = item.slice;
    const auto f32 = DType::float32;
    item.operands[kM] = place(TensorKind::m, f32, 1, s, s.heads, s.q.count);
    item.operands[kL] = place(TensorKind::l, f32, 1, s, s.heads, s.q.count);
    item.operands[kAcc] = place(TensorKind::acc, f32, data_.problem.head_dim_v, s, s.heads, s.q.count);
    RowItem rows = rows_of(s, s.heads, s.q.count);
    rows.operands[0] = item.operands[kM];
    add_rows(LaunchKind::fill, rows, 1, written, -std::numeric_limits<float>::infinity());
  }

  void add_merged(const AttendItem& item, const Slice& slice, std::vector<Launch>& written) {
    const Problem& p = data_.problem;
    AttendItem call = inputs(item, slice);
    call.operands[kOut] = place(TensorKind::partial_o, p.dtype, p.head_dim_v, slice, slice.heads, slice.q.count);
    call.operands[kLse] = place(TensorKind::partial_lse, DType::float32, 1, slice, slice.heads, slice.q.count);
    add_call(LaunchKind::fused, call, written);
    RowItem merge = rows_of(slice, slice.heads, slice.q.count);
    merge.operands[0] = call.operands[kOut];
    merge.operands[1] = call.operands[kLse];
    merge.operands[2] = moved(item.operands[kM], item.slice.q, slice.q);
    merge.operands[3] = moved(item.operands[kL], item.slice.q, slice.q);
    merge.operands[4] = moved(item.operands[kAcc], item.slice.q, slice.q);
    add_rows(LaunchKind::merge, merge, p.head_dim_v, written);
  }

  void add_backward(const AttendItem& item, const IndexedSlice& indexed, std::vector<Launch>& written) {
    const Problem& p = data_.problem;
    const Slice& slice = indexed.slice;
    const Progression kv_heads = fused_kv_heads(slice, p.group());
    if (item.writes_dq) add_zeros(item, kDq, slice.heads, item.slice.q, indexed, p.head_dim, written);
    if (item.writes_dk_dv) add_zeros(item, kDk, kv_heads, item.slice.k, indexed, p.head_dim, written);
    if (item.writes_dk_dv) add_zeros(item, kDv, kv_heads, item.slice.k, indexed, p.head_dim_v, written);
    if (indexed.empty) return;
    AttendItem call = inputs(item, slice);
    call.operands[kDOut] = moved(item.operands[kDOut], item.slice.q, slice.q);
    call.operands[kLse] = moved(item.operands[kLse], item.slice.q, slice.q);
    call.operands[kOut] = call.operands[kQ];  // both are the caller's, with the same rows
    call.operands[kOut].view = o_view_;
    struct Gradient {
      int operand, width;
      bool is_written;  // to the caller's rows, which no other task has
      const Progression &heads, &from, &to;
    };
    const Slice& whole = item.slice;
    const Gradient gradients[] = {{kDq, p.head_dim, item.writes_dq, slice.heads, whole.q, slice.q},
                                  {kDk, p.head_dim, item.writes_dk_dv, kv_heads, whole.k, slice.k},
                                  {kDv, p.head_dim_v, item.writes_dk_dv, kv_heads, whole.k, slice.k}};
    for (const Gradient& g : gradients) {
      const auto kind = g.operand == kDq ? TensorKind::dq : g.operand == kDk ? TensorKind::dk : TensorKind::dv;
      call.operands[g.operand] = g.is_written ? moved(item.operands[g.operand], g.from, g.to)
                                              : place(kind, p.dtype, g.width, slice, g.heads, g.to.count);
    }
    add_call(LaunchKind::fused_backward, call, written);
    for (const Gradient& g : gradients) {
      if (g.is_written) continue;
      RowItem rows = rows_of(slice, g.heads, g.to.count);
      rows.operands[0] = call.operands[g.operand];
      rows.operands[1] = moved(item.operands[g.operand], g.from, g.to);
      add_rows(LaunchKind::add, rows, g.width, written);
    }
  }

  // Where the task was to write all its rows of a gradient, and the call leaves some out.
  void add_zeros(const AttendItem& item, int operand, const Progression& heads, const Progression& all,
                 const IndexedSlice& indexed, int width, std::vector<Launch>& written) {
    const std::int64_t called = operand == kDq ? indexed.slice.q.count : indexed.slice.k.count;
    if (!indexed.empty && called == all.count) return;
    RowItem rows = rows_of(item.slice, heads, all.count);
    rows.operands[0] = item.operands[operand];
    add_rows(LaunchKind::fill, rows, width, written);
  }

  static AttendItem inputs(const AttendItem& item, const Slice& slice) {
    AttendItem call;
    call.slice = slice;
    call.operands[kQ] = moved(item.operands[kQ], item.slice.q, slice.q);
    call.operands[kK] = moved(item.operands[kK], item.slice.k, slice.k);
    call.operands[kV] = moved(item.operands[kV], item.slice.k, slice.k);
    return call;
  }

  static RowItem rows_of(const Slice& slice, const Progression& heads, std::int64_t rows) {
    RowItem item;
    item.batch_first = slice.batch_first;
    item.batch_count = slice.batch_count;
    item.heads = heads;
    item.rows = rows;
    return item;
  }

  // Dense rows behind those that the call has already: (batch, row, head), statistics (batch, head, row).
  RowRef place(TensorKind kind, DType dtype, int width, const Slice& slice, const Progression& heads, std::int64_t rows) {
    View view;
    view.kind = kind;
    view.in_arena = true;
    view.dtype = dtype;
    view.width = width;
    view.offset = begin_ + used_;
    view.row_stride = width == 1 ? 1 : heads.count * width;
    view.head_stride = width == 1 ? rows : width;
    view.batch_stride = rows * heads.count * width;
    view.batch_first = slice.batch_first;
    view.heads = {heads.first, std::max<std::int64_t>(heads.stride, 1), heads.count};
    used_ = round_up(used_ + slice.batch_count * view.batch_stride * size_of(view.dtype), kViewAlignment);
    bytes_ = std::max(bytes_, used_);
    return {add_view(view), 0, 1};
  }

  void add_call(LaunchKind kind, const AttendItem& call, std::vector<Launch>& written) {
    Launch launch;
    launch.kind = kind;
    launch.first = static_cast<std::int64_t>(program_.attend_items.size());
    launch.count = 1;
    launch.width = data_.problem.head_dim_v;
    program_.attend_items.push_back(call);
    written.push_back(launch);
  }

  void add_rows(LaunchKind kind, const RowItem& item, int width, std::vector<Launch>& written, float value = 0.0F,
                bool with_sinks = false) {
    Launch launch;
    launch.kind = kind;
    launch.first = static_cast<std::int64_t>(program_.row_items.size());
    launch.count = 1;
    launch.width = width;
    launch.value = value;
    launch.with_sinks = with_sinks;
    program_.row_items.push_back(item);
    written.push_back(launch);
  }

  const PlanData& data_;
  bool backward_;
  const Program& source_;
  Program program_;
  std::int32_t o_view_ = -1;
  std::int64_t begin_ = 0, used_ = 0, bytes_ = 0;  // of the partials: in the arena, of a call, of the largest
};

}  // namespace

FusedProgram fuse_partials(const PlanData& data, Pass pass) {
  FusedProgram result;
  result.refusal = partials_refusal(data, pass);
  if (!result.refusal.empty()) return result;
  PartialsWriter writer(data, pass);
  result.refusal = writer.write();
  if (result.refusal.empty()) result.program = writer.take();
  return result;
}

}  // namespace ringspan::internal
