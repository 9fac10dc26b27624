#include "oracle/linear.h"

// One binary for every machine: the compiler makes a second version of the loops for AVX2 and picks one when the program
// starts. Sanitizers do not support that.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define RINGSPAN_ORACLE_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define RINGSPAN_ORACLE_CLONES
#endif

namespace ringspan::oracle {
namespace {

// Independent partial sums, so that a vector register holds them without reordering what the language orders.
template <typename Real>
inline __attribute__((always_inline)) Real dot(const Real* a, const Real* b, std::size_t width) {
  constexpr std::size_t kLanes = 64 / sizeof(Real);
  Real lanes[kLanes] = {};
  std::size_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[c + lane] * b[c + lane];
  }
  Real sum = 0;
  for (; c < width; ++c) sum += a[c] * b[c];
  for (const Real lane : lanes) sum += lane;
  return sum;
}

template <typename Real>
inline __attribute__((always_inline)) void add_scaled(Real weight, const Real* __restrict x, std::size_t width,
                                                      Real* __restrict y) {
  for (std::size_t c = 0; c < width; ++c) y[c] += weight * x[c];
}

template <typename Real>
inline __attribute__((always_inline)) void dot_all(const Real* vector, const Real* rows, std::size_t width, RowList list,
                                                   Real* out) {
  for (std::size_t x = 0; x < list.size(); ++x) out[x] = dot(vector, rows + list[x] * width, width);
}

// Four rows at a time, so that `out` is loaded and stored once for four of them.
template <typename Real>
inline __attribute__((always_inline)) void gather_all(const Real* weights, const Real* rows, std::size_t width, RowList list,
                                                      Real* __restrict out) {
  std::size_t x = 0;
  for (; x + 4 <= list.size(); x += 4) {
    const Real* a = rows + list[x] * width;
    const Real* b = rows + list[x + 1] * width;
    const Real* c = rows + list[x + 2] * width;
    const Real* d = rows + list[x + 3] * width;
    const Real wa = weights[x], wb = weights[x + 1], wc = weights[x + 2], wd = weights[x + 3];
    for (std::size_t i = 0; i < width; ++i) out[i] += (wa * a[i] + wb * b[i]) + (wc * c[i] + wd * d[i]);
  }
  for (; x < list.size(); ++x) add_scaled(weights[x], rows + list[x] * width, width, out);
}

template <typename Real>
inline __attribute__((always_inline)) void scatter_all(const Real* weights, const Real* vector, std::size_t width, RowList list,
                                                       Real* rows) {
  for (std::size_t x = 0; x < list.size(); ++x) add_scaled(weights[x], vector, width, rows + list[x] * width);
}

}  // namespace

RINGSPAN_ORACLE_CLONES
void dot_rows(const double* vector, const double* rows, std::size_t width, RowList list, double* out) {
  dot_all(vector, rows, width, list, out);
}

RINGSPAN_ORACLE_CLONES
void dot_rows(const float* vector, const float* rows, std::size_t width, RowList list, float* out) {
  dot_all(vector, rows, width, list, out);
}

RINGSPAN_ORACLE_CLONES
void gather_rows(const double* weights, const double* rows, std::size_t width, RowList list, double* out) {
  gather_all(weights, rows, width, list, out);
}

RINGSPAN_ORACLE_CLONES
void gather_rows(const float* weights, const float* rows, std::size_t width, RowList list, float* out) {
  gather_all(weights, rows, width, list, out);
}

RINGSPAN_ORACLE_CLONES
void scatter_rows(const double* weights, const double* vector, std::size_t width, RowList list, double* rows) {
  scatter_all(weights, vector, width, list, rows);
}

RINGSPAN_ORACLE_CLONES
void scatter_rows(const float* weights, const float* vector, std::size_t width, RowList list, float* rows) {
  scatter_all(weights, vector, width, list, rows);
}

}  // namespace ringspan::oracle
