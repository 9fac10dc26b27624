// Communicators around others, for tests of what uses a communicator. Each borrows the one inside, which must outlive it.
//   RecordingCommunicator  keeps a list of what was posted
//   GatedCommunicator      receives complete only once the test has opened their round's gate: a user that waits before it
//                          does what opens the gate meets its deadline; behind the gate only a peer that is dead is missed
//   HostileCommunicator    completes late, in random order, receives into shadow memory (what the user reads before wait() is
//                          garbage) and checks at wait() that nobody wrote into what was being sent
// Thread safety: as the communicator inside; a Gate may be opened by any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ringspan/communicator.h"
#include "ringspan/error.h"

namespace ringspan::comm_testing {

class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(Communicator& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Request post(std::uint64_t round, std::span<const Message> batch) override { return inner_.post(round, batch); }
  bool test(Request request) override { return inner_.test(request); }
  void wait(Request request, Seconds deadline) override { inner_.wait(request, deadline); }
  void progress() override { inner_.progress(); }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }
  std::unique_ptr<Communicator> duplicate() override { return inner_.duplicate(); }  // not decorated
  bool takes_device_memory(const void* data) const override { return inner_.takes_device_memory(data); }
  std::span<const PeerTraffic> traffic() const override { return inner_.traffic(); }

 protected:
  Communicator& inner() { return inner_; }

 private:
  Communicator& inner_;
};

class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  struct Entry {
    std::uint64_t round;
    Message::Direction direction;
    int peer;
    std::int64_t bytes;
    bool operator==(const Entry&) const = default;
  };

  using ForwardingCommunicator::ForwardingCommunicator;

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    const Request request = ForwardingCommunicator::post(round, batch);
    for (const Message& message : batch) entries_.push_back({round, message.direction, message.peer, message.bytes});
    return request;
  }

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

// Receives of rounds below open_rounds() may complete.
class Gate {
 public:
  explicit Gate(std::uint64_t open_rounds = 0) : open_rounds_(open_rounds) {}
  void open_below(std::uint64_t round) {
    std::uint64_t current = open_rounds_.load();
    while (current < round && !open_rounds_.compare_exchange_weak(current, round)) {
    }
  }
  bool is_open(std::uint64_t round) const { return round < open_rounds_.load(); }

 private:
  std::atomic<std::uint64_t> open_rounds_;
};

class GatedCommunicator final : public ForwardingCommunicator {
 public:
  GatedCommunicator(Communicator& inner, const Gate& gate) : ForwardingCommunicator(inner), gate_(gate) {}

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    const Request request = ForwardingCommunicator::post(round, batch);
    const auto receives = [](const Message& message) { return message.direction == Message::Direction::receive; };
    if (std::any_of(batch.begin(), batch.end(), receives)) receiving_[request] = round;
    return request;
  }

  bool test(Request request) override { return is_open(request) && ForwardingCommunicator::test(request); }

  void wait(Request request, Seconds deadline) override {
    const auto begin = std::chrono::steady_clock::now();
    while (!is_open(request)) {
      progress();
      if (Seconds(std::chrono::steady_clock::now() - begin) >= deadline) {
        const std::string text = "rank " + std::to_string(rank()) + "/" + std::to_string(size()) + ": the gate of round " +
                                 std::to_string(receiving_.at(request)) + " was still closed at the deadline";
        abort(text);
        throw CommError(text);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ForwardingCommunicator::wait(request, std::max(deadline, Seconds(60)));
    receiving_.erase(request);
  }

 private:
  bool is_open(Request request) const {
    const auto found = receiving_.find(request);
    return found == receiving_.end() || gate_.is_open(found->second);
  }

  const Gate& gate_;
  std::map<Request, std::uint64_t> receiving_;  // outstanding requests with receives, and their rounds
};

class HostileCommunicator final : public ForwardingCommunicator {
 public:
  HostileCommunicator(Communicator& inner, std::uint64_t seed) : ForwardingCommunicator(inner), random_(seed) {}

  // What is still posted lies in our shadows.
  ~HostileCommunicator() override {
    const bool posted = std::any_of(flights_.begin(), flights_.end(), [](const auto& f) { return !f.second.copies.empty(); });
    if (posted) inner().abort("left with requests outstanding");
  }

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    Flight flight;
    flight.round = round;
    if (!batch.empty()) flight.polls_left = random_() % 4 == 0 ? random_() % 20 : random_() % 3;
    std::vector<Message> shadowed(batch.begin(), batch.end());
    for (Message& message : shadowed) {
      if (message.data == nullptr || message.bytes <= 0) continue;  // the communicator inside refuses it
      Copy& copy = flight.copies.emplace_back();
      copy.message = message;
      copy.shadow.resize(static_cast<std::size_t>(message.bytes));
      if (message.direction == Message::Direction::send) {
        std::memcpy(copy.shadow.data(), message.data, copy.shadow.size());
      } else {
        std::memset(message.data, 0xa5, copy.shadow.size());
        message.data = copy.shadow.data();  // moving `copy` leaves it where it is
      }
    }
    const Request request = ForwardingCommunicator::post(round, shadowed);
    flights_[request] = std::move(flight);
    return request;
  }

  bool takes_device_memory(const void* /*data*/) const override { return false; }  // it touches what it passes on

  bool test(Request request) override {
    const auto flight = flights_.find(request);
    if (flight != flights_.end() && flight->second.polls_left > 0) {
      --flight->second.polls_left;
      progress();
      return false;
    }
    return ForwardingCommunicator::test(request);
  }

  void wait(Request request, Seconds deadline) override {
    if (const auto flight = flights_.find(request); flight != flights_.end()) {
      for (; flight->second.polls_left > 0; --flight->second.polls_left) {
        progress();
        std::this_thread::yield();
      }
    }
    ForwardingCommunicator::wait(request, deadline);
    const Flight flight = std::move(flights_.at(request));
    flights_.erase(request);
    for (const Copy& copy : flight.copies) {
      if (copy.message.direction == Message::Direction::receive) {
        std::memcpy(copy.message.data, copy.shadow.data(), copy.shadow.size());
      } else if (std::memcmp(copy.message.data, copy.shadow.data(), copy.shadow.size()) != 0) {
        throw std::logic_error("rank " + std::to_string(rank()) + ": the buffer of a send to rank " +
                               std::to_string(copy.message.peer) + " in round " + std::to_string(flight.round) +
                               " was written before it was waited for");
      }
    }
  }

 private:
  struct Copy {
    Message message;  // as the user gave it
    std::vector<std::uint8_t> shadow;
  };
  struct Flight {
    std::uint64_t round = 0;
    std::uint64_t polls_left = 0;
    std::vector<Copy> copies;
  };

  std::map<Request, Flight> flights_;
  std::mt19937_64 random_;
};

}  // namespace ringspan::comm_testing
