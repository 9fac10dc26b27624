// The reference kernels: float32 loops straight from the formulas of attend.h, every option, every shape. What every other
// kernel is compared with, and what runs where no other supports a shape.
//
// Cost: about four operations per multiplication of the formula, no vector instructions; scratch none. Threads: units.
#pragma once

#include <limits>
#include <span>

#include "kernels/attend.h"

namespace ringspan::kernels {

bool reference_supports(const AttendShape& shape, DType dtype);
std::int64_t reference_scratch_bytes(const AttendShape& shape);
// For kernels that have no tile sizes to choose, and that keep the state of a row from its first key to the last.
inline TileSizes no_tile_sizes(const AttendShape&) { return {}; }
inline std::int64_t any_keys(const AttendShape&) { return std::numeric_limits<std::int64_t>::max(); }
template <DType kType>
void attend_reference(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context);
template <DType kType>
void attend_backward_reference(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context);

}  // namespace ringspan::kernels
