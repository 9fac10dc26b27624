// AArch64: Advanced SIMD (NEON), which every such machine has.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tile.h"

namespace ringspan::kernels {
namespace {

struct Isa {
  using Reg = float32x4_t;
  static constexpr int kWidth = 4;
  static constexpr int kVectors = 4;  // 6 x 4 sums, 4 of the right operand and 1 of the left: 29 of 32 registers

  static Reg zero() { return vdupq_n_f32(0.0F); }
  static Reg set1(float x) { return vdupq_n_f32(x); }
  static Reg load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Reg x) { vst1q_f32(p, x); }
  static Reg load_partial(const float* p, int n) {
    Reg x = zero();
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
  }
  static void store_partial(float* p, Reg x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
  }
  static Reg load_bf16(const std::uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static Reg load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
  static Reg max(Reg a, Reg b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static Reg last_bits_as_exponent(Reg x) { return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(x), 23)); }
  static float reduce_add(Reg x) { return vaddvq_f32(x); }
  static float reduce_max(Reg x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }
  static void transpose(Reg (&t)[4]) {
    const float32x4x2_t low = vtrnq_f32(t[0], t[1]), high = vtrnq_f32(t[2], t[3]);
    t[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
    t[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
    t[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
    t[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_generic.h"
#include "kernels/tile_generic_backward.h"

namespace ringspan::kernels {
const TileOps kTileNeon = make_tile_ops();
}
#endif
