// A case of `ringspan verify`: a problem and how it is run, as one line of words; and running it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "oracle/random_problem.h"
#include "verification.h"

namespace ringspan::cli {

using VerifyCase = oracle::RandomCase;

// The words of io/problem_line.h, and
//   strategy   auto, local, all-gather, exchange, ring, pass-q, ulysses (auto)   backward  0: only the forward pass (1)
//   bucket     rows, none or auto (auto)                                         dlse      1: lse has a gradient (0)
//   computing  ranks that compute, with strategy local (0: one)                  gain      of the logits (1)
//   threads    of each rank (1)                                                  data      seed of the tensors (1)
//   keep_o     0: backward reads the 16-bit o (1)                                device    fake: an asynchronous device (cpu)
//   kernel     by name (the best for the shape)
// parse(print(x)) == x. Throws InvalidArgument naming the word, also where it would change nothing: a seed without dropout,
// dlse without a backward pass.
std::string print_case(const VerifyCase& test);
VerifyCase parse_case(std::string_view line);
// What is drawn has such words.
VerifyCase without_idle_words(VerifyCase test);

struct VerifySetting {
  bool processes = false;  // ranks are forked processes, not threads
  bool show_progress = false;
  std::int64_t memory_budget = 0;  // of each rank
  double deadline = 30.0;
};

// Runs the case on seeded normal tensors, forward and (unless off) backward, through the public interface, and judges the
// joined outputs. Where queries are replicated, the ranks' outputs must be the same bits. Memory: the whole tensors once, and
// what ranks hold of them again unless a shard is one run of rows.
Verification run_case(const VerifyCase& test, const VerifySetting& setting);

}  // namespace ringspan::cli
