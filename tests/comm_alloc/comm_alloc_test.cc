// What communicators allocate once they are warm: nothing, on any thread, over any transport, agreement included.
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <vector>

#include "alloc/counting.h"
#include "comm/agree.h"
#include "comm_testing/patience.h"
#include "comm_testing/worlds.h"

namespace ringspan::comm_testing {
namespace {

constexpr int kRanks = 3;
constexpr std::size_t kInFlight = 6;

// The buffers of one rank, made before anything is counted.
struct Buffers {
  std::array<std::array<std::vector<std::uint8_t>, kRanks>, kInFlight> out, in;
  std::array<std::array<Message, 2 * kRanks>, kInFlight> batches;
  explicit Buffers(int rank) {
    for (std::size_t flight = 0; flight < kInFlight; ++flight) {
      auto next = batches[flight].begin();
      for (int step = 1; step < kRanks; ++step) {
        const auto peer = static_cast<std::size_t>((rank + step) % kRanks);
        const std::size_t bytes = std::size_t{100} << (2 * flight);
        out[flight][peer].resize(bytes);
        in[flight][peer].resize(bytes);
        *next++ = {Message::Direction::send, static_cast<int>(peer), out[flight][peer].data(),
                   static_cast<std::int64_t>(bytes)};
        *next++ = {Message::Direction::receive, static_cast<int>(peer), in[flight][peer].data(),
                   static_cast<std::int64_t>(bytes)};
      }
    }
  }
};

void talk(Communicator& comm, Agreement& agreement, Buffers& buffers, int times) {
  std::array<Request, kInFlight> requests{};
  for (int time = 0; time < times; ++time) {
    const std::array<AgreeField, 2> fields{AgreeField{"time", time}, AgreeField{"budget", comm.rank(), decimal_text, true}};
    agreement.agree(fields, nullptr, kPatience);
    agreement.agree_pass({.plan = 17, .execution = static_cast<std::uint64_t>(time)}, nullptr, kPatience);
    for (std::size_t flight = 0; flight < kInFlight; ++flight) {
      requests[flight] = comm.post(flight, std::span(buffers.batches[flight]).first(2 * (kRanks - 1)));
      comm.progress();
    }
    for (std::size_t flight = kInFlight; flight-- > 0;) {
      comm.test(requests[flight]);
      comm.wait(requests[flight], kPatience);
    }
  }
}

// `threads`: how many ranks share this process, and so the count.
void measure(Communicator& comm, std::barrier<>& meeting, int threads) {
  Buffers buffers(comm.rank());
  Agreement agreement(comm);
  talk(comm, agreement, buffers, 3);
  meeting.arrive_and_wait();
  if (threads == 1 || comm.rank() == 0) ringspan::testing::start_counting();
  meeting.arrive_and_wait();
  talk(comm, agreement, buffers, 20);
  meeting.arrive_and_wait();
  if (threads > 1 && comm.rank() != 0) return;
  ringspan::testing::stop_counting();
  const ringspan::testing::Allocations made = ringspan::testing::counted();
  require(made.count == 0, std::to_string(made.count) + " allocations, the first in " + made.first);
}

void expect_none(const World& world, int threads) {
  std::barrier<> meeting(threads);
  const auto errors = world.run(kRanks, [&](Communicator& comm) {
    try {
      measure(comm, meeting, threads);
    } catch (...) {
      meeting.arrive_and_drop();  // nobody waits for a rank that failed
      throw;
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(CommunicatorAllocations, ThreadsMakeNone) { expect_none(ThreadRanks(), kRanks); }
TEST(CommunicatorAllocations, ProcessesMakeNone) { expect_none(ForkedRanks(), 1); }
TEST(CommunicatorAllocations, CallbacksMakeNone) { expect_none(CallbackRanks(), kRanks); }

}  // namespace
}  // namespace ringspan::comm_testing
