// Agreement: all ranks learn whether they were given the same, before any of them relies on it.
//
// Every rank brings the same list of named values. By dissemination (in step k rank r sends what it knows to r + 2^k and hears
// from r - 2^k) the minimum and the maximum of every field, with the lowest ranks that hold them, reach every rank in
// ceil(log2 p) rounds, for any p; both are idempotent, so it does not matter that a rank may be heard of twice. A rank whose
// own arguments are wrong takes part with its error instead of leaving the others to wait: all ranks throw the error of the
// lowest such rank, with its class. Ranks of different versions of the library, or with different lists, are told so.
//
// Cost: steps(p) rounds of one message out and one in, each of message_bytes() or pass_message_bytes(); no allocation
// after construction except for errors. Thread safety: as the communicator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/rounds.h"
#include "ringspan/communicator.h"

namespace ringspan {

// How an error shows a value.
using AgreeText = std::string (*)(std::int64_t value);
std::string decimal_text(std::int64_t value);
std::string hexadecimal_text(std::int64_t value);

struct AgreeField {
  std::string_view name;  // as an error shall name it: "tokens_k"
  std::int64_t value = 0;
  AgreeText text = decimal_text;
  bool minimum_wins = false;  // may differ; the minimum counts (a memory budget)
};

// The extremes of one field over the ranks.
struct AgreeExtent {
  std::int64_t minimum = 0;
  std::int64_t maximum = 0;
  std::int32_t minimum_rank = 0;  // the lowest rank that holds it
  std::int32_t maximum_rank = 0;
};

// What a pass must have in common on all ranks.
struct AgreePass {
  std::uint64_t plan = 0;       // its fingerprint
  std::uint64_t attention = 0;  // the number that the ranks gave it
  std::uint64_t execution = 0;  // how many passes of it there were, of both kinds
  bool backward = false;
  std::uint64_t seed = 0;  // of dropout
};

class Agreement {
 public:
  static constexpr std::size_t kMaxFields = 64;
  static constexpr std::int64_t kVersion = 2;  // of the message and of what the fields mean

  explicit Agreement(Communicator& communicator);
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // Collective. Returns the extremes of every field, in order, valid until the next call. Throws, on all ranks alike, the error
  // of the lowest rank that brought one ("rank 1/4: on rank 3: ..."), else CommError about the first field that is not equal
  // everywhere ("rank 1/4: ranks disagree on tokens_k: 4096 on rank 0, 8192 on rank 3"). These leave the communicator usable.
  std::span<const AgreeExtent> agree(std::span<const AgreeField> fields, const std::exception_ptr& own_error,
                                     Communicator::Seconds deadline, std::uint64_t first_round = kAgreeRounds);

  // The short form before every pass.
  void agree_pass(const AgreePass& pass, const std::exception_ptr& own_error, Communicator::Seconds deadline,
                  std::uint64_t first_round = kPassRounds);

  static int steps(int ranks);  // ceil(log2 p)
  static std::int64_t message_bytes();
  static std::int64_t pass_message_bytes();

 private:
  struct Packet;

  void fill(std::span<const AgreeField> fields, const std::exception_ptr& own_error);
  void disseminate(std::int64_t bytes, Communicator::Seconds deadline, std::uint64_t first_round);
  void throw_if_different(std::span<const AgreeField> fields) const;

  Communicator& communicator_;
  std::unique_ptr<Packet> known_;
  std::unique_ptr<Packet> heard_;
};

}  // namespace ringspan
