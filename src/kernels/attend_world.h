// For tests: random operands in awkward layouts, tasks over them, and attention in any precision as a dense loop.
//
// Every tensor has gaps between its rows, heads and batch items, filled with a NaN of known bits, so that a kernel that reads
// one spoils its result and one that writes there is seen.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attend.h"
#include "kernels/storage.h"

namespace ringspan::kernels::testing {

inline constexpr std::int64_t kUnbounded = std::int64_t{1} << 60;
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline double round_to(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::bfloat16) return bfloat16_to_float(float_to_bfloat16(single));
  if (dtype == DType::float16) return float16_to_float(float_to_float16(single));
  return single;
}

// (batch, row, head, element) with gaps; `rows_inner`: rows are adjacent (bhsd) instead of heads (bshd).
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t width, bool rows_inner,
         std::int64_t gap)
      : dtype_(dtype), batch_(batch), rows_(rows), heads_(heads), width_(width) {
    const std::int64_t inner = width + gap;
    row_stride = rows_inner ? inner : inner * heads + gap;
    head_stride = rows_inner ? inner * rows + gap : inner;
    batch_stride = (rows_inner ? head_stride * heads : row_stride * rows) + gap;
    bytes_.resize(static_cast<std::size_t>((batch_stride * batch + gap) * size_of(dtype)));
    fill_gap_pattern();
  }

  void set(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e, double value) {
    const auto single = static_cast<float>(value);
    if (dtype_ == DType::float32) return store(b, r, h, e, single);
    store(b, r, h, e, dtype_ == DType::bfloat16 ? float_to_bfloat16(single) : float_to_float16(single));
  }
  double get(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e) const {
    if (dtype_ == DType::float32) return load<float>(b, r, h, e);
    const auto bits = load<std::uint16_t>(b, r, h, e);
    return dtype_ == DType::bfloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
  }
  template <typename Function>
  void for_each(Function&& function) const {
    for (std::int64_t b = 0; b < batch_; ++b)
      for (std::int64_t r = 0; r < rows_; ++r)
        for (std::int64_t h = 0; h < heads_; ++h)
          for (std::int64_t e = 0; e < width_; ++e) function(b, r, h, e);
  }
  void fill(double value) {
    for_each([&](auto b, auto r, auto h, auto e) { set(b, r, h, e, value); });
  }
  // Whether every byte outside the elements still has its pattern.
  bool gaps_intact() const;
  const std::vector<std::byte>& bytes() const { return bytes_; }
  void* at(std::int64_t b, std::int64_t r, std::int64_t h) { return bytes_.data() + offset(b, r, h, 0) * size_of(dtype_); }
  std::int64_t batch() const { return batch_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t heads() const { return heads_; }
  std::int64_t width() const { return width_; }

  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;

 private:
  void fill_gap_pattern() { std::memset(bytes_.data(), 0xff, bytes_.size()); }  // 0xffff.. is a NaN in every dtype
  std::int64_t offset(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e) const {
    return b * batch_stride + r * row_stride + h * head_stride + e;
  }
  template <typename T>
  void store(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e, T value) {
    std::memcpy(bytes_.data() + offset(b, r, h, e) * size_of(dtype_), &value, sizeof value);
  }
  template <typename T>
  T load(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t e) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset(b, r, h, e) * size_of(dtype_), sizeof value);
    return value;
  }

  DType dtype_ = DType::float32;
  std::int64_t batch_ = 0, rows_ = 0, heads_ = 0, width_ = 0;
  std::vector<std::byte> bytes_;
};

// Of normally distributed values.
Tensor random_tensor(DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t width,
                     bool rows_inner, std::uint64_t seed, std::int64_t gap = 3);

// A task in terms of rows of the world's tensors.
struct Part {
  std::int64_t batch_first = 0, batch_count = 1;
  std::int64_t head_first = 0, head_step = 1, head_count = 1;
  std::int64_t q_row = 0, q_stride = 1, q_count = 0;
  std::int64_t k_row = 0, k_stride = 1, k_count = 0;
  std::int64_t lo = -kUnbounded, hi = kUnbounded;
  bool results = false;  // of forward: o, o32 and lse
};

