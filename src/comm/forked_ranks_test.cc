#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm_testing/conformance_support.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using Direction = Message::Direction;
using comm_testing::kPatience;
using testing::HasSubstr;
using testing::StartsWith;

// A ring step: everybody needs everybody within size() steps.
void ring_step(Communicator& comm, std::uint64_t round, Communicator::Seconds deadline = kPatience) {
  const int size = comm.size();
  if (size == 1) return;
  int mine = comm.rank();
  int received = -1;
  const std::array batch{Message{Direction::send, (comm.rank() + 1) % size, &mine, sizeof mine},
                         Message{Direction::receive, (comm.rank() + size - 1) % size, &received, sizeof received}};
  comm.wait(comm.post(round, batch), deadline);
  if (received != (comm.rank() + size - 1) % size) throw std::logic_error("wrong value");
}

TEST(ForkedRanksTest, SharedMemoryReturnsResults) {
  for (const int ranks : {1, 2, 5}) {
    SharedMemory shared(static_cast<std::size_t>(ranks) * sizeof(int));
    run_forked_ranks(ranks, [&](Communicator& comm) {
      for (std::uint64_t round = 0; round < 20; ++round) ring_step(comm, round);
      const int value = 100 + comm.rank();
      std::memcpy(shared.bytes().data() + sizeof value * static_cast<std::size_t>(comm.rank()), &value, sizeof value);
    });
    for (int rank = 0; rank < ranks; ++rank) {
      int value = 0;
      std::memcpy(&value, shared.bytes().data() + sizeof value * static_cast<std::size_t>(rank), sizeof value);
      EXPECT_EQ(value, 100 + rank);
    }
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child is left
  EXPECT_EQ(errno, ECHILD);
}

TEST(ForkedRanksTest, TheMeshMayNeedMoreDescriptorsThanTheSoftLimit) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 128;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  run_forked_ranks(9, [](Communicator& comm) { ring_step(comm, 0); });  // 144 sockets
  rlimit after{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_EQ(after.rlim_cur, 128U);
  low.rlim_cur = 256;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  std::array<int, 120> open{};  // besides what is open anyway
  for (int& fd : open) ASSERT_GE(fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  run_forked_ranks(9, [](Communicator& comm) { ring_step(comm, 0); });
  for (const int fd : open) ::close(fd);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(ForkedRanksTest, TheRootCauseKeepsItsClass) {
  const auto body = [](Communicator& comm) {
    if (comm.rank() == 2) throw Unsupported("paged keys are not supported");
    ring_step(comm, 0);
    ring_step(comm, 1);
    ring_step(comm, 2);
  };
  try {
    run_forked_ranks(4, body);
    FAIL() << "expected an error";
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(), "paged keys are not supported");
  }
  const auto outcomes = try_forked_ranks(4, body);
  for (const int rank : {0, 1, 3}) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(outcome.told_by_peer) << outcome.message;
    EXPECT_THAT(outcome.message, HasSubstr("rank 2 aborted: paged keys are not supported"));
  }
  EXPECT_FALSE(outcomes[2].told_by_peer);
}

// A rank that is silent because it works at what fails in the end: its peer had the first error, and not the cause.
TEST(ForkedRanksTest, AnErrorOfARanksOwnGoesBeforeWhatCommunicationNoticed) {
  SharedMemory shared(sizeof(int));
  const std::atomic_ref<int> missed(*reinterpret_cast<int*>(shared.bytes().data()));
  const auto body = [&](Communicator& comm) {
    if (comm.rank() == 1) {
      while (missed == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      throw InvalidArgument("no");
    }
    const std::string error = comm_testing::error_of([&] { ring_step(comm, 0, Communicator::Seconds(0.05)); });
    missed = 1;
    throw CommError(error);
  };
  EXPECT_EQ(comm_testing::error_of<InvalidArgument>([&] { run_forked_ranks(2, body); }), "no");
}

TEST(ForkedRanksTest, AKilledRankIsTheCauseAndEveryOtherNamesIt) {
  const auto body = [](Communicator& comm) {
    for (std::uint64_t round = 0; round < 5; ++round) ring_step(comm, round);
    if (comm.rank() == 1) ::raise(SIGKILL);
    for (std::uint64_t round = 5; round < 20; ++round) ring_step(comm, round);
  };
  const auto outcomes = try_forked_ranks(4, body);
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_THAT(outcomes[1].message, StartsWith("rank 1/4: killed by signal 9"));
  for (const int rank : {0, 2, 3}) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_NE(outcome.error, nullptr);
    EXPECT_THAT(outcome.message, HasSubstr("rank 1 died: its connection closed"));
  }
  EXPECT_THROW(run_forked_ranks(4, body), CommError);
}

// Rank 0 waits for rank 1, which computes; neither needs the one that dies.
TEST(ForkedRanksTest, ADeathIsNoticedByRanksThatWaitForOthers) {
  const auto outcomes = try_forked_ranks(3, [](Communicator& comm) {
    comm_testing::barrier(comm, 0);
    if (comm.rank() == 2) ::raise(SIGKILL);
    if (comm.rank() == 1) throw CommError(comm_testing::error_in_time(comm));
    int value = 0;
    const Message message{Direction::receive, 1, &value, sizeof value};
    comm.wait(comm.post(1, std::span(&message, 1)), Communicator::Seconds(1e9));
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)].message, HasSubstr("rank 2 died: its connection closed"));
  }
}

