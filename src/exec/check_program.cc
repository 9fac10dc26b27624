#include "exec/check_program.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "base/check.h"
#include "exec/bindings.h"
#include "exec/resolve.h"

namespace ringspan::internal {
namespace {

// What an operand of an attention task has to be.
enum class Side { query, key };
enum class Width { one, head_dim, head_dim_v };
enum class Type { storage, float32 };
struct OperandRule {
  int operand;
  Side side;
  Width width;
  Type type;
};
constexpr OperandRule kForward[] = {
    {kQ, Side::query, Width::head_dim, Type::storage},
    {kK, Side::key, Width::head_dim, Type::storage},
    {kV, Side::key, Width::head_dim_v, Type::storage},
    {kM, Side::query, Width::one, Type::float32},
    {kL, Side::query, Width::one, Type::float32},
    {kAcc, Side::query, Width::head_dim_v, Type::float32},
    {kResult, Side::query, Width::head_dim_v, Type::storage},
    {kResultLse, Side::query, Width::one, Type::float32},
    {kResult32, Side::query, Width::head_dim_v, Type::float32},
};
constexpr OperandRule kBackward[] = {
    {kQ, Side::query, Width::head_dim, Type::storage},  {kK, Side::key, Width::head_dim, Type::storage},
    {kV, Side::key, Width::head_dim_v, Type::storage},  {kDOut, Side::query, Width::head_dim_v, Type::storage},
    {kLse, Side::query, Width::one, Type::float32},     {kDelta, Side::query, Width::one, Type::float32},
    {kDq, Side::query, Width::head_dim, Type::float32}, {kDk, Side::key, Width::head_dim, Type::float32},
    {kDv, Side::key, Width::head_dim_v, Type::float32},
};
constexpr OperandRule kFused[] = {
    {kQ, Side::query, Width::head_dim, Type::storage},     {kK, Side::key, Width::head_dim, Type::storage},
    {kV, Side::key, Width::head_dim_v, Type::storage},     {kLse, Side::query, Width::one, Type::float32},
    {kOut, Side::query, Width::head_dim_v, Type::storage},
};
constexpr OperandRule kFusedBackward[] = {
    {kQ, Side::query, Width::head_dim, Type::storage},  {kK, Side::key, Width::head_dim, Type::storage},
    {kV, Side::key, Width::head_dim_v, Type::storage},  {kDOut, Side::query, Width::head_dim_v, Type::storage},
    {kLse, Side::query, Width::one, Type::float32},     {kOut, Side::query, Width::head_dim_v, Type::storage},
    {kDq, Side::query, Width::head_dim, Type::storage}, {kDk, Side::key, Width::head_dim, Type::storage},
    {kDv, Side::key, Width::head_dim_v, Type::storage},
};

std::span<const OperandRule> rules_of(LaunchKind kind) {
  switch (kind) {
    case LaunchKind::attend:
      return kForward;
    case LaunchKind::attend_backward:
      return kBackward;
    case LaunchKind::fused:
      return kFused;
    case LaunchKind::fused_backward:
      return kFusedBackward;
    default:
      return {};
  }
}

// Checks one program; the members are what every item needs.
class Checker {
 public:
  Checker(const PlanData& plan, const Program& program) : plan_(plan), program_(program) {}

  void check() const {
    for (const Region& region : program_.regions) {
      RINGSPAN_CHECK(region.offset >= 0 && region.bytes >= 0 && region.offset % 64 == 0);
      RINGSPAN_CHECK(region.offset + region.bytes <= program_.arena_bytes);
    }
    for (const Stage& stage : program_.stages) {
      for (const Launch& launch : stage.before) check(launch);
      for (const Launch& launch : stage.copies) check_copies(launch);
      for (const Round& round : stage.rounds) check(round);
      for (const Launch& launch : stage.compute) check(launch);
      if (!plan_.options.host_tensors) continue;
      for (const auto* launches : {&stage.before, &stage.compute}) {
        for (const Launch& launch : *launches) check_on_device(launch);
      }
    }
  }

