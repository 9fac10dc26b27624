// Attention on emulated devices over every transport: the bits are those of messages through the host, the messages lie in
// memory of the devices, and a rank whose NCCL fails ends all ranks with an error that says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/rounds.h"
#include "cuda/device_world.h"
#include "nccl/device_worlds.h"
#include "oracle/random_problem.h"

namespace ringspan::testing {
namespace {

constexpr const char* kDevice = "cuda-emulated";

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
  test.execute.device = kDevice;
  return test;
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

Case over_nccl(Case test, Ranks ranks, const std::string& library = STAND_IN) {
  test.ranks = ranks;
  test.wrap = [library](Communicator& host) { return make_nccl_communicator(host, comm_testing::stand_in_options(library)); };
  return test;
}
Case over_peer_copies(Case test) {
  test.devices.assign(static_cast<std::size_t>(test.problem.ranks), kDevice);
  return test;
}

// Empty where all transports give the same bits.
std::string compare_transports(const Case& test) {
  const Whole whole(test);
  const RankScript script = device_script(kDevice);
  const Outputs staged = run(test, whole, script);
  std::string failures;
  if (run(over_peer_copies(test), whole, script) != staged) failures += " peer copies differ;";
  if (run(over_nccl(test, Ranks::threads), whole, script) != staged) failures += " nccl over threads differs;";
  if (run(over_nccl(test, Ranks::processes), whole, script) != staged) failures += " nccl over processes differs;";
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
    test.execute.device = kDevice;
    EXPECT_EQ(compare_transports(test), "") << "case " << index << " of seed 31";
    ++run;
  }
}

TEST(DeviceTransports, NothingIsStagedOnTheHost) {
  const Case plain = make_case("causal", Strategy::ring, 3);
  const Whole whole(plain);
  const Outputs staged = run(plain, whole, device_script(kDevice));
  for (const bool nccl : {false, true}) {
    std::atomic<int> count{0};
    Case test = nccl ? plain : over_peer_copies(plain);
    test.wrap = [&](Communicator& host) -> std::unique_ptr<Communicator> {
      if (!nccl) return std::make_unique<DeviceMessagesOnly>(host, nullptr, count);
      auto made = make_nccl_communicator(host, comm_testing::stand_in_options());
      Communicator& inner = *made;
      return std::make_unique<DeviceMessagesOnly>(inner, std::move(made), count);
    };
    EXPECT_EQ(run(test, whole, device_script(kDevice)), staged);
    EXPECT_GE(count, 12);
  }
}

TEST(DeviceTransports, ThreadsWithoutADeviceStageOnTheHost) {
  const Case plain = make_case("causal", Strategy::exchange, 2);
  const Whole whole(plain);
  std::atomic<int> count{0};
  Case test = plain;
  test.wrap = [&](Communicator& host) { return std::make_unique<DeviceMessagesOnly>(host, nullptr, count); };
  EXPECT_THROW(run(test, whole, device_script(kDevice)), std::exception);
}

}  // namespace
}  // namespace ringspan::testing
