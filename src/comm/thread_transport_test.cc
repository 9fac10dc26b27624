#include <array>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "comm_testing/patience.h"
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

}  // namespace
}  // namespace ringspan
