#include "comm/batch_checker.h"

#include <fmt/format.h>

#include "comm/rounds.h"
#include "ringspan/error.h"

namespace ringspan {

std::string rank_prefix(int rank, int size) { return fmt::format("rank {}/{}: ", rank, size); }

std::string_view without_rank_prefix(std::string_view text, int rank, int size) {
  const std::string prefix = rank_prefix(rank, size);
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

BatchChecker::BatchChecker(int rank, int size) : rank_(rank), size_(size) {
  for (auto& stamps : last_) stamps.resize(static_cast<std::size_t>(size), 0);
}

void BatchChecker::check(std::uint64_t round, std::span<const Message> batch) {
  ++batches_;
  for (const Message& message : batch) {
    const auto where = [&] { return fmt::format("{}{}: ", rank_prefix(rank_, size_), round_name(round)); };
    if (message.peer < 0 || message.peer >= size_) {
      throw InvalidArgument(fmt::format("{}peer ({}) must be in [0, {})", where(), message.peer, size_));
    }
    if (message.peer == rank_) throw InvalidArgument(fmt::format("{}peer ({}) must be another rank", where(), message.peer));
    if (message.data == nullptr) {
      throw InvalidArgument(fmt::format("{}data of the message for rank {} must not be null", where(), message.peer));
    }
    if (message.bytes <= 0) {
      throw InvalidArgument(
          fmt::format("{}bytes ({}) of the message for rank {} must be positive", where(), message.bytes, message.peer));
    }
    const std::size_t direction = message.direction == Message::Direction::send ? 0 : 1;
    std::uint64_t& last = last_[direction][static_cast<std::size_t>(message.peer)];
    if (last == batches_) refuse_second(round, message);
    last = batches_;
  }
}

void BatchChecker::refuse_second(std::uint64_t round, const Message& message) const {
  throw InvalidArgument(fmt::format("{}{}: second {} rank {} in one round", rank_prefix(rank_, size_), round_name(round),
                                    message.direction == Message::Direction::send ? "send to" : "receive from", message.peer));
}

}  // namespace ringspan
