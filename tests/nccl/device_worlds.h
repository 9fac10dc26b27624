// Worlds whose messages lie in memory of emulated devices: threads with copies from device to device, in the order of the host
// or of streams, and ranks with NCCL, threads and processes, where the stand-in plays NCCL. Buffers of tests are host memory;
// under another address they are the device's.
#pragma once

#include <gtest/gtest.h>

#include "comm_testing/worlds.h"
#include "cuda/emulated_memory.h"
#include "cuda/runtime.h"
#include "ringspan/error.h"

namespace ringspan::comm_testing {

inline void* on_emulated_device(void* data) {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) | cuda::kEmulatedTag);
}

// Posts every message as one in memory of the device.
class DeviceMemoryCommunicator final : public ForwardingCommunicator {
 public:
  explicit DeviceMemoryCommunicator(Communicator& inner) : ForwardingCommunicator(inner) {}
  explicit DeviceMemoryCommunicator(std::unique_ptr<Communicator> inner)
      : ForwardingCommunicator(*inner), owned_(std::move(inner)) {}

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    return ForwardingCommunicator::post(round, moved(inner(), batch));
  }
  static std::vector<Message> moved(const Communicator& inner, std::span<const Message> batch) {
    std::vector<Message> moved(batch.begin(), batch.end());
    for (Message& message : moved) {
      if (message.data == nullptr) continue;
      message.data = on_emulated_device(message.data);
      require(inner.takes_device_memory(message.data), "the communicator takes memory of the device");
    }
    return moved;
  }
  std::unique_ptr<Communicator> duplicate() override {
    return std::make_unique<DeviceMemoryCommunicator>(ForwardingCommunicator::duplicate());
  }

 private:
  std::unique_ptr<Communicator> owned_;
};

// The same in the order of a stream, whose end is waited for with every request.
class StreamCommunicator final : public ForwardingCommunicator {
 public:
  explicit StreamCommunicator(Communicator& inner) : ForwardingCommunicator(inner) {}
  explicit StreamCommunicator(std::unique_ptr<Communicator> inner) : ForwardingCommunicator(*inner), owned_(std::move(inner)) {}

  Request post(std::uint64_t round, std::span<const Message> batch) override {
    return inner().on_streams()->post(stream_->stream(), round, DeviceMemoryCommunicator::moved(inner(), batch));
  }
  void wait(Request request, Seconds deadline) override {
    inner().on_streams()->wait(stream_->stream(), request, deadline);
    stream_->wait(stream_->record(), [] {});
  }
  std::unique_ptr<Communicator> duplicate() override {
    return std::make_unique<StreamCommunicator>(ForwardingCommunicator::duplicate());
  }

 private:
  std::unique_ptr<Communicator> owned_;
  std::unique_ptr<cuda::Runtime> stream_ = cuda::make_emulated_runtime(test_seed() + static_cast<std::uint64_t>(rank()));
};

inline RankBody on_device_memory(const RankBody& body) {
  return [&body](Communicator& comm) {
    DeviceMemoryCommunicator there(comm);
    body(there);
  };
}

inline RankBody over_nccl(const RankBody& body, const NcclOptions& options) {
  return [&body, options](Communicator& host) {
    const std::unique_ptr<Communicator> nccl = make_nccl_communicator(host, options);
    try {
      body(*nccl);
    } catch (const std::exception& error) {
      nccl->abort(error.what());
      throw;
    }
  };
}

inline NcclOptions stand_in_options(const std::string& library = STAND_IN) {
  NcclOptions options;
  options.device = "cuda-emulated";
  options.library = library;
  return options;
}

class DeviceThreadRanks final : public World {
 public:
  std::string name() const override { return "peer_copies"; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    const std::vector<std::string> devices(static_cast<std::size_t>(ranks), "cuda-emulated");
    return run_on_threads(make_thread_world(devices), on_device_memory(body));
  }
};

// All ranks, or every other one, the rest in the order of the host.
class StreamThreadRanks final : public World {
 public:
  explicit StreamThreadRanks(bool all) : all_(all) {}
  std::string name() const override { return all_ ? "peer_copies_on_streams" : "peer_copies_on_some_streams"; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    const std::vector<std::string> devices(static_cast<std::size_t>(ranks), "cuda-emulated");
    const RankBody on_host = on_device_memory(body);
    return run_on_threads(make_thread_world(devices), [&](Communicator& comm) {
      if (!all_ && comm.rank() % 2 == 1) return on_host(comm);
      StreamCommunicator there(comm);
      body(there);
    });
  }

 private:
  bool all_;
};

class NcclThreadRanks final : public World {
 public:
  std::string name() const override { return "nccl_threads"; }
  bool whole_rounds() const override { return true; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    const RankBody there = on_device_memory(body);
    return run_on_threads(make_thread_world(ranks), over_nccl(there, stand_in_options()));
  }
};

class NcclForkedRanks final : public World {
 public:
  std::string name() const override { return "nccl_processes"; }
  bool whole_rounds() const override { return true; }
  std::vector<std::string> run(int ranks, const RankBody& body) const override {
    const RankBody there = on_device_memory(body);
    std::vector<std::string> errors;
    for (RankOutcome& outcome : try_forked_ranks(ranks, over_nccl(there, stand_in_options()))) {
      errors.push_back(std::move(outcome.message));
    }
    return errors;
  }
};

}  // namespace ringspan::comm_testing
