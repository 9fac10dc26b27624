// What goes wrong with NCCL, played by the stand-in: it stalls, fails, never joins, is missing, too old or of different
// releases, and ranks die. Every rank ends with an error that names rank, peer, round and time, and nothing waits for ever.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "comm/nccl_library.h"
#include "comm_testing/conformance_support.h"
#include "cuda/report.h"
#include "cuda/runtime_stream.h"
#include "nccl/device_worlds.h"
#include "nccl/stand_in.h"

namespace ringspan::comm_testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The control of the stand-in; what it was told ends with the test.
class Faults : public ::testing::Test {
 protected:
  Faults() {
    NcclLibrary::load(STAND_IN);
    void* handle = ::dlopen(STAND_IN, RTLD_NOW | RTLD_NOLOAD);
    fault = reinterpret_cast<StandInFault*>(::dlsym(handle, "stand_in_fault"));
    count = reinterpret_cast<StandInCountOf*>(::dlsym(handle, "stand_in_count"));
  }
  ~Faults() override {
    fault(-1, kStandInNone, 0);
    EXPECT_EQ(count(kStandInLive), 0) << "a communicator of NCCL was not ended";
    EXPECT_EQ(count(kStandInRunning), 0) << "a group still runs";
  }
  // Until so many groups are on streams, over all ranks of this process.
  void wait_for_groups(Communicator& comm, std::int64_t groups) const {
    while (count(kStandInGroups) < groups) {
      comm.progress();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  StandInFault* fault = nullptr;
  StandInCountOf* count = nullptr;
};

// A deadline for waiting for what cannot come any more.
constexpr Seconds kSoon{0.3};

// Every rank sends 65,536 bytes to the next.
struct RingStep {
  Request post(Communicator& comm, std::uint64_t round) {
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    const std::array batch{send_to(next, out), receive_from(previous, in)};
    return comm.post(round, batch);
  }
  Bytes out = Bytes(65536);
  Bytes in = Bytes(65536);
};

// So many steps, or until something fails.
void round_the_ring(Communicator& comm, int rounds) {
  RingStep step;
  for (int round = 0; round < rounds; ++round) comm.wait(step.post(comm, static_cast<std::uint64_t>(round)), kPatience);
}

std::vector<std::string> run_nccl(int ranks, const RankBody& body) { return NcclThreadRanks().run(ranks, body); }

TEST_F(Faults, NothingGoesWrongUnlessToldTo) {
  const std::int64_t groups = count(kStandInGroups);
  const std::int64_t messages = count(kStandInMessages);
  for (const std::string& error : run_nccl(4, [](Communicator& comm) { round_the_ring(comm, 5); })) EXPECT_EQ(error, "");
  EXPECT_EQ(count(kStandInGroups) - groups, 4 * 5) << "one group per rank and batch";
  EXPECT_EQ(count(kStandInMessages) - messages, 2 * 4 * 5) << "which holds all its messages";
}

// NCCL does not tell what of a group it has moved: that it takes longer than the deadline is no sign that it will not end.
TEST_F(Faults, AHealthyGroupMayTakeLongerThanTheDeadline) {
  const auto run_slowly = [&](Seconds deadline) {
    const std::int64_t groups = count(kStandInGroups);
    fault(1, kStandInStall, 0);
    std::string wrong;
    const auto errors = run_nccl(3, [&](Communicator& comm) {
      RingStep step;
      const Request request = step.post(comm, 0);
      wait_for_groups(comm, groups + 3);
      std::jthread lifts;
      if (comm.rank() == 0) {
        lifts = std::jthread([&] {
          std::this_thread::sleep_for(1.5 * deadline);
          fault(-1, kStandInNone, 0);
        });
      }
      comm.wait(request, deadline);
    });
    for (const std::string& error : errors) wrong += error;
    return wrong;
  };
  EXPECT_EQ(with_growing_deadlines(Seconds(0.3), run_slowly), "");
}

TEST_F(Faults, AStalledGroupMeetsTheDeadlineOnEveryRank) {
  const std::int64_t aborts = count(kStandInAborts);
  const std::int64_t groups = count(kStandInGroups);
  fault(1, kStandInStall, 2);
  const auto errors = run_nccl(3, [&](Communicator& comm) {
    round_the_ring(comm, 2);
    RingStep step;
    const Request request = step.post(comm, 2);
    wait_for_groups(comm, groups + 3 * 3);  // all ranks have come
    comm.wait(request, kSoon);
  });
  EXPECT_EQ(count(kStandInAborts) - aborts, 3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)], StartsWith(fmt::format("rank {}/3: ", rank)));
    EXPECT_THAT(
        errors[static_cast<std::size_t>(rank)],
        ContainsRegex("waiting (for|to send) 65536 bytes (from|to) rank [0-9] in round 2: rank [0-9] has come, but NCCL has "
                      "ended no group for [0-9.]+ s \\(deadline 0\\.3 s, extended to 1\\.2 s\\)"));
  }
}

