// Differential: all implementations that run on this machine get the same random operands, special values planted among them
// (NaN, infinities, denormals, equal keys, dominant keys), and must agree: within the bound where the result is finite, and on
// which results are not finite. RINGSPAN_SEED is the first case, RINGSPAN_CASES how many (for long runs).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "kernels/attend_harness.h"

namespace ringspan::kernels::testing {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Puts up to `count` values at random places of a tensor.
void plant(CaseGenerator& generate, Tensor& tensor, std::int64_t count, const std::vector<double>& values) {
  if (tensor.batch() * tensor.rows() * tensor.heads() * tensor.width() == 0) return;
  for (; count > 0; --count) {
    tensor.set(generate.below(tensor.batch()), generate.below(tensor.rows()), generate.below(tensor.heads()),
               generate.below(tensor.width()),
               values[static_cast<std::size_t>(generate.below(static_cast<std::int64_t>(values.size())))]);
  }
}

void scale_key(Tensor& k, std::int64_t row, double factor) {
  for (std::int64_t b = 0; b < k.batch(); ++b)
    for (std::int64_t h = 0; h < k.heads(); ++h)
      for (std::int64_t e = 0; e < k.width(); ++e) k.set(b, row, h, e, factor * k.get(b, row, h, e));
}

void make_adversarial(CaseGenerator& generate, World& world) {
  const double nan = std::nan("");
  switch (generate.below(7)) {
    case 0:
      return plant(generate, world.v, 3, {nan, kInfinity, -kInfinity});
    case 1:
      return plant(generate, world.k, 3, {nan, kInfinity, -kInfinity});
    case 2:
      return plant(generate, world.q, 2, {nan, kInfinity, -kInfinity});
    case 3:  // tiny operands, some of them denormal
      for (Tensor* tensor : {&world.q, &world.k, &world.v}) plant(generate, *tensor, 200, {1e-40, -1e-38, 6e-8, -0.0, 0.0});
      return;
    case 4:  // one key takes nearly all the weight of its rows
      if (world.spec.n_k > 0) scale_key(world.k, generate.below(world.spec.n_k), 30.0);
      return;
    case 5:
      return world.k.fill(0.25);
    default:
      return;
  }
}

struct Output {
  const char* name;
  Tensor World::*tensor;
  Values DenseResult::*exact;
  Values DenseResult::*size;
};

constexpr Output kGradients[] = {{"dq", &World::dq, &DenseResult::dq, &DenseResult::dq_size},
                                 {"dk", &World::dk, &DenseResult::dk, &DenseResult::dk_size},
                                 {"dv", &World::dv, &DenseResult::dv, &DenseResult::dv_size}};

// Finite or not alike in every element, and near each other: the bound of each to the truth, twice. To the bound of
// excess_error comes one rounding of the terms of a sum to the storage type (a naive computation may be right by luck where
// all operands are equal), and products below the smallest normal number, which hardware may take for zero.
class Agreement {
 public:
  Agreement(DType dtype, const DenseResult& truth, std::string what) : dtype_(dtype), truth_(truth), what_(std::move(what)) {}

  void check(const Tensor& a, const Tensor& b, const Values& exact, const Values& naive, const Values& size, const char* name) {
    const double rounding = a_rounding_of(dtype_), eps = 0x1p-23 * (4.0 + truth_.largest_score) + rounding;
    double naive_error = 0.0;
    for (std::size_t i = 0; i < exact.data.size(); ++i) {
      const double error = std::abs(naive.data[i] - exact.data[i]);
      if (std::isfinite(error)) naive_error = std::max(naive_error, error);
    }
    int reported = 0;
    a.for_each([&](auto batch, auto row, auto head, auto e) {
      const double x = a.get(batch, row, head, e), y = b.get(batch, row, head, e);
      const double floor = eps * size(batch, row, head, e) + 0x1p-110;
      const bool same = std::isfinite(x) == std::isfinite(y) &&
                        (!std::isfinite(x) || !std::isfinite(floor) || std::abs(x - y) <= 2.0 * (2.0 * naive_error + floor));
      if (!same && ++reported <= 3) {
        ADD_FAILURE() << what_ << ": " << name << " of row " << row << ", head " << head << ", element " << e << ": " << x
                      << " and " << y;
      }
    });
  }

