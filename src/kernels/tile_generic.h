// The one algorithm behind TileOps, over the vector primitives of an ISA file. Included once by each ISA file after its
// `struct Isa` in an anonymous namespace; everything here is in one too, and no inline function of another header (the
// standard library included) is called, so that nothing compiled for one machine can be linked into code for another.
//
// Isa: Reg (a GCC vector of kWidth floats), kWidth, kVectors (registers per row of a register tile), and
//   zero, set1, load, store, load_partial, store_partial (first n elements; others read as 0), load_bf16, load_f16,
//   fma(a, b, c) = a b + c, max(a, b) (b where either is NaN), reduce_add, reduce_max, transpose (kWidth registers), and either
//   last_bits_as_exponent(x), x with its bits shifted left by 23, or fraction(x) = x - floor(x), 0 where x is infinite, and
//   ldexp(x, n) = x 2^floor(n) for any n, 0 where n < -126. Optional, for n = 2 and where kWidth is 16
//   also 4: set_group<n>(p), n floats repeated, and add_groups(x), the sums of such groups of x[0], then of x[1], ...,
//   x[n - 1].
#include "kernels/tile_fetch.h"

namespace ringspan::kernels {
namespace {

// ---- packing -----------------------------------------------------------------------------------------------------------
//
// Packed forms of a matrix of `rows` x `width` (w = vector width, panel = columns of one register tile):
//   columns  transposed: panels of `panel` rows, each stored [width][panel]; the last panel has round_up(rest, w) rows, the
//            added ones zero
//   panels   panels of `panel` elements, each stored [rows][panel]; the last has round_up(rest, w) elements, added ones zero
//   rows     [rows][stride]

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
          tile[r] = Isa::zero();
          if (r >= present) continue;
          const auto* p = row_at<Type>(source, first + group + r) + e;
          if (source.index == nullptr) fetch_row_ahead(p, source, first + group + r);
          tile[r] = load_up_to<Type>(p, source.width - e) * factor;
        }
        Isa::transpose(tile);
        const int elements = at_most(source.width - e, kWidth);
        for (int c = 0; c < elements; ++c) Isa::store(out + (e + c) * columns + group, tile[c]);
        if (source.ahead != nullptr) fetch_lines(source.ahead, source.ahead->burst);
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
      if (source.ahead != nullptr && row % 8 == 0) fetch_lines(source.ahead, source.ahead->burst);
      const auto* p = row_at<Type>(source, row) + first;
      for (int e = 0; e < columns; e += kWidth) {
        if (source.index == nullptr) fetch_row_ahead(p + e, source, row);
        const Reg value = load_up_to<Type>(p + e, source.width - first - e) * factor;
        check = Isa::fma(value, Isa::zero(), check);
        Isa::store(out + e, value);
      }
    }
  }
  return Isa::reduce_add(check) == 0.0F;
}

// Rows are filled up with zeros to whole vectors where the stride has room for them.
template <typename Type>
bool pack_rows(float* out, std::int64_t stride, const RowSource& source, float scale) {
  const Reg factor = Isa::set1(scale);
  const int rows = source.rows, width = source.width;  // copies, which what is stored cannot change
  Reg check[4] = {Isa::zero(), Isa::zero(), Isa::zero(), Isa::zero()};
  for (int row = 0; row < rows; ++row, out += stride) {
    const auto* p = row_at<Type>(source, row);
    int e = 0;
    for (; e + 4 * kWidth <= width; e += 4 * kWidth) {
      RINGSPAN_UNROLL for (int i = 0; i < 4; ++i) {
        const Reg value = Type::load(p + e + i * kWidth) * factor;
        check[i] = Isa::fma(value, Isa::zero(), check[i]);
        Isa::store(out + e + i * kWidth, value);
      }
    }
    for (; e < width; e += kWidth) {
      const Reg value = load_up_to<Type>(p + e, width - e) * factor;
      check[0] = Isa::fma(value, Isa::zero(), check[0]);
      if (e + kWidth <= stride) {
        Isa::store(out + e, value);
      } else {
        Isa::store_partial(out + e, value, width - e);
      }
    }
  }
  return Isa::reduce_add((check[0] + check[1]) + (check[2] + check[3])) == 0.0F;
}

