// Greeting: what all ranks of a group tell each other first in every call, before any of them relies on the others.
//
// Every rank learns every rank's record, in ceil(log2 p) rounds (Bruck's all-gather); the size of the messages depends on
// nothing but p, so ranks that are about to do different things still understand each other. Collective.
#pragma once

#include <cstdint>
#include <vector>

#include "ringspan/communicator.h"

namespace ringspan::python {

struct Record {
  std::int64_t version = 0;  // of ringspan
  std::int64_t call = 0;     // its number, in this group
  std::int64_t digest = 0;   // of everything that must be equal
  std::int64_t tokens_q = 0;
  std::int64_t tokens_k = 0;
  std::int64_t failed = 0;  // this rank's own arguments are wrong
  std::int64_t seed = 0;    // of dropout; that of rank 0 counts
  std::int64_t spare = 0;
};

// The records of all ranks, by rank.
std::vector<Record> greet(Communicator& communicator, const Record& own, Communicator::Seconds deadline);

}  // namespace ringspan::python
