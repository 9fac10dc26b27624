// Judging a result against the oracle.
//
// An element passes when its error against float64 is at most
//     2 x the largest error of the naive same-dtype computation in its row + the floor of its row + half a step of its dtype.
// Judging row by row keeps a row of many small probabilities from hiding behind one of few large ones. NaN passes where float64
// gives NaN too, and nothing else passes there; an infinity passes where the exact value is that infinity or too large for the
// dtype. Pure; thread safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oracle/dense.h"

namespace ringspan::oracle {

struct Comparison {
  std::string name;
  bool passed = true;
  std::int64_t elements = 0;
  std::int64_t failures = 0;
  std::int64_t both_nan = 0;  // elements that pass because float64 has NaN too
  // The element that comes closest to its tolerance, or exceeds it most.
  std::int64_t worst = -1;
  double expected = 0, actual = 0, error = 0, tolerance = 0;
  // Largest error over all elements, and that of the naive computation.
  double max_error = 0, max_naive_error = 0;
};

// `actual` holds the elements in the order of `exact`; `dtype` is what they were stored in.
Comparison compare(std::string name, const Tensor& exact, const Tensor& naive, std::span<const double> actual, DType dtype);

// "dq: failed, 3 of 4096 elements; worst at 17: 0.25 instead of 0.125 (error 1.2e-01, tolerance 3.1e-03)".
std::string to_string(const Comparison& comparison);

// The elements of a (batch, tokens, heads, width) view in the order of the oracle's tensors.
std::vector<double> to_doubles(const View& view, std::int64_t batch, std::int64_t tokens, std::int64_t heads,
                               std::int64_t width);
// The rows of a view.
std::vector<double> to_doubles(const View& view, std::span<const Row> rows, std::int64_t width);

}  // namespace ringspan::oracle
