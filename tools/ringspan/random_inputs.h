// Random inputs for programs that measure: normal numbers for everything that a problem reads.
#pragma once

#include <cstdint>
#include <vector>

#include "rank_work.h"

namespace ringspan::cli {

// Owns the tensors that inputs() points to.
class RandomInputs {
 public:
  explicit RandomInputs(const Problem& problem);
  const Inputs& inputs() const { return inputs_; }

 private:
  std::vector<Pages> pages_;
  std::vector<float> slopes_, sinks_;
  Inputs inputs_;
};

}  // namespace ringspan::cli
