// Part of tile_generic.h: keys and values of few queries. They are used once, so they are not packed: float32 rows are read
// where they lie, 16-bit ones converted to rows, as many at a time as the first cache holds.
namespace ringspan::kernels {
namespace {

constexpr int kFewKeys = kPanel >= 16 ? 12 : 6;  // of a block of one vector of queries: chains that hide the latency

template <typename Type>
struct RowsOf {
  const typename Type::Type* data;
  std::int64_t stride;
};
using FewRows = RowsOf<Float32>;

// Keys and values as float32 rows, some at a time: themselves, or copies in `space`, also where vectors would read beyond the
// end of a row.
class FloatRows {
 public:
  FloatRows(const TileDims& dims, const RowSource& source, void* space, bool whole_vectors)
      : dtype_(dims.dtype),
        source_(source),
        copy_(static_cast<float*>(space)),
        copies_(dims.dtype != 0 || (whole_vectors && source.width % kWidth != 0)),
        stride_(whole_vectors ? up(source.width) : source.width) {}

  const RowSource& source() const { return source_; }

  // function(rows, first, count), for the rows that are had at once, a multiple of `block`; `again`: each part is read several
  // times.
  template <typename Function>
  void in_parts(int block, bool again, const Function& function) const {
    const int step = copies_ || again ? part(block) : source_.rows;
    for (int first = 0; first < source_.rows; first += step) {
      const int count = at_most(step, source_.rows - first);
      function(at(first, count), first, count);
    }
  }

 private:
  // Rows that fit the first cache.
  int part(int block) const {
    constexpr int kElements = 4096;  // 16 KiB
    return block * at_least(kElements / static_cast<int>(stride_) / block, 1);
  }

  FewRows at(int first, int count) const {
    const std::int64_t size = dtype_ == 0 ? 4 : 2;
    RowSource rows = source_;
    rows.data = static_cast<const char*>(source_.data) + first * source_.stride * size;
    rows.rows = count;
    if (!copies_) return {static_cast<const float*>(rows.data), source_.stride};
    kCopyRows[dtype_](copy_, stride_, rows);
    return {copy_, stride_};
  }

  int dtype_;
  const RowSource& source_;
  float* copy_;
  bool copies_;
  std::int64_t stride_;
};

// Rows of probabilities so few that values are read in place: converting 16 bits costs less than a copy would, even where there
// are registers for half of the rows only.
constexpr int kRowsInPlace = kVectors >= 4 ? 16 : 8, kRowsAtOnce = kVectors >= 4 ? 8 : 4;

// acc = acc shrink + p v of kRows rows and kCols vectors, over `depth` values that lie near each other.
template <typename Type, int kRows, int kCols>
void values_of_block(const Left& p, const typename Type::Type* values, std::int64_t stride, int depth, const ShrinkAndAdd& add,
                     FarLines* next) {
  constexpr int kBytes = kCols * kWidth * sizeof(typename Type::Type);
  constexpr int kSteps = kBytes < 64 ? 64 / kBytes : 1, kLines = kSteps * kBytes / 64;
  constexpr bool kInHalves = has_halves<Type>() && kCols % 2 == 0;
  Reg sum[kRows][kCols];
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) { RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) sum[r][v] = Isa::zero(); }
  const float* a = p.data;
  const auto step = [&]() __attribute__((always_inline)) {
    Reg b[kCols];
    if constexpr (kInHalves) {
      RINGSPAN_UNROLL for (int v = 0; v < kCols; v += 2) {
        const Halves x = load_halves(values + v * kWidth);
        b[v] = x.even, b[v + 1] = x.odd;
      }
    } else {
      RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) b[v] = Type::load(values + v * kWidth);
    }
    RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
      const Reg x = Isa::set1(a[r * p.row_stride]);
      RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) sum[r][v] = Isa::fma(x, b[v], sum[r][v]);
    }
    a += p.depth_stride, values += stride;
  };
  FarLines far = *next;  // a copy, which stays in registers
  int k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    far.fetch<kLines>();
    RINGSPAN_UNROLL for (int i = 0; i < kSteps; ++i) step();
  }
  for (; k < depth; ++k) step();
  *next = far;
  if constexpr (kInHalves) {
    RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) {
      RINGSPAN_UNROLL for (int v = 0; v < kCols; v += 2) put_in_order(sum[r][v], sum[r][v + 1]);
    }
  }
  RINGSPAN_UNROLL for (int r = 0; r < kRows; ++r) { RINGSPAN_UNROLL for (int v = 0; v < kCols; ++v) add(r, v, sum[r][v]); }
}

