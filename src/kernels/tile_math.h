// What the algorithms of tile_generic.h and tile_pairs.h share: elementary functions over the vectors of an ISA file's
// `struct Isa`, ranges of rows, sources. Included after it; everything is in an anonymous namespace, as there.
#pragma once

namespace ringspan::kernels {
namespace {

#define RINGSPAN_INLINE inline __attribute__((always_inline))
#define RINGSPAN_UNROLL _Pragma("GCC unroll 16")

using Reg = Isa::Reg;
constexpr int kWidth = Isa::kWidth;
constexpr int kVectors = Isa::kVectors;
constexpr int kPanel = kWidth * kVectors;
constexpr float kInf = __builtin_inff(), kLog2e = 1.44269504F;

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a < b ? b : a; }
constexpr int down(int x) { return x / kWidth * kWidth; }
constexpr int up(int x) { return (x + kWidth - 1) / kWidth * kWidth; }

// function(i, i % kWays) for i in [0, count): sums that take turns stay in registers.
template <int kWays, typename Function>
RINGSPAN_INLINE void in_turns(int count, const Function& function) {
  int i = 0;
  for (; i + kWays <= count; i += kWays) {
    RINGSPAN_UNROLL for (int way = 0; way < kWays; ++way) function(i + way, way);
  }
  RINGSPAN_UNROLL for (int way = 0; way < kWays - 1; ++way) {
    if (i + way < count) function(i + way, way);
  }
}

// ---- elementary functions ----------------------------------------------------------------------------------------------

// 2^x for x <= 127, over a fraction() whose integer part ldexp() takes: a polynomial of it on [0, 1), of the least relative
// error: 9e-5 or 1e-7 of degree 3 or 5. Exactly 1 at 0, exactly 0 below -126 (and at -inf), NaN at NaN. Were the
// probabilities below that denormal numbers, every product with one of them would take a hundred times as long.
template <typename Set = Isa, int kDegree = 5>
RINGSPAN_INLINE Reg exp2_of(Reg x) {
  constexpr float kThird[] = {7.7067041997E-2F, 2.2764499120E-1F, 6.9511678642E-1F};
  constexpr float kFifth[] = {1.8671301659E-3F, 9.0170297764E-3F, 5.5799912661E-2F, 2.4016444385E-1F, 6.9315129519E-1F};
  const auto of = [&](const auto& coefficients) {
    const Reg f = Set::fraction(x);
    Reg p = Set::set1(coefficients[0]);
    RINGSPAN_UNROLL for (int i = 1; i < kDegree; ++i) p = Set::fma(p, f, Set::set1(coefficients[i]));
    return Set::ldexp(Set::fma(p, f, Set::set1(1.0F)), x);
  };
  if constexpr (kDegree == 3) {
    return of(kThird);
  } else {
    return of(kFifth);
  }
}

// e^x for x <= 88; relative error 1e-7; exactly 1 at 0, exactly 0 below -87.7 (and at -inf), NaN at NaN.
template <typename Set = Isa>
RINGSPAN_INLINE Reg exp_of(Reg x) {
  const Reg log2e = Set::set1(kLog2e);
  if constexpr (requires { Set::fraction(x); }) {
    return exp2_of<Set>(x * log2e);
  } else {
    x = Set::max(Set::set1(-88.0F), x);
    // Rounds to a whole number, and leaves it in the last bits, as an exponent.
    const Reg shift = Set::set1(0x1.8p23F + 127.0F);
    const Reg whole = Set::fma(x, log2e, shift), f = Set::fma(x, log2e, shift - whole);
    Reg p = Set::set1(1.327646719e-3F);  // 2^f, |f| <= 1/2: minimax of degree 5
    p = Set::fma(p, f, Set::set1(9.675541682e-3F));
    p = Set::fma(p, f, Set::set1(5.550713292e-2F));
    p = Set::fma(p, f, Set::set1(2.402211972e-1F));
    p = Set::fma(p, f, Set::set1(6.931469671e-1F));
    p = Set::fma(p, f, Set::set1(1.0F));
    return p * Set::last_bits_as_exponent(whole);
  }
}

// Near 0 the odd polynomial of Cephes; elsewhere from e^(2|x|). Relative error 2e-7; NaN at NaN.
RINGSPAN_INLINE Reg tanh_of(Reg x) {
  const Reg zero = Isa::zero();
  const Reg magnitude = x < zero ? -x : x;
  const Reg z = x * x;
  Reg p = Isa::set1(-5.70498872745e-3F);
  p = Isa::fma(p, z, Isa::set1(2.06390887954e-2F));
  p = Isa::fma(p, z, Isa::set1(-5.37397155531e-2F));
  p = Isa::fma(p, z, Isa::set1(1.33314422036e-1F));
  p = Isa::fma(p, z, Isa::set1(-3.33332819422e-1F));
  const Reg small = Isa::fma(p * z, x, x);
  const Reg limit = Isa::set1(10.0F);  // tanh is 1 in float32
  const Reg bounded = magnitude > limit ? limit : magnitude;
  const Reg large = Isa::set1(1.0F) - Isa::set1(2.0F) / (exp_of(bounded + bounded) + Isa::set1(1.0F));
  return magnitude < Isa::set1(0.625F) ? small : (x < zero ? -large : large);
}

// s -= slope |distance + c step| for c in [begin, end).
inline void subtract_alibi(float* s, int begin, int end, float slope, std::int64_t distance, std::int64_t step) {
  for (int c = begin; c < end; ++c) {
    const std::int64_t d = distance + c * step;
    s[c] -= slope * static_cast<float>(d < 0 ? -d : d);
  }
}

inline void fill(float* s, int begin, int end, float value) {
  for (int c = begin; c < end; ++c) s[c] = value;
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

template <typename Type>
RINGSPAN_INLINE const typename Type::Type* row_at(const RowSource& source, int row) {
  const std::int64_t index = source.index == nullptr ? row : source.index[row];
  return static_cast<const typename Type::Type*>(source.data) + index * source.stride;
}

// ---- fetching what is read next ----------------------------------------------------------------------------------------

// Lines at data + i * stride; fetching beyond the last one does no harm.
struct Lines {
  const char* data;
  std::int64_t stride, count;
};

// The next lines to be fetched, `count` at most. Rows that are not neighbours: the first line of all, then the second, so that
// neighbours in time have one stride.
inline Lines next_lines(Ahead* ahead, std::int64_t count) {
  if (ahead == nullptr) return {nullptr, 0, 0};
  for (; ahead->done < Ahead::kSources; ++ahead->done) {
    AheadRows& rows = ahead->rows[ahead->done];
    const std::int64_t left = rows.rows * rows.row_lines - rows.next;
    if (left <= 0) continue;
    if (rows.stride == rows.row_lines * 64) {
      const Lines lines{rows.data + rows.next * 64, 64, count < left ? count : left};
      rows.next += lines.count;
      return lines;
    }
    const std::int64_t line = rows.next / rows.rows, row = rows.next % rows.rows;
    const Lines lines{rows.data + row * rows.stride + line * 64, rows.stride,
                      count < rows.rows - row ? count : rows.rows - row};
    rows.next += lines.count;
    return lines;
  }
  return {nullptr, 0, 0};
}

// Into the second cache: with misses of the first one, loads would wait.
RINGSPAN_INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }
RINGSPAN_INLINE void fetch_near(const void* line) { __builtin_prefetch(line, 1, 3); }  // into the first cache, to be written

inline void fetch_lines(Ahead* ahead, int count) {
  const Lines lines = next_lines(ahead, count);
  for (std::int64_t i = 0; i < lines.count; ++i) fetch(lines.data + i * lines.stride);
}

// What products fetch beside them. lines(depth, nothing): for a register tile, a line beside each of so many depths; `nothing`:
// what else may be fetched.

// As soon as possible, another line for each depth.
struct LinePerDepth {
  const char* data;
  std::int64_t stride, left;
  RINGSPAN_INLINE bool done() const { return left == 0; }
  RINGSPAN_INLINE const char* line() const { return data; }
  RINGSPAN_INLINE void next() { data += stride, --left; }
};
struct Soon {
  Ahead* ahead;
  LinePerDepth lines(std::int64_t depth, const void* nothing) const {
    const Lines lines = next_lines(ahead, depth);
    if (lines.data == nullptr) return {static_cast<const char*>(nothing), 0, depth};
    return {lines.data, lines.stride, depth};
  }
};

// Spread over as many depths as set_pace was told, where reading takes about as long as computing: prefetches that wait for
// each other hold up loads that hit the second cache.
struct SpreadLines {
  const char* data;
  std::int64_t stride, pace, end, paced = 0;
  RINGSPAN_INLINE bool done() const { return paced >= end; }
  RINGSPAN_INLINE const char* line() const { return data + (paced >> Ahead::kPaceBits) * stride; }
  RINGSPAN_INLINE void next() { paced += pace; }
};
struct Evenly {
  Ahead* ahead;
  SpreadLines lines(std::int64_t depth, const void* nothing) const {
    const Lines lines = next_lines(ahead, ahead == nullptr ? 0 : ((depth - 1) * ahead->pace >> Ahead::kPaceBits) + 1);
    if (lines.data == nullptr) return {static_cast<const char*>(nothing), 0, 1, depth};
    return {lines.data, lines.stride, ahead->pace, depth * ahead->pace};
  }
};
inline void set_pace(Ahead* ahead, std::int64_t depths) {
  if (ahead == nullptr) return;
  std::int64_t lines = 0;
  for (int i = ahead->done; i < Ahead::kSources; ++i)
    lines += ahead->rows[i].rows * ahead->rows[i].row_lines - ahead->rows[i].next;
  const std::int64_t pace = ((lines < depths ? lines : depths) << Ahead::kPaceBits) / depths;
  ahead->pace = pace > 0 ? pace : 1;
}

// Rows that few queries use once: reading them from memory takes as long as computing with them. Beside each row those some
// bytes further on are fetched, line by line as they lie, and as many as are read meanwhile: loads wait behind a burst of
// them.
constexpr int kFarBytes = 16384;
// Values: all columns of as many, then of those that were fetched meanwhile. More of more queries, as a block of products
// begins and ends with their sums, but where registers hold half of the rows only: values are read twice, from the first cache.
inline int value_bytes(const ForwardTile& tile) { return kVectors >= 4 && tile.task_rows > 4 ? 32768 : kFarBytes; }

inline int far_rows(const RowSource& source, int element_bytes, int bytes) {
  return at_least(bytes / (source.width * element_bytes), 1);
}

class FarLines {
 public:
  // Beside row `first`. The source has no index.
  FarLines(const RowSource& source, int first, int element_bytes, int bytes) {
    const int far = first + far_rows(source, element_bytes, bytes);
    const bool is_next = far >= source.rows;
    const std::int64_t stride = (is_next ? source.next_stride : source.stride) * element_bytes;
    line_ = static_cast<const char*>(is_next ? source.next : source.data) + (is_next ? far - source.rows : far) * stride;
    if (is_next && source.next == nullptr) {
      stay(source.data);
      return;
    }
    const std::int64_t row_bytes = source.width * element_bytes;
    if (stride == row_bytes) return;
    row_lines_ = left_ = static_cast<int>((reinterpret_cast<std::uintptr_t>(line_) % 64 + row_bytes + 63) / 64);
    jump_ = stride - row_lines_ * 64 + 64;
  }

