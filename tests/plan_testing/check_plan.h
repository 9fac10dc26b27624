// What must hold of any plan, checked by brute force on small problems. Every function returns what is wrong, or "".
#pragma once

#include <fmt/format.h>

#include <array>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "pattern/lower.h"
#include "plan/plan_data.h"
#include "ringspan/plan.h"

namespace ringspan::testing {

using internal::AttendItem;
using internal::Launch;
using internal::LaunchKind;
using internal::PlanData;
using internal::Program;
using internal::Region;
using internal::RowItem;
using internal::RowRef;
using internal::Stage;
using internal::TensorKind;
using internal::View;

// How often each (state, batch, head, i, j) is attended.
class PairCounts {
 public:
  explicit PairCounts(const Problem& p)
      : problem_(p), counts_(static_cast<std::size_t>(p.pattern.states() * p.batch * p.heads * p.tokens_q * p.tokens_k)) {}

  void add(const Slice& slice) {
    for (std::int64_t b = slice.batch_first; b < slice.batch_first + slice.batch_count; ++b) {
      for (std::int64_t h = 0; h < slice.heads.count; ++h) {
        for (std::int64_t x = 0; x < slice.q.count; ++x) {
          for (std::int64_t y = 0; y < slice.k.count; ++y) {
            const std::int64_t i = slice.q.at(x), j = slice.k.at(y);
            if (j - i < slice.lo || j - i > slice.hi) continue;
            const Problem& p = problem_;
            ++counts_[static_cast<std::size_t>(
                (((slice.state * p.batch + b) * p.heads + slice.heads.at(h)) * p.tokens_q + i) * p.tokens_k + j)];
          }
        }
      }
    }
  }
  bool operator==(const PairCounts& other) const { return counts_ == other.counts_; }

 private:
  const Problem& problem_;
  std::vector<int> counts_;
};

// The ranks together attend every pair of the pattern once, in both passes; backward also once for dq, and once for dk and dv.
inline std::string check_pairs(const std::vector<Plan>& plans) {
  const Problem& problem = plans.front().problem();
  PairCounts expected(problem);
  for (const Slice& slice : lower(problem)) expected.add(slice);
  for (const bool backward : {false, true}) {
    if (backward && !plans.front().data().has_backward) continue;
    PairCounts planned(problem), planned_again(problem);
    Int128 pairs = 0;
    for (const Plan& plan : plans) {
      const Program& program = backward ? plan.data().backward : plan.data().forward;
      for (const AttendItem& item : program.attend_items) {
        if (!backward || item.operands[internal::kDq].view >= 0) planned.add(item.slice);
        if (backward && item.operands[internal::kDk].view >= 0) planned_again.add(item.slice);
      }
      pairs += program.pairs;
    }
    if (!(planned == expected) || (backward && !(planned_again == expected)))
      return fmt::format("{}: the tasks are not the pattern", backward ? "backward" : "forward");
    if (pairs != pair_count(problem)) return "the counts of pairs do not sum up";
  }
  return {};
}

// What r plans to send to s is what s plans to receive from r: rounds, order, bytes, boxes, parts, operation.
inline std::string check_messages(const std::vector<Plan>& plans, bool backward) {
  struct Sent {
    std::int64_t bytes;
    internal::Bundle bundle;
    int source;
    internal::TransferOp op;
  };
  std::map<std::tuple<int, int, std::uint64_t>, Sent> messages[2];  // sent, received
  for (const Plan& plan : plans) {
    const Program& program = backward ? plan.data().backward : plan.data().forward;
    std::int64_t last = -1;
    for (const Stage& stage : program.stages) {
      for (const internal::Round& round : stage.rounds) {
        if (static_cast<std::int64_t>(round.number) <= last) return fmt::format("rank {}: rounds do not ascend", plan.rank());
        last = static_cast<std::int64_t>(round.number);
        if (round.transfers.empty()) return fmt::format("rank {}: round {} is empty", plan.rank(), round.number);
        for (const internal::Transfer& t : round.transfers) {
          if (t.bytes <= 0) return fmt::format("rank {}: an empty message in round {}", plan.rank(), round.number);
          if (t.peer == plan.rank()) return fmt::format("rank {}: a message to itself", plan.rank());
          const auto key =
              t.send ? std::tuple(plan.rank(), t.peer, round.number) : std::tuple(t.peer, plan.rank(), round.number);
          const internal::Bundle bundle =
              t.bundle < 0 ? internal::Bundle{} : program.bundles[static_cast<std::size_t>(t.bundle)];
          if (t.bundle >= 0 && bundle.bytes != t.bytes) return "a message has not the size of its bundle";
          if (!messages[t.send ? 0 : 1].emplace(key, Sent{t.bytes, bundle, t.source, t.op}).second) {
            return fmt::format("two messages from {} to {} in round {}", std::get<0>(key), std::get<1>(key), round.number);
          }
        }
      }
    }
  }
  if (messages[0].size() != messages[1].size()) {
    return fmt::format("{} messages are sent, {} received", messages[0].size(), messages[1].size());
  }
  for (const auto& [key, sent] : messages[0]) {
    const auto found = messages[1].find(key);
    const auto where = fmt::format("from {} to {} in round {}", std::get<0>(key), std::get<1>(key), std::get<2>(key));
    if (found == messages[1].end()) return "nobody receives the message " + where;
    const Sent& received = found->second;
    if (sent.bytes != received.bytes || sent.bundle.boxes != received.bundle.boxes ||
        sent.bundle.parts != received.bundle.parts || sent.source != received.source || sent.op != received.op) {
      return "the ends differ about the message " + where;
    }
  }
  return {};
}

// A pass of one rank on memory of which only what each byte may be used for is kept. Finds: accesses outside of a view's
// region or tensor, reads of what was never written, uses of what is being sent or received, writes to inputs, outputs that
// are not written, messages that nobody reads.
class Hazards {
 public:
  explicit Hazards(const PlanData& data) : data_(data), arena_(static_cast<std::size_t>(arena_bytes())) {}

