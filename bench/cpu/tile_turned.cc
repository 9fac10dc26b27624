// What a tile of bfloat16 takes forward in AMX (tile_amx_forward.h), and its products alone, in cycles per 16 scores:
//     g++ -std=c++20 -O3 -DNDEBUG -ffp-contract=fast -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c
//         -mprefer-vector-width=512 -mavx512bf16 -mamx-tile -mamx-bf16 -Wno-subobject-linkage -Wno-uninitialized
//         -Isrc -Iinclude bench/cpu/tile_turned.cc -o tile_turned && ./tile_turned > report.json
// Tiles of 192 queries and 1,024 keys, which lie in the second cache; what packs, fetches and rounds rows comes on top in a
// call. Cycles are those of a chain of multiplications of integers, timed before and after; only turns before and after which
// products had their full rate count, as beside another thread of the core that uses tiles they do not.
#include "kernels/tile_amx.cc"  // NOLINT(bugprone-suspicious-include): what it has is in an anonymous namespace

#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace ringspan::kernels {
namespace {

constexpr int kQueries = 192, kKeys = 1024, kTurns = 3000;

double ticks_per_cycle() {
  std::uint64_t n = 200, x = 3;
  const std::uint64_t begin = __rdtsc();
  __asm__ volatile("1: imul %1, %1\n imul %1, %1\n imul %1, %1\n imul %1, %1\n dec %0\n jnz 1b" : "+r"(n), "+r"(x));
  return static_cast<double>(__rdtsc() - begin) / (200 * 12.0);
}
// Of products that do not wait for each other; 16 where nobody else uses tiles.
double cycles_per_product(double clock) {
  const Dot::Session session;
  const std::uint64_t begin = __rdtsc();
  for (int i = 0; i < 16; ++i) add_product<0, 4, 6>(), add_product<1, 4, 6>(), add_product<2, 4, 6>(), add_product<3, 4, 6>();
  return static_cast<double>(__rdtsc() - begin) / (64 * clock);
}
bool has_full_rate(double clock) {
  for (int i = 0; i < 8; ++i) cycles_per_product(clock);  // awake
  return cycles_per_product(clock) < 20;
}

void* room(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>((bytes + 4095) / 4096 * 4096);
  void* const data = std::aligned_alloc(4096, size);
  return std::memset(data, 0, size);
}

// The median of the turns that count, and how many did.
template <typename Call>
void report(const char* name, const Call& call) {
  std::vector<double> cycles;
  for (int i = 0; i < kTurns; ++i) {
    const double before = ticks_per_cycle();
    const bool counts = has_full_rate(before);
    const std::uint64_t begin = __rdtsc();
    call();
    const auto ticks = static_cast<double>(__rdtsc() - begin);
    const double after = ticks_per_cycle();
    if (counts && has_full_rate(after)) cycles.push_back(ticks / std::min(before, after) / (kQueries * kKeys / 16));
  }
  std::sort(cycles.begin(), cycles.end());
  std::printf("\"%s\": {\"cycles\": %.2f, \"turns\": %zu}", name, cycles.empty() ? -1.0 : cycles[cycles.size() / 2],
              cycles.size());
}

template <Sums kSums>
void products(const ForwardTile& tile, const TurnedParts& parts) {
  float* const s = static_cast<float*>(tile.work);
  const auto steps = [&](auto step_of) {
    return [&tile, &parts, step_of] {
      const Dot::Session session;
      TurnedProducts<kSums> products(tile, parts);
      for (auto step = TurnedStep<kSums>::first_of_rows(tile, 0); step.keys > 0; step = step.next()) step_of(products, step);
    };
  };
  std::printf(", ");
  report("scores", steps([=](auto& products, const auto& step) { products.multiply_keys(step, s, [] {}); }));
  std::printf(", ");
  report("values", steps([=](auto& products, const auto& step) { products.multiply_values(step, s, [] {}); }));
}

void forward(int width) {
  TileDims dims{};
  dims.dtype = kBFloat16Type, dims.head_dim = dims.head_dim_v = width, dims.tile = {kQueries, kKeys};
  const ForwardBytes bytes = forward_bytes_amx(dims);
  std::vector<Word> numbers(static_cast<std::size_t>(kKeys) * width);
  std::uint32_t seed = 1;
  for (Word& word : numbers) {
    seed = seed * 1664525U + 1013904223U;
    const float x = static_cast<float>(seed >> 8) / (1 << 24) - 0.5F;
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    word = static_cast<Word>(bits >> 16);
  }
  const std::vector<std::int32_t> begin(kQueries, 0), end(kQueries, kKeys);
  std::vector<float> m(kQueries, -kInf), l(kQueries);
  void *const q = room(bytes.queries), *const k = room(bytes.keys), *const v = room(bytes.values);
  ForwardTile tile{};
  tile.dims = dims, tile.rows = kQueries, tile.keys = kKeys, tile.scale = 0.125F;
  tile.v_finite = true;
  RowSource rows{numbers.data(), width, nullptr, kKeys, width};
  pack_keys_amx(dims, k, rows), pack_values_amx(dims, v, rows);
  rows.rows = kQueries;
  pack_queries_amx(dims, q, rows, tile.scale);
  tile.q = q, tile.k = k, tile.v = v, tile.work = room(bytes.work);
  tile.begin = begin.data(), tile.end = end.data(), tile.m = m.data(), tile.l = l.data();
  const std::int64_t acc_bytes = 4 * std::int64_t{kQueries} * up16(width);
  tile.acc = static_cast<float*>(room(acc_bytes)), tile.acc_stride = up16(width);
  std::printf("    \"%d\": {\"products would take\": %.1f, ", width, up32(width) / 32.0 + up16(width) / 32.0);
  report("tile", [&] {
    attend_amx(tile);
    std::fill(l.begin(), l.end(), 0.0F), std::memset(tile.acc, 0, static_cast<std::size_t>(acc_bytes));  // sums stay small
  });
  const TurnedParts parts(dims);
  switch (parts.sums) {
    case Sums::kInTiles:
      products<Sums::kInTiles>(tile, parts);
      break;
    case Sums::kNear:
      products<Sums::kNear>(tile, parts);
      break;
    case Sums::kFar:
      products<Sums::kFar>(tile, parts);
      break;
  }
  std::printf("}");
}

}  // namespace
}  // namespace ringspan::kernels

int main() {
  constexpr int kTileData = 18, kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0) {
    std::fputs("tile_turned: this machine does not let a program use tiles\n", stderr);
    return 1;
  }
  std::printf("{\n  \"cycles per 16 scores, bfloat16 forward in AMX, by head_dim\": {\n");
  for (const int width : {32, 64, 96, 128, 192, 256}) {
    ringspan::kernels::forward(width);
    std::printf(width == 256 ? "\n  }\n}\n" : ",\n");
  }
}
