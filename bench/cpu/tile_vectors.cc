// What vectors of 512 bits cost beside tiles of AMX, what products cost after a while without any, and what tiles do to the
// clock. Needs AMX-BF16, AVX512-BF16 and Linux:
//     g++ -std=c++20 -O2 -march=native bench/cpu/tile_vectors.cc -o tile_vectors && ./tile_vectors > report.json
// Cycles are those of the clock at which the core runs meanwhile: a chain of multiplications of integers, which take three
// each, is timed beside each measurement.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

alignas(64) std::uint8_t configuration[64] = {1};
alignas(64) char rows[8192];

double ticks_per_cycle() {
  std::uint64_t n = 200, x = 3;
  const std::uint64_t begin = __rdtsc();
  __asm__ volatile("1: imul %1, %1\n imul %1, %1\n imul %1, %1\n imul %1, %1\n dec %0\n jnz 1b" : "+r"(n), "+r"(x));
  return static_cast<double>(__rdtsc() - begin) / (200 * 12.0);
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Time {
  double cycles, ticks;  // per call; time-stamp ticks per cycle
};
// After the clock has settled.
template <typename Function>
Time time_of(const Function& function) {
  std::vector<double> cycles, ticks;
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t begin = __rdtsc();
    std::uint64_t now = begin;
    int calls = 0;
    for (; now - begin < 1000000; now = __rdtsc(), ++calls) function();
    const double clock = ticks_per_cycle();
    if (i < 20) continue;
    cycles.push_back(static_cast<double>(now - begin) / calls / clock);
    ticks.push_back(clock);
  }
  return {median(cycles), median(ticks)};
}

#define PRODUCT "tdpbf16ps %tmm6, %tmm4, %tmm0\n"
#define TO_16(before, after)                                                                                                \
  before "%%zmm0" after before "%%zmm1" after before "%%zmm2" after before "%%zmm3" after before "%%zmm4" after before      \
         "%%zmm5" after before "%%zmm6" after before "%%zmm7" after before "%%zmm8" after before "%%zmm9" after before      \
         "%%zmm10" after before "%%zmm11" after before "%%zmm12" after before "%%zmm13" after before "%%zmm14" after before \
         "%%zmm15" after
#define CLOBBERED                                                                                                              \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
      "xmm15", "k1", "memory"

// 64 of an instruction alone, and beside a product, a load or a store of a tile.
#define INSTRUCTION(name, before, after)                                                                                \
  do {                                                                                                                  \
    const auto times = [](auto tile) {                                                                                  \
      return time_of([&] {                                                                                              \
        for (int i = 0; i < 64; ++i) {                                                                                  \
          tile();                                                                                                       \
          for (int j = 0; j < 4; ++j) __asm__ volatile(TO_16(before, after) : : "r"(rows + 4096) : CLOBBERED);          \
        }                                                                                                               \
      });                                                                                                               \
    };                                                                                                                  \
    std::printf("    \"%s\": {\"alone\": %.2f", name, times([] {}).cycles / 4096);                                      \
    std::printf(", \"product\": %.2f", times([] { __asm__ volatile(PRODUCT); }).cycles / 4096);                         \
    std::printf(", \"load\": %.2f",                                                                                     \
                times([] { __asm__ volatile("tileloadd (%0,%1,1), %%tmm5" ::"r"(rows), "r"(64L)); }).cycles / 4096);    \
    std::printf(                                                                                                        \
        ", \"store\": %.2f}%s\n",                                                                                       \
        times([] { __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(rows), "r"(64L)                                \
                                    : "memory"); }).cycles / 4096, \
        name[0] == 'w' ? "" : ",");                                                                                     \
  } while (false)

void products(int count) {
  for (int i = 0; i < count; ++i) __asm__ volatile(PRODUCT);
}
void wait(int cycles) {
  std::uint64_t x = 3;
  for (int i = 0; i < cycles / 12; ++i) __asm__ volatile("imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0" : "+r"(x));
}
// Cycles of each of 64 products after so many cycles without one.
double products_after(int pause) {
  std::vector<double> ticks, clocks;
  for (int i = 0; i < 8000; ++i) {
    _mm_lfence();
    const std::uint64_t begin = __rdtsc();
    _mm_lfence();
    products(64);
    __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(rows), "r"(64L) : "memory");
    _mm_lfence();
    const std::uint64_t end = __rdtsc();
    const bool looks = i % 100 == 99;  // at the clock, which is a pause, too
    if (i >= 4000 && i % 100 > 1) ticks.push_back(static_cast<double>(end - begin));
    if (looks) clocks.push_back(ticks_per_cycle());
    wait(pause);
  }
  return median(ticks) / median(clocks) / 64;
}

}  // namespace

int main() {
  for (int i = 0; i < 8; ++i) configuration[16 + 2 * i] = 64, configuration[48 + i] = 16;
  if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */) != 0) {
    std::fputs("tile_vectors: this machine does not let a program use tiles\n", stderr);
    return 1;
  }
  _tile_loadconfig(configuration);
  std::printf("{\n  \"cycles per instruction on 512 bits: alone, and 64 of them beside one instruction on tiles\": {\n");
  INSTRUCTION("multiply-add", "vfmadd231ps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("multiplication", "vmulps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("addition", "vaddps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("maximum", "vmaxps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("fraction", "vreduceps $9, %%zmm30, ", "\n");
  INSTRUCTION("power of two", "vscalefps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("dot product of bfloat16", "vdpbf16ps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("addition of integers", "vpaddd %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("logic", "vpternlogd $248, %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("shift", "vpsrld $16, %%zmm30, ", "\n");
  INSTRUCTION("shuffle", "vunpcklps %%zmm31, %%zmm30, ", "\n");
  INSTRUCTION("written to memory", "vmovups ", ", (%0)\n");
  std::printf("  },\n  \"cycles per product, of 64 after so many cycles without one\": {");
  const int pauses[] = {0, 500, 1000, 1500, 1700, 2000, 2500, 4000, 16000};
  for (const int pause : pauses) std::printf("%s\"%d\": %.1f", pause == 0 ? "" : ", ", pause, products_after(pause));
  const double integers = time_of([] { wait(10000); }).ticks;
  const double vectors = time_of([] {
                           for (int i = 0; i < 64; ++i)
                             __asm__ volatile(TO_16("vfmadd231ps %%zmm31, %%zmm30, ", "\n") : : : CLOBBERED);
                         }).ticks;
  const double tiles = time_of([] { products(256); }).ticks;
  std::printf("},\n  \"clock, of that of integers\": {\"vectors\": %.2f, \"products\": %.2f}\n}\n", integers / vectors,
              integers / tiles);
  _tile_release();
}
