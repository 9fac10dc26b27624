// Part of tile_generic.h: keys and values of few queries. They are used once, so they are not packed: float32 rows are read
// where they lie, 16-bit ones converted to rows, as many at a time as the first cache holds.
namespace ringspan::kernels {
namespace {

constexpr int kFewKeys = kPanel >= 16 ? 12 : 6;  // of a block of one vector of queries: chains that hide the latency

struct FewRows {
  const float* data;
  std::int64_t stride;
};

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

  // function(rows, first, count), for the rows that are had at once; `again`: each part is read several times.
  template <typename Function>
  void in_parts(bool again, const Function& function) const {
    const int step = copies_ || again ? part() : source_.rows;
    for (int first = 0; first < source_.rows; first += step) {
      const int count = at_most(step, source_.rows - first);
      function(at(first, count), first, count);
    }
  }

 private:
  // Rows that fit the first cache: a multiple of the keys of a block.
  int part() const {
    constexpr int kElements = 4096;  // 16 KiB
    return kFewKeys * at_least(kElements / static_cast<int>(stride_) / kFewKeys, 1);
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

// Values of 16 bits that so few rows of probabilities read that converting them costs less than a copy would.
constexpr int kRowsInPlace = kVectors >= 4 ? 8 : 4;

template <typename Type, int kRows, int kCols>
void values_of_rows(const ForwardTile& tile, const RowSource& values, const Left& p, const float* shrink, int row,
                    int& column) {
  const auto* const data = static_cast<const std::uint16_t*>(values.data);
  for (; column + kCols * kWidth <= tile.dims.head_dim_v; column += kCols * kWidth) {
    multiply_block<kRows, kCols, Type>(
        Left{p.data + row * p.row_stride, p.row_stride, p.depth_stride}, data + column, values.stride, values.rows,
        ShrinkAndAdd{tile.acc + row * tile.acc_stride + column, tile.acc_stride, shrink + row}, tile.ahead);
  }
}

template <typename Type, int kRows>
int values_in_place(const ForwardTile& tile, const RowSource& values, const Left& p, const float* shrink, int row) {
  for (; row + kRows <= tile.rows; row += kRows) {
    int column = 0;
    values_of_rows<Type, kRows, kRows == 8 ? 2 : kVectors>(tile, values, p, shrink, row, column);
    values_of_rows<Type, kRows, 1>(tile, values, p, shrink, row, column);
  }
  return row;
}

template <typename Type>
void values_in_place(const ForwardTile& tile, const RowSource& values, const Left& p, const float* shrink) {
  int row = 0;
  if constexpr (kRowsInPlace == 8) row = values_in_place<Type, 8>(tile, values, p, shrink, row);
  row = values_in_place<Type, 4>(tile, values, p, shrink, row);
  row = values_in_place<Type, 2>(tile, values, p, shrink, row);
  values_in_place<Type, 1>(tile, values, p, shrink, row);
}

// acc = acc shrink + p v; p: element (query, key), of the first key.
inline void few_values(const ForwardTile& tile, const FloatRows& values, const Left& p, float* shrink) {
  if (tile.dims.dtype != 0 && tile.task_rows <= kRowsInPlace && tile.dims.head_dim_v % kWidth == 0) {
    return tile.dims.dtype == 1 ? values_in_place<BFloat16>(tile, values.source(), p, shrink)
                                : values_in_place<Float16>(tile, values.source(), p, shrink);
  }
  values.in_parts(tile.task_rows > kRowBlock, [&](const FewRows& here, int first, int count) {
    for (int column = 0; column < tile.dims.head_dim_v; column += kPanel) {
      const int width = up(at_most(tile.dims.head_dim_v - column, kPanel));
      multiply(tile.rows, width / kWidth, Left{p.data + first * p.depth_stride, p.row_stride, p.depth_stride},
               here.data + column, here.stride, count, ShrinkAndAdd{tile.acc + column, tile.acc_stride, shrink}, tile.ahead);
    }
    if (first == 0) fill(shrink, 0, tile.rows, 1.0F);
  });
}

}  // namespace
}  // namespace ringspan::kernels