 private:
  static double a_rounding_of(DType dtype) {
    return dtype == DType::bfloat16 ? 0x1p-8 : dtype == DType::float16 ? 0x1p-11 : 0.0;
  }

  DType dtype_;
  const DenseResult& truth_;
  std::string what_;
};

class Implementations : public ::testing::TestWithParam<DType> {
 protected:
  static std::vector<AttendKernel> of(std::span<const AttendKernel> kernels) {
    std::vector<AttendKernel> list = runnable(kernels);
    std::erase_if(list, [](const AttendKernel& kernel) { return dtype_of(kernel) != GetParam(); });
    return list;
  }
  static std::uint64_t first() { return from_environment("RINGSPAN_SEED", 1); }
  static std::uint64_t last() { return first() + from_environment("RINGSPAN_CASES", kRandomCases) - 1; }
};

// Normalised, so that implementations may keep different maxima.
void normalise(World& world) {
  world.acc.for_each([&](auto b, auto r, auto h, auto e) {
    const double l = world.l.get(b, r, h, 0);
    world.acc.set(b, r, h, e, l == 0.0 ? 0.0 : world.acc.get(b, r, h, e) / l);
  });
}

TEST_P(Implementations, AgreeForward) {
  for (std::uint64_t seed = first(); seed <= last(); ++seed) {
    CaseGenerator generate(seed);
    World operands(generate.spec(GetParam()));
    operands.spec.output_scale = 1.0F;
    const std::vector<Part> parts = generate.parts(operands.spec);
    make_adversarial(generate, operands);
    const DenseResult truth = exact_attention(operands, parts, false), naive = naive_attention(operands, parts, false);
    const std::vector<AttendKernel> kernels = of(attend_kernels());
    World expected = operands;
    run_kernel(kernels.back(), expected, parts);
    normalise(expected);
    for (std::size_t i = 0; i + 1 < kernels.size(); ++i) {
      World world = operands;
      run_kernel(kernels[i], world, parts);
      normalise(world);
      Agreement(GetParam(), truth,
                "RINGSPAN_SEED=" + std::to_string(seed) + ", " + std::string(kernels[i].name) + ": " + operands.spec.describe())
          .check(world.acc, expected.acc, truth.o, naive.o, truth.o_size, "o");
    }
  }
}

TEST_P(Implementations, AgreeBackward) {
  for (std::uint64_t seed = first(); seed <= last(); ++seed) {
    CaseGenerator generate(seed);
    World operands(generate.spec(GetParam()));
    const std::vector<Part> parts = generate.parts(operands.spec);
    make_adversarial(generate, operands);
    const DenseResult truth = exact_attention(operands, parts), naive = naive_attention(operands, parts);
    set_final_rows(operands, truth);
    const std::vector<AttendKernel> kernels = of(attend_backward_kernels());
    World expected = operands;
    run_kernel(kernels.back(), expected, parts);
    for (std::size_t i = 0; i + 1 < kernels.size(); ++i) {
      World world = operands;
      run_kernel(kernels[i], world, parts);
      Agreement agreement(
          GetParam(), truth,
          "RINGSPAN_SEED=" + std::to_string(seed) + ", " + std::string(kernels[i].name) + ": " + operands.spec.describe());
      for (const Output& output : kGradients) {
        agreement.check(world.*output.tensor, expected.*output.tensor, truth.*output.exact, naive.*output.exact,
                        truth.*output.size, output.name);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Implementations, ::testing::Values(DType::float32, DType::bfloat16, DType::float16),
                         [](const auto& dtype) { return std::string(to_string(dtype.param)); });

}  // namespace
}  // namespace ringspan::kernels::testing