TEST_F(Faults, ARankThatNeverCameIsNotSaidToHaveCome) {
  const std::int64_t groups = count(kStandInGroups);
  fault(1, kStandInStall, 0);
  const auto errors = run_nccl(3, [&](Communicator& comm) {
    if (comm.rank() == 2) throw CommError(error_in_time(comm));
    Bytes out(10);
    Bytes in(10);
    const int peer = 1 - comm.rank();
    const std::array batch{send_to(peer, out), receive_from(peer, in)};
    comm.post(0, batch);
    wait_for_groups(comm, groups + 2);
    if (comm.rank() == 1) throw CommError(error_in_time(comm));
    comm.wait(post_one(comm, 1, receive_from(2, in)), kSoon);
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("from rank 2 in round 1: NCCL has ended none of the groups before for "));
  }
}

TEST_F(Faults, AnAsynchronousErrorReachesEveryRank) {
  fault(2, kStandInAsyncError, 1);
  const auto errors = run_nccl(3, [](Communicator& comm) { round_the_ring(comm, 5); });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("remote process exited or there was a network error (6): told by the stand-in"));
  }
  EXPECT_THAT(errors[0], HasSubstr("rank 2 failed: "));
}

TEST_F(Faults, AGroupThatCannotBeStartedReachesEveryRank) {
  fault(0, kStandInGroupFails, 1);
  const auto errors = run_nccl(2, [](Communicator& comm) { round_the_ring(comm, 5); });
  for (const std::string& error : errors)
    EXPECT_THAT(error, HasSubstr("ncclGroupEnd of NCCL failed: internal error of the stand-in (3)"));
}

// A peer that has posted and dies while the group runs: the other ranks' groups end by abort.
TEST_F(Faults, AKilledRankIsNoticedWhileItsGroupRuns) {
  fault(2, kStandInStall, 1);
  const std::int64_t groups = count(kStandInGroups);
  const auto outcomes = try_forked_ranks(3, [&](Communicator& host) {
    const std::unique_ptr<Communicator> nccl = make_nccl_communicator(host, stand_in_options());
    DeviceMemoryCommunicator comm(*nccl);
    round_the_ring(comm, 1);
    RingStep step;
    const Request request = step.post(comm, 7);
    if (comm.rank() == 2) wait_for_groups(comm, groups + 2);
    if (comm.rank() == 2) ::raise(SIGKILL);
    comm.wait(request, Seconds(1e9));
  });
  EXPECT_EQ(outcomes[2].signal, SIGKILL);
  for (const std::size_t rank : {0U, 1U}) {
    EXPECT_THAT(outcomes[rank].message, StartsWith(fmt::format("rank {}/3: ", rank)));
    EXPECT_THAT(outcomes[rank].message, HasSubstr("rank 2 died: its connection closed"));
  }
}

TEST_F(Faults, AStoppedRankMeetsTheDeadline) {
  ForkOptions options;
  const auto outcomes = try_forked_ranks(
      2,
      [&](Communicator& host) {
        const std::unique_ptr<Communicator> nccl = make_nccl_communicator(host, stand_in_options());
        DeviceMemoryCommunicator comm(*nccl);
        round_the_ring(comm, 2);
        if (comm.rank() == 1) ::raise(SIGSTOP);
        Bytes in(10);
        comm.wait(post_one(comm, 9, receive_from(1, in)), kSoon);
      },
      options);
  EXPECT_THAT(outcomes[0].message, ContainsRegex("rank 0/2: waiting for 10 bytes from rank 1 in round 9: no sign of life for"));
}

TEST_F(Faults, ARankThatNeverJoinsEndsAllAtTheDeadline) {
  fault(1, kStandInNeverJoins, 0);
  const auto join = [](Seconds deadline) {
    const auto errors = run_on_threads(make_thread_world(3), [&](Communicator& host) {
      NcclOptions options = stand_in_options();
      options.deadline = deadline;
      make_nccl_communicator(host, options);
    });
    const std::string expected = fmt::format("NCCL did not join the ranks in {:g} s", deadline.count());
    std::string wrong;
    for (const std::string& error : errors) {
      if (error.find(expected) == std::string::npos) wrong += fmt::format("\"{}\" instead of \"{}\"; ", error, expected);
    }
    return wrong;
  };
  EXPECT_EQ(with_growing_deadlines(Seconds(0.5), join), "");
}

