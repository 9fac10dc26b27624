#include "plan/device_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/attend.h"
#include "kernels/rowwise.h"
#include "plan/capability.h"
#include "plan/cost.h"
#include "plan/kernel_choice.h"
#include "ringspan/error.h"

namespace ringspan::internal {

// Lists of tasks, their places in maps, groups and counters, one of these per wave. A launch is cut into waves of at least one
// task.
std::int64_t task_list_bytes(std::int64_t row_tasks, std::int64_t attend_tasks, std::int64_t launches) {
  const auto task_bytes =
      static_cast<std::int64_t>(sizeof(kernels::AttendTask) + sizeof(std::int32_t)) + kTaskGroupBytes + kTaskPlacesBytes;
  const auto row_bytes = static_cast<std::int64_t>(sizeof(kernels::RowTask) + sizeof(std::int64_t));
  const std::int64_t waves = row_tasks + attend_tasks + launches;
  return row_tasks * row_bytes + attend_tasks * task_bytes + 4 * waves * kTaskListAlignment;
}

namespace {

// How often the tasks of a launch are sent: for dq, and for dk and dv, which are apart in some kernels and, in a capture, sent
// for each.
std::int64_t sends_of(const Program& program, const Launch& launch) {
  if (launch.kind != LaunchKind::attend_backward || launch.count == 0) return 1;
  const AttendItem& item = program.attend_items[static_cast<std::size_t>(launch.first)];
  return (item.operands[kDq].view >= 0 ? 1 : 0) + (item.operands[kDk].view >= 0 ? 2 : 0);
}

}  // namespace

std::int64_t task_list_bytes(const PlanData& data) {
  std::int64_t most_rows = 0, most_attends = 0, most_launches = 0;
  for (const Program* program : {&data.forward, &data.backward}) {
    std::int64_t rows = 1, attends = 0, launches = 1;  // one launch of one task clears the gradient of the sinks
    for (const Stage& stage : program->stages) {
      for (const auto* list : {&stage.before, &stage.compute}) {
        for (const Launch& launch : *list) {
          ++launches;
          if (launch.kind == LaunchKind::sum_sinks) continue;  // sends no list
          const bool is_own = is_attention(launch.kind) && !is_fused(launch.kind);
          (is_own ? attends : rows) +=
              launch.count * (is_own ? sends_of(*program, launch) : 1);  // a library's call may have lse copied
          if (is_own) launches += sends_of(*program, launch) - 1;
        }
      }
    }
    most_rows = std::max(most_rows, rows);
    most_attends = std::max(most_attends, attends);
    most_launches = std::max(most_launches, launches);
  }
  return std::max(task_list_bytes(most_rows, most_attends, most_launches), kLeastTaskListBytes);
}

std::vector<MessagePart> message_parts(const Program& forward, const Program& backward) {
  std::vector<MessagePart> parts;
  for (const Program* program : {&forward, &backward}) {
    for (const Stage& stage : program->stages) {
      for (const Round& round : stage.rounds) {
        for (const Transfer& transfer : round.transfers) {
          parts.push_back({transfer.offset, transfer.offset + transfer.bytes, 0});
        }
      }
    }
  }
  std::sort(parts.begin(), parts.end(), [](const MessagePart& a, const MessagePart& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const MessagePart& part : parts) {
    if (kept > 0 && part.begin < parts[kept - 1].end) {
      parts[kept - 1].end = std::max(parts[kept - 1].end, part.end);
    } else {
      parts[kept++] = part;
    }
  }
  parts.resize(kept);
  std::int64_t offset = 0;
  for (MessagePart& part : parts) {
    part.offset = offset;
    offset += (part.end - part.begin + 63) / 64 * 64;
  }
  return parts;
}

std::int64_t mirror_bytes(const std::vector<MessagePart>& parts) {
  return parts.empty() ? 0 : parts.back().offset + (parts.back().end - parts.back().begin + 63) / 64 * 64;
}

std::vector<MemoryLine> device_memory(const PlanData& data) {
  if (data.options.device == DeviceKind::cpu) return {};
  const std::int64_t lists = kTaskListBlocks * task_list_bytes(data);
  const std::int64_t mirror = data.options.device_messages ? 0 : mirror_bytes(message_parts(data.forward, data.backward));
  MemoryLine on_device{"task lists", lists, false, true, false};
  MemoryLine pinned{"pinned task lists", lists, false, true, true};
  MemoryLine messages{"pinned messages", mirror, false, true, true};
  return {std::move(on_device), std::move(pinned), std::move(messages)};
}

PlanData plan_for_device(const PlanData& data, bool device_messages) {
  PlanData result = data;
  result.has_own_arena = true;
  result.options.device = DeviceKind::cuda;
  result.options.device_messages = device_messages;
  const std::string reason = unsupported_reason(result.problem, result.options);
  if (!reason.empty()) throw Unsupported(reason);
  for (Program* program : {&result.forward, &result.backward}) {
    if (program->regions.empty() || program->regions.back().component != Component::scratch) continue;
    program->arena_bytes = program->regions.back().offset;  // it comes last
    program->regions.pop_back();
    program->scratch_offset = 0;
  }
  if (const std::int64_t budget = result.options.memory_budget, needed = peak_bytes(result); budget > 0 && needed > budget) {
    throw OutOfBudget(
        fmt::format("the plan was made for the CPU; on a device it needs {} bytes, memory_budget is {}", needed, budget));
  }
  result.attend = choose_kernel(result.problem, result.options, Pass::forward);
  if (result.has_backward) result.attend_backward = choose_kernel(result.problem, result.options, Pass::backward);
  return result;
}

}  // namespace ringspan::internal