  std::string check() {
    std::string error = check_pass(data_.forward, false);
    if (error.empty() && data_.has_backward) error = check_pass(data_.backward, true);
    return error;
  }

 private:
  enum : std::uint8_t { kWritten = 1, kSending = 2, kReceiving = 4, kUnread = 8, kCopying = 16 };
  // peek and hold are read and update of l and acc, which m says whether there are any; discard: holds nothing any more.
  enum class Access : std::uint8_t { read, write, update, peek, hold, discard };
  static bool needs_written(Access how) { return how == Access::read || how == Access::update || how == Access::discard; }
  static bool only_reads(Access how) { return how == Access::read || how == Access::peek; }

  // Without the kernels' scratch, which is large and nobody else's.
  std::int64_t arena_bytes() const {
    std::int64_t end = 0;
    for (const Program* program : {&data_.forward, &data_.backward}) {
      for (const Region& r : program->regions) {
        if (r.component != internal::Component::scratch) end = std::max(end, r.offset + r.bytes);
      }
    }
    return end;
  }

  std::string check_regions(const Program& program) const {
    std::vector<Region> sorted = program.regions;
    std::erase_if(sorted, [](const Region& r) { return r.bytes == 0; });
    std::sort(sorted.begin(), sorted.end(), [](const Region& a, const Region& b) { return a.offset < b.offset; });
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      const std::int64_t end = i + 1 < sorted.size() ? sorted[i + 1].offset : program.arena_bytes;
      if (sorted[i].offset % 64 != 0) return "region " + sorted[i].name + " is not aligned";
      if (sorted[i].offset + sorted[i].bytes > end)
        return "region " + sorted[i].name + " overlaps the next one or the arena's end";
    }
    return {};
  }