// The others would wait for NCCL until the deadline.
TEST_F(Faults, ARankThatCannotJoinEndsAllAtOnceWithItsError) {
  const auto join = [&] {
    SharedCounter arrived;
    return run_on_threads(make_thread_world(3), [&](Communicator& host) {
      NcclOptions options = stand_in_options();
      options.deadline = kPatience;
      const std::string error = error_of([&] { make_nccl_communicator(host, options); });
      arrived.add();
      arrived.wait_for(3);  // what is thrown aborts those that have not come so far
      throw CommError(error);
    });
  };
  fault(1, kStandInCannotJoin, 0);
  const std::string what = "ncclCommInitRankConfig failed: internal error of the stand-in (3): told by the stand-in";
  EXPECT_THAT(join(), ElementsAre("rank 0/3: on rank 1: " + what, "rank 1/3: " + what, "rank 2/3: on rank 1: " + what));
  fault(2, kStandInAsyncError, 0);
  for (const std::string& error : join()) EXPECT_THAT(error, HasSubstr("there was a network error (6)"));
}

TEST_F(Faults, ThatOthersWereLateDoesNotHideTheErrorOfARank) {
  const auto join = [&](Seconds deadline) {
    fault(1, kStandInCannotJoin, static_cast<int>(count(kStandInAborts)) + 1);  // when rank 0 has waited in vain
    std::string wrong;
    for (const std::string& error : run_on_threads(make_thread_world(2), [&](Communicator& host) {
           NcclOptions options = stand_in_options();
           options.deadline = deadline;
           make_nccl_communicator(host, options);
         })) {
      if (error.find("ncclCommInitRankConfig failed: ") == std::string::npos) wrong += error + "; ";
    }
    return wrong;
  };
  EXPECT_EQ(with_growing_deadlines(Seconds(0.5), join), "");
}

TEST_F(Faults, ALibraryThatIsNotThereIsNamedOnAllRanks) {
  const auto errors = run_on_threads(make_thread_world(3), [](Communicator& host) {
    const NcclOptions options = stand_in_options(host.rank() == 1 ? "/nowhere/libnccl.so.2" : STAND_IN);
    EXPECT_THROW(make_nccl_communicator(host, options), Unsupported);
    make_nccl_communicator(host, options);
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("cannot load /nowhere/libnccl.so.2: "),
                             HasSubstr("RINGSPAN_NCCL_LIBRARY can name another file")));
  }
}

TEST_F(Faults, TheVariableNamesTheLibrary) {
  ASSERT_EQ(::setenv("RINGSPAN_NCCL_LIBRARY", STAND_IN, 1), 0);
  EXPECT_EQ(NcclLibrary::load().version, 22703);
  EXPECT_THAT(cuda::nccl_report(), AllOf(HasSubstr(STAND_IN), HasSubstr("is version 2.27.3")));
  ASSERT_EQ(::setenv("RINGSPAN_NCCL_LIBRARY", "libno-such-nccl.so", 1), 0);
  EXPECT_THAT(cuda::nccl_report(), HasSubstr("cannot load libno-such-nccl.so (named by RINGSPAN_NCCL_LIBRARY)"));
  ::unsetenv("RINGSPAN_NCCL_LIBRARY");
}

TEST_F(Faults, OldReleasesAndOtherLibrariesAreRefused) {
  const auto refusal = [](const char* path) -> std::string { return error_of<Unsupported>([&] { NcclLibrary::load(path); }); };
  EXPECT_THAT(refusal(STAND_IN_OLD), EndsWith("is version 2.7.8 (2708); at least 2.14.0 and less than 3 is needed"));
  EXPECT_EQ(refusal("libm.so.6"), "nccl: libm.so.6 has no ncclGetVersion");
  EXPECT_EQ(nccl_version_text(22703), "2.27.3");
}

TEST_F(Faults, DifferentReleasesAreRefusedOnAllRanks) {
  const auto errors = run_on_threads(make_thread_world(3), [](Communicator& host) {
    make_nccl_communicator(host, stand_in_options(host.rank() == 2 ? STAND_IN_OTHER : STAND_IN));
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, EndsWith("ranks disagree on the version of NCCL: 22703 on rank 0, 22905 on rank 2"));
  }
}

