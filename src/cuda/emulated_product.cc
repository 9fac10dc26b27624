#include "cuda/emulated_product.h"

#include "kernels/storage.h"

namespace ringspan::cuda {
namespace {

constexpr int kMostColumns = 256;

float load(DType dtype, std::uint16_t bits) {
  return dtype == DType::bfloat16 ? kernels::Storage<DType::bfloat16>::load(bits)
                                  : kernels::Storage<DType::float16>::load(bits);
}

// Element e of chunk i goes to at(i, e).
template <typename At>
void load_elements(DType dtype, const std::uint16_t* chunks, int rows, At&& at) {
  for (int i = 0; i < rows * kInner / 8; ++i) {
    for (int e = 0; e < 8; ++e) at(i, e) = load(dtype, chunks[i * 8 + e]);
  }
}

}  // namespace

void load_operand(DType dtype, Major major, const std::uint16_t* chunks, int rows, float* out) {
  if (major == Major::k) {
    load_elements(dtype, chunks, rows, [&](int i, int e) -> float& { return out[i * 8 + e]; });
  } else {
    load_elements(dtype, chunks, rows, [&](int i, int e) -> float& { return out[(i / kInner * 8 + e) * kInner + i % kInner]; });
  }
}

void multiply_rows(float* c, const float* a, const float* b, int rows, int columns) {
  float inner[kInner][kMostColumns];  // b, the inner dimension first
  for (int column = 0; column < columns; ++column) {
    for (int k = 0; k < kInner; ++k) inner[k][column] = b[column * kInner + k];
  }
  for (int row = 0; row < rows; ++row) {
    float sums[kMostColumns];
    for (int column = 0; column < columns; ++column) sums[column] = c[row * columns + column];
    for (int k = 0; k < kInner; ++k) {
      for (int column = 0; column < columns; ++column) sums[column] += a[row * kInner + k] * inner[k][column];
    }
    for (int column = 0; column < columns; ++column) c[row * columns + column] = sums[column];
  }
}

void multiply_fragments(DType dtype, float* c, int c_step, const std::uint32_t* a, const std::uint32_t* b) {
  const auto load_pair = [&](std::uint32_t pair, float* out) {
    out[0] = load(dtype, static_cast<std::uint16_t>(pair & 0xffff));
    out[1] = load(dtype, static_cast<std::uint16_t>(pair >> 16));
  };
  float a_rows[16][kInner], b_columns[8][kInner], sums[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, k = lane % 4 * 2;
    for (int part = 0; part < 4; ++part) load_pair(a[lane * 4 + part], &a_rows[g + part % 2 * 8][k + part / 2 * 8]);
    for (int part = 0; part < 2; ++part) load_pair(b[lane * 4 + part], &b_columns[g][k + part * 8]);
    for (int element = 0; element < 4; ++element) sums[g + element / 2 * 8][k + element % 2] = c[lane * c_step + element];
  }
  multiply_rows(sums[0], a_rows[0], b_columns[0], 16, 8);
  for (int lane = 0; lane < 32; ++lane) {
    for (int element = 0; element < 4; ++element) {
      c[lane * c_step + element] = sums[lane / 4 + element / 2 * 8][lane % 4 * 2 + element % 2];
    }
  }
}

void multiply_warpgroup(float* c, const float* a, const float* b, int columns, bool accumulate) {
  const auto at = [&](int row, int column) -> float& {
    const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
    return c[thread * (columns / 2) + column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
  };
  float sums[kWarpgroupRows * kMostColumns];
  for (int row = 0; row < kWarpgroupRows; ++row) {
    for (int column = 0; column < columns; ++column) {
      sums[row * columns + column] = accumulate ? at(row, column) : 0.0F;
    }
  }
  multiply_rows(sums, a, b, kWarpgroupRows, columns);
  for (int row = 0; row < kWarpgroupRows; ++row) {
    for (int column = 0; column < columns; ++column) at(row, column) = sums[row * columns + column];
  }
}

}  // namespace ringspan::cuda
