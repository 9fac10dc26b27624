#include "kernels/key_split.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ringspan::kernels {
namespace {

template <typename View>
void advance(View& view, std::int64_t elements, std::int64_t element_size) {
  view.data = static_cast<std::byte*>(view.data) + elements * element_size;
}

void merge_row(float& m, float& l, float* acc, float m_part, float l_part, const float* part, int width) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  if (m_part == kNothing) return;
  if (m == kNothing) {
    l = 0.0F;
    std::fill_n(acc, width, 0.0F);
  }
  const float m_new = m_part > m ? m_part : m;
  const float keep = m == m_new ? 1.0F : std::exp(m - m_new);
  const float take = m_part == m_new ? 1.0F : std::exp(m_part - m_new);
  l = l * keep + l_part * take;
  for (int e = 0; e < width; ++e) acc[e] = acc[e] * keep + part[e] * take;
  m = m_new;
}

}  // namespace

KeySplit::KeySplit(const AttendTask& task, const AttendShape& shape, std::int64_t multiple)
    : task_(task), shape_(shape), units_({&task, 1}, shape.group) {
  const std::int64_t units = units_.count();
  if (units == 0 || task.q_count > kSplitRows / std::min<std::int64_t>(shape.group, task.head_count)) return;
  const std::int64_t last = task.q_first + (task.q_count - 1) * task.q_step;
  keys_ = indices_between(task.k_first, task.k_step, task.k_count, task.q_first + task.lo, last + task.hi);
  keys_.begin = keys_.begin / multiple * multiple;
  const std::int64_t parts = std::min(kSplitParts / units, keys_.size() / kSplitMinKeys);
  if (parts < 2) return;
  part_keys_ = ceil_div(ceil_div(keys_.size(), parts), multiple) * multiple;
  parts_ = ceil_div(keys_.size(), part_keys_);
}

std::int64_t KeySplit::state_bytes(const AttendShape& shape) {
  static_assert(kSplitRows * sizeof(float) % 64 == 0);
  return kSplitRows * (2 + shape.head_dim_v) * static_cast<std::int64_t>(sizeof(float));
}

AttendTask KeySplit::part(std::int64_t index, std::byte* state) const {
  const Unit of = unit(index);
  const std::int64_t size = size_of(shape_.dtype), b = of.batch - task_.batch_first;
  const IndexRange heads = heads_of_unit(task_, of, shape_.group);
  AttendTask part = task_;
  part.batch_first = of.batch, part.batch_count = 1;
  part.head_first += heads.begin * task_.head_step, part.head_count = heads.size();
  advance(part.q, b * task_.q.batch_stride + heads.begin * task_.q.head_stride, size);

  const std::int64_t first = keys_.begin + index % parts_ * part_keys_;
  part.k_first += first * task_.k_step, part.k_count = std::min(part_keys_, keys_.end - first);
  advance(part.k, b * task_.k.batch_stride + first * task_.k.row_stride, size);
  advance(part.v, b * task_.v.batch_stride + first * task_.v.row_stride, size);

  auto* floats = reinterpret_cast<float*>(state);
  part.m = {floats, 0, 1, task_.q_count};
  part.l = {floats + kSplitRows, 0, 1, task_.q_count};
  part.acc = {floats + 2 * kSplitRows, 0, shape_.head_dim_v, task_.q_count * shape_.head_dim_v};
  part.o = part.o32 = part.lse = {};
  return part;
}

void KeySplit::clear(const AttendTask& part) const {
  std::fill_n(static_cast<float*>(part.m.data), part.head_count * part.q_count, -std::numeric_limits<float>::infinity());
}

void KeySplit::merge(std::int64_t index, const AttendTask& part) const {
  const Unit of = unit(index);
  const std::int64_t b = of.batch - task_.batch_first, begin = heads_of_unit(task_, of, shape_.group).begin;
  for (std::int64_t row = 0; row < part.q_count; ++row) {
    if (keys_of_row(part, row).empty()) continue;
    for (std::int64_t t = 0; t < part.head_count; ++t) {
      merge_row(*row_of<float>(task_.m, b, begin + t, row), *row_of<float>(task_.l, b, begin + t, row),
                row_of<float>(task_.acc, b, begin + t, row), *row_of<const float>(part.m, 0, t, row),
                *row_of<const float>(part.l, 0, t, row), row_of<const float>(part.acc, 0, t, row), shape_.head_dim_v);
    }
  }
}

}  // namespace ringspan::kernels
