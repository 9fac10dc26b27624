// What bodies of conformance tests are made of: messages, meetings, expected errors, and traffic whose content both ends know.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "comm_testing/patience.h"
#include "comm_testing/worlds.h"
#include "ringspan/error.h"

namespace ringspan::comm_testing {

using Direction = Message::Direction;
using Seconds = Communicator::Seconds;
using Bytes = std::vector<std::uint8_t>;

inline constexpr int kWorldSizes[] = {1, 2, 3, 4, 7};

inline Message send_to(int peer, Bytes& data) {
  return {Direction::send, peer, data.data(), static_cast<std::int64_t>(data.size())};
}
inline Message receive_from(int peer, Bytes& data) {
  return {Direction::receive, peer, data.data(), static_cast<std::int64_t>(data.size())};
}

inline Request post_one(Communicator& comm, std::uint64_t round, const Message& message) {
  return comm.post(round, std::span(&message, 1));
}

inline void exchange(Communicator& comm, std::uint64_t round, std::span<const Message> batch) {
  comm.wait(comm.post(round, batch), kPatience);
}

// A number that ranks share, whatever they are.
class SharedCounter {
 public:
  SharedCounter() : memory_(sizeof(int)) {}
  void add() { ref().fetch_add(1); }
  void wait_for(int value) {
    while (ref().load() < value) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::atomic_ref<int> ref() { return std::atomic_ref<int>(*reinterpret_cast<int*>(memory_.bytes().data())); }
  SharedMemory memory_;
};

// Everybody tells everybody one byte: returns when all have come so far.
inline void barrier(Communicator& comm, std::uint64_t round, Seconds deadline = kPatience) {
  Bytes out(1, 1);
  std::vector<Bytes> in(static_cast<std::size_t>(comm.size()), Bytes(1));
  std::vector<Message> batch;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    batch.push_back(send_to(peer, out));
    batch.push_back(receive_from(peer, in[static_cast<std::size_t>(peer)]));
  }
  comm.wait(comm.post(round, batch), deadline);
}

// A barrier after which nobody is still inside it: what then fails cannot reach a rank that is.
inline void meet(Communicator& comm, SharedCounter& arrived) {
  barrier(comm, 0);
  arrived.add();
  arrived.wait_for(comm.size());
}

// The text of the CommError that `action` must throw.
template <typename Expected = CommError, typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  }
  throw std::logic_error("expected an error, but there was none");
}

// Calls something that fails sooner or later until it does, and returns the text.
inline std::string error_in_time(Communicator& comm) {
  return error_of([&] {
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
         std::chrono::steady_clock::now() < end;) {
      comm.progress();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

// For what only a deadline ends, but must not end before all ranks have come so far: a machine may keep one of them from
// running for longer than any short deadline. `run` says what was wrong with this deadline; one that is four times longer
// follows, up to a minute, until nothing was. Returns what was wrong at last.
inline std::string with_growing_deadlines(Seconds first, const std::function<std::string(Seconds)>& run) {
  std::string wrong;
  for (Seconds deadline = first; deadline <= kPatience; deadline *= 4) {
    wrong = run(deadline);
    if (wrong.empty()) break;
  }
  return wrong;
}

// The random traffic of a test: a function of the seed alone, so that both ends know it.
struct RandomTraffic {
  std::uint32_t seed;
  std::size_t bytes(std::uint64_t round, int source, int destination) const {
    std::uint64_t draw =
        seed ^ (round << 32) ^ (static_cast<std::uint64_t>(source) << 16) ^ static_cast<std::uint64_t>(destination);
    for (int i = 0; i < 2; ++i) draw = (draw ^ (draw >> 31)) * 0x9e3779b97f4a7c15U;  // mixes; as good as it needs to be
    draw ^= draw >> 29;
    constexpr std::size_t kMost[] = {0, 16, 5000, 300000};  // 0: no message
    const std::size_t most = kMost[draw % 4];
    return most == 0 ? 0 : 1 + (draw >> 8) % most;
  }
};

// What a message holds: random bytes, read round and round from a place that depends on round and source. The length is prime,
// so that a piece that lands in the wrong place shows.
class Content {
 public:
  Content(std::uint64_t round, int source) : at_((round * 7919 + static_cast<std::uint64_t>(source) * 104729) % kLength) {}

  void fill(Bytes& data) const {
    visit(data.size(),
          [&](std::size_t at, const std::uint8_t* from, std::size_t count) { std::memcpy(data.data() + at, from, count); });
  }
  bool is_in(const Bytes& data) const {
    bool same = true;
    visit(data.size(), [&](std::size_t at, const std::uint8_t* from, std::size_t count) {
      same = same && std::memcmp(data.data() + at, from, count) == 0;
    });
    return same;
  }

 private:
  static constexpr std::size_t kLength = 65521;

  template <typename Piece>
  void visit(std::size_t size, Piece piece) const {
    static const Bytes table = [] {
      Bytes bytes(kLength);
      std::mt19937 random(1);
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
      return bytes;
    }();
    for (std::size_t at = 0; at < size;) {
      const std::size_t from = (at_ + at) % kLength;
      const std::size_t count = std::min(size - at, kLength - from);
      piece(at, table.data() + from, count);
      at += count;
    }
  }

  std::size_t at_;
};

// One round in flight: buffers that stay where they are.
struct Flight {
  std::vector<Bytes> out, in;
  std::vector<Request> requests;
};

inline Flight take_off(Communicator& comm, const RandomTraffic& traffic, std::uint64_t round, std::mt19937& random,
                       bool whole) {
  const auto size = static_cast<std::size_t>(comm.size());
  Flight flight{std::vector<Bytes>(size), std::vector<Bytes>(size), {}};
  std::vector<Message> batch;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    Bytes& out = flight.out[static_cast<std::size_t>(peer)];
    Bytes& in = flight.in[static_cast<std::size_t>(peer)];
    out.resize(traffic.bytes(round, comm.rank(), peer));
    in.resize(traffic.bytes(round, peer, comm.rank()));
    Content(round, comm.rank()).fill(out);
    if (!out.empty()) batch.push_back(send_to(peer, out));
    if (!in.empty()) batch.push_back(receive_from(peer, in));
  }
  std::shuffle(batch.begin(), batch.end(), random);
  const std::size_t cut = batch.empty() || whole ? 0 : random() % batch.size();  // one round may be posted in parts
  flight.requests.push_back(comm.post(round, std::span(batch).first(cut)));
  flight.requests.push_back(comm.post(round, std::span(batch).subspan(cut)));
  return flight;
}

inline void land(Communicator& comm, Flight& flight, std::uint64_t round, std::mt19937& random, std::uint32_t seed) {
  if (random() % 2 == 0) std::swap(flight.requests[0], flight.requests[1]);
  for (const Request request : flight.requests) {
    if (random() % 3 == 0) {
      while (!comm.test(request)) std::this_thread::yield();
    }
    comm.wait(request, kPatience);
  }
  for (int peer = 0; peer < comm.size(); ++peer) {
    const Bytes& in = flight.in[static_cast<std::size_t>(peer)];
    require(Content(round, peer).is_in(in), fmt::format("rank {}: {} bytes from rank {} in round {} are wrong (seed {})",
                                                        comm.rank(), in.size(), peer, round, seed));
  }
}

}  // namespace ringspan::comm_testing