  std::string check_saved() const {
    const auto saved = [](const Program& program) {
      std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> list;
      for (const Region& r : program.regions) {
        if (r.component == internal::Component::saved) list.emplace_back(r.name, r.offset, r.bytes);
      }
      return list;
    };
    return saved(data_.forward) == saved(data_.backward) ? "" : "saved regions differ between the passes";
  }

  struct Caller {
    std::int64_t rows = 0;
    int heads = 0, width = 0;
    std::vector<std::uint8_t> written;  // by (batch, row, head)
  };

  void make_callers(bool backward) {
    const Problem& p = data_.problem;
    const std::int64_t rows_q = p.replicated_q ? p.tokens_q : data_.shard_q.rows;
    for (int kind = 0; kind < internal::kCallerTensors; ++kind) {
      Caller& caller = callers_[static_cast<std::size_t>(kind)];
      const auto k = static_cast<TensorKind>(kind);
      const bool key = internal::is_key_side(k);
      const bool scalar = k == TensorKind::lse || k == TensorKind::dlse;
      const bool value = k == TensorKind::v || k == TensorKind::o || k == TensorKind::d_out || k == TensorKind::dv;
      caller = {key ? data_.shard_k.rows : rows_q,
                key ? p.kv_heads : p.heads,
                scalar  ? 1
                : value ? p.head_dim_v
                        : p.head_dim,
                {}};
      caller.written.assign(static_cast<std::size_t>(p.batch * caller.rows * caller.heads),
                            is_input(k, backward) ? kWritten : 0);
    }
  }

  static bool is_input(TensorKind kind, bool backward) {
    switch (kind) {
      case TensorKind::q:
      case TensorKind::k:
      case TensorKind::v:
        return true;
      case TensorKind::o:
      case TensorKind::lse:
      case TensorKind::d_out:
      case TensorKind::dlse:
        return backward;
      default:
        return false;
    }
  }

  std::string check_pass(const Program& program, bool backward) {
    program_ = &program;
    backward_ = backward;
    error_ = check_regions(program);
    if (error_.empty() && backward) error_ = check_saved();
    make_callers(backward);
    // Nothing survives between the passes but what is saved.
    std::vector<std::uint8_t> kept(arena_.size());
    for (const Region& r : program.regions) {
      if (r.component != internal::Component::saved) continue;
      std::copy_n(arena_.begin() + r.offset, r.bytes, kept.begin() + r.offset);
    }
    arena_ = kept;
    if (backward && data_.problem.sinks) mark_sink_gradient();
    for (const Stage& stage : program.stages) {
      if (error_.empty()) run(stage);
    }
    if (error_.empty()) check_outputs();
    if (error_.empty() && program.excess_rows < 0) error_ = "negative excess";
    return error_.empty() ? "" : fmt::format("rank {}, {}: {}", data_.rank, backward ? "backward" : "forward", error_);
  }

  // The executor clears it, and sums it up.
  void mark_sink_gradient() {
    const std::int64_t bytes = std::int64_t{8} * data_.problem.heads * data_.problem.ranks;
    std::fill_n(arena_.begin() + program_->sink_gradient_offset, bytes, std::uint8_t{kWritten});
  }

  void run(const Stage& stage) {
    stage_ = stage.name;
    for (const Launch& launch : stage.before) run(launch);
    for (const internal::Round& round : stage.rounds) {
      for (const internal::Transfer& t : round.transfers) {
        for (std::int64_t i = t.offset; i < t.offset + t.bytes; ++i) {
          std::uint8_t& byte = arena_.at(static_cast<std::size_t>(i));
          if (t.send && (byte & kWritten) == 0) fail("sends what was never written");
          if ((byte & kReceiving) != 0 || (!t.send && (byte & kSending) != 0)) fail("one buffer in two messages");
          if (!t.send) check_read(byte);
          byte = static_cast<std::uint8_t>(t.send ? (byte | kSending) & ~kUnread : byte | kReceiving);
        }
      }
    }
    for (const Launch& launch : stage.copies) copy_beside(launch);
    for (const Launch& launch : stage.compute) run(launch);
    for (std::uint8_t& byte : arena_) {
      if ((byte & kCopying) != 0) byte = kWritten;
      byte = static_cast<std::uint8_t>((byte & kReceiving) != 0 ? kWritten | kUnread : byte & (kWritten | kUnread));
    }
  }

