// BatchChecker: what must hold of every batch, whatever the transport. Throws InvalidArgument; no allocation after
// construction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/communicator.h"

namespace ringspan {

// "rank 3/8: "
std::string rank_prefix(int rank, int size);
// An error's text without the prefix, where it begins with that: to be part of another.
std::string_view without_rank_prefix(std::string_view text, int rank, int size);

class BatchChecker {
 public:
  BatchChecker(int rank, int size);

  // Peers are other ranks, data is not null, bytes are positive, and nobody is named twice in one direction.
  void check(std::uint64_t round, std::span<const Message> batch);
  [[noreturn]] void refuse_second(std::uint64_t round, const Message& message) const;

 private:
  int rank_;
  int size_;
  std::vector<std::uint64_t> last_[2];  // per direction and peer: the number of the last batch that named it
  std::uint64_t batches_ = 0;
};

}  // namespace ringspan
