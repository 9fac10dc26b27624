// Worlds to test communicators in: how to run a body as every rank over one transport and learn how each ended.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/c_adapter.h"
#include "comm_testing/decorators.h"
#include "ringspan/transports.h"

namespace ringspan::comm_testing {

class World {
 public:
  virtual ~World() = default;
  virtual std::string name() const = 0;
  // The text of what each rank's body threw; empty where it returned. A body that throws aborts the others.
  virtual std::vector<std::string> run(int ranks, const RankBody& body) const = 0;
  // The contract for messages in memory of devices: the messages of a round are posted in one batch.
  virtual bool whole_rounds() const { return false; }
};

// What a body says when something is not as it should be; unlike EXPECT_* this also works in a forked process.
inline void require(bool condition, const std::string& text) {
  if (!condition) throw std::logic_error(text);
}

// The same in every run, so that a test cannot fail now and then; RINGSPAN_TEST_SEED for long runs. Failures print it.
inline std::uint32_t test_seed() {
  const char* given = std::getenv("RINGSPAN_TEST_SEED");
  return given != nullptr ? static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10)) : 1;
}

// Runs `body` once per communicator, each on its own thread.
inline std::vector<std::string> run_on_threads(std::vector<std::unique_ptr<Communicator>> world, const RankBody& body) {
  std::vector<std::string> errors(world.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back([&body, &error = errors[rank], comm = std::move(world[rank])]() mutable {
      try {
        body(*comm);
      } catch (const std::exception& e) {
        error = e.what();
        comm->abort(error);
      }
      comm.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

class ThreadRanks final : public World {
 public:
  std::string name() const override { return "threads"; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    return run_on_threads(make_thread_world(ranks), body);
  }
};

class ForkedRanks final : public World {
 public:
  std::string name() const override { return "processes"; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    std::vector<std::string> errors;
    const ForkOptions patient{.grace = Communicator::Seconds(60)};
    for (RankOutcome& outcome : try_forked_ranks(ranks, body, patient)) errors.push_back(std::move(outcome.message));
    return errors;
  }
};

// Threads, with every call going through the C struct of callbacks and back.
class CallbackRanks final : public World {
 public:
  std::string name() const override { return "callbacks"; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    std::vector<std::unique_ptr<Communicator>> world;
    for (auto& inner : make_thread_world(ranks)) world.push_back(make_communicator(export_communicator(std::move(inner))));
    return run_on_threads(std::move(world), body);
  }
};

// Threads, with completions that are late and in random order.
class HostileRanks final : public World {
 public:
  explicit HostileRanks(std::uint64_t seed) : seed_(seed) {}
  std::string name() const override { return "hostile"; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    return run_on_threads(make_thread_world(ranks), [&](Communicator& comm) {
      HostileCommunicator hostile(comm, seed_ + static_cast<std::uint64_t>(comm.rank()));
      body(hostile);
    });
  }

 private:
  std::uint64_t seed_;
};

}  // namespace ringspan::comm_testing
