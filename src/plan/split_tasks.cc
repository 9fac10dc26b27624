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
    std::map<std::int32_t, std::vector<std::size_t>> by_view;
    for (std::size_t i = 0; i < tasks.size(); ++i) by_view[tasks[i].operands[operand].view].push_back(i);
    std::vector<std::vector<AttendItem>> pieces(tasks.size());
    std::size_t count = 0;
    for (const auto& [view, members] : by_view) {
      if (view < 0 || !cut_together(tasks, members, operand, side, pieces, count)) return std::nullopt;
    }
    if (count == tasks.size() || !pays(tasks, pieces, side)) return std::nullopt;
    std::vector<AttendItem> result;
    result.reserve(count);
    for (const std::vector<AttendItem>& of_task : pieces) result.insert(result.end(), of_task.begin(), of_task.end());
    return result;
  }

 private:
  // Batch items, heads and rows in steps, of one task's own side.
  struct Own {
    Progression batches, heads, rows;
  };

  std::optional<Own> own(const AttendItem& task, int operand, Side side) const {
    const Slice& s = task.slice;
    const RowRef& ref = task.operands[operand];
    const auto heads = side == Side::queries ? std::optional(s.heads) : written_kv_heads(s.heads, group_);
    if (!heads || ref.step < 1) return std::nullopt;
    return Own{{s.batch_first, 1, s.batch_count}, *heads, {ref.row, ref.step, side == Side::queries ? s.q.count : s.k.count}};
  }

  // The tasks over rows of one view.
  bool cut_together(std::span<const AttendItem> tasks, std::span<const std::size_t> members, int operand, Side side,
                    std::vector<std::vector<AttendItem>>& pieces, std::size_t& count) const {
    std::vector<Own> owned;
    std::vector<Progression> batches, heads;
    for (const std::size_t index : members) {
      const auto found = own(tasks[index], operand, side);
      if (!found) return false;
      owned.push_back(*found);
      batches.push_back(found->batches);
      heads.push_back(found->heads);
    }
    const auto batch_parts = common_parts(batches);
    const auto head_parts = common_parts(heads);
    if (!batch_parts || !head_parts) return false;
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::size_t>> planes;  // by first batch item and head
    for (std::size_t i = 0; i < owned.size(); ++i) {
      for (const Progression& batch : (*batch_parts)[i]) {
        for (const Progression& head : (*head_parts)[i]) planes[{batch.first, head.first}].push_back(i);
      }
    }
    for (const auto& [plane, sharers] : planes) {
      std::vector<Progression> rows;
      for (const std::size_t i : sharers) rows.push_back(owned[i].rows);
      const auto row_parts = common_parts(rows);
      if (!row_parts) return false;
      for (std::size_t place = 0; place < sharers.size(); ++place) {
        const std::size_t i = sharers[place];
        const auto part_at = [](const std::vector<Progression>& parts, std::int64_t first) {
          return *std::find_if(parts.begin(), parts.end(), [&](const Progression& p) { return p.first == first; });
        };
        const Progression batch = part_at((*batch_parts)[i], plane.first);
        const Progression head = part_at((*head_parts)[i], plane.second);
        for (const Progression& part : (*row_parts)[place]) {
          for (AttendItem& piece : restricted(tasks[members[i]], owned[i], {batch, head, part}, side)) {
            if (is_empty(piece.slice)) continue;
            pieces[members[i]].push_back(std::move(piece));
            if (++count > kMostTasks) return false;
          }
        }
      }
    }
    return true;
  }

  // One task, or one for each progression of its query heads.
  std::vector<AttendItem> restricted(const AttendItem& task, const Own& whole, const Own& part, Side side) const {
    AttendItem piece = task;
    Slice& s = piece.slice;
    s.batch_first = part.batches.first, s.batch_count = part.batches.count;
    const std::int64_t skipped = (part.rows.first - whole.rows.first) / whole.rows.stride;
    const std::int64_t step = part.rows.count > 1 ? part.rows.stride / whole.rows.stride : 1;
    Progression& positions = side == Side::queries ? s.q : s.k;
    positions = {positions.at(skipped), positions.stride * step, part.rows.count};
    for (int operand = 0; operand < kAllOperands; ++operand) {
      const bool is_key = operand == kK || operand == kV || operand == kDk || operand == kDv;
      RowRef& ref = piece.operands[operand];
      if (is_key != (side == Side::keys) || ref.view < 0) continue;
      ref.row += skipped * ref.step;
      ref.step *= step;
    }
    std::vector<Progression> heads{part.heads};
    if (side == Side::keys)
      heads = part.heads == whole.heads ? std::vector{s.heads} : query_heads_of(s.heads, part.heads, group_);
    std::vector<AttendItem> pieces(heads.size(), piece);
    for (std::size_t i = 0; i < heads.size(); ++i) pieces[i].slice.heads = heads[i];
    return pieces;
  }

  // What blocks compute, of which each has rows of one piece only, and for each task over a row what its state costs, which
  // cutting saves.
  bool pays(std::span<const AttendItem> tasks, std::span<const std::vector<AttendItem>> pieces, Side side) const {
    const auto cost = [&](const AttendItem& task, double pairs_per_row) {
      const std::int64_t rows = side == Side::queries ? task.slice.q.count : task.slice.k.count;
      const std::int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
      return static_cast<double>(blocks * kBlockRows * task.slice.batch_count * task.slice.heads.count) *
             (pairs_per_row + kPairsOfTask);
    };
    double whole = 0.0, cut = 0.0;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const Slice& s = tasks[i].slice;
      const auto rows = static_cast<double>(s.batch_count * s.heads.count * (side == Side::queries ? s.q.count : s.k.count));
      const double pairs_per_row = static_cast<double>(pair_count(s)) / rows;
      whole += cost(tasks[i], pairs_per_row) + kPairsOfState * rows;
      for (const AttendItem& piece : pieces[i]) cut += cost(piece, pairs_per_row);
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
    if (launch.kind == LaunchKind::attend_backward && launch.count > 1) {
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
