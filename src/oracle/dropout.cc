#include "oracle/dropout.h"

#include <cmath>

namespace ringspan::oracle {
namespace {

std::uint32_t word(std::int64_t value, int index) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(value) >> (32 * index));
}

}  // namespace

Words philox(Words counter, std::array<std::uint32_t, 2> key) {
  for (std::uint32_t round = 0; round < 10; ++round) {
    const std::uint32_t k0 = key[0] + round * 0x9E3779B9U, k1 = key[1] + round * 0xBB67AE85U;
    const std::uint64_t p0 = static_cast<std::uint64_t>(counter[0]) * 0xD2511F53U;
    const std::uint64_t p1 = static_cast<std::uint64_t>(counter[2]) * 0xCD9E8D57U;
    counter = {static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<std::uint32_t>(p1),
               static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<std::uint32_t>(p0)};
  }
  return counter;
}

bool is_dropped(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j, int state) {
  const auto seed = static_cast<std::int64_t>(problem.seed);
  const Words key = philox({word(batch, 0), word(batch, 1), word(head, 0), static_cast<std::uint32_t>(state)},
                           {word(seed, 0), word(seed, 1)});
  const std::int64_t four = j / 4;
  const Words drawn = philox({word(four, 0), word(four, 1), word(i, 0), word(i, 1)}, {key[0], key[1]});
  return drawn[static_cast<std::size_t>(j % 4)] < std::round(static_cast<double>(problem.dropout) * 0x1p32);
}

}  // namespace ringspan::oracle