 private:
  void check(const Round& round) const {
    for (const Transfer& transfer : round.transfers) {
      RINGSPAN_CHECK(transfer.peer >= 0 && transfer.peer < plan_.problem.ranks && transfer.peer != plan_.rank);
      RINGSPAN_CHECK(transfer.bytes > 0 && transfer.offset >= 0 && transfer.offset + transfer.bytes <= program_.arena_bytes);
    }
  }

  // Kernels do not reach the caller's tensors on the host.
  void check_on_device(const Launch& launch) const {
    const auto is_there = [&](const RowRef& ref) { return ref.view < 0 || view_of(ref).in_arena; };
    const bool attend = is_attention(launch.kind);
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const auto at = static_cast<std::size_t>(index);
      RINGSPAN_CHECK(attend ? std::all_of(std::begin(program_.attend_items[at].operands),
                                          std::end(program_.attend_items[at].operands), is_there)
                            : std::all_of(std::begin(program_.row_items[at].operands),
                                          std::end(program_.row_items[at].operands), is_there));
    }
  }

  // One side is the caller's on the host, the other in the arena.
  void check_copies(const Launch& launch) const {
    check(launch);
    RINGSPAN_CHECK(plan_.options.host_tensors && launch.kind == LaunchKind::copy);
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      const RowItem& item = program_.row_items[static_cast<std::size_t>(index)];
      const View& source = view_of(item.operands[0]);
      const View& target = view_of(item.operands[1]);
      RINGSPAN_CHECK(source.in_arena != target.in_arena && source.dtype == target.dtype);
    }
  }

