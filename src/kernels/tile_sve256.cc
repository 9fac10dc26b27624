// AArch64 with SVE vectors of 256 bits.
#if defined(__aarch64__)
#include <arm_sve.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tile.h"

namespace ringspan::kernels {
namespace {

struct Isa {
  typedef svfloat32_t Reg __attribute__((arm_sve_vector_bits(256)));
  typedef svint32_t Ints __attribute__((arm_sve_vector_bits(256)));
  static constexpr int kWidth = 8;
  static constexpr int kVectors = 4;  // 6 x 4 sums, 4 of the right operand and 1 of the left: 29 of 32 registers

  static svbool_t all() { return svptrue_b32(); }
  static svbool_t first(int n) { return svwhilelt_b32(0, n); }
  static Reg zero() { return svdup_f32(0.0F); }
  static Reg set1(float x) { return svdup_f32(x); }
  static Reg load(const float* p) { return svld1_f32(all(), p); }
  static void store(float* p, Reg x) { svst1_f32(all(), p, x); }
  static Reg load_partial(const float* p, int n) { return svld1_f32(first(n), p); }
  static void store_partial(float* p, Reg x, int n) { svst1_f32(first(n), p, x); }
  static Reg load_bf16(const std::uint16_t* p) {
    return svreinterpret_f32_u32(svlsl_n_u32_x(all(), svld1uh_u32(all(), p), 16));
  }
  static Reg load_f16(const std::uint16_t* p) { return svcvt_f32_f16_x(all(), svreinterpret_f16_u32(svld1uh_u32(all(), p))); }
  static Reg fma(Reg a, Reg b, Reg c) { return svmla_f32_x(all(), c, a, b); }
  static Reg max(Reg a, Reg b) { return svsel_f32(svcmpgt_f32(all(), a, b), a, b); }
  static Reg last_bits_as_exponent(Reg x) { return svreinterpret_f32_s32(svlsl_n_s32_x(all(), svreinterpret_s32_f32(x), 23)); }
  static float reduce_add(Reg x) { return svaddv_f32(all(), x); }
  static float reduce_max(Reg x) { return svmaxnmv_f32(all(), x); }
  static void transpose(Reg (&t)[8]) {
    Reg pairs[8], quads[8];  // t[i] and t[i + 4] first, so that interleaving thrice puts columns in order
    for (int i = 0; i < 4; ++i) {
      pairs[2 * i] = svzip1_f32(t[i], t[i + 4]);
      pairs[2 * i + 1] = svzip2_f32(t[i], t[i + 4]);
    }
    for (int i = 0; i < 4; ++i) {
      quads[2 * i] = svzip1_f32(pairs[i], pairs[i + 4]);
      quads[2 * i + 1] = svzip2_f32(pairs[i], pairs[i + 4]);
    }
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = svzip1_f32(quads[i], quads[i + 4]);
      t[2 * i + 1] = svzip2_f32(quads[i], quads[i + 4]);
    }
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_generic.h"
#include "kernels/tile_generic_backward.h"

namespace ringspan::kernels {
const TileOps kTileSve256 = make_tile_ops();
}
#endif
