// The one algorithm behind TileOps, over the vector primitives of an ISA file. Included once by each ISA file after its
// `struct Isa` in an anonymous namespace; everything here is in one too, and no inline function of another header (the
// standard library included) is called, so that nothing compiled for one machine can be linked into code for another.
//
// Isa: Reg (a GCC vector of kWidth floats), kWidth, kVectors (registers per row of a register tile), and
//   zero, set1, load, store, load_partial, store_partial (first n elements; others read as 0), load_bf16, load_f16,
//   fma(a, b, c) = a b + c, max(a, b) (b where either is NaN), round (to nearest), ldexp(x, n) = x 2^n for an integral
//   n in [-152, 128], reduce_add, reduce_max, transpose (kWidth registers).
namespace ringspan::kernels {
namespace {

#define RINGSPAN_INLINE inline __attribute__((always_inline))
#define RINGSPAN_UNROLL _Pragma("GCC unroll 16")

using Reg = Isa::Reg;
constexpr int kWidth = Isa::kWidth;
constexpr int kVectors = Isa::kVectors;
constexpr int kPanel = kWidth * kVectors;
constexpr float kInf = __builtin_inff();

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a < b ? b : a; }
constexpr int down(int x) { return x / kWidth * kWidth; }
constexpr int up(int x) { return (x + kWidth - 1) / kWidth * kWidth; }

// ---- elementary functions ----------------------------------------------------------------------------------------------

// e^x for x <= 88; relative error 1e-7; exactly 1 at 0, exactly 0 below -105 (and at -inf), NaN at NaN.
RINGSPAN_INLINE Reg exp_of(Reg x) {
  x = Isa::max(Isa::set1(-105.0F), x);
  const Reg log2e = Isa::set1(1.44269504F);
  const Reg n = Isa::round(x * log2e);
  const Reg f = Isa::fma(x, log2e, -n);  // 2^f, |f| <= 1/2: minimax of degree 5
  Reg p = Isa::set1(1.327646719e-3F);
  p = Isa::fma(p, f, Isa::set1(9.675541682e-3F));
  p = Isa::fma(p, f, Isa::set1(5.550713292e-2F));
  p = Isa::fma(p, f, Isa::set1(2.402211972e-1F));
  p = Isa::fma(p, f, Isa::set1(6.931469671e-1F));
  p = Isa::fma(p, f, Isa::set1(1.0F));
  return Isa::ldexp(p, n);
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

// ---- packing -----------------------------------------------------------------------------------------------------------

struct Float32 {
  using Type = float;
  static Reg load(const float* p) { return Isa::load(p); }
  static Reg load_partial(const float* p, int n) { return Isa::load_partial(p, n); }
};

template <Reg (*kLoad)(const std::uint16_t*)>
struct Sixteen {
  using Type = std::uint16_t;
  static Reg load(const std::uint16_t* p) { return kLoad(p); }
  static Reg load_partial(const std::uint16_t* p, int n) {
    std::uint16_t copy[kWidth] = {};
    __builtin_memcpy(copy, p, static_cast<std::size_t>(n) * sizeof *p);
    return kLoad(copy);
  }
};

template <typename Type>
RINGSPAN_INLINE const typename Type::Type* row_at(const RowSource& source, int row) {
  const std::int64_t index = source.index == nullptr ? row : source.index[row];
  return static_cast<const typename Type::Type*>(source.data) + index * source.stride;
}

template <typename Type>
RINGSPAN_INLINE Reg load_up_to(const typename Type::Type* p, int n) {
  return n >= kWidth ? Type::load(p) : Type::load_partial(p, n);
}

template <typename Type>
void pack_columns(float* out, const RowSource& source, float scale) {
  const Reg factor = Isa::set1(scale);
  for (int first = 0; first < source.rows; first += kPanel) {
    const int columns = up(at_most(source.rows - first, kPanel));
    for (int group = 0; group < columns; group += kWidth) {
      const int present = at_most(source.rows - first - group, kWidth);
      for (int e = 0; e < source.width; e += kWidth) {
        Reg tile[kWidth];
        for (int r = 0; r < kWidth; ++r) {
          tile[r] = r < present ? load_up_to<Type>(row_at<Type>(source, first + group + r) + e, source.width - e) * factor
                                : Isa::zero();
        }
        Isa::transpose(tile);
        const int elements = at_most(source.width - e, kWidth);
        for (int c = 0; c < elements; ++c) Isa::store(out + (e + c) * columns + group, tile[c]);
      }
    }
    out += columns * source.width;
  }
}

template <typename Type>
bool pack_panels(float* out, const RowSource& source, float scale) {
  const Reg factor = Isa::set1(scale);
  Reg check = Isa::zero();  // 0 x is NaN where x is infinite or NaN
  for (int first = 0; first < source.width; first += kPanel) {
    const int columns = up(at_most(source.width - first, kPanel));
    for (int row = 0; row < source.rows; ++row, out += columns) {
      const auto* p = row_at<Type>(source, row) + first;
      for (int e = 0; e < columns; e += kWidth) {
        const Reg value = load_up_to<Type>(p + e, source.width - first - e) * factor;
        check = Isa::fma(value, Isa::zero(), check);
        Isa::store(out + e, value);
      }
    }
  }
  return Isa::reduce_add(check) == 0.0F;
}

template <typename Type>
void pack_rows(float* out, std::int64_t stride, const RowSource& source, float scale) {
  const Reg factor = Isa::set1(scale);
  for (int row = 0; row < source.rows; ++row, out += stride) {
    const auto* p = row_at<Type>(source, row);
    int e = 0;
    for (; e + kWidth <= source.width; e += kWidth) Isa::store(out + e, Type::load(p + e) * factor);
    if (e < source.width) Isa::store_partial(out + e, Type::load_partial(p + e, source.width - e) * factor, source.width - e);
  }
}

// ---- the register tile -------------------------------------------------------------------------------------------------

// The left operand: element (row, depth) is data[row * row_stride + depth * depth_stride].
struct Left {
  const float* data;
  std::int64_t row_stride, depth_stride;
};

// kRows x kCols registers: store(row, vector, sum over depth of left(row, depth) right[depth][vector]).
template <int kRows, int kCols, typename Store>
RINGSPAN_INLINE void multiply_block(const Left& left, const float* right, std::int64_t right_stride, std::int64_t depth,
                                    const Store& store) {
  Reg sum[kRows][kCols];
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) { RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) sum[r][v] = Isa::zero(); }
  const float* a = left.data;
  const std::int64_t row_stride = left.row_stride;
  for (std::int64_t k = 0; k < depth; ++k, a += left.depth_stride, right += right_stride) {
    Reg b[kCols];
    RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) b[v] = Isa::load(right + v * kWidth);
    RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Reg x = Isa::set1(a[r * row_stride]);
      RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) sum[r][v] = Isa::fma(x, b[v], sum[r][v]);
    }
  }
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) { RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) store(r, v, sum[r][v]); }
}