TEST(ForkedRanksTest, AnExitInTheBodyIsADeath) {
  const auto outcomes = try_forked_ranks(2, [](Communicator& comm) {
    if (comm.rank() == 1) ::_exit(7);
    ring_step(comm, 0);
  });
  EXPECT_EQ(outcomes[1].message, "rank 1/2: exited with status 7 in its body");
  EXPECT_THAT(outcomes[0].message, HasSubstr("rank 1 died"));
}

std::string error_of_run(int ranks, const RankBody& body) {
  try {
    run_forked_ranks(ranks, body);
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ForkedRanksTest, AnExitInTheBodyIsTheCauseOfWhatItsPeersSay) {
  const auto body = [](Communicator& comm) {
    ring_step(comm, 0);
    if (comm.rank() == 1) ::_exit(7);
    for (std::uint64_t round = 1; round < 9; ++round) ring_step(comm, round);
  };
  EXPECT_EQ(error_of_run(3, body), "rank 1/3: exited with status 7 in its body");
}

// A rank that is killed, in a program that has its own way with SIGCHLD.
std::string error_with(const struct sigaction& of_program) {
  struct sigaction before {};
  ::sigaction(SIGCHLD, &of_program, &before);
  const std::string error = error_of_run(3, [](Communicator& comm) {
    ring_step(comm, 0);
    if (comm.rank() == 1) ::raise(SIGKILL);
    for (std::uint64_t round = 1; round < 9; ++round) ring_step(comm, round);
  });
  struct sigaction after {};
  ::sigaction(SIGCHLD, &before, &after);
  EXPECT_EQ(after.sa_handler, of_program.sa_handler);
  EXPECT_EQ(after.sa_flags & SA_NOCLDWAIT, of_program.sa_flags & SA_NOCLDWAIT);
  return error;
}

TEST(ForkedRanksTest, AProgramMayIgnoreItsChildren) {
  struct sigaction ignored {};
  ignored.sa_handler = SIG_IGN;
  EXPECT_THAT(error_with(ignored), StartsWith("rank 1/3: killed by signal 9"));
  struct sigaction dropped {};
  dropped.sa_flags = SA_NOCLDWAIT;
  EXPECT_THAT(error_with(dropped), StartsWith("rank 1/3: killed by signal 9"));
}

TEST(ForkedRanksTest, AProgramMayReapItsChildren) {
  struct sigaction reaping {};
  reaping.sa_handler = [](int) {
    const int kept = errno;
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    errno = kept;
  };
  // Mostly the handler is first.
  EXPECT_THAT(error_with(reaping),
              testing::AnyOf("rank 1/3: ended without a report", StartsWith("rank 1/3: killed by signal 9")));
}

TEST(ForkedRanksTest, LongErrorsAreCutBetweenCharacters) {
  for (int before = 0; before < 2; ++before) {
    std::string text(static_cast<std::size_t>(before), 'x');
    for (int i = 0; i < 3000; ++i) text += "é";
    const auto outcomes = try_forked_ranks(2, [&](Communicator& comm) {
      if (comm.rank() == 1) throw InvalidArgument(text);
      ring_step(comm, 0);
    });
    for (const RankOutcome& outcome : outcomes) EXPECT_THAT(outcome.message, testing::EndsWith("éé")) << before;
  }
}

TEST(ForkedRanksTest, AStoppedRankIsMissedAtTheDeadlineAndCleanedUp) {
  const auto outcomes = try_forked_ranks(3, [](Communicator& comm) {
    ring_step(comm, 0);
    if (comm.rank() == 2) ::raise(SIGSTOP);
    // Only who waits for it is impatient: a rank that the machine keeps from running would look as dead to the other.
    const Communicator::Seconds deadline = comm.rank() == 0 ? Communicator::Seconds(0.5) : kPatience;
    for (std::uint64_t round = 1; round < 10; ++round) ring_step(comm, round, deadline);
  });
  EXPECT_EQ(outcomes[2].message, "rank 2/3: was stopped, and killed when no other rank was left");
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)].message, HasSubstr("no sign of life"));
  }
  EXPECT_THAT(outcomes[0].message, HasSubstr("rank 2 in round"));
}