  void check(const Launch& launch) const {
    const bool attend = is_attention(launch.kind);
    if (launch.kind == LaunchKind::sum_sinks) return;
    const std::size_t items = attend ? program_.attend_items.size() : program_.row_items.size();
    RINGSPAN_CHECK(launch.first >= 0 && launch.count >= 0 && launch.first + launch.count <= static_cast<std::int64_t>(items));
    for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
      attend ? check(launch.kind, program_.attend_items[static_cast<std::size_t>(index)])
             : check(launch, program_.row_items[static_cast<std::size_t>(index)]);
    }
  }

  void check(const Launch& launch, const RowItem& item) const {
    RINGSPAN_CHECK(item.batch_count > 0 && item.rows > 0 && !item.heads.empty());
    for (int index = 0; index < operand_count(launch.kind); ++index) {
      const RowRef& ref = item.operands[index];
      const bool optional =
          (launch.kind == LaunchKind::finalize && index == 5) || (launch.kind == LaunchKind::delta && index == 3);
      if (ref.view < 0 && optional) continue;
      const View& view = view_of(ref);
      RINGSPAN_CHECK(view.width == width_of(launch, index));
      check_span(view, item.batch_first, item.batch_count, item.heads, ref, item.rows);
    }
  }

  // Elements per row of an operand: the launch's, or one per row.
  static int width_of(const Launch& launch, int operand) {
    switch (launch.kind) {
      case LaunchKind::merge:
        return operand == 0 || operand == 4 ? launch.width : 1;
      case LaunchKind::merge_states:
        return operand == 2 || operand == 5 ? launch.width : 1;
      case LaunchKind::finalize:
        return operand == 2 || operand == 3 || operand == 5 ? launch.width : 1;
      case LaunchKind::delta:
        return operand < 2 ? launch.width : 1;
      case LaunchKind::sink_gradient:
        return 1;
      default:
        return launch.width;
    }
  }

  void check(LaunchKind kind, const AttendItem& item) const {
    const Slice& slice = item.slice;
    RINGSPAN_CHECK(slice.batch_count > 0 && !slice.heads.empty() && !slice.q.empty() && !slice.k.empty());
    const Progression kv = covering_kv_heads(slice.heads, plan_.problem.group());
    for (const OperandRule& rule : rules_of(kind)) {
      const RowRef& ref = item.operands[rule.operand];
      if (ref.view < 0 && may_lack(kind, item, rule.operand)) continue;
      const View& view = view_of(ref);
      const bool is_key = rule.side == Side::key;
      RINGSPAN_CHECK(view.dtype == (is_stored(kind, item, rule) ? plan_.problem.dtype : DType::float32));
      RINGSPAN_CHECK(view.width == width_of(rule.width));
      check_span(view, slice.batch_first, slice.batch_count, is_key ? kv : slice.heads, ref,
                 is_key ? slice.k.count : slice.q.count);
    }
  }

  bool may_lack(LaunchKind kind, const AttendItem& item, int operand) const {
    if (kind == LaunchKind::attend_backward) {  // is for dq, or for dk and dv, only
      return operand == kDq ? item.operands[kDk].view >= 0 : operand > kDq && item.operands[kDq].view >= 0;
    }
    if (kind != LaunchKind::attend) return false;
    const bool finishes = item.operands[kResult].view >= 0;  // then it may have no state
    return finishes ? operand == kResult32 || (operand >= kM && operand <= kAcc) : operand >= kResult;
  }

  static bool is_stored(LaunchKind kind, const AttendItem& item, const OperandRule& rule) {
    if (kind == LaunchKind::attend_backward && rule.operand == kDq) return item.writes_dq;
    if (kind == LaunchKind::attend_backward && rule.operand >= kDk) return item.writes_dk_dv;
    return rule.type == Type::storage;
  }

  int width_of(Width width) const {
    return width == Width::one ? 1 : width == Width::head_dim ? plan_.problem.head_dim : plan_.problem.head_dim_v;
  }

  const View& view_of(const RowRef& ref) const {
    RINGSPAN_CHECK(ref.view >= 0 && ref.view < static_cast<std::int64_t>(program_.views.size()));
    return program_.views[static_cast<std::size_t>(ref.view)];
  }

  // The rows lie inside the caller's tensor, or inside the arena.
  void check_span(const View& view, std::int64_t batch_first, std::int64_t batch_count, const Progression& heads,
                  const RowRef& ref, std::int64_t rows) const {
    RINGSPAN_CHECK(view.heads.stride > 0 && view.heads.contains(heads.first) && view.heads.contains(heads.last()));
    RINGSPAN_CHECK(heads.count == 1 || heads.stride % view.heads.stride == 0);
    const std::int64_t last_row = ref.row + (rows - 1) * ref.step;
    const std::int64_t last_batch = batch_first + batch_count - 1 - view.batch_first;
    RINGSPAN_CHECK(batch_first >= view.batch_first && std::min(ref.row, last_row) >= 0);
    if (!view.in_arena) {
      RINGSPAN_CHECK(static_cast<int>(view.kind) < kCallerTensors);
      const TensorShape shape = shape_of(plan_, view.kind);
      RINGSPAN_CHECK(view.dtype == shape.dtype && view.width == shape.width && view.batch_first == 0);
      RINGSPAN_CHECK(std::max(ref.row, last_row) < shape.rows && last_batch < shape.batch);
      RINGSPAN_CHECK(view.heads == (Progression{0, 1, shape.heads}));
      return;
    }
    const std::int64_t last_head = (heads.last() - view.heads.first) / view.heads.stride;
    const std::int64_t last = last_batch * view.batch_stride + std::max(ref.row, last_row) * view.row_stride +
                              last_head * view.head_stride + view.width;
    RINGSPAN_CHECK(view.offset >= 0 && view.offset + last * size_of(view.dtype) <= program_.arena_bytes);
  }

  const PlanData& plan_;
  const Program& program_;
};

}  // namespace

void check_program(const PlanData& plan, const Program& program) { Checker(plan, program).check(); }

}  // namespace ringspan::internal
