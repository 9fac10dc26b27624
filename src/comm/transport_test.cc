#include "comm/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <thread>

#include "ringspan/error.h"

namespace ringspan {
namespace {

// Rank 0 of three. Nothing moves unless a test makes it.
class FakeTransport final : public Transport {
 public:
  using Transport::Clock;
  using Transport::fail_told_by_peer;
  using Transport::TimePoint;
  FakeTransport() : Transport(0, 3) {}
  std::function<void()> on_pump = [] {};
  std::function<void(int)> on_block = [](int) {};                            // the how manieth
  std::array<TimePoint, 3> lives{Clock::now(), Clock::now(), Clock::now()};  // last signs of life
  bool left = false;
  TimePoint block_until;
  void complete(int peer = 1) { operations_[static_cast<std::size_t>(peer)]->complete = true; }

 private:
  void start(Operation& operation) override { operations_[static_cast<std::size_t>(operation.message.peer)] = &operation; }
  void pump() override { on_pump(); }
  void block(TimePoint until) override {
    block_until = until;
    on_block(blocked_++);
  }
  TimePoint last_sign_of_life(int peer) const override { return lives[static_cast<std::size_t>(peer)]; }
  bool has_left(int) const override { return left; }
  void tell_peers(const std::string&) override {}
  void withdraw() override {}
  std::unique_ptr<Communicator> make_duplicate() override { return nullptr; }

  std::array<Operation*, 3> operations_{};
  int blocked_ = 0;
};

// The error of a wait for messages of so many ranks.
std::string wait_for_four_bytes(FakeTransport& transport, Communicator::Seconds deadline, int peers = 1) {
  std::array<int, 2> values{};
  const std::array batch{Message{Message::Direction::receive, 1, &values[0], sizeof(int)},
                         Message{Message::Direction::receive, 2, &values[1], sizeof(int)}};
  try {
    transport.wait(transport.post(0, std::span(batch).first(static_cast<std::size_t>(peers))), deadline);
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

// A job that is stopped as a whole for longer than the deadline goes on when it is continued.
TEST(TransportTest, TheTimeInWhichThisRankWasStoppedIsNotItsPeersSilence) {
  constexpr Communicator::Seconds kDeadline{1.0};
  FakeTransport transport;
  transport.on_block = [&](int blocked) {
    if (blocked == 0) std::this_thread::sleep_for(1.5 * kDeadline);  // stopped: block() would have returned long ago
    if (blocked == 1) transport.complete();
  };
  EXPECT_EQ(wait_for_four_bytes(transport, kDeadline), "");
}

TEST(TransportTest, ItsPeersAreMissedAtTheDeadlineAfterIt) {
  constexpr Communicator::Seconds kDeadline{1.0};
  FakeTransport transport;
  int looks = 0;
  transport.on_block = [&](int blocked) {
    std::this_thread::sleep_for(blocked == 0 ? 1.5 * kDeadline : kDeadline / 100);
    looks = blocked;
  };
  EXPECT_THAT(wait_for_four_bytes(transport, kDeadline), testing::HasSubstr("from rank 1 in round 0: no sign of life for "));
  EXPECT_GT(looks, 1);
}

TEST(TransportTest, AShortSilenceIsNotToldAsNone) {
  FakeTransport transport;
  transport.on_block = [](int) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
  const std::string error = wait_for_four_bytes(transport, Communicator::Seconds(0.002));
  EXPECT_THAT(error, testing::HasSubstr("(deadline 0.002 s)"));
  EXPECT_THAT(error, testing::Not(testing::HasSubstr(" 0.0 s")));
}

// Of a batch every peer counts: one that shows life does not hide another.
TEST(TransportTest, ASilentPeerIsMissedBehindOneThatIsAlive) {
  FakeTransport transport;
  transport.lives[1] += std::chrono::hours(1);
  transport.on_block = [&](int blocked) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (blocked < 1000) return;
    transport.complete(1);
    transport.complete(2);
  };
  EXPECT_THAT(wait_for_four_bytes(transport, Communicator::Seconds(0.1), 2),
              testing::HasSubstr("waiting for 4 bytes from rank 2 in round 0: no sign of life for "));
}

// Not before, and with no more looks, 20 ms apart, than it takes.
TEST(TransportTest, ADeadlineIsKept) {
  FakeTransport transport;
  constexpr Communicator::Seconds kDeadline{0.2};
  int looks = 0;
  transport.on_block = [&](int) {
    ++looks;
    std::this_thread::sleep_until(transport.block_until);
  };
  const auto begin = FakeTransport::Clock::now();
  EXPECT_THAT(wait_for_four_bytes(transport, kDeadline), testing::HasSubstr("no sign of life"));
  EXPECT_GE(FakeTransport::Clock::now() - begin, kDeadline);
  EXPECT_LE(looks, 12);
}

// While a rank waits it shows life, since every look at what has moved does: its peers may have short deadlines.
TEST(TransportTest, AWaitLooksOften) {
  FakeTransport transport;
  Communicator::Seconds sleep{1e9};
  transport.on_block = [&](int) {
    sleep = transport.block_until - FakeTransport::Clock::now();
    transport.complete();
  };
  EXPECT_EQ(wait_for_four_bytes(transport, Communicator::Seconds(1e9)), "");
  EXPECT_LE(sleep, Communicator::Seconds(0.05));
}

// A rank that failed says so before it leaves: what it said counts, though it came after the last look.
TEST(TransportTest, WhatALeavingRankSaidIsTheCause) {
  FakeTransport transport;
  transport.on_block = [&](int) {
    transport.on_pump = [&, pumped = 0]() mutable {
      transport.left = true;
      if (pumped++ > 0) transport.fail_told_by_peer("rank 1 failed: on fire");
    };
  };
  EXPECT_EQ(wait_for_four_bytes(transport, Communicator::Seconds(1e9)),
            "rank 0/3: waiting for 4 bytes from rank 1 in round 0: rank 1 failed: on fire");
}

TEST(TransportTest, ErrorsNameAMessageThatIsStillMissing) {
  FakeTransport transport;
  transport.on_block = [&](int blocked) {
    transport.complete(1);
    if (blocked > 0) transport.on_pump = [&] { transport.fail_told_by_peer("rank 1 aborted: enough"); };
  };
  EXPECT_EQ(wait_for_four_bytes(transport, Communicator::Seconds(1e9), 2),
            "rank 0/3: waiting for 4 bytes from rank 2 in round 0: rank 1 aborted: enough");
}

// Whoever runs the ranks tells a cause from its consequences by the class, whichever call throws it.
TEST(TransportTest, AFailureKeepsItsClass) {
  FakeTransport told, own;
  EXPECT_THROW(told.fail_told_by_peer("rank 1 aborted: enough"), PeerFailure);
  EXPECT_THROW(told.progress(), PeerFailure);
  own.abort("enough");
  try {
    own.progress();
    FAIL() << "expected an error";
  } catch (const PeerFailure&) {
    FAIL() << "a failure of this rank";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "rank 0/3: aborted: enough");
  }
}

TEST(TransportTest, ARequestThatWasWaitedForIsNotTheNextOfItsPlace) {
  FakeTransport transport;
  const Request first = transport.post(0, {});
  transport.wait(first, Communicator::Seconds(0));
  const Request second = transport.post(0, {});
  EXPECT_NE(first, second);
  EXPECT_THROW(transport.test(first), InvalidArgument);
  EXPECT_THROW(transport.wait(first, Communicator::Seconds(0)), InvalidArgument);
  transport.wait(second, Communicator::Seconds(0));
}

}  // namespace
}  // namespace ringspan