template <int kRows, typename Store>
void multiply_rows(int vectors, const Left& left, const float* right, std::int64_t right_stride, std::int64_t depth,
                   const Store& store) {
  if constexpr (kVectors >= 4) {
    if (vectors == 4) return multiply_block<kRows, 4>(left, right, right_stride, depth, store);
    if (vectors == 3) return multiply_block<kRows, 3>(left, right, right_stride, depth, store);
  }
  if (vectors == 2) return multiply_block<kRows, 2>(left, right, right_stride, depth, store);
  return multiply_block<kRows, 1>(left, right, right_stride, depth, store);
}

template <typename Store>
void multiply(int rows, int vectors, const Left& left, const float* right, std::int64_t right_stride, std::int64_t depth,
              const Store& store) {
  switch (rows) {
    case 6:
      return multiply_rows<6>(vectors, left, right, right_stride, depth, store);
    case 5:
      return multiply_rows<5>(vectors, left, right, right_stride, depth, store);
    case 4:
      return multiply_rows<4>(vectors, left, right, right_stride, depth, store);
    case 3:
      return multiply_rows<3>(vectors, left, right, right_stride, depth, store);
    case 2:
      return multiply_rows<2>(vectors, left, right, right_stride, depth, store);
    default:
      return multiply_rows<1>(vectors, left, right, right_stride, depth, store);
  }
}

