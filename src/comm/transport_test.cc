#include "comm/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace ringspan {
namespace {

// Rank 0 of two. Nothing moves unless `on_block` makes it; the peer's last sign of life is the begin.
class FakeTransport final : public Transport {
 public:
  FakeTransport() : Transport(0, 2) {}
  std::function<void(int)> on_block;  // the how manieth
  void complete() { operation_->complete = true; }

 private:
  void start(Operation& operation) override { operation_ = &operation; }
  void pump() override {}
  void block(TimePoint) override { on_block(blocked_++); }
  TimePoint last_sign_of_life(int) const override { return begin_; }
  bool has_left(int) const override { return false; }
  void tell_peers(const std::string&) override {}
  void withdraw() override {}
  std::unique_ptr<Communicator> make_duplicate() override { return nullptr; }

  TimePoint begin_ = Clock::now();
  Operation* operation_ = nullptr;
  int blocked_ = 0;
};

std::string wait_for_four_bytes(FakeTransport& transport, Communicator::Seconds deadline) {
  int value = 0;
  const Message message{Message::Direction::receive, 1, &value, sizeof value};
  try {
    transport.wait(transport.post(0, std::span(&message, 1)), deadline);
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

}  // namespace
}  // namespace ringspan
