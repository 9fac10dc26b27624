// Checks results against the float64 oracle: every element where that is cheap, otherwise sampled rows together with all that
// they depend on.
//
// Memory: whole inputs are read where they are; a generated gradient is made once. An interrupt ends the program (watch.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oracle/compare.h"
#include "rank_work.h"

namespace ringspan::cli {

// Whole outputs. dq, dk, dv, dsinks: null where there was no backward pass.
struct Outputs {
  const std::byte* o = nullptr;
  const std::byte* lse = nullptr;
  const std::byte* dq = nullptr;
  const std::byte* dk = nullptr;
  const std::byte* dv = nullptr;
  const std::byte* dsinks = nullptr;
};

struct Verification {
  bool passed = true;
  bool sampled = false;
  std::int64_t query_rows = 0, key_rows = 0;  // when sampled
  std::vector<int> ranks_without_keys;        // whose keys the sample left out (sample.h)
  double seconds = 0;
  std::vector<oracle::Comparison> comparisons;
  // Names of tensors that were compared with what float64 makes of all rows of the o and lse given: dsinks of a sample, without
  // a naive computation (max_naive_error is NaN), and dk and dv of one whose whole rows would take too long.
  std::vector<std::string> from_outputs;
};

// `rounded_o`: the backward pass took delta from an o of 16 bits (PlanOptions::keep_o_float32 off).
Verification verify_outputs(const Problem& problem, const Inputs& inputs, Layout layout, const Outputs& outputs,
                            std::uint64_t seed, bool rounded_o = false);

// "agrees with float64 on every element (1.2 s)" and a table: largest errors beside those of the naive same-dtype computation.
std::string to_text(const Verification& verification);

}  // namespace ringspan::cli
