// AMX: tiles of bfloat16 (AMX-TILE, AMX-BF16), with AVX-512 and AVX512-BF16 for everything else.
#if defined(__x86_64__)
#include "kernels/isa_avx512.h"
#include "kernels/tile_pairs.h"

namespace ringspan::kernels {
namespace {

// Palette 1; all eight tiles have 16 rows of 64 bytes. A constant: GCC does not know that the instruction reads all of it.
alignas(64) constexpr std::uint8_t kConfiguration[64] = {
    1,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  // palette
    64, 0,  64, 0,  64, 0,  64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  // row bytes
    0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  //
    16, 16, 16, 16, 16, 16, 16, 16};                            // rows

// Tiles 0 to 3 are a block of sums, 4 and 5 left operands, 6 and 7 right ones.
struct Dot {
  static constexpr int kRows = 32;
  static constexpr bool kSplits = true;
  static constexpr bool kFetchesQueries = false;
  static constexpr bool kNarrow = false;
  static constexpr int kPanels = 2;
  static constexpr bool kInRegisters = false;

  struct Session {
    Session() { _tile_loadconfig(kConfiguration); }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <typename Products, bool kTwoRows, bool kTwoPanels>
  static void tiles(const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride, bool add) {
    const std::int64_t c_bytes = c_stride * 4, left_bytes = left.stride * 2;
    float* const below = c + 16 * c_stride;
    if (add) {
      _tile_loadd(0, c, c_bytes);
      if (kTwoPanels) _tile_loadd(1, c + 16, c_bytes);
      if (kTwoRows) _tile_loadd(2, below, c_bytes);
      if (kTwoRows && kTwoPanels) _tile_loadd(3, below + 16, c_bytes);
    } else {
      _tile_zero(0);
      if (kTwoPanels) _tile_zero(1);
      if (kTwoRows) _tile_zero(2);
      if (kTwoRows && kTwoPanels) _tile_zero(3);
    }
    for (int k = 0; k < depth; k += kChunk) {
      RINGSPAN_UNROLL for (int n = 0; n < Products::kCount; ++n) {
        const int p = Products::kLeft[n], q = Products::kRight[n];
        const bool new_left = n == 0 || p != Products::kLeft[n - 1], new_right = n == 0 || q != Products::kRight[n - 1];
        const Word* a = left.data + p * left.plane + k;
        const Word* b = right.data + q * right.plane + k * kPanelColumns;
        if (new_right) _tile_loadd(6, b, 64);
        if (new_left) _tile_loadd(4, a, left_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (kTwoRows) {
          if (new_left) _tile_loadd(5, a + 16 * left.stride, left_bytes);
          _tile_dpbf16ps(2, 5, 6);
        }
        if (kTwoPanels) {
          if (new_right) _tile_loadd(7, b + right.panel, 64);
          _tile_dpbf16ps(1, 4, 7);
          if (kTwoRows) _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    _tile_stored(0, c, c_bytes);
    if (kTwoPanels) _tile_stored(1, c + 16, c_bytes);
    if (kTwoRows) _tile_stored(2, below, c_bytes);
    if (kTwoRows && kTwoPanels) _tile_stored(3, below + 16, c_bytes);
  }

  template <typename Products>
  static void block(int rows, int panels, const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride,
                    bool add) {
    if (rows > 16) {
      if (panels == 2) return tiles<Products, true, true>(left, right, depth, c, c_stride, add);
      return tiles<Products, true, false>(left, right, depth, c, c_stride, add);
    }
    if (panels == 2) return tiles<Products, false, true>(left, right, depth, c, c_stride, add);
    return tiles<Products, false, false>(left, right, depth, c, c_stride, add);
  }

  template <typename Products>
  static void column(int rows, int panels, Left left, const Right& right, int depth, float* c, std::int64_t c_stride, bool add,
                     Ahead* ahead, float*) {
    __asm__ volatile("" ::: "memory");  // nor that a load of a tile reads memory: what it reads must have been written
    for (; rows > 0; rows -= kRows, left.data += kRows * left.stride, c += kRows * c_stride) {
      block<Products>(rows, panels, left, right, depth, c, c_stride, add);
      if (ahead != nullptr) fetch_lines(ahead, ahead->step);
    }
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_pairs_backward.h"

namespace ringspan::kernels {
const TileOps kTileAmx = make_pair_tile_ops();
}
#endif
