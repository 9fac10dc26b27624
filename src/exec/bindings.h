// Bindings: the caller's tensors of one pass, checked, in the order of TensorKind.
//
// Checked: data present where the rank holds rows, aligned to its element, outputs that do not overlap themselves or share
// their start with another tensor, optional operands as the problem says. Cost: O(1), no allocation unless it throws.
#pragma once

#include <array>
#include <cstdint>

#include "plan/plan_data.h"
#include "ringspan/attention.h"

namespace ringspan::internal {

struct Binding {
  std::byte* data = nullptr;  // nullptr: no rows here, or an optional operand that was not given
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
  bool operator==(const Binding&) const = default;
};

struct Bindings {
  std::array<Binding, kCallerTensors> tensors;
  const float* alibi_slopes = nullptr;
  std::int64_t alibi_batch_stride = 0;
  const float* sinks = nullptr;
  float* dsinks = nullptr;
  std::byte* saved = nullptr;  // instead of the arena's; backward only reads it

  const Binding& operator[](TensorKind kind) const { return tensors[static_cast<std::size_t>(kind)]; }
  Binding& operator[](TensorKind kind) { return tensors[static_cast<std::size_t>(kind)]; }
  bool operator==(const Bindings&) const = default;
};

// Shape of one of the caller's tensors on this rank.
struct TensorShape {
  std::int64_t batch = 0, rows = 0, heads = 0;
  int width = 0;
  DType dtype = DType::float32;
};
TensorShape shape_of(const PlanData& plan, TensorKind kind);

// Whether a row of the caller's tensor is read or written by the program: backward does not read o where forward saved it in
// float32. O(items).
bool is_touched(const Program& program, TensorKind kind);

// Throw InvalidArgument naming tensor, value and expectation. `reads_o`: is_touched(plan.backward, TensorKind::o).
Bindings bind(const PlanData& plan, const ForwardTensors& tensors);
Bindings bind(const PlanData& plan, const BackwardTensors& tensors, bool reads_o);

}  // namespace ringspan::internal
