// Counts what this process allocates, on all threads: malloc and its kin, operator new, mmap, all interposed by linking
// counting.cc. Nothing of ours is asked.
#pragma once

#include <cstdint>
#include <string>

namespace ringspan::testing {

// From now on; the counts start from 0.
void start_counting();
void stop_counting();

struct Allocations {
  std::int64_t count = 0;
  std::int64_t bytes = 0;
  std::string first;  // where the first came from, symbols as far as they are known
};
// Since start_counting().
Allocations counted();

}  // namespace ringspan::testing
