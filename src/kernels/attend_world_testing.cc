#include "kernels/attend_world.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace ringspan::kernels::testing {
namespace {

// Normally distributed numbers, in their order. Drawing them takes long, and most kernel tests have the
// same seed: those of the latest one are kept.
class Normals {
 public:
  explicit Normals(std::uint64_t seed) : drawn_(of_latest_seed()) {
    if (drawn_.seed != seed || drawn_.values.empty()) drawn_ = {seed, std::mt19937_64(seed), {}, {}};
  }
  double operator()() {
    if (next_ == drawn_.values.size()) drawn_.values.push_back(drawn_.normal(drawn_.random));
    return drawn_.values[next_++];
  }

 private:
  struct Drawn {
    std::uint64_t seed = 0;
    std::mt19937_64 random;
    std::normal_distribution<double> normal;
    std::vector<double> values;
  };
  static Drawn& of_latest_seed() {
    static thread_local Drawn drawn;
    return drawn;
  }
  Drawn& drawn_;
  std::size_t next_ = 0;
};

}  // namespace

bool Tensor::gaps_intact() const {
  if (bytes_.empty()) return true;
  std::vector<std::byte> gaps = bytes_;
  const auto row_bytes = static_cast<std::size_t>(width_ * size_of(dtype_));
  for (std::int64_t b = 0; b < batch_; ++b)
    for (std::int64_t r = 0; r < rows_; ++r)
      for (std::int64_t h = 0; h < heads_; ++h)
        std::memset(gaps.data() + offset(b, r, h, 0) * size_of(dtype_), 0xff, row_bytes);
  const std::vector<std::byte> pattern(gaps.size(), std::byte{0xff});
  return std::memcmp(gaps.data(), pattern.data(), gaps.size()) == 0;
}

Tensor random_tensor(DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t width,
                     bool rows_inner, std::uint64_t seed, std::int64_t gap) {
  Tensor tensor(dtype, batch, rows, heads, width, rows_inner, gap);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  tensor.for_each([&](auto b, auto r, auto h, auto e) { tensor.set(b, r, h, e, normal(random)); });
  return tensor;
}

std::string Spec::describe() const {
  return std::string(to_string(dtype)) + " batch " + std::to_string(batch) + " kv_heads " + std::to_string(kv_heads) +
         " group " + std::to_string(group) + " n_q " + std::to_string(n_q) + " n_k " + std::to_string(n_k) + " d " +
         std::to_string(head_dim) + " d_v " + std::to_string(head_dim_v) + " q " + std::to_string(q_first) + ":" +
         std::to_string(q_step) + " k " + std::to_string(k_first) + ":" + std::to_string(k_step) + " inner " +
         std::to_string(rows_inner) + " softcap " + std::to_string(softcap) + " alibi " + std::to_string(alibi_slope) +
         " dropout " + std::to_string(dropout) + " seed " + std::to_string(seed) + " tile " + std::to_string(tile.queries) +
         " x " + std::to_string(tile.keys);
}

World::World(const Spec& s) : spec(s) {
  Normals normal(s.seed);
  const auto make = [&](std::int64_t rows, std::int64_t heads, int width, double magnitude) {
    Tensor tensor(s.dtype, s.batch, rows, heads, width, s.rows_inner, s.gap);
    tensor.for_each([&](auto b, auto r, auto h, auto e) { tensor.set(b, r, h, e, magnitude * normal()); });
    return tensor;
  };
  q = make(s.n_q, s.heads(), s.head_dim, s.magnitude);
  k = make(s.n_k, s.kv_heads, s.head_dim, s.magnitude);
  v = make(s.n_k, s.kv_heads, s.head_dim_v, 1.0);
  d_out = make(s.n_q, s.heads(), s.head_dim_v, 1.0);
  const auto result = [&](std::int64_t rows, std::int64_t heads, int width, double value) {
    Tensor tensor(DType::float32, s.batch, rows, heads, width, !s.rows_inner, s.gap);
    tensor.fill(value);
    return tensor;
  };
  m = result(s.n_q, s.heads(), 1, -kInfinity);
  l = result(s.n_q, s.heads(), 1, kNan);  // as m says, nothing yet
  acc = result(s.n_q, s.heads(), s.head_dim_v, kNan);
  o = Tensor(s.dtype, s.batch, s.n_q, s.heads(), s.head_dim_v, s.rows_inner, s.gap);
  o32 = result(s.n_q, s.heads(), s.head_dim_v, kNan);
  lse = result(s.n_q, s.heads(), 1, 0.0);
  delta = result(s.n_q, s.heads(), 1, 0.0);
  dq = result(s.n_q, s.heads(), s.head_dim, 0.0);
  dk = result(s.n_k, s.kv_heads, s.head_dim, 0.0);
  dv = result(s.n_k, s.kv_heads, s.head_dim_v, 0.0);
  for (std::int64_t h = 0; h < s.batch * s.heads(); ++h) slopes.push_back(s.alibi_slope / static_cast<float>(1 + h));
  for (std::int64_t h = 0; s.sinks && h < s.heads(); ++h) {
    sinks.push_back(h % 3 == 2 ? -std::numeric_limits<float>::infinity() : static_cast<float>(normal()));
  }
}

bool World::output_gaps_intact() const {
  for (const Tensor* t : {&m, &l, &acc, &o, &o32, &lse, &delta, &dq, &dk, &dv}) {
    if (!t->gaps_intact()) return false;
  }
  return true;
}

}  // namespace ringspan::kernels::testing
