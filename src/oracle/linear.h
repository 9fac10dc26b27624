// The three inner loops of the oracle, over rows picked by a list: contiguous and vectorised by the compiler.
//
// `rows` holds rows of `width` elements; list[x] is the row of the x-th weight. Pure; no allocation; thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringspan::oracle {

using RowList = std::span<const std::uint32_t>;

// out[x] = vector . rows[list[x]]
void dot_rows(const double* vector, const double* rows, std::size_t width, RowList list, double* out);
void dot_rows(const float* vector, const float* rows, std::size_t width, RowList list, float* out);

// out += sum over x of weights[x] rows[list[x]]
void gather_rows(const double* weights, const double* rows, std::size_t width, RowList list, double* out);
void gather_rows(const float* weights, const float* rows, std::size_t width, RowList list, float* out);

// rows[list[x]] += weights[x] vector
void scatter_rows(const double* weights, const double* vector, std::size_t width, RowList list, double* rows);
void scatter_rows(const float* weights, const float* vector, std::size_t width, RowList list, float* rows);

}  // namespace ringspan::oracle