// The same as they are: without a factor, and nobody asks what they hold.
template <typename Type>
void copy_rows(float* out, std::int64_t stride, const RowSource& source) {
  const int rows = source.rows, width = source.width, whole = width - width % kWidth;
  for (int row = 0; row < rows; ++row, out += stride) {
    const auto* p = row_at<Type>(source, row);
    int e = 0;
    for (; e + 4 * kWidth <= whole; e += 4 * kWidth) {
      RINGSPAN_UNROLL for (int i = 0; i < 4; ++i) Isa::store(out + e + i * kWidth, Type::load(p + e + i * kWidth));
    }
    for (; e < whole; e += kWidth) Isa::store(out + e, Type::load(p + e));
    if (whole == width) continue;
    const Reg value = load_up_to<Type>(p + whole, width - whole);
    whole + kWidth <= stride ? Isa::store(out + whole, value) : Isa::store_partial(out + whole, value, width - whole);
  }
}

using BFloat16 = Sixteen<Isa::load_bf16>;
using Float16 = Sixteen<Isa::load_f16>;

// 2 kWidth bfloat16 as two vectors of floats: of the even and of the odd ones, which takes one instruction each, where those in
// order take two.
template <typename Type>
constexpr bool has_halves() {
  return __is_same(Type, BFloat16);
}
typedef std::uint32_t Bits __attribute__((vector_size(sizeof(Reg))));
struct Halves {
  Reg even, odd;
};
RINGSPAN_INLINE Halves halves_of(Reg x) {
  const Bits bits = (Bits)x;
  return {(Reg)(bits << 16), (Reg)(bits & 0xffff0000U)};
}
RINGSPAN_INLINE Halves load_halves(const std::uint16_t* p) {
  Reg x;
  __builtin_memcpy(&x, p, sizeof x);
  return halves_of(x);
}
// Elements in order again.
RINGSPAN_INLINE void put_in_order(Reg& even, Reg& odd) {
  Bits low, high;
  for (unsigned i = 0; i < kWidth; ++i) {
    const unsigned from = i / 2 + i % 2 * kWidth;
    low[i] = from, high[i] = from + kWidth / 2;
  }
  const Reg first = __builtin_shuffle(even, odd, low);
  odd = __builtin_shuffle(even, odd, high), even = first;
}

// By DType.
constexpr void (*kPackColumns[3])(float*, const RowSource&, float) = {pack_columns<Float32>, pack_columns<BFloat16>,
                                                                      pack_columns<Float16>};
constexpr bool (*kPackPanels[3])(float*, const RowSource&, float) = {pack_panels<Float32>, pack_panels<BFloat16>,
                                                                     pack_panels<Float16>};
constexpr bool (*kPackRows[3])(float*, std::int64_t, const RowSource&, float) = {pack_rows<Float32>, pack_rows<BFloat16>,
                                                                                 pack_rows<Float16>};
constexpr void (*kCopyRows[3])(float*, std::int64_t, const RowSource&) = {copy_rows<Float32>, copy_rows<BFloat16>,
                                                                          copy_rows<Float16>};

// ---- the register tile -------------------------------------------------------------------------------------------------

// The left operand: element (row, depth) is data[row * row_stride + depth * depth_stride].
struct Left {
  const float* data;
  std::int64_t row_stride, depth_stride;
};

