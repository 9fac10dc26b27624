#include "pattern/slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/arithmetic.h"

namespace ringspan {
namespace {

using internal::ceil_div;
using internal::floor_mod;

// One form per set of positions: the stride of at most one position says nothing.
Progression canonical(Progression p) {
  if (p.count <= 0) return {p.first, 1, 0};
  if (p.count == 1) p.stride = 1;
  return p;
}

Progression shifted(Progression p, std::int64_t by) {
  p.first += by;
  return p;
}

// x with a x = 1 (mod m); a and m coprime, m >= 1.
std::int64_t inverse_mod(std::int64_t a, std::int64_t m) {
  std::int64_t r0 = m, r1 = floor_mod(a, m), t0 = 0, t1 = 1;
  while (r1 != 0) {
    const std::int64_t quotient = r0 / r1;
    r0 = std::exchange(r1, r0 - quotient * r1);
    t0 = std::exchange(t1, t0 - quotient * t1);
  }
  return floor_mod(t0, m);
}

// The smallest t >= 0 with low <= (a t mod m) <= high, or -1; 0 <= a < m, 0 <= low <= high < m. O(log m): where no multiple
// of a falls into the range, the question is asked again for the number of times that a t has passed m, modulo a.
Int128 first_in_range(Int128 a, Int128 m, Int128 low, Int128 high) {
  if (low == 0) return 0;
  if (a == 0) return -1;
  if (2 * a > m) return first_in_range(m - a, m, m - high, m - low);
  const Int128 t = ceil_div(low, a);
  if (t * a <= high) return t;
  const Int128 laps = first_in_range(m % a, a, a - high % a, a - low % a);
  return laps < 0 ? Int128{-1} : ceil_div(low + m * laps, a);
}

// The smallest t >= 0 with ((step t + start) mod m) <= width, or -1; m >= 1, width >= 0.
Int128 first_near(std::int64_t step, std::int64_t start, std::int64_t m, std::int64_t width) {
  const std::int64_t low = floor_mod(-start, m);
  if (low == 0 || low + width >= m) return 0;
  return first_in_range(floor_mod(step, m), m, low, low + width);
}

// The rows of x, first and last one exactly, that have a y with lo <= y - x <= hi; differences in steps of `grid`.
Progression rows_with_partner(const Progression& x, const Progression& y, std::int64_t lo, std::int64_t hi, std::int64_t grid) {
  Progression rows = clip(x, y.first - hi, y.last() - lo + 1);
  // A band that holds y.stride / grid differences meets a y wherever it is; a narrower one meets at most one.
  if (rows.empty() || y.count == 1 || hi - lo + grid >= y.stride) return rows;
  const std::int64_t width = hi - lo;
  const Int128 skip = first_near(-rows.stride, y.first - lo - rows.first, y.stride, width);
  if (skip < 0 || skip >= rows.count) return {rows.first, 1, 0};
  const Int128 drop = first_near(rows.stride, y.first - lo - rows.last(), y.stride, width);
  rows.first += static_cast<std::int64_t>(skip) * rows.stride;
  rows.count -= static_cast<std::int64_t>(skip + drop);
  return rows;
}

// sum of floor((a t + b) / m) over 0 <= t < n; a, b >= 0, m >= 1. Counts lattice points under a line as Euclid divides.
Int128 floor_sum(Int128 n, Int128 m, Int128 a, Int128 b) {
  Int128 sum = 0;
  while (n > 0) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const Int128 top = a * n + b;
    if (top < m) break;
    n = top / m;
    b = top % m;
    std::swap(m, a);
  }
  return sum;
}

// Over the rows i of q: how many positions of k are at most i + shift. Three ranges: none, some, all of them.
Int128 count_up_to(const Progression& q, const Progression& k, std::int64_t shift) {
  const auto first_reaching = [&](std::int64_t position) {  // the first t with q.at(t) + shift >= position
    return std::clamp<std::int64_t>(ceil_div(position - shift - q.first, q.stride), 0, q.count);
  };
  const std::int64_t some = first_reaching(k.first);
  const std::int64_t all = first_reaching(k.last());
  const std::int64_t start = q.at(some) + shift - k.first;
  Int128 sum = Int128{q.count - all} * k.count;
  if (all > some) sum += floor_sum(all - some, k.stride, q.stride, start) + (all - some);
  return sum;
}

}  // namespace

