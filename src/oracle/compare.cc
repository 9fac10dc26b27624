#include "oracle/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "oracle/row_engine.h"

namespace ringspan::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double largest(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return 0x1.fffffep127;
    case DType::bfloat16:
      return 0x1.fep127;
    case DType::float16:
      return 65504.0;
  }
  return 0.0;
}

// The largest error of the naive computation in one row; where it overflowed it says nothing.
double naive_error(std::span<const double> exact, std::span<const double> naive) {
  double error = 0.0;
  for (std::size_t c = 0; c < exact.size(); ++c) {
    const double difference = std::abs(naive[c] - exact[c]);
    if (std::isfinite(difference)) error = std::max(error, difference);
  }
  return error;
}

// How far an element is from what it should be; infinite where no tolerance may forgive it.
double error_of(double exact, double actual, DType dtype) {
  if (exact == actual || (std::isnan(exact) && std::isnan(actual))) return 0.0;
  if (std::isnan(exact) || std::isnan(actual) || std::isinf(exact)) return kInfinity;
  const bool overflows = std::abs(exact) > largest(dtype) * (1.0 - unit_roundoff(dtype));
  if (std::isinf(actual) && overflows && (actual > 0) == (exact > 0)) return 0.0;
  return std::abs(exact - actual);
}

}  // namespace

Comparison compare(std::string name, const Tensor& exact, const Tensor& naive, std::span<const double> actual, DType dtype) {
  RINGSPAN_CHECK(actual.size() == exact.values.size() && naive.values.size() == exact.values.size());
  RINGSPAN_CHECK(static_cast<std::int64_t>(exact.floors.size()) == exact.rows());
  Comparison result;
  result.name = std::move(name);
  result.elements = static_cast<std::int64_t>(actual.size());
  double worst_ratio = -1.0;
  const auto width = static_cast<std::size_t>(exact.width);
  for (std::size_t row = 0; row < exact.floors.size(); ++row) {
    const std::span<const double> expected(&exact.values[row * width], width);
    const double naive_row = naive_error(expected, {&naive.values[row * width], width});
    const double floor = std::isnan(exact.floors[row]) ? 0.0 : exact.floors[row];  // NaN in the row says nothing about the rest
    result.max_naive_error = std::max(result.max_naive_error, naive_row);
    for (std::size_t c = 0; c < width; ++c) {
      const double value = actual[row * width + c];
      const double error = error_of(expected[c], value, dtype);
      const double rounding = std::isfinite(expected[c]) ? 1.01 * unit_roundoff(dtype) * std::abs(expected[c]) : 0.0;
      const double tolerance = 2.0 * naive_row + floor + rounding;
      const bool passed = error <= tolerance && std::isfinite(error);
      if (!passed) ++result.failures;
      if (std::isnan(expected[c]) && std::isnan(value)) ++result.both_nan;
      result.max_error = std::max(result.max_error, error);
      const double ratio = error == 0.0 || error == kInfinity ? error : error / tolerance;  // never NaN, as 0 / 0 would be
      if (ratio <= worst_ratio) continue;
      worst_ratio = ratio;
      result.worst = static_cast<std::int64_t>(row * width + c);
      result.expected = expected[c];
      result.actual = value;
      result.error = error;
      result.tolerance = tolerance;
    }
  }
  result.passed = result.failures == 0;
  return result;
}

std::string to_string(const Comparison& c) {
  if (c.elements == 0) return fmt::format("{}: passed, empty", c.name);
  if (c.passed) {
    return fmt::format(
        "{}: passed, {} elements; max error {:.1e}, naive {:.1e}; closest to its tolerance at {}: {:.1e} of {:.1e}", c.name,
        c.elements, c.max_error, c.max_naive_error, c.worst, c.error, c.tolerance);
  }
  return fmt::format("{}: failed, {} of {} elements; worst at {}: {:.9g} instead of {:.9g} (error {:.1e}, tolerance {:.1e})",
                     c.name, c.failures, c.elements, c.worst, c.actual, c.expected, c.error, c.tolerance);
}

std::vector<double> to_doubles(const View& view, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                               std::int64_t width) {
  std::vector<double> values(static_cast<std::size_t>(batch * tokens * heads * width));
  double* out = values.data();
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      for (std::int64_t h = 0; h < heads; ++h, out += width) load_row(view, b, i, h, width, out);
    }
  }
  return values;
}

std::vector<double> to_doubles(const View& view, std::span<const Row> rows, std::int64_t width) {
  std::vector<double> values(rows.size() * static_cast<std::size_t>(width));
  for (std::size_t x = 0; x < rows.size(); ++x) {
    load_row(view, rows[x].batch, rows[x].position, rows[x].head, width, &values[x * static_cast<std::size_t>(width)]);
  }
  return values;
}

}  // namespace ringspan::oracle
