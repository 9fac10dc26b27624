// Any machine: vectors of 128 bits in the compiler's own vector types, multiplications and additions rounded separately.
#include <cstddef>
#include <cstdint>

#include "base/float16.h"
#include "kernels/tile.h"

namespace ringspan::kernels {
namespace {

struct Isa {
  typedef float Reg __attribute__((vector_size(16), aligned(16)));
  typedef float Unaligned __attribute__((vector_size(16), aligned(4)));
  typedef std::int32_t Ints __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;
  static constexpr int kVectors = 2;

  static Reg zero() { return Reg{}; }
  static Reg set1(float x) { return Reg{x, x, x, x}; }
  static Reg load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
  static void store(float* p, Reg x) { *reinterpret_cast<Unaligned*>(p) = x; }
  static Reg load_partial(const float* p, int n) {
    Reg x{};
    for (int i = 0; i < n; ++i) x[i] = p[i];
    return x;
  }
  static void store_partial(float* p, Reg x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
  }
  static Reg load_bf16(const std::uint16_t* p) {
    return Reg{bfloat16_to_float(p[0]), bfloat16_to_float(p[1]), bfloat16_to_float(p[2]), bfloat16_to_float(p[3])};
  }
  static Reg load_f16(const std::uint16_t* p) {
    return Reg{float16_to_float(p[0]), float16_to_float(p[1]), float16_to_float(p[2]), float16_to_float(p[3])};
  }
  static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
  static Reg max(Reg a, Reg b) { return a > b ? a : b; }
  static Reg last_bits_as_exponent(Reg x) { return reinterpret_cast<Reg>(reinterpret_cast<Ints>(x) << 23); }
  static float reduce_add(Reg x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float reduce_max(Reg x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }
  static void transpose(Reg (&t)[4]) {
    const Reg a = t[0], b = t[1], c = t[2], d = t[3];
    for (int i = 0; i < 4; ++i) t[i] = Reg{a[i], b[i], c[i], d[i]};
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_generic.h"
#include "kernels/tile_generic_backward.h"

namespace ringspan::kernels {
const TileOps kTilePortable = make_tile_ops();
}
