#include "kernels/key_split.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernels/tile.h"

namespace ringspan::kernels {
namespace {

constexpr std::int64_t kLineFloats = 16;
// Items that a thread has to itself, at least, before units share one.
constexpr std::int64_t kPartsPerThread = 4;

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

KeySplit::KeySplit(const AttendTask& task, const AttendShape& shape, std::int64_t multiple, int threads)
    : task_(task), shape_(shape), units_({&task, 1}, shape.group) {
  const std::int64_t units = units_.count(), heads = std::min<std::int64_t>(shape.group, task.head_count);
  if (units == 0 || task.q_count > kSplitRows / heads) return;
  const std::int64_t last = task.q_first + (task.q_count - 1) * task.q_step;
  keys_ = indices_between(task.k_first, task.k_step, task.k_count, task.q_first + task.lo, last + task.hi);
  keys_.begin = keys_.begin / multiple * multiple;
  if (keys_.size() < 2 * kSplitMinKeys) return;
  const bool are_few = heads * task.q_count <= kFewRows;
  const std::int64_t parts = std::min(kSplitParts / units, keys_.size() / kSplitMinKeys);
  if (parts < 2 && !(are_few && units_.kv_heads.size() > 1)) return;
  part_keys_ = ceil_div(ceil_div(keys_.size(), std::max<std::int64_t>(parts, 1)), multiple) * multiple;
  parts_ = ceil_div(keys_.size(), part_keys_);

  rows_ = internal::round_up(heads * task.q_count, kLineFloats);
  state_floats_ = rows_ * (2 + shape.head_dim_v);
  const std::int64_t room = state_bytes(shape) / static_cast<std::int64_t>(sizeof(float)) / state_floats_;
  const std::int64_t shared = units * parts_ / (kPartsPerThread * threads);
  if (are_few) together_ = std::clamp<std::int64_t>(std::min(room, shared), 1, units_.kv_heads.size());
  const bool are_side_by_side = std::abs(task.k.head_stride) < std::abs(task.k.row_stride);
  step_keys_ = together_ > 1 && are_side_by_side ? multiple : part_keys_;
}

std::int64_t KeySplit::state_bytes(const AttendShape& shape) {
  static_assert(kSplitRows % kLineFloats == 0);
  return kSplitRows * (2 + shape.head_dim_v) * static_cast<std::int64_t>(sizeof(float));
}

IndexRange KeySplit::keys_of(const Item& item) const {
  const std::int64_t first = keys_.begin + item.part * part_keys_;
  return {first, std::min(first + part_keys_, keys_.end)};
}

KeySplit::Item KeySplit::item(std::int64_t index) const {
  const std::int64_t heads = units_.kv_heads.size(), groups = ceil_div(heads, together_), group = index / parts_ % groups;
  Item item;
  item.part = index % parts_;
  item.first = {units_.batch.begin + index / parts_ / groups, units_.kv_heads.begin + group * together_};
  item.units = std::min(together_, heads - group * together_);
  item.steps = ceil_div(keys_of(item).size(), step_keys_) * item.units;
  return item;
}

KeySplit::Step KeySplit::step(const Item& item, std::int64_t index, std::byte* states) const {
  const IndexRange keys = keys_of(item);
  const std::int64_t unit = index % item.units, first = keys.begin + index / item.units * step_keys_;
  return {{item.first.batch, item.first.kv_head + unit},
          part(item, unit, {first, std::min(first + step_keys_, keys.end)}, states)};
}

AttendTask KeySplit::part(const Item& item, std::int64_t unit, IndexRange keys, std::byte* states) const {
  const Unit of{item.first.batch, item.first.kv_head + unit};
  const std::int64_t size = size_of(shape_.dtype), b = of.batch - task_.batch_first;
  const IndexRange heads = heads_of_unit(task_, of, shape_.group);
  AttendTask part = task_;
  part.batch_first = of.batch, part.batch_count = 1;
  part.head_first += heads.begin * task_.head_step, part.head_count = heads.size();
  advance(part.q, b * task_.q.batch_stride + heads.begin * task_.q.head_stride, size);

  part.k_first += keys.begin * task_.k_step, part.k_count = keys.size();
  advance(part.k, b * task_.k.batch_stride + keys.begin * task_.k.row_stride, size);
  advance(part.v, b * task_.v.batch_stride + keys.begin * task_.v.row_stride, size);

  auto* floats = reinterpret_cast<float*>(states) + unit * state_floats_;
  part.m = {floats, 0, 1, task_.q_count};
  part.l = {floats + rows_, 0, 1, task_.q_count};
  part.acc = {floats + 2 * rows_, 0, shape_.head_dim_v, task_.q_count * shape_.head_dim_v};
  part.o = part.o32 = part.lse = {};
  return part;
}

void KeySplit::clear(const Item& item, std::byte* states) const {
  for (std::int64_t unit = 0; unit < item.units; ++unit)
    std::fill_n(reinterpret_cast<float*>(states) + unit * state_floats_, rows_, -std::numeric_limits<float>::infinity());
}

void KeySplit::merge(const Item& item, std::byte* states) const {
  for (std::int64_t unit = 0; unit < item.units; ++unit) {
    const Unit of{item.first.batch, item.first.kv_head + unit};
    const std::int64_t b = of.batch - task_.batch_first, begin = heads_of_unit(task_, of, shape_.group).begin;
    const AttendTask part = this->part(item, unit, keys_of(item), states);
    for (std::int64_t row = 0; row < part.q_count; ++row) {
      if (keys_of_row(part, row).empty()) continue;
      for (std::int64_t t = 0; t < part.head_count; ++t) {
        merge_row(*row_of<float>(task_.m, b, begin + t, row), *row_of<float>(task_.l, b, begin + t, row),
                  row_of<float>(task_.acc, b, begin + t, row), *row_of<const float>(part.m, 0, t, row),
                  *row_of<const float>(part.l, 0, t, row), row_of<const float>(part.acc, 0, t, row), shape_.head_dim_v);
      }
    }
  }
}

}  // namespace ringspan::kernels
