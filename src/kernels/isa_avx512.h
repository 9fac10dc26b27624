// The float32 vectors of AVX-512 (F, DQ, BW, VL), for tile_generic.h and tile_pairs.h. Only for files compiled for it.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/tile.h"

namespace ringspan::kernels {
namespace {

struct Isa {
  using Reg = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kVectors = 4;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set1(float x) { return _mm512_set1_ps(x); }
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static __mmask16 first(int n) { return static_cast<__mmask16>((1U << n) - 1U); }
  static Reg load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_partial(float* p, Reg x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static Reg load_bf16(const std::uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Reg load_f16(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg fraction(Reg x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static Reg ldexp(Reg x, Reg n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ), x, n);
  }
  static float reduce_add(Reg x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(Reg x) { return _mm512_reduce_max_ps(x); }
  static Reg set_group(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  template <int kSets>
  static void add_groups(const Reg (&x)[kSets][4], Reg (&s)[kSets]) {
    Reg sum[kSets];  // by 128 bits: one of each
    for (int n = 0; n < kSets; ++n) {
      const Reg a = _mm512_mask_blend_ps(0xcccc, x[n][0], x[n][1]) + _mm512_shuffle_ps(x[n][0], x[n][1], 0x4e);
      const Reg b = _mm512_mask_blend_ps(0xcccc, x[n][2], x[n][3]) + _mm512_shuffle_ps(x[n][2], x[n][3], 0x4e);
      sum[n] = _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
    }
    if constexpr (kSets == 1) {
      s[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sum[0]);
    } else {
      const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
      const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(2));
      for (int n = 0; n < kSets; n += 2) {
        s[n] = _mm512_permutex2var_ps(sum[n], first, sum[n + 1]);
        s[n + 1] = _mm512_permutex2var_ps(sum[n], last, sum[n + 1]);
      }
    }
    if constexpr (kSets == 4) {
      const Reg even[2] = {_mm512_shuffle_f32x4(s[0], s[2], 0x44), _mm512_shuffle_f32x4(s[1], s[3], 0x44)};
      s[3] = _mm512_shuffle_f32x4(s[1], s[3], 0xee), s[1] = _mm512_shuffle_f32x4(s[0], s[2], 0xee);
      s[0] = even[0], s[2] = even[1];
    }
  }
  static void transpose(Reg (&t)[16]) {
    Reg a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(t[i], t[i + 1]);
      a[i + 1] = _mm512_unpackhi_ps(t[i], t[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
      b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
      b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    // b[4 g + c] holds columns c, c + 4, c + 8, c + 12 of rows 4 g .. 4 g + 3, one per 128-bit lane.
    for (int c = 0; c < 4; ++c) {
      const Reg low = _mm512_shuffle_f32x4(b[c], b[c + 4], 0x88), high = _mm512_shuffle_f32x4(b[c], b[c + 4], 0xdd);
      const Reg low2 = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0x88), high2 = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0xdd);
      t[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
      t[c + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
      t[c + 8] = _mm512_shuffle_f32x4(low, low2, 0xdd);
      t[c + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
  }
};

}  // namespace
}  // namespace ringspan::kernels
