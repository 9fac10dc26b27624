// AVX512-BF16: dot products of pairs in vectors.
#if defined(__x86_64__)
#include "kernels/isa_avx512.h"
#include "kernels/tile_pairs.h"

namespace ringspan::kernels {
namespace {

// Broadcast from memory, as float, which GCC does in one instruction; rows that are read in place begin at any word.
typedef float __attribute__((may_alias, aligned(2))) PairBits;

struct Dot {
  static constexpr int kRows = 6;
  static constexpr bool kSplits = false;
  static constexpr bool kNarrow = true;
  static constexpr int kPanels = 4;
  struct Session {
    Session() {}
    ~Session() {}
  };

  template <typename Products, int kRowCount, int kPanelCount>
  static void vectors(const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride, bool add) {
    Reg sum[kRowCount][kPanelCount];
    RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
      RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) sum[r][v] =
          add ? Isa::load(c + r * c_stride + v * kWidth) : Isa::zero();
    }
    for (int product = 0; product < Products::kCount; ++product) {
      const Word* a = left.data + Products::kLeft[product] * left.plane;
      const Word* b = right.data + Products::kRight[product] * right.plane;
      for (int k = 0; k < depth; k += 2, a += 2, b += kChunk) {
        __m512i column[kPanelCount];
        RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) column[v] = _mm512_loadu_si512(b + v * right.panel);
        RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
          const __m512i row = _mm512_castps_si512(_mm512_set1_ps(*reinterpret_cast<const PairBits*>(a + r * left.stride)));
          RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) sum[r][v] =
              _mm512_dpbf16_ps(sum[r][v], (__m512bh)row, (__m512bh)column[v]);
        }
      }
    }
    RINGSPAN_UNROLL for (int r = 0; r < kRowCount; ++r) {
      RINGSPAN_UNROLL for (int v = 0; v < kPanelCount; ++v) Isa::store(c + r * c_stride + v * kWidth, sum[r][v]);
    }
  }

  template <typename Products, int kRowCount>
  static void rows_of(int panels, const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride, bool add) {
    if (panels == 4) return vectors<Products, kRowCount, 4>(left, right, depth, c, c_stride, add);
    if (panels == 3) return vectors<Products, kRowCount, 3>(left, right, depth, c, c_stride, add);
    if (panels == 2) return vectors<Products, kRowCount, 2>(left, right, depth, c, c_stride, add);
    return vectors<Products, kRowCount, 1>(left, right, depth, c, c_stride, add);
  }

  template <typename Products>
  static void block(int rows, int panels, const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride,
                    bool add) {
    switch (rows) {
      case 6:
        return rows_of<Products, 6>(panels, left, right, depth, c, c_stride, add);
      case 5:
        return rows_of<Products, 5>(panels, left, right, depth, c, c_stride, add);
      case 4:
        return rows_of<Products, 4>(panels, left, right, depth, c, c_stride, add);
      case 3:
        return rows_of<Products, 3>(panels, left, right, depth, c, c_stride, add);
      case 2:
        return rows_of<Products, 2>(panels, left, right, depth, c, c_stride, add);
      default:
        return rows_of<Products, 1>(panels, left, right, depth, c, c_stride, add);
    }
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_pairs_backward.h"

namespace ringspan::kernels {
const TileOps kTileAvx512Bf16 = make_pair_tile_ops();
}
#endif