struct Assign {
  float* out;
  std::int64_t stride;
  RINGSPAN_INLINE void operator()(int r, int v, Reg sum) const { Isa::store(out + r * stride + v * kWidth, sum); }
};

struct Add {
  float* out;
  std::int64_t stride;
  RINGSPAN_INLINE void operator()(int r, int v, Reg sum) const {
    float* p = out + r * stride + v * kWidth;
    Isa::store(p, Isa::load(p) + sum);
  }
};

// out = out shrink + sum; the added zero turns -0 into +0, so that a row is the same whatever shares its tile.
struct ShrinkAndAdd {
  float* out;
  std::int64_t stride;
  const float* shrink;
  RINGSPAN_INLINE void operator()(int r, int v, Reg sum) const {
    float* p = out + r * stride + v * kWidth;
    Isa::store(p, Isa::fma(Isa::load(p), Isa::set1(shrink[r]), sum) + Isa::zero());
  }
};

// Rows of the caller's, not padded: only the first `width` elements from `column` on are there.
struct AddToRows {
  float* const* rows;
  int column, width;
  RINGSPAN_INLINE void operator()(int r, int v, Reg sum) const {
    float* p = rows[r] + column + v * kWidth;
    const int n = width - column - v * kWidth;
    if (n >= kWidth) {
      Isa::store(p, Isa::load(p) + sum);
    } else {
      Isa::store_partial(p, Isa::load_partial(p, n) + sum, n);
    }
  }
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

// out[rows][columns] (op)= left x columns of a packed "columns" matrix, only where blocks of rows have a range; used for the
// scores of a tile: `depth` is the head dimension.
template <typename Ranges>
void multiply_columns(int rows, int columns, const float* left, std::int64_t left_stride, const float* packed, int depth,
                      float* out, std::int64_t out_stride, const Ranges& range_of) {
  for (int first = 0; first < columns; first += kPanel) {
    const int width = up(at_most(columns - first, kPanel));
    const float* panel = packed + static_cast<std::int64_t>(first) * depth;
    for (int row = 0; row < rows; row += kRowBlock) {
      const Range range = range_of(row);
      const int begin = at_least(down(range.begin) - first, 0);
      const int end = at_most(up(range.end) - first, width);
      if (begin >= end) continue;
      multiply(at_most(kRowBlock, rows - row), (end - begin) / kWidth, Left{left + row * left_stride, left_stride, 1},
               panel + begin, width, depth, Assign{out + row * out_stride + first + begin, out_stride});
    }
  }
}

// ---- forward -----------------------------------------------------------------------------------------------------------

// Scores of one row become probabilities relative to the new maximum; zero in the rest of `range`. Returns e^(m - m').
inline float softmax_row(const ForwardTile& tile, int row, Range range) {
  float* s = tile.scores + row * tile.score_stride;
  const int begin = tile.begin[row], end = tile.end[row];
  if (begin >= end) {
    fill(s, range.begin, range.end, 0.0F);
    return 1.0F;
  }
  const int first = down(begin), last = up(end);
  if (tile.softcap > 0.0F) {
    const Reg cap = Isa::set1(tile.softcap), inverse = Isa::set1(1.0F / tile.softcap);
    for (int c = first; c < last; c += kWidth) Isa::store(s + c, cap * tanh_of(Isa::load(s + c) * inverse));
  }
  if (tile.slope != nullptr) subtract_alibi(s, begin, end, *tile.slope, tile.distance[row], tile.distance_step);
  fill(s, first, begin, -kInf);
  fill(s, end, last, -kInf);

  Reg top[2] = {Isa::set1(-kInf), Isa::set1(-kInf)};
  int c = first;
  for (; c + 2 * kWidth <= last; c += 2 * kWidth) {
    top[0] = Isa::max(Isa::load(s + c), top[0]);
    top[1] = Isa::max(Isa::load(s + c + kWidth), top[1]);
  }
  if (c < last) top[0] = Isa::max(Isa::load(s + c), top[0]);
  const float old_m = tile.m[row];
  const float tile_m = Isa::reduce_max(Isa::max(top[0], top[1]));
  const float new_m = tile_m > old_m ? tile_m : old_m;
  const float origin = new_m == -kInf ? 0.0F : new_m;  // no inf - inf while the row has only scores of -inf

  const Reg shift = Isa::set1(origin);
  Reg sum = Isa::zero();
  for (c = first; c < last; c += kWidth) {
    const Reg p = exp_of(Isa::load(s + c) - shift);
    sum += p;
    Isa::store(s + c, p);
  }
  if (tile.factors != nullptr) {
    const float* factors = tile.factors + row * tile.score_stride;
    for (c = begin; c < end; ++c) s[c] *= factors[c];
  }
  fill(s, range.begin, first, 0.0F);
  fill(s, last, range.end, 0.0F);
  float shrink = 1.0F;
  if (old_m != new_m) {
    float lanes[kWidth];
    Isa::store(lanes, exp_of(Isa::set1(old_m - new_m)));
    shrink = lanes[0];
  }
  tile.m[row] = new_m;
  tile.l[row] = tile.l[row] * shrink + Isa::reduce_add(sum);
  return shrink;
}

// acc = acc shrink + p v for rows [row, row + rows) over keys of `range`.
inline void accumulate_rows(const ForwardTile& tile, const float* panel, int column, int width, int row, int rows, Range range,
                            const float* shrink) {
  multiply(rows, width / kWidth, Left{tile.scores + row * tile.score_stride + range.begin, tile.score_stride, 1},
           panel + static_cast<std::int64_t>(range.begin) * width, width, range.end - range.begin,
           ShrinkAndAdd{tile.acc + row * tile.acc_stride + column, tile.acc_stride, shrink + row});
}

void attend_tile(const ForwardTile& tile) {
  constexpr int kBlocks = (kQueryTile + kRowBlock - 1) / kRowBlock;
  Range ranges[kBlocks];
  float shrink[kQueryTile];
  for (int row = 0; row < tile.rows; row += kRowBlock) {
    ranges[row / kRowBlock] = union_of(tile.begin, tile.end, row, at_most(row + kRowBlock, tile.rows));
  }
  multiply_columns(tile.rows, tile.keys, tile.q, tile.q_stride, tile.k, tile.head_dim, tile.scores, tile.score_stride,
                   [&](int row) { return ranges[row / kRowBlock]; });
  for (int row = 0; row < tile.rows; ++row) {
    const Range range = ranges[row / kRowBlock];
    if (!range.empty()) shrink[row] = softmax_row(tile, row, range);
  }
  for (int column = 0; column < tile.head_dim_v; column += kPanel) {
    const int width = up(at_most(tile.head_dim_v - column, kPanel));
    const float* panel = tile.v + static_cast<std::int64_t>(column) * tile.keys;
    for (int row = 0; row < tile.rows; row += kRowBlock) {
      const int last = at_most(row + kRowBlock, tile.rows);
      const Range range = ranges[row / kRowBlock];
      if (range.empty()) continue;
      if (tile.v_finite) {
        accumulate_rows(tile, panel, column, width, row, last - row, range, shrink);
        continue;
      }
      for (int r = row; r < last; ++r) {  // row by row over its own keys: 0 inf is NaN
        const Range own{tile.begin[r], tile.end[r]};
        if (!own.empty()) accumulate_rows(tile, panel, column, width, r, 1, own, shrink);
      }
    }
  }
}

}  // namespace
}  // namespace ringspan::kernels
