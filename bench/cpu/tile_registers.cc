// What tiles of AMX cost by how many of them are in use, alone on a core and beside a hardware thread that uses tiles,
// too: cycles per load from the first cache, and per product. Tiles not in use are zero. Needs AMX-BF16 and Linux:
//     g++ -std=c++20 -O2 -march=native bench/cpu/tile_registers.cc -o tile_registers && ./tile_registers [SECONDS] >
//     report.json
// Which of the two it is cannot be asked for; each round is told by what a load takes with all eight in use, which
// bench/cpu/builds asks of it as a library, too.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr int kTimes = 400, kTries = 5, kOperations = 8;

alignas(64) std::uint8_t configuration[64] = {1};
alignas(64) char rows[1024];

// Time-stamp ticks per cycle: multiplications that depend on each other take three.
double ticks_per_cycle() {
  double least = 1e9;
  for (int i = 0; i < 20; ++i) {
    std::uint64_t n = 10000, x = 3;
    const std::uint64_t begin = __rdtsc();
    __asm__ volatile("1: imul %1, %1\n imul %1, %1\n imul %1, %1\n imul %1, %1\n dec %0\n jnz 1b" : "+r"(n), "+r"(x));
    least = std::min(least, static_cast<double>(__rdtsc() - begin) / 120000.0);
  }
  return least;
}

#define ZERO_ALL                                                                                                \
  "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n tilezero %%tmm4\n tilezero %%tmm5\n" \
  "tilezero %%tmm6\n tilezero %%tmm7\n"
#define LOAD(n) "tileloadd (%1,%2,1), %%tmm" #n "\n"
#define LOAD_AND_ZERO(n) LOAD(n) "tilezero %%tmm" #n "\n"
#define PRODUCTS                                                                                             \
  "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm6, %%tmm4, %%tmm1\n tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n" \
  "tdpbf16ps %%tmm6, %%tmm4, %%tmm1\n tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm6, %%tmm4, %%tmm1\n" \
  "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm6, %%tmm4, %%tmm1\n"

#define MEASURE(name, first, body)                                                                               \
  do {                                                                                                           \
    double least = 1e18;                                                                                         \
    for (int i = 0; i < kTries; ++i) {                                                                           \
      std::uint64_t n = kTimes;                                                                                  \
      const std::uint64_t begin = __rdtsc();                                                                     \
      __asm__ volatile(ZERO_ALL first "1:\n" body "dec %0\n jnz 1b" : "+r"(n) : "r"(rows), "r"(64L) : "memory"); \
      least = std::min(least, static_cast<double>(__rdtsc() - begin));                                           \
    }                                                                                                            \
    round[name] = least / ticks / kTimes / kOperations;                                                          \
  } while (false)

constexpr double kMostAlone = 12.0, kLeastBeside = 24.0;  // cycles of a load with all in use

using Round = std::map<std::string, double>;

void measure_all_in_use(double ticks, Round& round) {
  MEASURE("load, 8 in use", "", LOAD(0) LOAD(1) LOAD(2) LOAD(3) LOAD(4) LOAD(5) LOAD(6) LOAD(7));
}

Round measure(double ticks) {
  Round round;
  MEASURE("load, 1 in use", "", LOAD(0) LOAD(0) LOAD(0) LOAD(0) LOAD(0) LOAD(0) LOAD(0) LOAD(0));
  MEASURE("load, 2 in use", "", LOAD(0) LOAD(1) LOAD(0) LOAD(1) LOAD(0) LOAD(1) LOAD(0) LOAD(1));
  MEASURE("load, 4 in use", "", LOAD(0) LOAD(1) LOAD(2) LOAD(3) LOAD(0) LOAD(1) LOAD(2) LOAD(3));
  MEASURE("load, 6 in use", "", LOAD(0) LOAD(1) LOAD(2) LOAD(3) LOAD(4) LOAD(5) LOAD(0) LOAD(1));
  MEASURE("load, 7 in use", "", LOAD(0) LOAD(1) LOAD(2) LOAD(3) LOAD(4) LOAD(5) LOAD(6) LOAD(0));
  measure_all_in_use(ticks, round);
  MEASURE("load, 8 in turns, zeroed after each", "",
          LOAD_AND_ZERO(0) LOAD_AND_ZERO(1) LOAD_AND_ZERO(2) LOAD_AND_ZERO(3) LOAD_AND_ZERO(4) LOAD_AND_ZERO(5) LOAD_AND_ZERO(6)
              LOAD_AND_ZERO(7));
  MEASURE("product, 4 in use", LOAD(4) LOAD(6), PRODUCTS);
  MEASURE("product, 5 in use", LOAD(4) LOAD(6) LOAD(2), PRODUCTS);
  MEASURE("product, 6 in use", LOAD(4) LOAD(6) LOAD(2) LOAD(3), PRODUCTS);
  MEASURE("product, 7 in use", LOAD(4) LOAD(6) LOAD(2) LOAD(3) LOAD(5), PRODUCTS);
  MEASURE("product, 8 in use", LOAD(4) LOAD(6) LOAD(2) LOAD(3) LOAD(5) LOAD(7), PRODUCTS);
  return round;
}

void print(const char* mode, std::vector<Round>& rounds) {
  std::printf("  \"%s\": {\"rounds\": %zu", mode, rounds.size());
  if (!rounds.empty()) {
    for (const auto& [name, unused] : rounds.front()) {
      std::vector<double> values;
      for (const Round& round : rounds) values.push_back(round.at(name));
      std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
      std::printf(",\n    \"%s\": %.1f", name.c_str(), values[values.size() / 2]);
    }
  }
  std::printf("}");
}

bool has_tiles() {
  for (int i = 0; i < 8; ++i) configuration[16 + 2 * i] = 64, configuration[48 + i] = 16;
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */) == 0;
}

}  // namespace

// Whether another thread of the core uses tiles now: 1 or 0; -1: that cannot be told.
extern "C" int tiles_are_shared() {
  static const bool has = has_tiles();
  if (!has) return -1;
  static const double ticks = ticks_per_cycle();
  _tile_loadconfig(configuration);
  Round round;
  measure_all_in_use(ticks, round);
  _tile_release();
  const double told = round.begin()->second;
  return told < kMostAlone ? 0 : told > kLeastBeside ? 1 : -1;
}

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 30.0;
  if (!has_tiles()) {
    std::fputs("tile_registers: this machine does not let a program use tiles\n", stderr);
    return 1;
  }
  _tile_loadconfig(configuration);
  const double ticks = ticks_per_cycle();
  std::vector<Round> alone, beside;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    const Round round = measure(ticks);
    const double told = round.at("load, 8 in use");
    if (told < kMostAlone) alone.push_back(round);
    if (told > kLeastBeside) beside.push_back(round);
    usleep(1000);
  }
  _tile_release();
  std::printf("{\n  \"unit\": \"cycles, medians of rounds, each the least of %d\",\n", kTries);
  print("alone", alone);
  std::printf(",\n");
  print("beside", beside);
  std::printf("\n}\n");
}
