// ringspan selftest: communication between ranks on this machine: is it right, and how fast is it.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/rounds.h"
#include "command.h"
#include "problem_options.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"
#include "text.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

constexpr std::array<std::int64_t, 7> kSizes{1, 7, 64, 4'095, 65'537, 1 << 20, 3'000'001};  // of messages that are checked
constexpr int kPings = 200;
constexpr int kStreamed = 8;  // messages of a bandwidth measurement
constexpr std::int64_t kStreamedBytes = 4 << 20;

// What ranks leave in shared memory: for each pair (a < b) what a measured.
struct Pair {
  double latency_seconds = 0;   // one way, the median
  double bytes_per_second = 0;  // one way
};

class Exchange {
 public:
  Exchange(Communicator& communicator, Communicator::Seconds deadline) : communicator_(communicator), deadline_(deadline) {}

  void run(std::vector<Message> batch) {
    throw_if_interrupted();
    communicator_.wait(communicator_.post(kUserRounds + round_++, batch), deadline_);
  }
  // Rounds are numbered alike on all ranks: those that a rank takes no part in count too.
  void skip() { ++round_; }

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  void send(int peer, std::byte* data, std::int64_t bytes) { run({{Message::Direction::send, peer, data, bytes}}); }
  void receive(int peer, std::byte* data, std::int64_t bytes) { run({{Message::Direction::receive, peer, data, bytes}}); }

 private:
  Communicator& communicator_;
  Communicator::Seconds deadline_;
  std::uint64_t round_ = 0;
};

std::byte content(int source, int destination, std::int64_t index) {
  return static_cast<std::byte>(static_cast<std::uint64_t>(source * 131 + destination * 31) +
                                static_cast<std::uint64_t>(index) * 7 + static_cast<std::uint64_t>(index >> 8));
}

using Buffer = std::vector<std::byte>;

void check(const Buffer& data, int source, int destination, int ranks) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (data[i] == content(source, destination, static_cast<std::int64_t>(i))) continue;
    throw CommError(fmt::format("rank {}/{}: byte {} of a message of {} bytes from rank {} arrived wrong", destination, ranks,
                                i, data.size(), source));
  }
}

// Every rank sends to the ranks at these distances, and hears from those at the opposite ones, at once.
void check_distances(Exchange& exchange, std::int64_t bytes, int first, int last) {
  const int ranks = exchange.size();
  const int rank = exchange.rank();
  const auto count = static_cast<std::size_t>(last - first) + 1;
  std::vector<Buffer> out(count, Buffer(static_cast<std::size_t>(bytes)));
  std::vector<Buffer> in = out;
  std::vector<Message> batch;
  for (int distance = first; distance <= last; ++distance) {
    const auto index = static_cast<std::size_t>(distance - first);
    const int peer = (rank + distance) % ranks;
    for (std::size_t i = 0; i < out[index].size(); ++i) out[index][i] = content(rank, peer, static_cast<std::int64_t>(i));
    batch.push_back({Message::Direction::send, peer, out[index].data(), bytes});
    batch.push_back({Message::Direction::receive, (rank + ranks - distance) % ranks, in[index].data(), bytes});
  }
  exchange.run(std::move(batch));
  for (int distance = first; distance <= last; ++distance) {
    check(in[static_cast<std::size_t>(distance - first)], (rank + ranks - distance) % ranks, rank, ranks);
  }
}

// Small messages between all pairs at once; of large ones each rank holds one at a time.
void check_all_pairs(Exchange& exchange, std::int64_t bytes) {
  constexpr std::int64_t kSmall = 1 << 17;
  const int last = exchange.size() - 1;
  if (bytes <= kSmall) {
    check_distances(exchange, bytes, 1, last);
    return;
  }
  for (int distance = 1; distance <= last; ++distance) check_distances(exchange, bytes, distance, distance);
}

Pair measure(Exchange& exchange, int peer, bool first, std::vector<std::byte>& buffer) {
  Pair pair;
  std::vector<double> times;
  for (int i = 0; i < kPings; ++i) {
    const double begin = now();
    first ? exchange.send(peer, buffer.data(), 8) : exchange.receive(peer, buffer.data(), 8);
    first ? exchange.receive(peer, buffer.data(), 8) : exchange.send(peer, buffer.data(), 8);
    times.push_back((now() - begin) / 2);
  }
  std::nth_element(times.begin(), times.begin() + kPings / 2, times.end());
  pair.latency_seconds = times[kPings / 2];
  const double begin = now();
  for (int i = 0; i < kStreamed; ++i) {
    first ? exchange.send(peer, buffer.data(), kStreamedBytes) : exchange.receive(peer, buffer.data(), kStreamedBytes);
  }
  first ? exchange.receive(peer, buffer.data(), 1) : exchange.send(peer, buffer.data(), 1);  // the last one has arrived
  pair.bytes_per_second = kStreamed * static_cast<double>(kStreamedBytes) / (now() - begin);
  return pair;
}