TEST_F(Faults, AnIdGivenByTheCallerMustBeTheSameOnAllRanks) {
  const std::vector<std::byte> id = make_nccl_unique_id(STAND_IN);
  const auto with_id = [&](bool other) {
    return run_on_threads(make_thread_world(2), [&](Communicator& host) {
      NcclOptions options = stand_in_options();
      options.unique_id = id;
      if (other && host.rank() == 1) options.unique_id[5] ^= std::byte{1};
      DeviceMemoryCommunicator comm(make_nccl_communicator(host, options));
      round_the_ring(comm, 2);
    });
  };
  for (const std::string& error : with_id(true)) EXPECT_THAT(error, HasSubstr("ranks disagree on unique_id"));
  for (const std::string& error : with_id(false)) EXPECT_EQ(error, "");
  NcclOptions options = stand_in_options();
  options.unique_id.resize(5);
  const auto world = make_thread_world(1);
  EXPECT_THAT(error_of<InvalidArgument>([&] { make_nccl_communicator(*world[0], options); }),
              HasSubstr("unique_id has 5 bytes"));
}

TEST_F(Faults, RoundsArePostedWhollyInOneMemory) {
  const auto errors = run_on_threads(make_thread_world(2), [](Communicator& host) {
    const std::unique_ptr<Communicator> nccl = make_nccl_communicator(host, stand_in_options());
    Bytes out(8, 3);
    Bytes in(8);
    std::array batch{send_to(1 - host.rank(), out), receive_from(1 - host.rank(), in)};
    batch[0].data = on_emulated_device(batch[0].data);
    const std::string error = error_of<InvalidArgument>([&] { nccl->post(4, batch); });
    require(error == fmt::format(
                         "rank {}/2: round 4: 1 of 2 messages lie in memory of cuda-emulated; either all of a round do or none",
                         host.rank()),
            error);
    batch[1].data = on_emulated_device(batch[1].data);
    exchange(*nccl, 4, batch);
    require(in == out, "content");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// Why a batch is one group: two ranks that each first send and then receive, in groups of their own, wait for each other.
TEST_F(Faults, SendsThatAreNoGroupWithTheirReceivesDeadlock) {
  const NcclLibrary& nccl = NcclLibrary::load(STAND_IN);
  NcclUniqueId id{};
  ASSERT_EQ(nccl.get_unique_id(&id), kNcclSuccess);
  NcclComm* comms[2] = {};
  NcclConfig config;
  for (int rank = 0; rank < 2; ++rank)
    ASSERT_EQ(nccl.comm_init_rank_config(&comms[rank], 2, id, rank, &config), kNcclInProgress);
  const auto settle = [&] {
    for (NcclComm* comm : comms) {
      for (int state = kNcclInProgress; state == kNcclInProgress;)
        ASSERT_EQ(nccl.comm_get_async_error(comm, &state), kNcclSuccess);
    }
  };
  settle();
  const DeviceStreamFactory factory = cuda::stream_factory("cuda-emulated");
  const std::unique_ptr<DeviceStream> streams[2] = {factory(), factory()};
  Bytes out(100);
  Bytes in[2] = {Bytes(100), Bytes(100)};
  for (const bool sending : {true, false}) {
    for (int rank = 0; rank < 2; ++rank) {
      void* data = on_emulated_device(sending ? out.data() : in[rank].data());
      const int status = sending ? nccl.send(data, 100, kNcclUint8, 1 - rank, comms[rank], streams[rank]->handle())
                                 : nccl.recv(data, 100, kNcclUint8, 1 - rank, comms[rank], streams[rank]->handle());
      ASSERT_EQ(status, kNcclInProgress);
    }
    settle();
  }
  const std::uint64_t events[2] = {streams[0]->record(), streams[1]->record()};
  while (count(kStandInRunning) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(streams[rank]->is_complete(events[rank]));
    nccl.comm_abort(comms[rank]);
  }
  for (int rank = 0; rank < 2; ++rank) {
    while (!streams[rank]->is_complete(events[rank])) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Ranks that post in different orders form a ring in which each waits for the next: the deadline ends it.
TEST_F(Faults, RoundsInDifferentOrdersMeetTheDeadline) {
  const std::int64_t groups = count(kStandInGroups);
  const auto errors = run_nccl(3, [&](Communicator& comm) {
    Bytes out(65536);
    Bytes in(65536);
    const int next = (comm.rank() + 1) % 3;
    const int previous = (comm.rank() + 2) % 3;
    const Request first = post_one(comm, static_cast<std::uint64_t>(comm.rank()), send_to(next, out));
    const Request second = post_one(comm, static_cast<std::uint64_t>(previous), receive_from(previous, in));
    wait_for_groups(comm, groups + 2 * 3);
    comm.wait(first, kSoon);
    comm.wait(second, kSoon);
  });
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("NCCL has ended no group for"));
}

}  // namespace
}  // namespace ringspan::comm_testing
