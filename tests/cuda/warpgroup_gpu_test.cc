// The operations of warpgroup.h on a GPU, each by itself: what a kernel for warpgroups does wrong, one of these does.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "base/float16.h"
#include "cuda/gpu_kernels.h"
#include "cuda/warpgroup.h"
#include "cuda/warpgroup_probe.h"

namespace ringspan::testing {
namespace {

constexpr int kRows = 128;

class Matrix {
 public:
  Matrix(DType dtype, int rows, int columns, std::mt19937& random) : columns_(columns) {
    for (int i = 0; i < rows * columns; ++i) {
      const auto value = static_cast<float>(static_cast<int>(random() % 9) - 4);  // products and their sums are exact
      values_.push_back(value);
      bits_.push_back(dtype == DType::bfloat16 ? float_to_bfloat16(value) : float_to_float16(value));
    }
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&device_), bits_.size() * 2), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(device_, bits_.data(), bits_.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~Matrix() { cudaFree(device_); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  float operator()(int row, int column) const { return values_[static_cast<std::size_t>(row * columns_ + column)]; }
  std::uint16_t bits(int row, int column) const { return bits_[static_cast<std::size_t>(row * columns_ + column)]; }
  const std::uint16_t* device() const { return device_; }

 private:
  int columns_;
  std::vector<float> values_;
  std::vector<std::uint16_t> bits_;
  std::uint16_t* device_ = nullptr;
};

template <typename T>
class Result {
 public:
  explicit Result(int count) : values(static_cast<std::size_t>(count)) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&device), values.size() * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemset(device, 0xff, values.size() * sizeof(T)), cudaSuccess);
  }
  ~Result() { cudaFree(device); }
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;
  void fetch() { ASSERT_EQ(cudaMemcpy(values.data(), device, values.size() * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess); }
  std::vector<T> values;
  T* device = nullptr;
};

// kRows rows of the result, element by element; the first that are wrong are shown.
template <typename Expected>
void expect_rows(const char* name, const Result<float>& result, int columns, Expected&& expected) {
  int wrong = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const float is = result.values[static_cast<std::size_t>(row * columns + column)];
      if (is == expected(row, column) || ++wrong > 3) continue;
      ADD_FAILURE() << name << ' ' << row << ' ' << column << ": " << is << " instead of " << expected(row, column);
    }
  }
  EXPECT_EQ(wrong, 0) << name << " of " << kRows * columns;
}

class WarpgroupOnGpu : public ::testing::TestWithParam<ProbeShape> {};

TEST_P(WarpgroupOnGpu, TilesAndProducts) {
  if (!has_gpu() || !has_warpgroups()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  const auto [dtype, dim, columns] = GetParam();
  std::mt19937 random(7);
  const Matrix rows(dtype, kRows, dim, random), others(dtype, columns, dim, random), weights(dtype, kRows, columns, random);
  Result<unsigned char> copied(columns * dim * 2), mapped(columns * dim * 2);
  Result<float> scores(kRows * columns), sums(kRows * dim);
  cuda::TileMaps maps;
  maps.maps[maps.count++] = {others.device(), dim, 0, 0, columns, 1, 1, dim};
  ASSERT_EQ(
      launch_probe(GetParam(),
                   {rows.device(), others.device(), weights.device(), copied.device, mapped.device, scores.device, sums.device},
                   maps),
      cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  copied.fetch(), mapped.fetch(), scores.fetch(), sums.fetch();

  int wrong = 0;
  for (int row = 0; row < columns; ++row) {
    for (int k = 0; k < dim; ++k) {
      const int panel = k / cuda::kPanelColumns * columns * cuda::kPanelRowBytes;
      const int offset = panel + row * cuda::kPanelRowBytes + ((k / 8 ^ row) % 8) * 16 + k % 8 * 2;
      std::uint16_t bits = 0;
      std::memcpy(&bits, copied.values.data() + offset, 2);
      wrong += bits != others.bits(row, k);
    }
  }
  EXPECT_EQ(wrong, 0) << "elements of the tile that threads copied";
  EXPECT_EQ(std::memcmp(copied.values.data(), mapped.values.data(), mapped.values.size()), 0) << "the tile that TMA copied";

  expect_rows("scores", scores, columns, [&](int row, int column) {
    float sum = 0;
    for (int k = 0; k < dim; ++k) sum += rows(row, k) * others(column, k);
    return sum;
  });
  expect_rows("sums", sums, dim, [&](int row, int column) {
    float sum = 1;
    for (int k = 0; k < columns; ++k) sum += weights(row, k) * others(k, column);
    return sum;
  });
}

std::vector<ProbeShape> shapes() {
  std::vector<ProbeShape> all;
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const int dim : {64, 128}) {
      for (const int columns : {64, 128}) all.push_back({dtype, dim, columns});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, WarpgroupOnGpu, ::testing::ValuesIn(shapes()), [](const auto& shape) {
  return std::string(to_string(shape.param.dtype)) + "_d" + std::to_string(shape.param.dim) + "_by" +
         std::to_string(shape.param.columns);
});

}  // namespace
}  // namespace ringspan::testing
