// The decorators that other layers' tests rely on: each must see the mistake that it is for.
#include "comm_testing/decorators.h"

#include <array>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm_testing/patience.h"
#include "ringspan/transports.h"

namespace ringspan::comm_testing {
namespace {

using Direction = Message::Direction;

Message message(Direction direction, int peer, int& value) { return {direction, peer, &value, sizeof value}; }

// Both ranks tell each other their number in round 5.
Request swap_numbers(Communicator& comm, int& mine, int& other) {
  mine = comm.rank();
  const std::array batch{message(Direction::send, 1 - comm.rank(), mine), message(Direction::receive, 1 - comm.rank(), other)};
  return comm.post(5, batch);
}

TEST(RecordingCommunicatorTest, ListsWhatWasPosted) {
  run_thread_ranks(2, [](Communicator& comm) {
    RecordingCommunicator recording(comm);
    int mine = 0;
    int other = -1;
    recording.wait(swap_numbers(recording, mine, other), kPatience);
    const std::vector<RecordingCommunicator::Entry> expected{{5, Direction::send, 1 - comm.rank(), 4},
                                                             {5, Direction::receive, 1 - comm.rank(), 4}};
    EXPECT_EQ(recording.entries(), expected);
  });
}

TEST(GatedCommunicatorTest, WhoWaitsBeforeOpeningMeetsTheDeadline) {
  std::vector<std::string> errors(2);
  try {
    run_thread_ranks(2, [&](Communicator& comm) {
      const Gate gate(5);
      GatedCommunicator gated(comm, gate);
      int mine = 0;
      int other = -1;
      const Request request = swap_numbers(gated, mine, other);
      EXPECT_FALSE(gated.test(request));
      gated.wait(request, Communicator::Seconds(0.05));
      ADD_FAILURE() << "the gate was closed";
    });
    FAIL() << "expected an error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("the gate of round 5 was still closed at the deadline"));
  }
}

TEST(GatedCommunicatorTest, WhoOpensFirstPasses) {
  run_thread_ranks(2, [&](Communicator& comm) {
    Gate gate;
    GatedCommunicator gated(comm, gate);
    int mine = 0;
    int other = -1;
    const Request request = swap_numbers(gated, mine, other);
    gate.open_below(6);
    gate.open_below(2);  // never closes again
    gated.wait(request, kPatience);
    EXPECT_EQ(other, 1 - comm.rank());
  });
}

TEST(HostileCommunicatorTest, ReceivedDataIsGarbageBeforeTheWait) {
  run_thread_ranks(2, [&](Communicator& comm) {
    HostileCommunicator hostile(comm, 3);
    int mine = 0;
    int other = -1;
    const Request request = swap_numbers(hostile, mine, other);
    while (!hostile.test(request)) std::this_thread::yield();
    EXPECT_EQ(static_cast<unsigned>(other), 0xa5a5a5a5U);
    hostile.wait(request, kPatience);
    EXPECT_EQ(other, 1 - comm.rank());
  });
}

TEST(HostileCommunicatorTest, AWriteIntoASendThatIsNotWaitedForIsSeen) {
  run_thread_ranks(2, [&](Communicator& comm) {
    HostileCommunicator hostile(comm, 4);
    int mine = 0;
    int other = -1;
    const Request request = swap_numbers(hostile, mine, other);
    while (!comm.test(request)) std::this_thread::yield();
    mine = 99;
    EXPECT_THROW(hostile.wait(request, kPatience), std::logic_error);
  });
}

}  // namespace
}  // namespace ringspan::comm_testing