  // Between the caller's tensors on the host and the arena, while the stage computes and messages are on their way. A row that
  // is copied in need not be read.
  void copy_beside(const Launch& launch) {
    launch_ = "copy beside";
    copying_ = true;
    for (std::int64_t i = launch.first; i < launch.first + launch.count && error_.empty(); ++i) {
      run(launch, program_->row_items.at(static_cast<std::size_t>(i)));
    }
    copying_ = false;
  }

  // Rows beyond those read travel only where that is said; with several states the delta of each travels for the rows of all.
  void check_read(std::uint8_t byte) {
    if ((byte & kUnread) == 0 || program_->excess_rows > 0 || data_.problem.pattern.states() > 1) return;
    fail("received, but never read");
  }

  void fail(const std::string& what) {
    if (error_.empty()) error_ = fmt::format("stage '{}', {}: {}", stage_, launch_, what);
  }

  void run(const Launch& launch) {
    launch_ = std::string(internal::to_string(launch.kind));
    if (launch.kind == LaunchKind::sum_sinks) return mark_sink_gradient();
    for (std::int64_t i = launch.first; i < launch.first + launch.count && error_.empty(); ++i) {
      if (launch.kind == LaunchKind::attend || launch.kind == LaunchKind::attend_backward) {
        run(launch.kind, program_->attend_items.at(static_cast<std::size_t>(i)), has_later(launch, i));
      } else {
        run(launch, program_->row_items.at(static_cast<std::size_t>(i)));
      }
    }
  }

  void run(const Launch& launch, const RowItem& item) {
    using enum Access;
    static const std::map<LaunchKind, std::vector<Access>> kAccesses{
        {LaunchKind::fill, {write}},
        {LaunchKind::copy, {read, write}},
        {LaunchKind::add, {read, update}},
        {LaunchKind::merge, {read, read, update, hold, hold}},
        {LaunchKind::merge_states, {read, peek, peek, update, hold, hold}},
        {LaunchKind::finalize, {read, peek, peek, write, write, write}},
        {LaunchKind::delta, {read, read, write, read}},
        {LaunchKind::sink_gradient, {read, read}}};
    const std::vector<Access>& accesses = kAccesses.at(launch.kind);
    for (std::size_t i = 0; i < accesses.size(); ++i) {
      const RowRef& ref = item.operands[i];
      const bool optional = (launch.kind == LaunchKind::finalize && i == 5) || (launch.kind == LaunchKind::delta && i == 3);
      if (ref.view < 0) {
        if (!optional) fail(fmt::format("operand {} is missing", i));
        continue;
      }
      access(ref, accesses[i], item.batch_first, item.batch_count, item.heads, 1, item.rows);
    }
  }

  // Whether the launch has a later task with the same results.
  bool has_later(const Launch& launch, std::int64_t index) const {
    const AttendItem& item = program_->attend_items.at(static_cast<std::size_t>(index));
    const auto rows_of = [](const AttendItem& task) {
      const RowRef& o = task.operands[internal::kResult];
      return std::tuple(o.view, o.row, o.step, task.slice.batch_first, task.slice.batch_count, task.slice.heads.first,
                        task.slice.heads.stride, task.slice.heads.count, task.slice.q.count);
    };
    const auto first = program_->attend_items.begin() + index + 1;
    return launch.kind == LaunchKind::attend && item.operands[internal::kResult].view >= 0 &&
           std::any_of(first, program_->attend_items.begin() + launch.first + launch.count,
                       [&](const AttendItem& later) { return rows_of(later) == rows_of(item); });
  }