// kRows x kCols registers: store(row, vector, sum over depth of left(row, depth) right[depth][vector]). Beside: Soon or Evenly.
template <int kRows, int kCols, typename Store, typename Beside>
RINGSPAN_INLINE void multiply_block(const Left& left, const float* right, std::int64_t right_stride, std::int64_t depth,
                                    const Store& store, Beside beside) {
  Reg sum[kRows][kCols];
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) { RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) sum[r][v] = Isa::zero(); }
  const Store to = store;  // a copy, which what is stored cannot change
  // More rows than there are registers for their offsets: by threes, which addresses of one offset reach.
  constexpr int kGroup = kRows > kRowBlock ? 3 : kRows;
  static_assert(kRows % kGroup == 0);
  const std::int64_t row_stride = left.row_stride;
  const float* a[kRows / kGroup];
  RINGSPAN_UNROLL for (int g = 0; g < kRows / kGroup; ++g) a[g] = left.data + g * kGroup * row_stride;
  for (auto lines = beside.lines(depth, right); !lines.done(); lines.next(), right += right_stride) {
    fetch(lines.line());
    Reg b[kCols];
    RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) b[v] = Isa::load(right + v * kWidth);
    RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Reg x = Isa::set1(a[r / kGroup][r % kGroup * row_stride]);
      RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) sum[r][v] = Isa::fma(x, b[v], sum[r][v]);
    }
    RINGSPAN_UNROLL for (int g = 0; g < kRows / kGroup; ++g) a[g] += left.depth_stride;
  }
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) { RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) to(r, v, sum[r][v]); }
}

// Blocks below each other of any number of rows. One loop over all of them: what lies between two blocks is time in which
// nothing is multiplied.
template <int kCols, typename Store, typename Beside>
void multiply_blocks(int rows, Left left, const float* right, std::int64_t right_stride, std::int64_t depth, Store store,
                     Beside beside) {
  for (; rows >= kRowBlock; rows -= kRowBlock) {
    multiply_block<kRowBlock, kCols>(left, right, right_stride, depth, store, beside);
    left.data += kRowBlock * left.row_stride;
    store = store.below(kRowBlock);
  }
  switch (rows) {
    case 5:
      return multiply_block<5, kCols>(left, right, right_stride, depth, store, beside);
    case 4:
      return multiply_block<4, kCols>(left, right, right_stride, depth, store, beside);
    case 3:
      return multiply_block<3, kCols>(left, right, right_stride, depth, store, beside);
    case 2:
      return multiply_block<2, kCols>(left, right, right_stride, depth, store, beside);
    case 1:
      return multiply_block<1, kCols>(left, right, right_stride, depth, store, beside);
    default:
      return;
  }
}

template <typename Store, typename Beside = Soon>
void multiply(int rows, int vectors, const Left& left, const float* right, std::int64_t right_stride, std::int64_t depth,
              const Store& store, Beside beside = {}) {
  if constexpr (kVectors >= 4) {
    if (vectors == 4) return multiply_blocks<4>(rows, left, right, right_stride, depth, store, beside);
    if (vectors == 3) return multiply_blocks<3>(rows, left, right, right_stride, depth, store, beside);
  }
  if (vectors == 2) return multiply_blocks<2>(rows, left, right, right_stride, depth, store, beside);
  return multiply_blocks<1>(rows, left, right, right_stride, depth, store, beside);
}

// Where a product goes; below(r): the same of the rows from r on.
struct Assign {
  float* out;
  std::int64_t stride;
  RINGSPAN_INLINE void operator()(int r, int v, Reg sum) const { Isa::store(out + r * stride + v * kWidth, sum); }
  RINGSPAN_INLINE Assign below(int r) const { return {out + r * stride, stride}; }
};

struct Add {
  float* out;
  std::int64_t stride;
  RINGSPAN_INLINE void operator()(int r, int v, Reg sum) const {
    float* p = out + r * stride + v * kWidth;
    Isa::store(p, Isa::load(p) + sum);
  }
  RINGSPAN_INLINE Add below(int r) const { return {out + r * stride, stride}; }
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
  RINGSPAN_INLINE ShrinkAndAdd below(int r) const { return {out + r * stride, stride, shrink + r}; }
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
  RINGSPAN_INLINE AddToRows below(int r) const { return {rows + r, column, width}; }
};

