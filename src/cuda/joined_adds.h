// Sums of float32 take in up to five tasks that add to the same rows at a time, in their order: the sums are read and written
// once. Where a task between them touches what the later one does, they stay apart. Pure.
#pragma once

#include <span>
#include <vector>

#include "kernels/rowwise.h"

namespace ringspan::cuda {

// Tasks of RowOp::add, of `width` elements per row. Cost: each task is compared with some of those before it.
std::vector<kernels::RowTask> joined_adds(std::span<const kernels::RowTask> tasks, int width);

}  // namespace ringspan::cuda