// Of the pair (a, b) in the table of all.
std::size_t index_of(int a, int b, int ranks) {
  return static_cast<std::size_t>(a) * static_cast<std::size_t>(ranks) + static_cast<std::size_t>(b);
}

void test_rank(Communicator& communicator, Communicator::Seconds deadline, std::span<Pair> pairs) {
  Exchange exchange(communicator, deadline);
  const int ranks = communicator.size();
  for (const std::int64_t bytes : kSizes) {
    check_all_pairs(exchange, bytes);
  }
  std::vector<std::byte> buffer(static_cast<std::size_t>(kStreamedBytes));
  constexpr int kRounds = 2 * kPings + kStreamed + 1;
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      if (communicator.rank() == a) {
        pairs[index_of(a, b, ranks)] = measure(exchange, b, true, buffer);
      } else if (communicator.rank() == b) {
        measure(exchange, a, false, buffer);
      } else {
        for (int i = 0; i < kRounds; ++i) exchange.skip();
      }
      // A barrier: the others wait, so that a pair is measured alone.
      if (ranks > 2) check_all_pairs(exchange, 1);
    }
  }
}

struct Result {
  std::string transport;
  std::vector<Pair> pairs;
};

Result test_transport(const std::string& transport, int ranks, Communicator::Seconds deadline) {
  const SharedMemory memory(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks) * sizeof(Pair));
  const std::span<Pair> pairs(reinterpret_cast<Pair*>(memory.bytes().data()),
                              static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks));
  const RankBody body = [&](Communicator& communicator) { test_rank(communicator, deadline, pairs); };
  transport == "threads" ? run_thread_ranks(ranks, body) : run_forked_ranks(ranks, body);
  return {transport, {pairs.begin(), pairs.end()}};
}

void print_text(const Result& result, int ranks) {
  fmt::print("{}: {} ranks, messages of 1 B to {} between all pairs arrived right\n", result.transport, ranks,
             bytes_text(static_cast<double>(kSizes.back())));
  fmt::print("  {:<12}{:>12}{:>16}\n", "pair", "latency", "bandwidth");
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      const Pair& pair = result.pairs[index_of(a, b, ranks)];
      fmt::print("  {:<12}{:>12}{:>16}\n", fmt::format("{} - {}", a, b), seconds_text(pair.latency_seconds),
                 bytes_text(pair.bytes_per_second) + "/s");
    }
  }
}

nlohmann::ordered_json json_of(const Result& result, int ranks) {
  nlohmann::ordered_json json{{"transport", result.transport}, {"ranks", ranks}, {"passed", true}};
  json["pairs"] = nlohmann::ordered_json::array();
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      const Pair& pair = result.pairs[index_of(a, b, ranks)];
      json["pairs"].push_back(
          {{"ranks", {a, b}}, {"latency_seconds", pair.latency_seconds}, {"bytes_per_second", pair.bytes_per_second}});
    }
  }
  return json;
}

}  // namespace

Body setup_selftest(CLI::App& app) {
  struct Options {
    int ranks = 4;
    std::string transport = "all";
    double deadline = 30;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  app.footer(
      "Every pair of ranks exchanges messages that are checked byte by byte; then each pair is timed alone.\n\n"
      "example\n  ringspan selftest --ranks 8 --transport processes");
  add_parsed(app, "--ranks", "N", "2 to 64 (default 4)", [options](const std::string& text) {
    const std::int64_t ranks = parse_integer("--ranks", text);
    if (ranks < 2 || ranks > 64) throw InvalidArgument(fmt::format("--ranks ({}) must be in [2, 64]", text));
    options->ranks = static_cast<int>(ranks);
  });
  add_parsed(app, "--transport", "NAME", "threads, processes or all (default all)", [options](const std::string& text) {
    if (text != "threads" && text != "processes" && text != "all") {
      throw InvalidArgument(fmt::format("--transport ({}) must be threads, processes or all", text));
    }
    options->transport = text;
  });
  add_deadline(app, options->deadline);
  app.add_flag("--json", options->json, "print JSON");
  return [options] {
    nlohmann::ordered_json json{{"version", 1}, {"transports", nlohmann::ordered_json::array()}};
    for (const char* transport : {"processes", "threads"}) {
      if (options->transport != "all" && options->transport != transport) continue;
      const Result result = test_transport(transport, options->ranks, Communicator::Seconds(options->deadline));
      if (options->json) {
        json["transports"].push_back(json_of(result, options->ranks));
      } else {
        print_text(result, options->ranks);
      }
    }
    if (options->json) fmt::print("{}\n", json_text(json));
    return kOk;
  };
}

}  // namespace ringspan::cli
