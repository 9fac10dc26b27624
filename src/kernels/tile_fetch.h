// Part of tile_generic.h and tile_pairs.h: fetching what is read next while something else is computed: what `Ahead` lists, in
// bursts or beside products, and rows that few queries use once.
#pragma once

#include "kernels/tile_math.h"

namespace ringspan::kernels {
namespace {

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

// Rows further on that packing asks for: rows that are far apart lie on pages of their own, which processors do not fetch
// ahead. Not beyond the last: that may be memory that was never written, and asking for it means walking the page tables each
// time. element: of row `row`; of a source without index.
constexpr int kRowsAhead = 16;
template <typename Element>
RINGSPAN_INLINE void fetch_row_ahead(const Element* element, const RowSource& source, int row) {
  __builtin_prefetch(element + (at_most(row + kRowsAhead, source.rows - 1) - row) * source.stride, 0, 3);
}

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
  constexpr std::int64_t kLine = std::int64_t{1} << Ahead::kPaceBits;
  const std::int64_t pace = lines < depths ? lines * kLine / depths : kLine;
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

}  // namespace
}  // namespace ringspan::kernels
