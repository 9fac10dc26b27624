#include "plan/cost.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/arithmetic.h"
#include "plan/device_memory.h"

namespace ringspan::internal {

std::int64_t flops_per_pair(const Problem& problem, Pass pass) {
  const std::int64_t d = problem.head_dim;
  const std::int64_t dv = problem.head_dim_v;
  return pass == Pass::forward ? 2 * (d + dv) : 2 * (3 * d + 2 * dv);
}

namespace {

constexpr Int128 kNanoseconds = 1'000'000'000;
constexpr Int128 kMostSeconds = Int128{1} << 95;  // the sum of both passes is in range, too

}  // namespace

Int128 nanoseconds_of(Int128 flops, const CostModel& cost) {
  const Int128 seconds = flops / cost.flops_per_second;  // apart, so that the product stays in range
  if (seconds > kMostSeconds) return kMostSeconds * kNanoseconds;
  return seconds * kNanoseconds + flops % cost.flops_per_second * kNanoseconds / cost.flops_per_second;
}

std::int64_t saturated(Int128 value) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  return value > kMost ? kMost : static_cast<std::int64_t>(value);
}

namespace {

// Of a launch. The halves of backward that make dq, or dk and dv, share its operations by what each multiplies: q k, do v and
// dq against q k, do v, dk and dv.
Int128 flops_of(const Problem& problem, const Program& program, const Launch& launch, Pass pass) {
  if (launch.kind != LaunchKind::attend && launch.kind != LaunchKind::attend_backward) return 0;
  const std::int64_t d = problem.head_dim, dv = problem.head_dim_v;
  Int128 flops = 0;
  for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
    const AttendItem& item = program.attend_items[static_cast<std::size_t>(index)];
    Int128 own = pair_count(item.slice) * flops_per_pair(problem, pass);
    if (pass == Pass::backward) {
      const bool dq = item.operands[kDq].view >= 0, dkv = item.operands[kDk].view >= 0;
      own = own * ((dq ? 2 * d + dv : 0) + (dkv ? 2 * d + 2 * dv : 0)) / (4 * d + 3 * dv);
    }
    flops += own;
  }
  return flops;
}

struct ExactHostTime {
  Int128 copies = 0, exposed = 0;
};

ExactHostTime exact_host_time(const Problem& problem, const Program& program, Pass pass, const CostModel& cost) {
  ExactHostTime time;
  for (const Stage& stage : program.stages) {
    if (stage.copies.empty()) continue;
    Plan::HostBytes bytes;
    for (const Launch& launch : stage.copies) add_host_bytes(program, launch, &bytes);
    Int128 flops = 0;
    for (const Launch& launch : stage.compute) flops += flops_of(problem, program, launch, pass);
    const Int128 copies = Int128{bytes.to_device + bytes.to_host} * kNanoseconds / cost.host_bytes_per_second;
    time.copies += copies;
    time.exposed += std::max<Int128>(copies - nanoseconds_of(flops, cost), 0);
  }
  return time;
}

}  // namespace

Plan::HostTime host_nanoseconds(const Problem& problem, const Program& program, Pass pass, const CostModel& cost) {
  const ExactHostTime time = exact_host_time(problem, program, pass, cost);
  return {saturated(time.copies), saturated(time.exposed)};
}

Int128 modelled_nanoseconds(const Problem& problem, const Program& program, Pass pass, const CostModel& cost) {
  Int128 bytes = 0;
  Int128 messages = 0;
  for (const Stage& stage : program.stages) {
    for (const Round& round : stage.rounds) {
      for (const Transfer& transfer : round.transfers) {
        if (transfer.send) continue;
        bytes += transfer.bytes;
        messages += 1;
      }
    }
  }
  const Int128 computing = nanoseconds_of(program.pairs * flops_per_pair(problem, pass), cost);
  const Int128 exposed = exact_host_time(problem, program, pass, cost).exposed;
  return computing + bytes * kNanoseconds / cost.bytes_per_second + messages * cost.message_nanoseconds + exposed;
}

