// What the C boundary refuses, and how errors cross it. What works is the conformance suite's.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/c_adapter.h"
#include "comm_testing/patience.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using comm_testing::kPatience;

// An embedder's communicator that answers as it is told.
struct Scripted {
  std::int32_t status = RINGSPAN_OK;
  std::string text;
  bool makes_request = true;
  int destroyed = 0;
  std::string aborted;
  ringspan_communicator copy{};  // what duplicate gives
};

Scripted& scripted(void* user) { return *static_cast<Scripted*>(user); }

ringspan_communicator callbacks_of(Scripted& script) {
  ringspan_communicator c{};
  c.struct_size = sizeof c;
  c.user = &script;
  c.rank = 1;
  c.size = 3;
  c.post = [](void* user, std::uint64_t, const ringspan_message*, std::uint64_t, std::uint64_t* request) {
    *request = scripted(user).makes_request ? 1 : 0;
    return scripted(user).status;
  };
  c.test = [](void* user, std::uint64_t, std::int32_t* complete) {
    *complete = 1;
    return scripted(user).status;
  };
  c.wait = [](void* user, std::uint64_t, double) { return scripted(user).status; };
  c.progress = [](void* user) { return scripted(user).status; };
  c.abort = [](void* user, const char* reason) { scripted(user).aborted = reason; };
  c.error_text = [](void* user, char* buffer, std::uint64_t capacity) {
    std::strncpy(buffer, scripted(user).text.c_str(), capacity);
    return static_cast<std::uint64_t>(scripted(user).text.size());
  };
  c.destroy = [](void* user) { ++scripted(user).destroyed; };
  return c;
}

template <typename Expected, typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  }
  return "no error";
}

std::string refusal_of(const ringspan_communicator& callbacks) {
  return error_of<InvalidArgument>([&] { make_communicator(callbacks); });
}

TEST(CallbackCommunicatorErrors, AStructThatIsNotWholeIsRefusedMemberByMember) {
  Scripted script;
  const ringspan_communicator good = callbacks_of(script);
  ringspan_communicator c = good;
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{sizeof c - 4}, std::uint64_t{1} << 50}) {
    c.struct_size = size;
    EXPECT_EQ(refusal_of(c), "communicator.struct_size (" + std::to_string(size) + ") must be the size of the struct (" +
                                 std::to_string(sizeof c) + ")");
  }
  c = good;
  c.size = 0;
  EXPECT_EQ(refusal_of(c), "communicator.size (0) must be at least 1");
  c = good;
  c.rank = 3;
  EXPECT_EQ(refusal_of(c), "communicator.rank (3) must be in [0, 3)");
  c.rank = -1;
  EXPECT_EQ(refusal_of(c), "communicator.rank (-1) must be in [0, 3)");
  c = good;
  c.post = nullptr;
  EXPECT_EQ(refusal_of(c), "communicator.post must not be null");
  c = good;
  c.test = nullptr;
  EXPECT_EQ(refusal_of(c), "communicator.test must not be null");
  c = good;
  c.wait = nullptr;
  EXPECT_EQ(refusal_of(c), "communicator.wait must not be null");
  c = good;
  c.progress = nullptr;
  EXPECT_EQ(refusal_of(c), "communicator.progress must not be null");
  c = good;
  c.abort = nullptr;
  EXPECT_EQ(refusal_of(c), "communicator.abort must not be null");
  EXPECT_EQ(script.destroyed, 0);
  make_communicator(good).reset();
  EXPECT_EQ(script.destroyed, 1);
}

TEST(CallbackCommunicatorErrors, WhatANewerStructSetsIsNotIgnored) {
  Scripted script;
  struct Newer {
    ringspan_communicator known;
    void (*unknown)();
  } newer = {callbacks_of(script), nullptr};
  newer.known.struct_size = sizeof newer;
  EXPECT_EQ(make_communicator(newer.known)->size(), 3);
  newer.unknown = [] {};
  EXPECT_NE(error_of<Unsupported>([&] {
              make_communicator(newer.known);
            }).find("communicator has something set at byte " + std::to_string(sizeof newer.known)),
            std::string::npos);
}

