// Random cases for verification: a valid, supported problem and the options to run it with, drawn from (seed, index).
//
// The same pair gives the same case on every machine. A case's work is capped, so that hundreds take minutes. A Tally counts
// what was drawn and knows what could have been, so that a value that is never drawn is noticed. Pure; thread safe but for
// Tally.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ringspan/plan.h"
#include "ringspan/problem.h"

namespace ringspan::oracle {

struct RandomCase {
  Problem problem;
  PlanOptions options;       // strategy, bucket, computing ranks, backward, keep_o_float32, threads
  bool dlse = false;         // a gradient of lse is given
  bool fake_device = false;  // launches run late, on the fake asynchronous device
  float gain = 1.0F;         // of the logits: q is multiplied with it
  std::uint64_t data_seed = 1;
};

RandomCase draw_case(std::uint64_t seed, std::uint64_t index);

bool is_prime(std::int64_t n);

// Bound of the oracle's work: sum over heads and queries of the keys in reach, times (head_dim + head_dim_v).
std::int64_t work_of(const Problem& problem);
inline constexpr std::int64_t kMaxRandomWork = 150'000'000;

// How often each value of each choice was drawn.
class Tally {
 public:
  struct Count {
    std::string choice, value;
    int count = 0;
  };

  Tally();
  void add(const RandomCase& drawn);
  const std::vector<Count>& counts() const { return counts_; }
  // "sharding of q: zigzag" of everything that never was drawn.
  std::vector<std::string> missing() const;
  // One line per choice: "dtype: float32 12, bfloat16 9, float16 11".
  std::string to_string() const;

 private:
  std::vector<Count> counts_;
};

}  // namespace ringspan::oracle
