// The fused attention of the emulated device: loops in float32, results rounded to 16 bits. Its limits are cuDNN's on a GPU of
// compute capability 9.0, or tighter.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cuda/fused.h"
#include "kernels/storage.h"

namespace ringspan::cuda {
namespace {

constexpr int kMostHeadDim = 128;

template <DType kType>
class Emulation {
 public:
  explicit Emulation(const FusedCall& call) : call_(call), s_(call.shape) {}

  void run() {
    for (std::int64_t b = 0; b < s_.batch; ++b) {
      for (std::int64_t h = 0; h < s_.heads; ++h) {
        for (std::int64_t t = 0; t < s_.queries; ++t) s_.backward ? backward(b, h, t) : forward(b, h, t);
      }
    }
    if (s_.backward) store_key_gradients();
  }

 private:
  using Storage = kernels::Storage<kType>;
  using Element = typename Storage::Type;

  static std::int64_t at(const FusedStrides& s, std::int64_t b, std::int64_t h, std::int64_t row) {
    return b * s.batch + h * s.head + row * s.row;
  }
  static float load(const void* data, std::int64_t index) { return Storage::load(static_cast<const Element*>(data)[index]); }
  static void store(void* data, std::int64_t index, float value) { static_cast<Element*>(data)[index] = Storage::store(value); }
  std::int64_t kv(std::int64_t head) const { return head / (s_.heads / s_.kv_heads); }

  // Keys that query t sees: a row without any is not a result but NaN.
  std::int64_t first_key(std::int64_t t) const { return s_.has_low ? std::max<std::int64_t>(0, t + s_.low) : 0; }
  std::int64_t end_key(std::int64_t t) const { return s_.has_high ? std::min(s_.keys, t + s_.high + 1) : s_.keys; }

  float score(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t u) const {
    float sum = 0.0F;
    for (int d = 0; d < s_.head_dim; ++d) {
      sum += load(call_.q, at(s_.q, b, h, t) + d) * load(call_.k, at(s_.k, b, kv(h), u) + d);
    }
    return sum * s_.scale;
  }

  void forward(std::int64_t b, std::int64_t h, std::int64_t t) {
    float most = -std::numeric_limits<float>::infinity();
    for (std::int64_t u = first_key(t); u < end_key(t); ++u) most = std::max(most, score(b, h, t, u));
    float sum = 0.0F;
    std::vector<float> row(static_cast<std::size_t>(s_.head_dim_v));
    for (std::int64_t u = first_key(t); u < end_key(t); ++u) {
      const float p = std::exp(score(b, h, t, u) - most);
      sum += p;
      for (int d = 0; d < s_.head_dim_v; ++d) row[static_cast<std::size_t>(d)] += p * load(call_.v, at(s_.v, b, kv(h), u) + d);
    }
    if (first_key(t) >= end_key(t)) sum = most = std::numeric_limits<float>::quiet_NaN();
    for (int d = 0; d < s_.head_dim_v; ++d) store(call_.o, at(s_.o, b, h, t) + d, row[static_cast<std::size_t>(d)] / sum);
    static_cast<float*>(call_.lse)[at(s_.lse, b, h, t)] = most + std::log(sum);
  }

  float* dk_sum(std::int64_t b, std::int64_t head, std::int64_t u) {
    return reinterpret_cast<float*>(call_.workspace) + ((b * s_.kv_heads + head) * s_.keys + u) * (s_.head_dim + s_.head_dim_v);
  }

  void backward(std::int64_t b, std::int64_t h, std::int64_t t) {
    float delta = 0.0F;
    for (int d = 0; d < s_.head_dim_v; ++d) {
      delta += load(call_.d_out, at(s_.d_out, b, h, t) + d) * load(call_.o, at(s_.o, b, h, t) + d);
    }
    const float lse = static_cast<const float*>(call_.lse)[at(s_.lse, b, h, t)];
    std::vector<float> dq(static_cast<std::size_t>(s_.head_dim));
    for (std::int64_t u = first_key(t); u < end_key(t); ++u) {
      const float p = std::exp(score(b, h, t, u) - lse);
      float dp = 0.0F;
      float* const sums = dk_sum(b, kv(h), u);
      for (int d = 0; d < s_.head_dim_v; ++d) {
        const float gradient = load(call_.d_out, at(s_.d_out, b, h, t) + d);
        dp += gradient * load(call_.v, at(s_.v, b, kv(h), u) + d);
        sums[s_.head_dim + d] += p * gradient;
      }
      const float ds = p * (dp - delta) * s_.scale;
      for (int d = 0; d < s_.head_dim; ++d) {
        dq[static_cast<std::size_t>(d)] += ds * load(call_.k, at(s_.k, b, kv(h), u) + d);
        sums[d] += ds * load(call_.q, at(s_.q, b, h, t) + d);
      }
    }
    for (int d = 0; d < s_.head_dim; ++d) store(call_.dq, at(s_.dq, b, h, t) + d, dq[static_cast<std::size_t>(d)]);
  }

  void store_key_gradients() {
    for (std::int64_t b = 0; b < s_.batch; ++b) {
      for (std::int64_t head = 0; head < s_.kv_heads; ++head) {
        for (std::int64_t u = 0; u < s_.keys; ++u) {
          const float* const sums = dk_sum(b, head, u);
          for (int d = 0; d < s_.head_dim; ++d) store(call_.dk, at(s_.dk, b, head, u) + d, sums[d]);
          for (int d = 0; d < s_.head_dim_v; ++d) store(call_.dv, at(s_.dv, b, head, u) + d, sums[s_.head_dim + d]);
        }
      }
    }
  }

  const FusedCall& call_;
  const FusedShape& s_;
};

}  // namespace

std::string emulated_refusal(const FusedShape& s) {
  if (s.dtype == DType::float32) return "it is for 16-bit tensors";
  if (s.head_dim % 8 != 0 || s.head_dim_v % 8 != 0 || std::max(s.head_dim, s.head_dim_v) > kMostHeadDim) {
    return fmt::format("head_dim ({}) and head_dim_v ({}) must be multiples of 8, at most {}", s.head_dim, s.head_dim_v,
                       kMostHeadDim);
  }
  if (s.has_low && s.queries > s.keys) {
    return fmt::format("a band with a lower bound needs no more queries ({}) than keys ({})", s.queries, s.keys);
  }
  if (s.backward && s.queries == 1 && s.keys == 1) return "a backward pass of one query and one key";
  return {};
}

std::int64_t emulated_workspace_bytes(const FusedShape& s) {
  if (!s.backward) return s.queries > 1 ? 256 : 0;
  return s.batch * s.kv_heads * s.keys * (s.head_dim + s.head_dim_v) * std::int64_t{4};
}

void emulate_fused(const FusedCall& call) {
  const FusedShape& s = call.shape;
  if (s.low > 0 || s.high < 0 || s.heads % s.kv_heads != 0)
    throw std::logic_error("a fused call with a band that it cannot have");
  std::memset(call.workspace, 0, static_cast<std::size_t>(emulated_workspace_bytes(s)));  // over whatever is there
  s.dtype == DType::bfloat16 ? Emulation<DType::bfloat16>(call).run() : Emulation<DType::float16>(call).run();
}

}  // namespace ringspan::cuda