  // has_later: it has results, but another task leaves them.
  void run(LaunchKind kind, const AttendItem& item, bool has_later) {
    const Slice& s = item.slice;
    const bool forward = kind == LaunchKind::attend;
    const bool finishes = forward && item.operands[internal::kResult].view >= 0;
    const int operands = forward && !finishes ? internal::kAttendOperands : internal::kAllOperands;
    if (is_empty(s)) fail("a task without a pair: " + to_string(s));
    for (int i = 0; i < operands; ++i) {
      const bool key = i == internal::kK || i == internal::kV || (!forward && (i == internal::kDk || i == internal::kDv));
      if (item.operands[i].view < 0) {
        const bool is_state = i == internal::kM || i == internal::kL || i == internal::kAcc;
        const bool is_other = !forward && (i == internal::kDq ? item.operands[internal::kDk].view >= 0
                                                              : i > internal::kDq && item.operands[internal::kDq].view >= 0);
        if (!(finishes && (i == internal::kResult32 || is_state)) && !is_other) fail(fmt::format("operand {} is missing", i));
        continue;
      }
      if (has_later && i >= internal::kResult) continue;
      if (data_.options.host_tensors && !program_->views.at(static_cast<std::size_t>(item.operands[i].view)).in_arena) {
        fail("a kernel follows an address of the host");
      }
      access(item.operands[i], forward ? forward_access(i, finishes && !has_later) : backward_access(i, item), s.batch_first,
             s.batch_count, s.heads, key ? data_.problem.group() : 1, key ? s.k.count : s.q.count);
      check_own_position(item.operands[i], key ? s.k : s.q, key);
    }
  }

  static Access forward_access(int operand, bool finishes) {
    if (operand < internal::kM) return Access::read;
    if (operand == internal::kM) return finishes ? Access::discard : Access::update;
    return operand < internal::kAttendOperands ? Access::hold : Access::write;
  }

  static Access backward_access(int operand, const AttendItem& item) {
    if (operand < internal::kDq) return Access::read;
    return (operand == internal::kDq ? item.writes_dq : item.writes_dk_dv) ? Access::write : Access::update;
  }

  // A row of the caller's tensor is the position that the task names.
  void check_own_position(const RowRef& ref, const Progression& positions, bool key) {
    const View& view = program_->views[static_cast<std::size_t>(ref.view)];
    if (view.in_arena) return;
    const internal::PlanData& d = data_;
    const std::vector<std::int64_t> own = (key ? d.shard_k : d.shard_q).positions();
    for (std::int64_t i = 0; i < positions.count; ++i) {
      const std::int64_t row = ref.row + i * ref.step;
      const bool replicated = d.problem.replicated_q && !key;
      const std::int64_t position = replicated ? row : own.at(static_cast<std::size_t>(row));
      if (position != positions.at(i)) fail(fmt::format("row {} is position {}, not {}", row, position, positions.at(i)));
    }
  }

  void access(const RowRef& ref, Access how, std::int64_t batch_first, std::int64_t batch_count, const Progression& heads,
              int group, std::int64_t rows) {
    const View& view = program_->views.at(static_cast<std::size_t>(ref.view));
    const Region* region = nullptr;
    if (view.in_arena) {
      for (const Region& r : program_->regions) {
        if (r.bytes > 0 && view.offset >= r.offset && view.offset < r.offset + r.bytes) region = &r;
      }
      if (region == nullptr) return fail("a view outside of all regions");
      if (region->component == internal::Component::scratch) return fail("a view in the kernel's scratch");
    }
    for (std::int64_t b = batch_first; b < batch_first + batch_count; ++b) {
      for (std::int64_t h = 0; h < heads.count; ++h) {
        const std::int64_t head = heads.at(h) / group;
        if (!view.heads.contains(head)) return fail(fmt::format("head {} is not in the view", head));
        const std::int64_t index = (head - view.heads.first) / view.heads.stride;
        for (std::int64_t i = 0; i < rows; ++i) {
          const std::int64_t row = ref.row + i * ref.step;
          if (region != nullptr) {
            const std::int64_t element =
                (b - view.batch_first) * view.batch_stride + row * view.row_stride + index * view.head_stride;
            arena_access(*region, view.offset + element * size_of(view.dtype), view.width * size_of(view.dtype), how);
          } else {
            caller_access(view, b, row, index, how);
          }
        }
      }
    }
  }