TEST(CallbackCommunicatorErrors, AStatusBecomesItsClassAndAFailureStays) {
  const auto check = [](std::int32_t status, auto expected, const std::string& text, const std::string& whole) {
    Scripted script;
    const auto comm = make_communicator(callbacks_of(script));
    script.status = status;
    script.text = text;
    EXPECT_EQ(error_of<decltype(expected)>([&] { comm->progress(); }), whole);
    script.status = RINGSPAN_OK;
    return error_of<decltype(expected)>([&] { comm->progress(); });  // afterwards
  };
  EXPECT_EQ(check(RINGSPAN_INVALID_ARGUMENT, InvalidArgument(""), "bad peer", "rank 1/3: bad peer"), "no error");
  EXPECT_EQ(check(RINGSPAN_UNSUPPORTED, Unsupported(""), "not here", "rank 1/3: not here"), "no error");
  EXPECT_EQ(check(RINGSPAN_COMM_ERROR, CommError(""), "rank 1/3: wire cut", "rank 1/3: wire cut"), "rank 1/3: wire cut");
  EXPECT_EQ(check(RINGSPAN_PEER_FAILURE, CommError(""), "rank 2 left", "rank 1/3: rank 2 left"), "rank 1/3: rank 2 left");
  EXPECT_EQ(check(RINGSPAN_DEVICE_ERROR, DeviceError(""), "on fire", "rank 1/3: on fire"), "rank 1/3: on fire");
  EXPECT_EQ(check(4711, CommError(""), "", "rank 1/3: the progress callback failed with status 4711"),
            "rank 1/3: the progress callback failed with status 4711");
}

TEST(CallbackCommunicatorErrors, TextsAreCutToTheBufferNotReadPastIt) {
  Scripted script;
  const auto comm = make_communicator(callbacks_of(script));
  script.status = RINGSPAN_COMM_ERROR;
  script.text = std::string(100000, 'x');
  const std::string text = error_of<CommError>([&] { comm->progress(); });
  EXPECT_GT(text.size(), 1000U);
  EXPECT_LT(text.size(), 5000U);
}

TEST(CallbackCommunicatorErrors, TextsAreCutBetweenCharacters) {
  Scripted script;
  const auto comm = make_communicator(callbacks_of(script));
  script.status = RINGSPAN_UNSUPPORTED;
  for (int before = 0; before < 2; ++before) {
    script.text.assign(static_cast<std::size_t>(before), 'x');
    for (int i = 0; i < 3000; ++i) script.text += "é";
    const std::string text = error_of<Unsupported>([&] { comm->progress(); });
    EXPECT_EQ(text.substr(text.size() - 4), "éé") << before;
  }
}

// Nobody but us could end it.
TEST(CallbackCommunicatorErrors, ADuplicateThatIsRefusedIsDestroyed) {
  Scripted script;
  ringspan_communicator c = callbacks_of(script);
  c.duplicate = [](void* user, ringspan_communicator* out) {
    *out = scripted(user).copy;
    return std::int32_t{RINGSPAN_OK};
  };
  const auto comm = make_communicator(c);
  Scripted of_copy;
  const auto refusal = [&] { return error_of<InvalidArgument>([&] { comm->duplicate(); }); };
  script.copy = callbacks_of(of_copy);
  script.copy.post = nullptr;
  EXPECT_EQ(refusal(), "communicator.post must not be null");
  EXPECT_EQ(of_copy.destroyed, 1);
  script.copy = callbacks_of(of_copy);
  script.copy.rank = 2;
  EXPECT_EQ(refusal(), "rank 1/3: the duplicate callback made rank 2/3");
  EXPECT_EQ(of_copy.destroyed, 2);
  script.copy.rank = 1;
  script.copy.size = 4;
  script.copy.destroy = nullptr;
  EXPECT_EQ(refusal(), "rank 1/3: the duplicate callback made rank 1/4");
  script.copy = callbacks_of(of_copy);
  EXPECT_EQ(comm->duplicate()->rank(), 1);
  EXPECT_EQ(of_copy.destroyed, 3);
  script.copy.struct_size = 2 * sizeof script.copy;  // of a newer header, which wrote no more than there is room for
  EXPECT_EQ(comm->duplicate()->rank(), 1);
  EXPECT_EQ(of_copy.destroyed, 4);
}

TEST(CallbackCommunicatorErrors, APostWithoutARequestIsAFailure) {
  Scripted script;
  const auto comm = make_communicator(callbacks_of(script));
  script.makes_request = false;
  EXPECT_EQ(error_of<CommError>([&] { comm->post(0, {}); }), "rank 1/3: post succeeded, but made no request");
}

TEST(CallbackCommunicatorErrors, AbortPassesTheReasonAndFails) {
  Scripted script;
  const auto comm = make_communicator(callbacks_of(script));
  comm->abort("enough");
  comm->abort("more than enough");
  EXPECT_EQ(script.aborted, "enough");
  EXPECT_EQ(error_of<CommError>([&] { comm->progress(); }), "rank 1/3: aborted: enough");
  const auto other = make_communicator(callbacks_of(script));
  other->abort("rank 1/3: on fire");
  EXPECT_EQ(error_of<CommError>([&] { other->progress(); }), "rank 1/3: aborted: on fire");
}

