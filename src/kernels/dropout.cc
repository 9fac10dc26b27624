#include "kernels/dropout.h"

#include <cmath>

#include "kernels/attend.h"

namespace ringspan::kernels {
std::uint32_t dropout_threshold(float dropout) {
  return static_cast<std::uint32_t>(std::llround(static_cast<double>(dropout) * 0x1p32));
}

DropoutRow::DropoutRow(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, int state)
    : key_(dropout_key(seed, batch, head, state)), threshold_(dropout_threshold(dropout)) {}

bool DropoutRow::is_dropped(std::int64_t i, std::int64_t j) const {
  return dropout_block(i, j, key_)[static_cast<std::size_t>(j & 3)] < threshold_;
}

void DropoutRow::factors(std::int64_t i, std::int64_t first, std::int64_t step, std::int64_t count, float keep,
                         float* factors) const {
  PhiloxBlock block{};
  for (std::int64_t c = 0; c < count; ++c) {
    const std::int64_t j = first + c * step;
    if (c == 0 || (j >> 2) != ((j - step) >> 2)) block = dropout_block(i, j, key_);
    factors[c] = block[static_cast<std::size_t>(j & 3)] < threshold_ ? 0.0F : keep;
  }
}

bool is_dropped(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j,
                int state) {
  return DropoutRow(seed, dropout, batch, head, state).is_dropped(i, j);
}

}  // namespace ringspan::kernels