// Of kRows rows from `row` on, as often as they are there, over values [first, first + depth).
template <typename Type, int kRows>
int values_of_rows(const ForwardTile& tile, const RowSource& values, int first, int depth, const Left& p, const float* shrink,
                   int row) {
  constexpr int kCols = kRows == 8 ? 2 : kVectors;
  for (; row + kRows <= tile.rows; row += kRows) {
    const auto* const data = static_cast<const typename Type::Type*>(values.data) + first * values.stride;
    const Left left{p.data + row * p.row_stride + first * p.depth_stride, p.row_stride, p.depth_stride};
    ShrinkAndAdd add{tile.acc + row * tile.acc_stride, tile.acc_stride, shrink + row};
    FarLines far(values, first, sizeof *data, value_bytes(tile));
    if (row > 0) far.stay(data);  // they are already
    int column = 0;
    for (; column + kCols * kWidth <= tile.dims.head_dim_v; column += kCols * kWidth, add.out += kCols * kWidth)
      values_of_block<Type, kRows, kCols>(left, data + column, values.stride, depth, add, &far);
    for (; column < tile.dims.head_dim_v; column += kWidth, add.out += kWidth)
      values_of_block<Type, kRows, 1>(left, data + column, values.stride, depth, add, &far);
  }
  return row;
}

template <typename Type>
void values_in_place(const ForwardTile& tile, const RowSource& values, const Left& p, float* shrink) {
  const int part = far_rows(values, sizeof(typename Type::Type), value_bytes(tile));
  for (int first = 0; first < values.rows; first += part) {
    const int depth = at_most(part, values.rows - first);
    int row = 0;
    if constexpr (kRowsAtOnce == 8) row = values_of_rows<Type, 8>(tile, values, first, depth, p, shrink, row);
    row = values_of_rows<Type, 4>(tile, values, first, depth, p, shrink, row);
    row = values_of_rows<Type, 2>(tile, values, first, depth, p, shrink, row);
    values_of_rows<Type, 1>(tile, values, first, depth, p, shrink, row);
    if (first == 0) fill(shrink, 0, tile.rows, 1.0F);
  }
}

inline bool values_are_in_place(const ForwardTile& tile) {
  return tile.task_rows <= kRowsInPlace && tile.dims.head_dim_v % kWidth == 0;
}

// acc = acc shrink + p v; p: element (query, key), of the first key.
inline void few_values(const ForwardTile& tile, const FloatRows& values, const Left& p, float* shrink) {
  if (values_are_in_place(tile)) {
    return tile.dims.dtype == 0   ? values_in_place<Float32>(tile, values.source(), p, shrink)
           : tile.dims.dtype == 1 ? values_in_place<BFloat16>(tile, values.source(), p, shrink)
                                  : values_in_place<Float16>(tile, values.source(), p, shrink);
  }
  values.in_parts(kFewKeys, tile.task_rows > kRowBlock, [&](const FewRows& here, int first, int count) {
    for (int column = 0; column < tile.dims.head_dim_v; column += kPanel) {
      const int width = up(at_most(tile.dims.head_dim_v - column, kPanel));
      multiply(tile.rows, width / kWidth, Left{p.data + first * p.depth_stride, p.row_stride, p.depth_stride},
               here.data + column, here.stride, count, ShrinkAndAdd{tile.acc + column, tile.acc_stride, shrink},
               Evenly{tile.ahead});
    }
    if (first == 0) fill(shrink, 0, tile.rows, 1.0F);
  });
}

}  // namespace
}  // namespace ringspan::kernels