// Of each block of rows the range of columns that a row of it sees.
constexpr int kMaxBlocks = (kMaxKeyTile + kRowBlock - 1) / kRowBlock;
inline void ranges_of_blocks(const std::int32_t* begin, const std::int32_t* end, int rows, Range* ranges) {
  for (int row = 0; row < rows; row += kRowBlock, ++ranges) *ranges = union_of(begin, end, row, at_most(row + kRowBlock, rows));
}

// run(row, count, range) for the rows whose blocks of `step` rows follow each other and have the same range; none where it is
// empty. range_of(row): of the block that begins there.
template <typename RangeOf, typename Run>
RINGSPAN_INLINE void for_equal_ranges(int rows, int step, const RangeOf& range_of, const Run& run) {
  Range next = rows > 0 ? range_of(0) : Range{0, 0};
  for (int row = 0; row < rows;) {
    const Range range = next;
    int end = row;
    do {
      end += step;
      if (end < rows) next = range_of(end);
    } while (end < rows && next.begin == range.begin && next.end == range.end);
    end = at_most(end, rows);
    if (!range.empty()) run(row, end - row, range);
    row = end;
  }
}

// out[rows][columns] (op)= left x columns of a packed "columns" matrix, only where blocks of rows have a range; used for the
// scores of a tile: `depth` is the head dimension.
template <typename Beside>
void multiply_columns(int rows, int columns, const float* left, std::int64_t left_stride, const float* packed, int depth,
                      float* out, std::int64_t out_stride, const Range* ranges, Beside beside) {
  for (int first = 0; first < columns; first += kPanel) {
    const int width = up(at_most(columns - first, kPanel));
    const float* panel = packed + static_cast<std::int64_t>(first) * depth;
    const auto seen = [&](int row) {
      const Range range = ranges[row / kRowBlock];
      return Range{at_least(down(range.begin) - first, 0), at_most(up(range.end) - first, width)};
    };
    for_equal_ranges(rows, kRowBlock, seen, [&](int row, int count, Range range) {
      multiply(count, (range.end - range.begin) / kWidth, Left{left + row * left_stride, left_stride, 1}, panel + range.begin,
               width, depth, Assign{out + row * out_stride + first + range.begin, out_stride}, beside);
    });
  }
}

// ---- forward -----------------------------------------------------------------------------------------------------------

TileSizes forward_sizes(const TileDims&) { return {{96, 256}, {kRowBlock, 32}, {kFewRows, 64}, {kMaxQueryTile, kMaxKeyTile}}; }

constexpr std::int64_t score_stride(const TileDims& dims) { return dims.tile.keys + kScorePad; }
constexpr std::int64_t query_stride(const TileDims& dims) { return (dims.head_dim + 15) / 16 * 16; }
constexpr std::int64_t float_bytes(std::int64_t count) { return (count * 4 + 63) / 64 * 64; }

ForwardBytes forward_bytes(const TileDims& dims) {
  const std::int64_t rows = dims.tile.queries, keys = dims.tile.keys;
  const std::int64_t scores = rows * score_stride(dims), few = (dims.head_dim + keys) * up(kFewRows);  // see attend_few
  return {float_bytes(keys * dims.head_dim), float_bytes(keys * up(dims.head_dim_v)), float_bytes(rows * query_stride(dims)),
          float_bytes(scores > few ? scores : few)};
}

