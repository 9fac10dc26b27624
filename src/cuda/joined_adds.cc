#include "cuda/joined_adds.h"

#include <algorithm>
#include <iterator>

#include "cuda/schedule.h"

namespace ringspan::cuda {

std::vector<kernels::RowTask> joined_adds(std::span<const kernels::RowTask> tasks, int width) {
  constexpr std::size_t kMost = 64;  // tasks that are compared with each other
  std::vector<kernels::RowTask> joined;
  const RowOperands shape = operands_of(RowOp::add, width);
  const auto accesses_of = [&](const kernels::RowTask& task) {
    std::vector<Access> accesses;
    add_accesses(task, 0, shape.written, shape.widths, accesses);
    return accesses;
  };
  const auto meet = [&](const kernels::RowTask& a, const kernels::RowTask& b) {
    for (const Access& x : accesses_of(a)) {
      for (const Access& y : accesses_of(b)) {
        if ((x.writes || y.writes) && have_common_bytes(x, y)) return true;
      }
    }
    return false;
  };
  const auto reads_its_sums = [&](const kernels::RowTask& task) {
    const std::vector<Access> accesses = accesses_of(task);
    return accesses.size() > 1 && have_common_bytes(accesses[0], accesses[1]);
  };
  const auto add_to_same = [](const kernels::RowTask& a, const kernels::RowTask& b) {
    return a.batch_count == b.batch_count && a.row_count == b.row_count && a.head_count == b.head_count &&
           a.operands[1] == b.operands[1] && a.operands[1].dtype == DType::float32;
  };
  for (const kernels::RowTask& task : tasks) {
    const auto take_in = [&] {
      for (std::size_t back = 1; back <= std::min(joined.size(), kMost); ++back) {
        kernels::RowTask& earlier = joined[joined.size() - back];
        if (add_to_same(earlier, task)) {
          const auto room = std::find_if(earlier.operands + 2, std::end(earlier.operands),
                                         [](const kernels::Operand& source) { return source.data == nullptr; });
          if (room == std::end(earlier.operands) || reads_its_sums(task)) return false;
          *room = task.operands[0];
          return true;
        }
        if (meet(earlier, task)) return false;
      }
      return false;
    };
    if (!take_in()) joined.push_back(task);
  }
  return joined;
}

}  // namespace ringspan::cuda
