// What this machine can do, for bench/cpu/compare: float32 multiply-adds, dot products of bfloat16 (in vectors, in AMX tiles)
// and reading from memory. Prints JSON, of one thread. Built by compare with -march=native, as a program and, for what
// takes turns with other calls, as a library.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

double now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

#if defined(__AVX512F__)
using Vector = __m512;
#elif defined(__AVX__)
using Vector = __m256;
#else
typedef float Vector __attribute__((vector_size(16)));
#endif

// The best of five runs of `pass`, which does `work` operations: rate in units of 1e9 per second.
template <typename Pass>
double rate(double work, const Pass& pass) {
  double best = 0.0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double begin = now();
    pass();
    const double here = work / (now() - begin) * 1e-9;
    if (here > best) best = here;
  }
  return best;
}

// Chains, which hide the latency (a dot product may take six cycles, two at a time); each named, so that all stay in registers:
// twelve where there are sixteen of these, as two more hold the operands.
#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#if defined(__x86_64__) && !defined(__AVX512F__)
#define ALL(X) TWELVE(X)
constexpr int kChains = 12;
#else
#define ALL(X) TWELVE(X) X(12) X(13) X(14) X(15)
constexpr int kChains = 16;
#endif
#define DECLARE(n) Vector a##n = x * static_cast<float>(n);
#define KEEP(n) __asm__ volatile("" : "+v"(a##n));

constexpr double kFlopsOfStep = 2.0 * kChains * sizeof(Vector) / 4;
void multiply_add(int steps) {
  Vector x{}, y{};
  x = x + 1.0001F, y = y + 0.5F;
  ALL(DECLARE)
  for (int i = 0; i < steps; ++i) {
#define STEP(n) a##n = a##n * x + y;
    ALL(STEP)
    ALL(KEEP)
  }
}

#if defined(__AVX512BF16__)
constexpr double kFlopsOfDots = kChains * 64.0;
void multiply_pairs(int steps) {
  Vector x{};
  x = x + 1.0F;
  const __m512bh pairs = (__m512bh)_mm512_set1_epi16(0x3f80);
  ALL(DECLARE)
  for (int i = 0; i < steps; ++i) {
#define DOT(n) a##n = _mm512_dpbf16_ps(a##n, pairs, pairs);
    ALL(DOT)
    ALL(KEEP)
  }
}
#endif

#if defined(__AMX_BF16__) && defined(__linux__)
alignas(64) constexpr std::uint8_t kTiles[64] = {1, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  64, 0, 64,
                                                 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  64, 0,  0,  0,  0,  0,  0, 0,
                                                 0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  16, 16, 16, 16, 16, 16, 16, 16};

constexpr double kFlopsOfTiles = 4.0 * 16 * 16 * 32 * 2;
bool has_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
void multiply_tiles(int steps) {
  static const std::uint16_t operands[4 * 512] = {};
  _tile_loadconfig(kTiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < steps; ++i) {
    _tile_loadd(4, operands, 64);
    _tile_loadd(5, operands + 512, 64);
    _tile_loadd(6, operands + 1024, 64);
    _tile_loadd(7, operands + 1536, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}
#endif

// What operations can be done at most: `steps` of a loop, each of so many.
struct Loop {
  const char* name;
  void (*run)(int steps);
  double flops_of_step;
};
std::vector<Loop> loops() {
  std::vector<Loop> found = {{"float32", multiply_add, kFlopsOfStep}};
#if defined(__AVX512BF16__)
  found.push_back({"bfloat16_dot", multiply_pairs, kFlopsOfDots});
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
  if (has_tiles()) found.push_back({"bfloat16_tile", multiply_tiles, kFlopsOfTiles});
#endif
  return found;
}

void sum_up(const float* memory, std::size_t count) {
  constexpr std::size_t kWidth = sizeof(Vector) / 4;
  Vector sum[4] = {};
  for (std::size_t i = 0; i + 4 * kWidth <= count; i += 4 * kWidth) {
    for (std::size_t n = 0; n < 4; ++n) sum[n] += *reinterpret_cast<const Vector*>(memory + i + n * kWidth);
  }
  __asm__ volatile("" ::"v"(sum[0]), "v"(sum[1]), "v"(sum[2]), "v"(sum[3]));
}

double read_rate() {
  const std::vector<float> memory(std::size_t{1} << 28, 1.0F);  // 1 GiB: beyond every cache
  return rate(4.0 * static_cast<double>(memory.size()), [&] { sum_up(memory.data(), memory.size()); });
}

}  // namespace

// Does `flops` operations in the loop of that name, on this thread; returns 0 where there is no such loop.
extern "C" int run_loop(const char* name, double flops) {
  static const std::vector<Loop> found = loops();
  for (const Loop& loop : found) {
    if (std::strcmp(loop.name, name) != 0) continue;
    constexpr int kMost = 1 << 30;
    for (double steps = flops / loop.flops_of_step; steps >= 1.0; steps -= kMost)
      loop.run(steps < kMost ? static_cast<int>(steps) : kMost);
    return 1;
  }
  return 0;
}

// Reads memory once, each thread a part of it; returns how many bytes.
extern "C" double read_memory(int threads) {
  static const std::vector<float> memory(std::size_t{1} << 26, 1.0F);
  const std::size_t part = memory.size() / static_cast<std::size_t>(threads);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(sum_up, memory.data() + static_cast<std::size_t>(i) * part, part);
  sum_up(memory.data(), part);
  for (std::thread& other : others) other.join();
  return 4.0 * static_cast<double>(part) * threads;
}

// GFLOP/s of float32 multiply-adds now, by the wall clock: what else the machine does shows in it. Some 2 ms.
extern "C" double float32_rate_now() {
  constexpr int kSteps = 1'000'000;
  timespec begin{}, end{};
  clock_gettime(CLOCK_MONOTONIC, &begin);
  multiply_add(kSteps);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return kFlopsOfStep * kSteps /
         (static_cast<double>(end.tv_sec - begin.tv_sec) * 1e9 + static_cast<double>(end.tv_nsec - begin.tv_nsec));
}

int main() {
  constexpr int kSteps = 4'000'000;
  std::printf("{");
  for (const Loop& loop : loops())
    std::printf("\"%s_gflops\": %.1f, ", loop.name, rate(loop.flops_of_step * kSteps, [&] { loop.run(kSteps); }));
  std::printf("\"read_gbytes_per_second\": %.1f}\n", read_rate());
  return 0;
}