bool pack_keys(const TileDims& dims, void* out, const RowSource& k) {
  kPackColumns[dims.dtype](static_cast<float*>(out), k, 1.0F);
  return true;
}
bool pack_values(const TileDims& dims, void* out, const RowSource& v) {
  return kPackPanels[dims.dtype](static_cast<float*>(out), v, 1.0F);
}
// Scale goes into the queries, in both passes alike, so that both see the same bits of a score.
bool pack_queries(const TileDims& dims, void* out, const RowSource& q, float scale) {
  kPackRows[dims.dtype](static_cast<float*>(out), query_stride(dims), q, scale);
  return true;
}

// The options of a row, and -inf at the masked pairs of its first and last vector.
inline void finish_scores(const ForwardTile& tile, int row) {
  float* s = static_cast<float*>(tile.work) + row * score_stride(tile.dims);
  const int begin = tile.begin[row], end = tile.end[row], first = down(begin), last = up(end);
  if (tile.softcap > 0.0F) {
    const Reg cap = Isa::set1(tile.softcap), inverse = Isa::set1(1.0F / tile.softcap);
    for (int c = first; c < last; c += kWidth) Isa::store(s + c, cap * tanh_of(Isa::load(s + c) * inverse));
  }
  if (tile.slope != nullptr) subtract_alibi(s, begin, end, *tile.slope, tile.distance[row], tile.distance_step);
  fill(s, first, begin, -kInf);
  fill(s, end, last, -kInf);
}

// The largest score of a row, lane by lane.
RINGSPAN_INLINE Reg row_maximum(const float* s, int first, int last) {
  Reg top[4] = {Isa::set1(-kInf), Isa::set1(-kInf), Isa::set1(-kInf), Isa::set1(-kInf)};
  int c = first;
  for (; c + 4 * kWidth <= last; c += 4 * kWidth) {
    RINGSPAN_UNROLL for (int i = 0; i < 4; ++i) top[i] = Isa::max(Isa::load(s + c + i * kWidth), top[i]);
  }
  for (; c < last; c += kWidth) top[0] = Isa::max(Isa::load(s + c), top[0]);
  return Isa::max(Isa::max(top[0], top[1]), Isa::max(top[2], top[3]));
}

// Scores of a row become probabilities, zero in the rest of `range`. Returns their sum, vector by vector.
inline Reg row_exponentials(const ForwardTile& tile, int row, Range range, float origin) {
  float* s = static_cast<float*>(tile.work) + row * score_stride(tile.dims);
  const int begin = tile.begin[row], end = tile.end[row];
  Reg sum = Isa::zero();
  if (begin >= end) {
    fill(s, range.begin, range.end, 0.0F);
    return sum;
  }
  const int first = down(begin), last = up(end);
  const Reg shift = Isa::set1(origin);
  const std::int64_t next = row + kWidth < tile.rows ? kWidth * score_stride(tile.dims) : 0;  // of the next group
  for (int c = first; c < last; c += kWidth) {
    fetch_near(s + next + c);
    const Reg p = exp_of(Isa::load(s + c) - shift);
    sum += p;
    Isa::store(s + c, p);
  }
  if (tile.factors != nullptr) {
    const float* factors = tile.factors + row * tile.factor_stride;
    for (int c = begin; c < end; ++c) s[c] *= factors[c];
  }
  fill(s, range.begin, first, 0.0F);
  fill(s, last, range.end, 0.0F);
  return sum;
}

