#include "plan/split_tasks.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plan/common_parts.h"

namespace ringspan::internal {
namespace {

constexpr std::size_t kMostTasks = std::size_t{1} << 18;
constexpr std::int64_t kBlockRows = 128;  // of most kernels
// What else takes as long as so many pairs of a row: a state that goes to memory and back (1 KB of 128 elements at 4 TB/s; 512
// operations per pair at 600 TFLOP/s), and a task that a block takes in (docs/cuda.md, "What a block costs").
constexpr double kPairsOfState = 256, kPairsOfTask = 256;

enum class Side { queries, keys };

class Splitter {
 public:
  Splitter(const Program& program, int group) : program_(program), group_(group) {}

  // The tasks of a launch, cut along the side; nothing where they are better left as they are.
  std::optional<std::vector<AttendItem>> cut(const Launch& launch, int operand, Side side) const {
    const std::span<const AttendItem> tasks{&program_.attend_items[static_cast<std::size_t>(launch.first)],
                                            static_cast<std::size_t>(launch.count)};
    if (tasks.size() > kMostTasks) return std::nullopt;
    std::vector<Cut> cuts;
    std::map<std::int32_t, std::vector<std::size_t>> by_view;
    for (const AttendItem& task : tasks) {
      const auto whole = own(task, operand, side);
      if (!whole) return std::nullopt;
      by_view[task.operands[operand].view].push_back(cuts.size());
      cuts.push_back({*whole, {}});
    }
    std::size_t parts = 0;
    for (const auto& [view, members] : by_view) {
      if (!cut_together(members, cuts, parts)) return std::nullopt;
    }
    if (parts == tasks.size() || !pays(tasks, cuts, side)) return std::nullopt;
    std::vector<AttendItem> result;
    result.reserve(parts);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      for (const Own& part : cuts[i].parts) add_pieces(tasks[i], cuts[i].whole, part, side, result);
    }
    return result;
  }

 private:
  // Batch items, heads and rows in steps, of one task's own side.
  struct Own {
    Progression batches, heads, rows;
  };
  struct Cut {
    Own whole;
    std::vector<Own> parts;
  };

  std::optional<Own> own(const AttendItem& task, int operand, Side side) const {
    const Slice& s = task.slice;
    const RowRef& ref = task.operands[operand];
    const auto heads = side == Side::queries ? std::optional(s.heads) : written_kv_heads(s.heads, group_);
    if (!heads || ref.view < 0 || ref.step < 1) return std::nullopt;
    return Own{{s.batch_first, 1, s.batch_count}, *heads, {ref.row, ref.step, side == Side::queries ? s.q.count : s.k.count}};
  }

  // Of the tasks over rows of one view. parts: of all so far; false: these are too many, or cannot be told.
  static bool cut_together(std::span<const std::size_t> members, std::vector<Cut>& cuts, std::size_t& parts) {
    std::vector<Progression> batches, heads;
    for (const std::size_t i : members) {
      batches.push_back(cuts[i].whole.batches);
      heads.push_back(cuts[i].whole.heads);
    }
    const auto batch_parts = common_parts(batches);
    const auto head_parts = common_parts(heads);
    if (!batch_parts || !head_parts) return false;
    struct Sharer {
      std::size_t task;
      Progression batches, heads;
    };
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<Sharer>> planes;  // by first batch item and head
    for (std::size_t i = 0; i < members.size(); ++i) {
      for (const Progression& batch : (*batch_parts)[i]) {
        for (const Progression& head : (*head_parts)[i]) planes[{batch.first, head.first}].push_back({members[i], batch, head});
      }
    }
    for (const auto& [plane, sharers] : planes) {
      std::vector<Progression> rows;
      for (const Sharer& sharer : sharers) rows.push_back(cuts[sharer.task].whole.rows);
      const auto row_parts = common_parts(rows);
      if (!row_parts) return false;
      for (std::size_t i = 0; i < sharers.size(); ++i) {
        parts += (*row_parts)[i].size();
        if (parts > kMostTasks) return false;
        for (const Progression& part : (*row_parts)[i]) {
          cuts[sharers[i].task].parts.push_back({sharers[i].batches, sharers[i].heads, part});
        }
      }
    }
    return true;
  }

