// Which memory an operation of the emulated device touches, for the check that streams which touch the same are in order
// (emulated_order.h): as bytes of the memory that stands for the device's. Operands of tasks and calls are addresses of that.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/arguments.h"
#include "cuda/fused.h"
#include "cuda/schedule.h"

namespace ringspan::cuda {

// Of a copy; these may be addresses of the device.
std::vector<Access> copy_accesses(const void* to, const void* from, std::int64_t bytes);
std::vector<Access> row_accesses(const std::vector<kernels::RowTask>& tasks, const RowOperands& operands);
// Of arguments.tasks[0] to [count - 1]. The key side has its own heads, from the first kv head that a task reads to the last.
std::vector<Access> attend_accesses(const AttendArguments& arguments, std::int64_t count);
std::vector<Access> fused_accesses(const FusedCall& call);

}  // namespace ringspan::cuda
