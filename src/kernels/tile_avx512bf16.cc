// AVX512-BF16: dot products of pairs in vectors.
#if defined(__x86_64__)
#include "kernels/isa_avx512.h"
#include "kernels/tile_pairs.h"

namespace ringspan::kernels {
namespace {

// Broadcast from memory, as float, which GCC does in one instruction; rows that are read in place begin at any word.
typedef float __attribute__((may_alias, aligned(2))) PairBits;

struct Dot {
  static constexpr bool kSplits = false;
  static constexpr bool kFetchesQueries = true;
  static constexpr bool kNarrow = true;
  static constexpr int kPanels = 4;
  static constexpr bool kInRegisters = true;
  static constexpr bool turns(const TileDims&) { return false; }
  struct Session {
    Session() {}
    ~Session() {}
  };

  // sum[n][r][v] += row r of left n x panel v of right n. Products beside each other where the sums of one are few: a dot
  // product takes six cycles, two at a time.
  template <int kCount, int kRowCount, int kPanelCount>
  RINGSPAN_INLINE static void add_products(const Left (&left)[kCount], const Right (&right)[kCount], const int (&depth)[kCount],
                                           Reg (&sum)[kCount][kRowCount][kPanelCount]) {
    constexpr int kGroup = 3, kGroups = (kRowCount + kGroup - 1) / kGroup;  // rows that addresses of one stride reach
    const Word *a[kCount][kGroups], *b[kCount];
    int both = depth[0];
    RINGSPAN_UNROLL for (int n = 0; n < kCount; ++n) {
      RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) a[n][g] = left[n].data + g * kGroup * left[n].stride;
      b[n] = right[n].data;
      both = at_most(both, depth[n]);
    }
    const auto step = [&](int n) __attribute__((always_inline)) {
      __m512i column[kPanelCount];
      RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) column[v] = _mm512_loadu_si512(b[n] + v * right[n].panel);
      RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
        const Word* element = a[n][r / kGroup] + r % kGroup * left[n].stride;
        const __m512i row = _mm512_castps_si512(_mm512_set1_ps(*reinterpret_cast<const PairBits*>(element)));
        RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) sum[n][r][v] =
            _mm512_dpbf16_ps(sum[n][r][v], (__m512bh)row, (__m512bh)column[v]);
      }
      RINGSPAN_UNROLL for (int g = 0; g < kGroups; ++g) a[n][g] += 2;
      b[n] += kChunk;
    };
    for (int k = 0; k < both; k += 2) {
      RINGSPAN_UNROLL for (int n = 0; n < kCount; ++n) step(n);
    }
    RINGSPAN_UNROLL for (int n = 0; n < kCount; ++n) {
      for (int k = both; k < depth[n]; k += 2) step(n);
    }
  }

  template <int kRowCount, int kPanelCount>
  RINGSPAN_INLINE static void vectors(const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride,
                                      bool add, float* tops) {
    Reg sums[1][kRowCount][kPanelCount];
    auto& sum = sums[0];
    RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
      RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) sum[r][v] =
          add ? Isa::load(c + r * c_stride + v * kWidth) : Isa::zero();
    }
    add_products({left}, {right}, {depth}, sums);
    if (tops != nullptr) {
      RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
        Reg top = Isa::load(tops + r * kWidth);
        RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) top = Isa::max(sum[r][v], top);
        Isa::store(tops + r * kWidth, top);
      }
    }
    RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
      RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) Isa::store(c + r * c_stride + v * kWidth, sum[r][v]);
    }
  }

  // Blocks as even as can be (32 rows are two of 6 and four of 5), those of one size in one loop: what lies between two blocks
  // is time in which nothing is multiplied.
  template <int kPanelCount>
  static void rows_of(int rows, Left left, const Right& right, int depth, float* c, std::int64_t c_stride, bool add,
                      Ahead* ahead, float* tops) {
    const auto block = [&]<int kCount>() __attribute__((always_inline)) {
      vectors<kCount, kPanelCount>(left, right, depth, c, c_stride, add, tops);
      if (tops != nullptr) tops += kCount * kWidth;
      left.data += kCount * left.stride;
      c += kCount * c_stride;
      rows -= kCount;
      if (ahead != nullptr) fetch_lines(ahead, ahead->step);
    };
    for (int sixes = rows - 5 * ((rows + 5) / 6); sixes > 0; --sixes) block.template operator()<6>();
    while (rows >= 5) block.template operator()<5>();
    if (rows == 4) block.template operator()<4>();
    if (rows == 3) block.template operator()<3>();
    if (rows == 2) block.template operator()<2>();
    if (rows == 1) block.template operator()<1>();
  }

  template <typename Products>
  static void column(int rows, int panels, const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride,
                     bool add, Ahead* ahead, float* tops) {
    static_assert(Products::kCount == 1);
    if (panels == 4) return rows_of<4>(rows, left, right, depth, c, c_stride, add, ahead, tops);
    if (panels == 3) return rows_of<3>(rows, left, right, depth, c, c_stride, add, ahead, tops);
    if (panels == 2) return rows_of<2>(rows, left, right, depth, c, c_stride, add, ahead, tops);
    return rows_of<1>(rows, left, right, depth, c, c_stride, add, ahead, tops);
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_pairs_backward.h"

namespace ringspan::kernels {
const TileOps kTileAvx512Bf16 = make_pair_tile_ops();
}
#endif
