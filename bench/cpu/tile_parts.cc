// What the parts of a float32 tile cost on one core, forward and backward, beside the multiply-adds that its products are:
//     g++ -std=c++20 -O3 -ffp-contract=fast -mavx2 -mfma -mf16c -Isrc -Iinclude bench/cpu/tile_parts.cc -o tile_parts
//     ./tile_parts > report.json
// For AVX-512 with -DRINGSPAN_AVX512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mprefer-vector-width=512 besides. In cycles of
// the rate at which multiply-adds go in the same turn, per vector of scores; the fastest of many turns, as what else the core
// does only ever takes time. Tiles have the kernel's own sizes and lie in the second cache; what packs, fetches and stores
// comes on top in a call.
#ifdef RINGSPAN_AVX512
#include "kernels/tile_avx512.cc"  // NOLINT(bugprone-suspicious-include): what it has is in an anonymous namespace
#else
#include "kernels/tile_avx2.cc"  // NOLINT(bugprone-suspicious-include)
#endif
#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <vector>

namespace ringspan::kernels {
namespace {

constexpr int kTurns = 2000;

// Ticks of a multiply-add of vectors: as many sums as hide its latency.
double ticks_of_multiply_add(float* out) {
  constexpr int kSums = 10, kSteps = 2000;
  const Reg a = Isa::set1(out[0]), b = Isa::set1(out[1]);
  Reg sums[kSums];
  RINGSPAN_UNROLL for (int j = 0; j < kSums; ++j) sums[j] = a;
  const auto begin = __rdtsc();
  for (int i = 0; i < kSteps; ++i) {
    RINGSPAN_UNROLL for (int j = 0; j < kSums; ++j) sums[j] = Isa::fma(sums[j], a, b);
  }
  const auto ticks = static_cast<double>(__rdtsc() - begin);
  RINGSPAN_UNROLL for (int j = 0; j < kSums; ++j) Isa::store(out + 2 + j * kWidth, sums[j]);
  return ticks / (kSums * kSteps);
}

// The fastest turn of each part.
template <std::size_t kParts>
class Times {
 public:
  Times() { best_.fill(std::numeric_limits<double>::max()); }
  template <typename... Parts>
  void take(const Parts&... parts) {
    multiply_add_ = std::min(multiply_add_, ticks_of_multiply_add(memory_.data()));
    std::size_t i = 0;
    (time(i++, parts), ...);
  }
  // In units of half a multiply-add of a vector, a cycle where two are begun at once, per vector of scores.
  double of(std::size_t part, double vectors) const { return best_[part] / (2 * multiply_add_) / vectors; }