  // A task for each progression of query heads of the part, but for those without a pair. The stride of a single row is 1.
  void add_pieces(const AttendItem& task, const Own& whole, const Own& part, Side side, std::vector<AttendItem>& pieces) const {
    AttendItem piece = task;
    Slice& s = piece.slice;
    s.batch_first = part.batches.first, s.batch_count = part.batches.count;
    const std::int64_t skipped = (part.rows.first - whole.rows.first) / whole.rows.stride;
    const bool single = part.rows.count == 1;
    const std::int64_t step = single ? 1 : part.rows.stride / whole.rows.stride;
    Progression& positions = side == Side::queries ? s.q : s.k;
    positions = {positions.at(skipped), single ? 1 : positions.stride * step, part.rows.count};
    for (int operand = 0; operand < kAllOperands; ++operand) {
      const bool is_key = operand == kK || operand == kV || operand == kDk || operand == kDv;
      RowRef& ref = piece.operands[operand];
      if (is_key != (side == Side::keys) || ref.view < 0) continue;
      ref.row += skipped * ref.step;
      ref.step = single ? 1 : ref.step * step;
    }
    std::vector<Progression> heads{part.heads};
    if (side == Side::keys)
      heads = part.heads == whole.heads ? std::vector{s.heads} : query_heads_of(s.heads, part.heads, group_);
    for (const Progression& own_heads : heads) {
      piece.slice.heads = own_heads;
      if (!is_empty(piece.slice)) pieces.push_back(piece);
    }
  }

  // What blocks compute, of which each has rows of one part only, and for each task over a row what its state costs, which
  // cutting saves.
  static bool pays(std::span<const AttendItem> tasks, std::span<const Cut> cuts, Side side) {
    double whole = 0.0, cut = 0.0;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const Slice& s = tasks[i].slice;
      const auto heads = static_cast<double>(s.heads.count) / static_cast<double>(cuts[i].whole.heads.count);  // per own head
      const auto rows_of = [&](const Own& own, std::int64_t rows) {
        return static_cast<double>(own.batches.count * own.heads.count * rows) * heads;
      };
      const std::int64_t count = side == Side::queries ? s.q.count : s.k.count;
      const double pairs_per_row = static_cast<double>(pair_count(s)) / rows_of(cuts[i].whole, count);
      const auto cost = [&](const Own& own) {
        const std::int64_t blocks = (own.rows.count + kBlockRows - 1) / kBlockRows;
        return rows_of(own, blocks * kBlockRows) * (pairs_per_row + kPairsOfTask);
      };
      whole += cost(cuts[i].whole) + kPairsOfState * rows_of(cuts[i].whole, count);
      for (const Own& part : cuts[i].parts) cut += cost(part);
    }
    return cut <= whole;
  }

  const Program& program_;
  int group_;
};

// Puts tasks in place of those of a launch.
void put(std::vector<AttendItem>&& tasks, Launch launch, std::vector<AttendItem>& kept, std::vector<Launch>& launches) {
  launch.first = static_cast<std::int64_t>(kept.size());
  launch.count = static_cast<std::int64_t>(tasks.size());
  kept.insert(kept.end(), tasks.begin(), tasks.end());
  launches.push_back(launch);
}

std::vector<AttendItem> without(std::vector<AttendItem>&& tasks, std::initializer_list<int> operands) {
  for (AttendItem& task : tasks) {
    for (const int operand : operands) task.operands[operand] = {};
  }
  return std::move(tasks);
}

}  // namespace

void split_tasks(Program* program, int group) {
  const Splitter splitter(*program, group);
  std::vector<AttendItem> kept;
  std::vector<Launch> result;
  const auto split = [&](const Launch& launch) {
    const auto first = program->attend_items.begin() + launch.first;
    const auto as_it_is = [&] { return std::vector<AttendItem>(first, first + launch.count); };
    if (launch.kind == LaunchKind::attend && launch.count > 1) {
      auto cut = splitter.cut(launch, kM, Side::queries);
      return put(cut ? std::move(*cut) : as_it_is(), launch, kept, result);
    }
    const auto has_both = [&] { return first->operands[kDq].view >= 0 && first->operands[kDk].view >= 0; };
    if (launch.kind == LaunchKind::attend_backward && launch.count > 1 && has_both()) {
      auto queries = splitter.cut(launch, kDq, Side::queries);
      auto keys = splitter.cut(launch, kDk, Side::keys);
      if (queries || keys) {
        put(without(queries ? std::move(*queries) : as_it_is(), {kDk, kDv}), launch, kept, result);
        return put(without(keys ? std::move(*keys) : as_it_is(), {kDq}), launch, kept, result);
      }
    }
    if (is_attention(launch.kind)) return put(as_it_is(), launch, kept, result);
    result.push_back(launch);
  };
  for (Stage& stage : program->stages) {
    for (std::vector<Launch>* launches : {&stage.before, &stage.compute}) {
      result.clear();
      for (const Launch& launch : *launches) split(launch);
      *launches = result;
    }
  }
  program->attend_items = std::move(kept);
}

}  // namespace ringspan::internal