std::vector<MemoryLine> caller_memory(const PlanData& data, Pass pass) {
  const Problem& problem = data.problem;
  const std::int64_t rows_q = data.shard_q.rows, rows_k = data.shard_k.rows;
  const std::int64_t size = size_of(problem.dtype);
  const std::int64_t q_rows = problem.batch * (problem.replicated_q ? problem.tokens_q : rows_q) * problem.heads;
  const std::int64_t k_rows = problem.batch * rows_k * problem.kv_heads;
  const std::int64_t q = q_rows * problem.head_dim * size;
  const std::int64_t o = q_rows * problem.head_dim_v * size;
  const std::int64_t k = k_rows * problem.head_dim * size;
  const std::int64_t v = k_rows * problem.head_dim_v * size;
  std::vector<MemoryLine> lines{{"q", q, false}, {"k", k, false}, {"v", v, false}, {"o", o, false}, {"lse", q_rows * 4, false}};
  if (pass == Pass::backward) {
    lines.insert(lines.end(), {{"do", o, false}, {"dq", q, false}, {"dk", k, false}, {"dv", v, false}});
  }
  for (MemoryLine& line : lines) line.pinned = data.options.host_tensors;
  return lines;
}

namespace {

std::int64_t caller_bytes(const PlanData& data, Pass pass) {
  std::int64_t bytes = 0;
  for (const MemoryLine& line : caller_memory(data, pass)) bytes += line.pinned ? 0 : line.bytes;
  return bytes;
}

// The backward pass holds more of the caller's tensors; the arena is one for both passes.
std::int64_t arena_bytes(const PlanData& data) { return std::max(data.forward.arena_bytes, data.backward.arena_bytes); }

}  // namespace

std::int64_t peak_bytes(const PlanData& data) {
  std::int64_t bytes = caller_bytes(data, data.has_backward ? Pass::backward : Pass::forward) + arena_bytes(data);
  for (const MemoryLine& line : device_memory(data)) bytes += line.pinned ? 0 : line.bytes;
  return bytes;
}

std::int64_t peak_bytes_of_any(const PlanData& data) {
  const RankOverhead& most = data.options.most_overhead;
  const bool on_device = most.task_lists || data.options.device != DeviceKind::cpu;
  const std::int64_t lists = on_device ? kTaskListBlocks * task_list_bytes(data) : 0;
  std::int64_t arena = 0;
  for (const auto& [program, scratch] :
       {std::pair{&data.forward, most.forward_scratch}, {&data.backward, most.backward_scratch}}) {
    const bool has_own = !program->regions.empty() && program->regions.back().component == Component::scratch;  // it comes last
    const std::int64_t steps = has_own ? program->regions.back().offset : program->arena_bytes;
    const std::int64_t others = program->attend_items.empty() ? 0 : round_up<std::int64_t>(scratch, 64);
    arena = std::max(arena, steps + std::max({program->arena_bytes - steps, others, lists}));
  }
  return caller_bytes(data, data.has_backward ? Pass::backward : Pass::forward) + arena;
}

MemoryLine dominating(const PlanData& data) {
  const Pass pass = data.has_backward ? Pass::backward : Pass::forward;
  std::vector<MemoryLine> lines = caller_memory(data, pass);
  const Program& program = data.forward.arena_bytes > data.backward.arena_bytes ? data.forward : data.backward;
  std::array<std::int64_t, 6> bytes{};
  for (const Region& region : program.regions) bytes[static_cast<std::size_t>(region.component)] += region.bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    lines.push_back({std::string(to_string(static_cast<Component>(i))), bytes[i], true});
  }
  const std::vector<MemoryLine> beside = device_memory(data);
  lines.insert(lines.end(), beside.begin(), beside.end());
  std::erase_if(lines, [](const MemoryLine& line) { return line.pinned; });
  return *std::max_element(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
}

}  // namespace ringspan::internal
