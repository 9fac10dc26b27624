// Attention on emulated devices over every transport: the bits are those of messages through the host, the messages lie in
// memory of the devices, and a rank whose NCCL fails ends all ranks with an error that says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "comm/rounds.h"
#include "cuda/device_world.h"
#include "nccl/device_worlds.h"
#include "oracle/random_problem.h"

namespace ringspan::testing {
namespace {

bool is_emulated() { return test_device() == "cuda-emulated"; }

int gpus() {
  const char* given = std::getenv("RINGSPAN_TEST_GPUS");
  return given == nullptr ? 1 : std::max(1, std::atoi(given));
}

Case with_devices(Case test) {
  for (int rank = 0; rank < test.problem.ranks; ++rank) {
    test.devices.push_back(is_emulated() ? test_device() : "cuda:" + std::to_string(rank % gpus()));
  }
  return test;
}

RankScript script_of(const Case& test) {
  return [devices = test.devices](Attention& attention, const RankTensors& tensors) {
    device_script(devices[static_cast<std::size_t>(attention.plan().rank())])(attention, tensors);
  };
}

Case make_case(std::string_view pattern, Strategy strategy, int ranks) {
  Case test;
  Problem& p = test.problem;
  p.tokens_q = p.tokens_k = 61;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.head_dim_v = 12;
  p.pattern = Pattern::parse(pattern);
  p.ranks = ranks;
  test.options.strategy = strategy;
  return with_devices(test);
}

// Refuses messages of a plan that lie on the host, and counts the others.
class DeviceMessagesOnly final : public comm_testing::ForwardingCommunicator {
 public:
  DeviceMessagesOnly(Communicator& inner, std::unique_ptr<Communicator> owned, std::atomic<int>& count)
      : ForwardingCommunicator(inner), owned_(std::move(owned)), count_(count) {}
  Request post(std::uint64_t round, std::span<const Message> batch) override {
    for (const Message& message : batch) {
      if (round >= kPlanRoundsEnd) continue;
      comm_testing::require(inner().takes_device_memory(message.data), "a message of the plan is staged on the host");
      ++count_;
    }
    return ForwardingCommunicator::post(round, batch);
  }

 private:
  std::unique_ptr<Communicator> owned_;
  std::atomic<int>& count_;
};

bool has_nccl(const Case& test) { return is_emulated() || gpus() >= test.problem.ranks; }

std::unique_ptr<Communicator> make_nccl(Communicator& host, const Case& test) {
  NcclOptions options;
  if (is_emulated()) options.library = STAND_IN;
  options.device = test.devices[static_cast<std::size_t>(host.rank())];
  return make_nccl_communicator(host, options);
}

Case over_nccl(Case test, Ranks ranks) {
  test.ranks = ranks;
  test.wrap = [plain = test](Communicator& host) { return make_nccl(host, plain); };
  return test;
}
Case over_peer_copies(Case test) {
  test.peer_copies = true;
  return test;
}

// Empty where all transports give the same bits.
std::string compare_transports(const Case& test) {
  const Whole whole(test);
  const RankScript script = script_of(test);
  const Outputs staged = run(test, whole, script);
  std::string failures;
  if (run(over_peer_copies(test), whole, script) != staged) failures += " peer copies differ;";
  if (!has_nccl(test)) return failures.empty() ? judge(test, whole, staged) : to_string(test) + failures;
  if (run(over_nccl(test, Ranks::threads), whole, script) != staged) failures += " nccl over threads differs;";
  // The runtime of CUDA does not survive a fork.
  if (is_emulated() && run(over_nccl(test, Ranks::processes), whole, script) != staged)
    failures += " nccl over processes differs;";
  return failures.empty() ? judge(test, whole, staged) : to_string(test) + failures;
}

TEST(DeviceTransports, EveryStrategyGivesTheSameBits) {
  for (const Strategy strategy :
       {Strategy::local, Strategy::all_gather, Strategy::exchange, Strategy::ring, Strategy::pass_q, Strategy::ulysses}) {
    EXPECT_EQ(compare_transports(make_case("causal", strategy, 3)), "");
  }
}

TEST(DeviceTransports, BucketsOptionsAndSinksGiveTheSameBits) {
  Case test = make_case("causal & window:40,-1", Strategy::ring, 4);
  test.problem.dtype = DType::bfloat16;
  test.problem.alibi = test.problem.sinks = true;
  test.problem.dropout = 0.2F;
  test.options.bucket_rows = 4;
  test.dlse = true;
  EXPECT_EQ(compare_transports(test), "");
  test.execute.overlap = false;
  EXPECT_EQ(compare_transports(test), "");
}

TEST(DeviceTransports, RandomProblemsGiveTheSameBits) {
  int run = 0;
  for (std::uint64_t index = 0; run < 8; ++index) {
    const oracle::RandomCase drawn = oracle::draw_case(31, index);
    if (drawn.problem.ranks < 2 || drawn.problem.ranks > 4 || oracle::work_of(drawn.problem) > 3'000'000) continue;
    Case test;
    test.problem = drawn.problem;
    test.options = drawn.options;
    test.dlse = drawn.dlse;
    test.gain = drawn.gain;
    test.seed = drawn.data_seed;
    EXPECT_EQ(compare_transports(with_devices(test)), "") << "case " << index << " of seed 31";
    ++run;
  }
}

TEST(DeviceTransports, NothingIsStagedOnTheHost) {
  const Case plain = make_case("causal", Strategy::ring, 3);
  const Whole whole(plain);
  const Outputs staged = run(plain, whole, script_of(plain));
  for (const bool nccl : {false, true}) {
    if (nccl && !has_nccl(plain)) continue;
    std::atomic<int> count{0};
    Case test = nccl ? plain : over_peer_copies(plain);
    test.wrap = [&](Communicator& host) -> std::unique_ptr<Communicator> {
      if (!nccl) return std::make_unique<DeviceMessagesOnly>(host, nullptr, count);
      std::unique_ptr<Communicator> made = make_nccl(host, plain);
      Communicator& inner = *made;
      return std::make_unique<DeviceMessagesOnly>(inner, std::move(made), count);
    };
    EXPECT_EQ(run(test, whole, script_of(plain)), staged);
    EXPECT_GE(count, 12);
  }
}

// Hides that the communicator inside takes memory of devices.
class HostMemoryOnly final : public comm_testing::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  bool takes_device_memory(const void* /*data*/) const override { return false; }
};

TEST(DeviceTransports, ARankMayStageOnTheHostWhatItsPeersDoNot) {
  const Case plain = make_case("causal", Strategy::ring, 3);
  const Whole whole(plain);
  Case test = over_peer_copies(plain);
  test.wrap = [](Communicator& inner) -> std::unique_ptr<Communicator> {
    return inner.rank() == 1 ? std::make_unique<HostMemoryOnly>(inner) : nullptr;
  };
  EXPECT_EQ(run(test, whole, script_of(plain)), run(plain, whole, script_of(plain)));
}

TEST(DeviceTransports, ThreadsWithoutADeviceStageOnTheHost) {
  const Case plain = make_case("causal", Strategy::exchange, 2);
  const Whole whole(plain);
  std::atomic<int> count{0};
  Case test = plain;
  test.wrap = [&](Communicator& host) { return std::make_unique<DeviceMessagesOnly>(host, nullptr, count); };
  try {
    run(test, whole, script_of(plain));
    ADD_FAILURE() << "nothing was refused";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("is staged on the host"));
  }
}

}  // namespace
}  // namespace ringspan::testing
