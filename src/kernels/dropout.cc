#include "kernels/dropout.h"

#include <cmath>

#include "kernels/attend.h"

namespace ringspan::kernels {
namespace {

using Block = std::array<std::uint32_t, 4>;

constexpr std::uint32_t low_word(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
constexpr std::uint32_t high_word(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

Block block_of(std::int64_t i, std::int64_t j, std::array<std::uint32_t, 2> key) {
  const auto row = static_cast<std::uint64_t>(i);
  const auto quad = static_cast<std::uint64_t>(j >> 2);
  return philox4x32({low_word(quad), high_word(quad), low_word(row), high_word(row)}, key);
}

}  // namespace

Block philox4x32(Block counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {high_word(b) ^ counter[1] ^ key[0], low_word(b), high_word(a) ^ counter[3] ^ key[1], low_word(a)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

DropoutRow::DropoutRow(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, int state) {
  const auto item = static_cast<std::uint64_t>(batch);
  const Block block =
      philox4x32({low_word(item), high_word(item), static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(state)},
                 {low_word(seed), high_word(seed)});
  key_ = {block[0], block[1]};
  threshold_ = static_cast<std::uint32_t>(std::llround(static_cast<double>(dropout) * 0x1p32));  // dropout <= 1 - 2^-24
}

bool DropoutRow::is_dropped(std::int64_t i, std::int64_t j) const {
  return block_of(i, j, key_)[static_cast<std::size_t>(j & 3)] < threshold_;
}

void DropoutRow::factors(std::int64_t i, std::int64_t first, std::int64_t step, std::int64_t count, float keep, float* factors,
                         std::int64_t stride) const {
  Block block{};
  for (std::int64_t c = 0; c < count; ++c) {
    const std::int64_t j = first + c * step;
    if (c == 0 || (j >> 2) != ((j - step) >> 2)) block = block_of(i, j, key_);
    factors[c * stride] = block[static_cast<std::size_t>(j & 3)] < threshold_ ? 0.0F : keep;
  }
}

bool is_dropped(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j,
                int state) {
  return DropoutRow(seed, dropout, batch, head, state).is_dropped(i, j);
}

}  // namespace ringspan::kernels
