// Dropout decisions: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on global
// coordinates, so that they depend neither on sharding nor on tiles nor on threads.
//
// The key of a (seed, batch, head, state) is one Philox block; the decision about (i, j) is word j mod 4 of the block with
// counter (i, floor(j / 4)), dropped where word < threshold. One block decides four neighbouring keys.
#pragma once

#include <array>
#include <cstdint>

namespace ringspan::kernels {

using PhiloxBlock = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

constexpr std::uint32_t low_word(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
constexpr std::uint32_t high_word(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

constexpr PhiloxBlock philox4x32(PhiloxBlock counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {high_word(b) ^ counter[1] ^ key[0], low_word(b), high_word(a) ^ counter[3] ^ key[1], low_word(a)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

constexpr PhiloxKey dropout_key(std::uint64_t seed, std::int64_t batch, std::int64_t head, int state) {
  const auto item = static_cast<std::uint64_t>(batch);
  const PhiloxBlock block =
      philox4x32({low_word(item), high_word(item), static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(state)},
                 {low_word(seed), high_word(seed)});
  return {block[0], block[1]};
}

// The block that decides about query i and the keys 4 floor(j / 4) to 4 floor(j / 4) + 3.
constexpr PhiloxBlock dropout_block(std::int64_t i, std::int64_t j, PhiloxKey key) {
  const auto row = static_cast<std::uint64_t>(i);
  const auto quad = static_cast<std::uint64_t>(j >> 2);
  return philox4x32({low_word(quad), high_word(quad), low_word(row), high_word(row)}, key);
}

// A pair is dropped where its word is below this; dropout <= 1 - 2^-24.
std::uint32_t dropout_threshold(float dropout);

class DropoutRow {
 public:
  // Decisions for query i of one (seed, batch, head, state); `dropout` is the probability of dropping, 0 <= dropout < 1.
  DropoutRow(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, int state);

  bool is_dropped(std::int64_t i, std::int64_t j) const;
  // factors[c] = 0 where key first + c * step is dropped, else keep.
  void factors(std::int64_t i, std::int64_t first, std::int64_t step, std::int64_t count, float keep, float* factors) const;

 private:
  PhiloxKey key_;
  std::uint32_t threshold_;
};

}  // namespace ringspan::kernels