Progression intersect(const Progression& a, const Progression& b) {
  if (a.empty() || b.empty()) return {a.first, 1, 0};
  const std::int64_t begin = std::max(a.first, b.first);
  const std::int64_t end = std::min(a.last(), b.last()) + 1;
  if (begin >= end) return {begin, 1, 0};
  if (b.stride == 1 || b.count == 1) return clip(a, begin, b.count == 1 && !a.contains(b.first) ? begin : end);
  if (a.stride == 1 || a.count == 1) return clip(b, begin, a.count == 1 && !b.contains(a.first) ? begin : end);
  if (a.stride == b.stride) {  // the frequent case, without arithmetic of 128 bits
    return (b.first - a.first) % a.stride == 0 ? clip(a, begin, end) : Progression{begin, 1, 0};
  }
  const std::int64_t common = std::gcd(a.stride, b.stride);
  if ((b.first - a.first) % common != 0) return {begin, 1, 0};
  // x = a.first + a.stride u with u = (b.first - a.first) / a.stride (mod b.stride), all divided by the common factor.
  const std::int64_t modulus = b.stride / common;
  const std::int64_t target = floor_mod((b.first - a.first) / common, modulus);
  const Int128 u = Int128{target} * inverse_mod(a.stride / common, modulus) % modulus;
  const Int128 period = Int128{a.stride} * modulus;
  const Int128 x = a.first + u * a.stride;
  const Int128 first = x + ceil_div(begin - x, period) * period;
  if (first >= end) return {begin, 1, 0};
  const Int128 count = (end - 1 - first) / period + 1;
  return canonical(
      {static_cast<std::int64_t>(first), count > 1 ? static_cast<std::int64_t>(period) : 1, static_cast<std::int64_t>(count)});
}

Progression clip(const Progression& a, std::int64_t begin, std::int64_t end) {
  if (a.empty() || begin >= end || a.first >= end || a.last() < begin) return {begin, 1, 0};
  if (a.first >= begin && a.last() < end) return canonical(a);
  const std::int64_t skip = a.first >= begin ? 0 : ceil_div(begin - a.first, a.stride);
  const std::int64_t first = a.at(skip);
  if (first >= end) return {begin, 1, 0};
  return canonical({first, a.stride, std::min((end - 1 - first) / a.stride + 1, a.count - skip)});
}

Slice restrict_q(const Slice& slice, const Progression& q) {
  Slice result = slice;
  result.q = intersect(slice.q, q);
  return result;
}

Slice restrict_k(const Slice& slice, const Progression& k) {
  Slice result = slice;
  result.k = intersect(slice.k, k);
  return result;
}

Slice normalize(const Slice& slice) {
  Slice s = slice;
  Slice none = slice;
  none.q = {slice.q.first, 1, 0};
  if (s.batch_count <= 0 || s.heads.empty()) return none;
  s.heads = canonical(s.heads);
  s.q = canonical(s.q);
  s.k = canonical(s.k);
  while (!s.q.empty() && !s.k.empty()) {
    // Differences occur in steps of the common factor of the strides, of which a single row has none.
    const std::int64_t grid = std::gcd(s.q.count > 1 ? s.q.stride : 0, s.k.count > 1 ? s.k.stride : 0);
    const std::int64_t least = s.k.first - s.q.last();
    const std::int64_t most = s.k.last() - s.q.first;
    s.lo = std::max(s.lo, least);
    s.hi = std::min(s.hi, most);
    if (grid > 1) {
      s.lo = least + ceil_div(s.lo - least, grid) * grid;
      s.hi = most - ceil_div(most - s.hi, grid) * grid;
    }
    if (s.lo > s.hi) return none;
    Progression q, k;
    if (s.lo == s.hi) {
      q = intersect(s.q, shifted(s.k, -s.lo));
      k = shifted(q, s.lo);
    } else {
      q = rows_with_partner(s.q, s.k, s.lo, s.hi, grid);
      k = rows_with_partner(s.k, s.q, -s.hi, -s.lo, grid);
    }
    if (q == s.q && k == s.k) return s;
    s.q = canonical(q);
    s.k = canonical(k);
  }
  return none;
}

Int128 pair_count(const Slice& slice) {
  if (slice.batch_count <= 0 || slice.heads.empty() || slice.q.empty() || slice.k.empty()) return 0;
  const std::int64_t lo = std::max(slice.lo, slice.k.first - slice.q.last());
  const std::int64_t hi = std::min(slice.hi, slice.k.last() - slice.q.first);
  if (lo > hi) return 0;
  const Int128 pairs = count_up_to(slice.q, slice.k, hi) - count_up_to(slice.q, slice.k, lo - 1);
  return pairs * slice.heads.count * slice.batch_count;
}

bool is_empty(const Slice& slice) { return normalize(slice).q.empty(); }

std::string to_string(const Progression& progression) {
  if (progression.empty()) return "-";
  if (progression.count == 1) return fmt::format("{}", progression.first);
  if (progression.stride == 1) return fmt::format("{}..{}", progression.first, progression.last());
  return fmt::format("{}..{}:{}", progression.first, progression.last(), progression.stride);
}

std::string to_string(const Slice& slice) {
  const auto bound = [](std::int64_t value) { return value <= kNoLow || value >= kNoHigh ? "*" : fmt::format("{}", value); };
  std::string text =
      fmt::format("batch {} heads {} q {} k {} band [{}, {}]", to_string(Progression{slice.batch_first, 1, slice.batch_count}),
                  to_string(slice.heads), to_string(slice.q), to_string(slice.k), bound(slice.lo), bound(slice.hi));
  if (slice.diagonal != 0) text += fmt::format(" diagonal {}", slice.diagonal);
  if (slice.state != 0) text += fmt::format(" state {}", slice.state);
  return text;
}

}  // namespace ringspan