// Scores of at most kWidth rows become probabilities relative to their new maxima; shrink: e^(m - m'). Rows side by side, so
// that one waits for its maximum and its sum while the others go on. ranges[i]: of the i-th block of rows of the tile.
inline void softmax_rows(const ForwardTile& tile, int row, int count, const Range* ranges, float* shrink) {
  Reg lanes[kWidth];
  const bool options = tile.softcap > 0.0F || tile.slope != nullptr;
  for (int r = 0; r < kWidth; ++r) {
    lanes[r] = Isa::set1(-kInf);
    if (r >= count || tile.begin[row + r] >= tile.end[row + r]) continue;
    const int begin = tile.begin[row + r], end = tile.end[row + r], first = down(begin), last = up(end);
    if (options || first != begin || last != end) finish_scores(tile, row + r);
    lanes[r] = row_maximum(static_cast<const float*>(tile.work) + (row + r) * score_stride(tile.dims), first, last);
  }
  Isa::transpose(lanes);
  RINGSPAN_UNROLL for (int width = kWidth / 2; width > 0; width /= 2) {
    RINGSPAN_UNROLL for (int r = 0; r < width; ++r) lanes[r] = Isa::max(lanes[r], lanes[r + width]);
  }
  const Reg tile_m = lanes[0], old_m = Isa::load_partial(tile.m + row, count);
  const Reg new_m = tile_m > old_m ? tile_m : old_m;
  float origins[kWidth];
  Isa::store(origins, new_m == Isa::set1(-kInf) ? Isa::zero() : new_m);  // no inf - inf while a row has only scores of -inf
  for (int r = 0; r < kWidth; ++r)
    lanes[r] = r < count ? row_exponentials(tile, row + r, ranges[(row + r) / kRowBlock], origins[r]) : Isa::zero();
  Isa::transpose(lanes);
  RINGSPAN_UNROLL for (int width = kWidth / 2; width > 0; width /= 2) {
    RINGSPAN_UNROLL for (int r = 0; r < width; ++r) lanes[r] += lanes[r + width];
  }
  const Reg factor = old_m == new_m ? Isa::set1(1.0F) : exp_of(old_m - new_m);
  Isa::store_partial(shrink + row, factor, count);
  Isa::store_partial(tile.m + row, new_m, count);
  Isa::store_partial(tile.l + row, Isa::fma(Isa::load_partial(tile.l + row, count), factor, lanes[0]), count);
}

// acc = acc shrink + p v for rows [row, row + rows) over keys of `range`.
inline void accumulate_rows(const ForwardTile& tile, const float* panel, int column, int width, int row, int rows, Range range,
                            const float* shrink) {
  const std::int64_t stride = score_stride(tile.dims);
  multiply(rows, width / kWidth, Left{static_cast<const float*>(tile.work) + row * stride + range.begin, stride, 1},
           panel + static_cast<std::int64_t>(range.begin) * width, width, range.end - range.begin,
           ShrinkAndAdd{tile.acc + row * tile.acc_stride + column, tile.acc_stride, shrink + row}, Soon{tile.ahead});
}

void attend_tile(const ForwardTile& tile) {
  Range ranges[kMaxBlocks] = {};
  ranges_of_blocks(tile.begin, tile.end, tile.rows, ranges);
  float shrink[kMaxQueryTile];
  multiply_columns(tile.rows, tile.keys, static_cast<const float*>(tile.q), query_stride(tile.dims),
                   static_cast<const float*>(tile.k), tile.dims.head_dim, static_cast<float*>(tile.work),
                   score_stride(tile.dims), ranges, Soon{tile.ahead});
  for (int row = 0; row < tile.rows; row += kWidth) softmax_rows(tile, row, at_most(kWidth, tile.rows - row), ranges, shrink);
  for (int column = 0; column < tile.dims.head_dim_v; column += kPanel) {
    const int width = up(at_most(tile.dims.head_dim_v - column, kPanel));
    const float* panel = static_cast<const float*>(tile.v) + static_cast<std::int64_t>(column) * tile.keys;
    // Where a probability of zero may not meet a value, each row over its own keys: 0 inf is NaN.
    const auto seen = [&](int row) { return tile.v_finite ? ranges[row / kRowBlock] : Range{tile.begin[row], tile.end[row]}; };
    for_equal_ranges(tile.rows, tile.v_finite ? kRowBlock : 1, seen, [&](int row, int count, Range range) {
      accumulate_rows(tile, panel, column, width, row, count, range, shrink);
    });
  }
}

}  // namespace
}  // namespace ringspan::kernels
