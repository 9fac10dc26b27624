#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm_testing/conformance_support.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using Direction = Message::Direction;
using comm_testing::kPatience;

TEST(ThreadTransportTest, RingOfOneValue) {
  for (const int ranks : {2, 3, 4, 7}) {
    run_thread_ranks(ranks, [&](Communicator& comm) {
      int mine = comm.rank();
      for (int step = 0; step < 50; ++step) {
        int received = -1;
        const std::array batch{Message{Direction::send, (comm.rank() + 1) % ranks, &mine, sizeof mine},
                               Message{Direction::receive, (comm.rank() + ranks - 1) % ranks, &received, sizeof received}};
        comm.wait(comm.post(static_cast<std::uint64_t>(step), batch), kPatience);
        mine = received;
      }
      EXPECT_EQ(mine, ((comm.rank() - 50) % ranks + ranks) % ranks);
      EXPECT_EQ(comm.traffic()[static_cast<std::size_t>((comm.rank() + 1) % ranks)].sent_bytes, 200);
    });
  }
}

TEST(ThreadTransportTest, TheRootCauseIsThrown) {
  const auto body = [](Communicator& comm) {
    if (comm.rank() == 2) throw InvalidArgument("no such thing");
    int value = 0;
    const Message message{Direction::receive, (comm.rank() + 1) % comm.size(), &value, sizeof value};
    comm.wait(comm.post(0, std::span(&message, 1)), kPatience);
  };
  try {
    run_thread_ranks(4, body);
    FAIL() << "expected an error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "no such thing");
  }
}

// Also where the rank that it began in is the last to say so.
TEST(ThreadTransportTest, TheRootCauseIsThrownThoughItComesLast) {
  std::atomic<bool> told{false};
  const auto body = [&](Communicator& comm) {
    if (comm.rank() == 1) {
      const std::string error = comm_testing::error_of([&] { comm_testing::barrier(comm, 0); });
      told = true;
      comm.progress();  // fails again
    }
    comm.abort("no such thing");
    while (!told) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    throw InvalidArgument("no such thing");
  };
  EXPECT_EQ(comm_testing::error_of<InvalidArgument>([&] { run_thread_ranks(2, body); }), "no such thing");
}

// What a rank posted is its own again when its communicator is destroyed.
TEST(ThreadTransportTest, NobodyMeetsMessagesOfARankThatHasLeft) {
  for (const auto direction : {Direction::send, Direction::receive}) {
    auto world = make_thread_world(2);
    int of_0 = 1, of_1 = 2;
    const Message message_of_0{direction, 1, &of_0, sizeof of_0};
    world[0]->post(0, std::span(&message_of_0, 1));
    world[0].reset();
    const Message message_of_1{direction == Direction::send ? Direction::receive : Direction::send, 0, &of_1, sizeof of_1};
    const std::string error =
        comm_testing::error_of([&] { world[1]->wait(world[1]->post(0, std::span(&message_of_1, 1)), kPatience); });
    EXPECT_EQ(error.substr(error.size() - 15), "rank 0 has left");
    EXPECT_EQ(of_0, 1);
    EXPECT_EQ(of_1, 2);
  }
}

// Of two failures that reach a rank before it looks the first is told: the other may be its consequence.
TEST(ThreadTransportTest, TheFirstFailureIsTold) {
  auto world = make_thread_world(3);
  world[1]->abort("first");
  world[2]->abort("second");
  EXPECT_EQ(comm_testing::error_of([&] { world[0]->progress(); }), "rank 0/3: rank 1 aborted: first");
}

}  // namespace
}  // namespace ringspan