TEST(ForkedRanksTest, ARankThatWasStoppedAndContinuedIsNotKilledAsAStoppedOne) {
  SharedMemory shared(2 * sizeof(int));
  const std::atomic_ref<int> pid(reinterpret_cast<int*>(shared.bytes().data())[0]);
  const std::atomic_ref<int> failing(reinterpret_cast<int*>(shared.bytes().data())[1]);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
  const auto outcomes = try_forked_ranks(2, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      pid = ::getpid();
      while (failing == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (int i = 0; i < 5; ++i) pause();  // meanwhile no other rank is left
      return;
    }
    while (pid == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ::kill(pid, SIGSTOP);
    pause();  // the parent looks every 20 ms
    ::kill(pid, SIGCONT);
    pause();
    failing = 1;
    throw InvalidArgument("no");
  });
  EXPECT_EQ(outcomes[0].message, "no");
  EXPECT_EQ(outcomes[1].message, "");
}

// The death of a rank's parent is seen at the pipe, which only the ranks hold.
TEST(ForkedRanksTest, RanksDieWithTheirParent) {
  int fds[2];
  ASSERT_EQ(::pipe2(fds, O_CLOEXEC), 0);
  const pid_t parent = ::fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    try_forked_ranks(2, [&](Communicator& comm) {
      comm_testing::barrier(comm, 0);
      if (::write(fds[1], "", 1) != 1) ::_exit(1);
      ::alarm(120);
      while (true) ::pause();
    });
    ::_exit(0);
  }
  ::close(fds[1]);
  char byte = 0;
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(::read(fds[0], &byte, 1), 1);
  ::kill(parent, SIGKILL);
  EXPECT_EQ(::waitpid(parent, nullptr, 0), parent);
  pollfd end{fds[0], POLLIN, 0};
  EXPECT_EQ(::poll(&end, 1, 60000), 1) << "the ranks live on";
  ::close(fds[0]);
}

TEST(ForkedRanksTest, WhatIsBufferedIsWrittenOnce) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(::fcntl(::fileno(file.get()), F_SETFL, O_APPEND), 0);
  std::fputs("before ", file.get());
  run_forked_ranks(3, [&](Communicator&) { std::fputs("rank ", file.get()); });
  std::fputs("after", file.get());
  std::fflush(file.get());
  char text[100] = {};
  ASSERT_GT(::pread(::fileno(file.get()), text, sizeof text - 1, 0), 0);
  EXPECT_STREQ(text, "before rank rank rank after");
}

TEST(ForkedRanksTest, ARankThatRunsOnAfterAnErrorIsKilled) {
  ForkOptions options;
  options.grace = Communicator::Seconds(0.2);
  const auto outcomes = try_forked_ranks(
      2,
      [](Communicator& comm) {
        if (comm.rank() == 0) throw InvalidArgument("no");
        while (true) ::pause();
      },
      options);
  EXPECT_EQ(outcomes[0].message, "no");
  EXPECT_EQ(outcomes[1].message, "rank 1/2: still ran long after another rank had failed, and was killed");
}

TEST(SocketCommunicatorTest, RefusesWhatIsNotASocket) {
  const std::array<PeerSockets, 2> peers{PeerSockets{}, PeerSockets{-1, -1}};
  try {
    make_socket_communicator(0, peers);
    FAIL() << "expected an error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "peers[1].data (-1) must be a connected stream socket");
  }
  EXPECT_THROW(make_socket_communicator(2, peers), InvalidArgument);
  EXPECT_THROW(make_socket_communicator(-1, peers), InvalidArgument);
}

}  // namespace
}  // namespace ringspan