 private:
  template <typename Part>
  void time(std::size_t i, const Part& part) {
    const auto begin = __rdtsc();
    part();
    best_[i] = std::min(best_[i], static_cast<double>(__rdtsc() - begin));
  }
  std::array<double, kParts> best_;
  std::vector<float> memory_ = std::vector<float>(256, 0.5F);
  double multiply_add_ = std::numeric_limits<double>::max();
};

std::vector<float> numbers(std::int64_t count) {
  std::vector<float> list(static_cast<std::size_t>(count) + 64);
  for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<float>(i * 37 % 101) / 101.0F - 0.5F;
  return list;
}
float* aligned(std::vector<float>& list) {
  return list.data() + (64 - reinterpret_cast<std::uintptr_t>(list.data()) % 64) % 64 / sizeof(float);
}

void forward(int width) {
  TileDims dims{0, width, width, {}};
  dims.tile = forward_sizes(dims).own;
  const int rows = dims.tile.queries, keys = dims.tile.keys;
  const ForwardBytes bytes = forward_bytes(dims);
  auto q = numbers(bytes.queries / 4), k = numbers(bytes.keys / 4), v = numbers(bytes.values / 4),
       work = numbers(bytes.work / 4);
  auto acc = numbers(std::int64_t{rows} * width), m = numbers(rows), l = numbers(rows);
  const std::vector<std::int32_t> begin(static_cast<std::size_t>(rows), 0), end(static_cast<std::size_t>(rows), keys);
  ForwardTile tile{};
  tile.dims = dims, tile.rows = rows, tile.keys = keys;
  tile.q = aligned(q), tile.k = aligned(k), tile.v = aligned(v), tile.work = aligned(work);
  tile.acc = aligned(acc), tile.acc_stride = width, tile.m = m.data(), tile.l = l.data();
  tile.begin = begin.data(), tile.end = end.data(), tile.v_finite = true;
  Range ranges[kMaxBlocks];
  ranges_of_blocks(tile.begin, tile.end, rows, ranges);
  float shrink[kMaxQueryTile];
  const auto scores = [&] {
    multiply_columns(rows, keys, static_cast<const float*>(tile.q), query_stride(dims), static_cast<const float*>(tile.k),
                     width, static_cast<float*>(tile.work), score_stride(dims), ranges, Soon{});
  };
  const auto softmax = [&] {
    for (int row = 0; row < rows; row += kWidth) softmax_rows(tile, row, at_most(kWidth, rows - row), ranges, shrink);
  };
  const auto maxima = [&] {
    Reg top = Isa::zero();
    for (int row = 0; row < rows; ++row)
      top = Isa::max(top, row_maximum(static_cast<const float*>(tile.work) + row * score_stride(dims), 0, keys));
    Isa::store(tile.m, top);
  };
  const auto values = [&] {
    for (int column = 0; column < width; column += kPanel)
      accumulate_rows(tile, static_cast<const float*>(tile.v) + static_cast<std::int64_t>(column) * keys, column, kPanel, 0,
                      rows, Range{0, keys}, shrink);
  };
  Times<5> times;
  for (int turn = 0; turn < kTurns; ++turn) times.take([&] { attend_tile(tile); }, scores, maxima, softmax, values);
  const double vectors = static_cast<double>(rows) * keys / kWidth, product = width / 2.0;
  std::printf("    \"%d\": {\"queries\": %d, \"keys\": %d, \"products\": %.1f, \"tile\": %.1f, \"q k\": %.1f, ", width, rows,
              keys, 2 * product, times.of(0, vectors), times.of(1, vectors));
  std::printf("\"softmax\": %.1f, \"maxima, of the softmax\": %.1f, \"p v\": %.1f}", times.of(3, vectors), times.of(2, vectors),
              times.of(4, vectors));
}

void backward(int width) {
  TileDims dims{0, width, width, {}};
  dims.tile = backward_sizes(dims).own;
  const int rows = dims.tile.queries, keys = dims.tile.keys;
  const BackwardBytes bytes = backward_bytes(dims);
  auto key_side = numbers(bytes.key_side / 4), query_side = numbers(bytes.query_side / 4), work = numbers(bytes.work / 4);
  auto dq = numbers(std::int64_t{rows} * width), lse = numbers(rows), delta = numbers(rows);
  for (float& value : lse) value += 6.0F;
  std::vector<float*> dq_rows;
  for (int row = 0; row < rows; ++row) dq_rows.push_back(dq.data() + std::int64_t{row} * width);
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(std::max(rows, keys)), 0);
  const std::vector<std::int32_t> all_keys(static_cast<std::size_t>(rows), keys),
      all_rows(static_cast<std::size_t>(keys), rows);
  BackwardTile tile{};
  tile.dims = dims, tile.rows = rows, tile.keys = keys, tile.scale = tile.output_scale = 1.0F;
  tile.key_side = aligned(key_side), tile.query_side = aligned(query_side), tile.work = aligned(work);
  tile.queries_finite = tile.keys_finite = true;
  tile.lse = lse.data(), tile.delta = delta.data(), tile.dq = dq_rows.data();
  tile.key_begin = tile.row_begin = zeros.data(), tile.key_end = all_keys.data(), tile.row_end = all_rows.data();
  const GradientParts parts(tile);
  Range keys_of[kMaxBlocks], rows_of[kMaxBlocks];
  ranges_of_blocks(tile.key_begin, tile.key_end, rows, keys_of);
  ranges_of_blocks(tile.row_begin, tile.row_end, keys, rows_of);
  const auto scores = [&] {
    multiply_columns(rows, keys, parts.q, parts.q_stride, parts.k_columns, width, parts.p, parts.stride, keys_of, Soon{});
    multiply_columns(rows, keys, parts.d_out, parts.d_out_stride, parts.v_columns, width, parts.ds, parts.stride, keys_of,
                     Soon{});
  };
  const auto gradients = [&] {
    for (int row = 0; row < rows; ++row) gradient_row(tile, parts, row);
  };
  const auto of_keys = [&] {
    add_key_gradient(tile, parts.p, parts.d_out, parts.d_out_stride, width, parts.dv, parts.v_stride, rows_of);
    add_key_gradient(tile, parts.ds, parts.q, parts.q_stride, width, parts.dk, parts.k_stride, rows_of);
  };
  const auto of_queries = [&] { add_query_gradient(tile, parts, keys_of); };
  Times<5> times;
  for (int turn = 0; turn < kTurns / 2; ++turn) {
    times.take([&] { attend_backward_tile(tile); }, scores, gradients, of_keys, of_queries);
    std::fill_n(parts.dk, parts.key_elements, 0.0F), std::fill_n(parts.dv, parts.value_elements, 0.0F);  // sums stay small
    std::fill(dq.begin(), dq.end(), 0.0F);
  }
  const double vectors = static_cast<double>(rows) * keys / kWidth, product = width / 2.0;
  std::printf("    \"%d\": {\"queries\": %d, \"keys\": %d, \"products\": %.1f, \"tile\": %.1f, \"q k and do v\": %.1f, ", width,
              rows, keys, 5 * product, times.of(0, vectors), times.of(1, vectors));
  std::printf("\"p and ds\": %.1f, \"dk and dv\": %.1f, \"dq\": %.1f}", times.of(2, vectors), times.of(3, vectors),
              times.of(4, vectors));
}

}  // namespace
}  // namespace ringspan::kernels

int main() {
  using namespace ringspan::kernels;
  std::printf("{\n  \"cycles per %d scores, forward, by head_dim\": {\n", kWidth);
  for (const int width : {64, 128}) forward(width), std::printf(width == 64 ? ",\n" : "\n  },\n");
  std::printf("  \"cycles per %d scores, backward, by head_dim\": {\n", kWidth);
  for (const int width : {64, 128}) backward(width), std::printf(width == 64 ? ",\n" : "\n  }\n}\n");
}
