// Dropout decisions: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on global
// coordinates, so that they depend neither on sharding nor on tiles nor on threads.
//
// The key of a (seed, batch, head, state) is one Philox block; the decision about (i, j) is word j mod 4 of the block with
// counter (i, floor(j / 4)), dropped where word < threshold. One block decides four neighbouring keys.
#pragma once

#include <array>
#include <cstdint>

namespace ringspan::kernels {

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

class DropoutRow {
 public:
  // Decisions for query i of one (seed, batch, head, state); `dropout` is the probability of dropping, 0 <= dropout < 1.
  DropoutRow(std::uint64_t seed, float dropout, std::int64_t batch, std::int64_t head, int state);

  bool is_dropped(std::int64_t i, std::int64_t j) const;
  // factors[c * stride] = 0 where key first + c * step is dropped, else keep.
  void factors(std::int64_t i, std::int64_t first, std::int64_t step, std::int64_t count, float keep, float* factors,
               std::int64_t stride) const;

 private:
  std::array<std::uint32_t, 2> key_;
  std::uint32_t threshold_;
};

}  // namespace ringspan::kernels