  // Fetches nothing but what is there.
  void stay(const void* line) {
    line_ = static_cast<const char*>(line);
    step_ = 0;
    row_lines_ = left_ = kAll;
  }

  // Rows are not neighbours: their lines are better fetched in bursts, others spread.
  bool strides() const { return row_lines_ < kAll; }

  template <int kLines>
  RINGSPAN_INLINE void fetch() {
    RINGSPAN_UNROLL for (int i = 0; i < kLines; ++i) {
      kernels::fetch(line_);
      const bool ends = --left_ == 0;
      line_ += ends ? jump_ : step_;
      left_ = ends ? row_lines_ : left_;
    }
  }

 private:
  static constexpr int kAll = 1 << 30;

  const char* line_;
  std::int64_t step_ = 64, jump_ = 0;  // to the next line, and from the last one of a row to the next row
  int row_lines_ = kAll, left_ = kAll;
};

// The union of the ranges of rows [first, last), empty ones left out.
struct Range {
  int begin, end;
  bool empty() const { return begin >= end; }
};
inline Range union_of(const std::int32_t* begin, const std::int32_t* end, int first, int last) {
  Range range{1 << 30, 0};
  for (int r = first; r < last; ++r) {
    if (begin[r] >= end[r]) continue;
    range = {at_most(range.begin, begin[r]), at_least(range.end, end[r])};
  }
  return range;
}

}  // namespace
}  // namespace ringspan::kernels