  void arena_access(const Region& region, std::int64_t first, std::int64_t bytes, Access how) {
    if (first < region.offset || first + bytes > region.offset + region.bytes) return fail("outside of region " + region.name);
    for (std::int64_t i = first; i < first + bytes; ++i) {
      std::uint8_t& byte = arena_[static_cast<std::size_t>(i)];
      if (needs_written(how) && (byte & kWritten) == 0) return fail("reads what was never written in " + region.name);
      if ((byte & kReceiving) != 0) return fail("uses what is being received in " + region.name);
      if ((byte & kCopying) != 0) return fail("uses what is being copied in " + region.name);
      if (copying_) {
        if (how == Access::write && (byte & kSending) != 0) return fail("copies over what is being sent in " + region.name);
        if (how == Access::write) check_read(byte);
        byte = static_cast<std::uint8_t>((how == Access::write ? kCopying : byte | kSending) & ~kUnread);
        continue;
      }
      if (!only_reads(how) && (byte & kSending) != 0) return fail("writes what is being sent in " + region.name);
      if (how == Access::write) check_read(byte);
      byte = static_cast<std::uint8_t>((byte | (only_reads(how) ? 0 : kWritten)) & ~kUnread);
      if (how == Access::discard) byte = static_cast<std::uint8_t>(byte & ~kWritten);
    }
  }

  void caller_access(const View& view, std::int64_t batch, std::int64_t row, std::int64_t head, Access how) {
    Caller& caller = callers_.at(static_cast<std::size_t>(view.kind));
    if (batch >= data_.problem.batch || row < 0 || row >= caller.rows || head >= caller.heads || view.width != caller.width) {
      return fail(fmt::format("outside of the caller's {}", internal::to_string(view.kind)));
    }
    std::uint8_t& written = caller.written[static_cast<std::size_t>((batch * caller.rows + row) * caller.heads + head)];
    if (needs_written(how) && written == 0)
      return fail(fmt::format("reads {} before it is written", internal::to_string(view.kind)));
    if (!only_reads(how) && is_input(view.kind, backward_))
      return fail(fmt::format("writes the input {}", internal::to_string(view.kind)));
    if (!only_reads(how)) written = kWritten;
  }

  void check_outputs() {
    for (const std::uint8_t byte : arena_) check_read(byte);
    const std::vector<TensorKind> outputs =
        backward_ ? std::vector{TensorKind::dq, TensorKind::dk, TensorKind::dv} : std::vector{TensorKind::o, TensorKind::lse};
    for (const TensorKind kind : outputs) {
      for (const std::uint8_t written : callers_[static_cast<std::size_t>(kind)].written) {
        if (written == 0) return fail(fmt::format("a row of {} is never written", internal::to_string(kind)));
      }
    }
  }

  const PlanData& data_;
  const Program* program_ = nullptr;
  bool backward_ = false, copying_ = false;
  std::vector<std::uint8_t> arena_;
  std::array<Caller, internal::kCallerTensors> callers_;
  std::string error_, stage_, launch_;
};

inline std::vector<Plan> plan_all(const Problem& problem, const PlanOptions& options) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < problem.ranks; ++rank) plans.push_back(make_plan(problem, options, rank));
  return plans;
}

inline std::string check_plans(const std::vector<Plan>& plans) {
  std::string error = check_pairs(plans);
  if (error.empty()) error = check_messages(plans, false);
  if (error.empty() && plans.front().data().has_backward) error = check_messages(plans, true);
  for (const Plan& plan : plans) {
    if (plan.fingerprint() != plans.front().fingerprint()) return "the fingerprints differ";
    if (error.empty()) error = Hazards(plan.data()).check();
  }
  return error;
}

}  // namespace ringspan::testing