struct Spec {
  DType dtype = DType::float32;
  std::int64_t batch = 1, kv_heads = 1, group = 1, n_q = 0, n_k = 0;
  int head_dim = 64, head_dim_v = 64;
  std::int64_t q_first = 0, q_step = 1, k_first = 0, k_step = 1;  // global position of row r: first + r * step
  bool rows_inner = false;
  std::int64_t gap = 3;
  float softcap = 0.0F, alibi_slope = 0.0F, dropout = 0.0F, output_scale = 1.0F, scale = 0.0F;
  std::int64_t diagonal = 0;
  double magnitude = 1.0;  // of q and k
  int state = 0;
  bool sinks = false;
  std::uint64_t seed = 1;
  TileSize tile{0, 0};
  std::int64_t heads() const { return kv_heads * group; }
  std::string describe() const;
};

class World {
 public:
  explicit World(const Spec& s);

  float scale() const { return spec.scale != 0.0F ? spec.scale : 1.0F / std::sqrt(static_cast<float>(spec.head_dim)); }
  std::int64_t position_q(std::int64_t row) const { return spec.q_first + row * spec.q_step; }
  std::int64_t position_k(std::int64_t row) const { return spec.k_first + row * spec.k_step; }

  AttendParams params(int threads) const {
    AttendParams p;
    p.shape = {spec.dtype,
               spec.head_dim,
               spec.head_dim_v,
               static_cast<int>(spec.group),
               spec.softcap != 0.0F,
               spec.alibi_slope != 0.0F,
               spec.dropout != 0.0F,
               threads,
               spec.tile};
    p.scale = scale();
    p.softcap = spec.softcap;
    p.alibi_slopes = slopes.data();
    p.alibi_batch_stride = spec.heads();
    p.dropout = spec.dropout;
    p.seed = spec.seed;
    p.output_scale = spec.output_scale;
    p.sinks = spec.sinks ? sinks.data() : nullptr;
    return p;
  }

  // The kv store of the task begins at the first kv head the part touches.
  AttendTask task(const Part& part) {
    AttendTask t;
    t.batch_first = part.batch_first, t.batch_count = part.batch_count;
    t.head_first = part.head_first, t.head_step = part.head_step, t.head_count = part.head_count;
    t.kv_head_first = part.head_first / spec.group, t.kv_head_step = 1;
    t.q_first = position_q(part.q_row), t.q_step = part.q_stride * spec.q_step, t.q_count = part.q_count;
    t.k_first = position_k(part.k_row), t.k_step = part.k_stride * spec.k_step, t.k_count = part.k_count;
    t.lo = part.lo, t.hi = part.hi, t.diagonal = spec.diagonal, t.state = spec.state;
    const auto query_rows = [&](Tensor& x) {
      return Rows{x.at(part.batch_first, part.q_row, part.head_first), x.batch_stride, x.row_stride * part.q_stride,
                  x.head_stride * part.head_step};
    };
    const auto key_rows = [&](Tensor& x) {
      return KeyRows{x.at(part.batch_first, part.k_row, t.kv_head_first), x.batch_stride, x.row_stride * part.k_stride,
                     x.head_stride};
    };
    t.q = query_rows(q), t.k = key_rows(k), t.v = key_rows(v);
    t.m = query_rows(m), t.l = query_rows(l), t.acc = query_rows(acc);
    if (part.results) t.o = query_rows(o), t.o32 = query_rows(o32);
    t.d_out = query_rows(d_out), t.lse = query_rows(lse), t.delta = query_rows(delta), t.dq = query_rows(dq);
    t.dk = key_rows(dk), t.dv = key_rows(dv);
    return t;
  }
  std::vector<AttendTask> tasks(const std::vector<Part>& parts) {
    std::vector<AttendTask> list;
    for (const Part& part : parts) list.push_back(task(part));
    return list;
  }
  // Everything against everything under a band.
  Part whole(std::int64_t lo = -kUnbounded, std::int64_t hi = kUnbounded) const {
    return {0, spec.batch, 0, 1, spec.heads(), 0, 1, spec.n_q, 0, 1, spec.n_k, lo, hi};
  }
  bool output_gaps_intact() const;

  Spec spec;
  Tensor q, k, v, d_out, m, l, acc, o, o32, lse, delta, dq, dk, dv;
  std::vector<float> slopes, sinks;
};

}  // namespace ringspan::kernels::testing
