// How the rows of a rowwise task are dealt to threads: a row is handled by 1 to 32 of them, as its width says. Pure.
#pragma once

#include <cstdint>

namespace ringspan::cuda {

inline constexpr int kRowThreads = 128;  // of a block
inline constexpr int kRowSteps = 4;      // rows that a thread has a part in, one after the other

constexpr int row_lanes(int width) {
  int lanes = 1;
  while (lanes < 32 && lanes * 4 < width) lanes *= 2;
  return lanes;
}
constexpr std::int64_t rows_per_block(int width) { return std::int64_t{kRowThreads} / row_lanes(width) * kRowSteps; }

}  // namespace ringspan::cuda