// What was posted is the callbacks' until abort returns, and the peers are to know.
TEST(CallbackCommunicatorErrors, AbortReachesTheCallbacksAfterAFailureToo) {
  Scripted script;
  const auto comm = make_communicator(callbacks_of(script));
  script.status = RINGSPAN_DEVICE_ERROR;
  script.text = "on fire";
  EXPECT_EQ(error_of<DeviceError>([&] { comm->progress(); }), "rank 1/3: on fire");
  EXPECT_EQ(script.aborted, "");
  comm->abort("rank 1/3: on fire");
  comm->abort("again");
  EXPECT_EQ(script.aborted, "rank 1/3: on fire");
  EXPECT_EQ(error_of<DeviceError>([&] { comm->progress(); }), "rank 1/3: on fire");
}

TEST(CallbackCommunicatorErrors, WithoutOptionalCallbacksOnlyTheirPartIsMissing) {
  Scripted script;
  ringspan_communicator c = callbacks_of(script);
  c.struct_size = offsetof(ringspan_communicator, duplicate);  // an older header: what follows is not even read
  c.error_text = reinterpret_cast<decltype(c.error_text)>(std::uintptr_t{8});
  c.destroy = reinterpret_cast<decltype(c.destroy)>(std::uintptr_t{8});
  const auto comm = make_communicator(c);
  EXPECT_EQ(error_of<Unsupported>([&] { comm->duplicate(); }), "rank 1/3: the communicator has no duplicate callback");
  int value = 0;
  const std::array batch{Message{Message::Direction::send, 0, &value, 4}, Message{Message::Direction::receive, 2, &value, 3}};
  comm->wait(comm->post(0, batch), kPatience);
  EXPECT_EQ(comm->traffic()[0].sent_bytes, 4);  // counted by us
  EXPECT_EQ(comm->traffic()[0].sent_messages, 1);
  EXPECT_EQ(comm->traffic()[2].received_bytes, 3);
  script.status = RINGSPAN_COMM_ERROR;
  EXPECT_EQ(error_of<CommError>([&] { comm->progress(); }), "rank 1/3: the progress callback failed with status 3");
}

TEST(ExportedCommunicatorErrors, ADirectionThatIsNoneIsRefused) {
  auto world = make_thread_world(2);
  const ringspan_communicator c = export_communicator(std::move(world[0]));
  int value = 0;
  const ringspan_message message{2, 1, &value, 4};
  std::uint64_t request = 0;
  EXPECT_EQ(c.post(c.user, 0, &message, 1, &request), RINGSPAN_INVALID_ARGUMENT);
  char text[16];
  EXPECT_GT(c.error_text(c.user, text, sizeof text), sizeof text);
  EXPECT_STREQ(text, "direction (2) m");  // cut, and ended
  c.destroy(c.user);
}

TEST(ExportedCommunicatorErrors, AnAbortWithoutAReasonReachesThePeers) {
  auto world = make_thread_world(2);
  const ringspan_communicator c = export_communicator(std::move(world[0]));
  c.abort(c.user, nullptr);
  EXPECT_EQ(error_of<CommError>([&] { world[1]->progress(); }), "rank 1/2: rank 0 aborted: no reason given");
  c.destroy(c.user);
}

TEST(ExportedCommunicatorErrors, ADuplicateFillsNoMoreThanTheCallersStruct) {
  const ringspan_communicator c = export_communicator(std::move(make_thread_world(1)[0]));
  ringspan_communicator older{};
  older.struct_size = offsetof(ringspan_communicator, destroy);
  ASSERT_EQ(c.duplicate(c.user, &older), RINGSPAN_OK);
  EXPECT_EQ(older.struct_size, offsetof(ringspan_communicator, destroy));
  EXPECT_NE(older.post, nullptr);
  EXPECT_EQ(older.destroy, nullptr);
  c.destroy(older.user);
  c.destroy(c.user);
}

TEST(TransportErrors, AWorldHasAtLeastOneRank) {
  EXPECT_EQ(error_of<InvalidArgument>([] { make_thread_world(0); }), "ranks (0) must be at least 1");
  EXPECT_EQ(error_of<InvalidArgument>([] { run_thread_ranks(-1, [](Communicator&) {}); }), "ranks (-1) must be at least 1");
  EXPECT_EQ(error_of<InvalidArgument>([] { run_forked_ranks(0, [](Communicator&) {}); }), "ranks (0) must be at least 1");
}

TEST(TransportErrors, AnEmptyBodyIsRefused) {
  EXPECT_EQ(error_of<InvalidArgument>([] { run_thread_ranks(2, nullptr); }), "body is empty");
  EXPECT_EQ(error_of<InvalidArgument>([] { run_forked_ranks(2, nullptr); }), "body is empty");
}

}  // namespace
}  // namespace ringspan
