// The conformance suite: what every transport must do, as tests parameterised by a World. A test program includes this once and
// instantiates ConformanceTest with its worlds.
//
// Bodies report by throwing (require), so that they also run in forked processes. Time never decides: a test waits for what
// must happen, with deadlines only where a deadline is the subject.
#pragma once

#include <limits>
#include <map>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm_testing/conformance_support.h"

namespace ringspan::comm_testing {

class ConformanceTest : public testing::TestWithParam<std::shared_ptr<const World>> {
 protected:
  std::vector<std::string> run(int ranks, const RankBody& body) const { return GetParam()->run(ranks, body); }
  void run_well(int ranks, const RankBody& body) const {
    const std::vector<std::string> errors = run(ranks, body);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) EXPECT_EQ(errors[rank], "") << "rank " << rank << "/" << ranks;
  }
};

// ---- What arrives -------------------------------------------------------------------------------------------------------

TEST_P(ConformanceTest, RandomBatchesWithManyRoundsInFlight) {
  const RandomTraffic traffic{test_seed()};
  SCOPED_TRACE(fmt::format("RINGSPAN_TEST_SEED={}", traffic.seed));
  constexpr std::uint64_t kRounds = 30;
  for (const int ranks : kWorldSizes) {
    run_well(ranks, [&](Communicator& comm) {
      std::mt19937 random(traffic.seed + static_cast<std::uint32_t>(comm.rank()));  // each rank in its own order
      std::map<std::uint64_t, Flight> flying;
      std::vector<PeerTraffic> expected(static_cast<std::size_t>(comm.size()));
      for (std::uint64_t round = 0; round < kRounds || !flying.empty();) {
        if (round < kRounds && (flying.size() < 8)) {
          const Flight& flight = flying[round] = take_off(comm, traffic, round, random, GetParam()->whole_rounds());
          for (std::size_t peer = 0; peer < expected.size(); ++peer) {
            const auto out = static_cast<std::int64_t>(flight.out[peer].size());
            const auto in = static_cast<std::int64_t>(flight.in[peer].size());
            expected[peer].sent_bytes += out;
            expected[peer].received_bytes += in;
            expected[peer].sent_messages += out > 0 ? 1 : 0;
            expected[peer].received_messages += in > 0 ? 1 : 0;
          }
          ++round;
          continue;
        }
        const auto chosen = std::next(flying.begin(), static_cast<std::ptrdiff_t>(random() % flying.size()));
        land(comm, chosen->second, chosen->first, random, traffic.seed);
        flying.erase(chosen);
      }
      const auto counted = comm.traffic();
      require(counted.size() == expected.size(), "traffic has one entry per rank");
      for (std::size_t peer = 0; peer < expected.size(); ++peer) {
        require(counted[peer].sent_bytes == expected[peer].sent_bytes, "sent bytes");
        require(counted[peer].received_bytes == expected[peer].received_bytes, "received bytes");
        require(counted[peer].sent_messages == expected[peer].sent_messages, "sent messages");
        require(counted[peer].received_messages == expected[peer].received_messages, "received messages");
      }
    });
  }
}

TEST_P(ConformanceTest, BigMessagesBothWaysBeforeAnyReceiveIsPosted) {
  constexpr std::size_t kBig = (std::size_t{3} << 20) + 3;
  for (const int ranks : {2, 4}) {
    run_well(ranks, [&](Communicator& comm) {
      Bytes out(kBig);
      Content(1, comm.rank()).fill(out);
      std::vector<Bytes> in(static_cast<std::size_t>(ranks), Bytes(kBig));
      std::vector<Request> sends;
      std::vector<Request> receives;
      std::vector<Message> batch;
      const auto post = [&](std::vector<Request>& requests, const Message& message) {
        batch.push_back(message);
        if (GetParam()->whole_rounds() && batch.size() + 2 < 2 * static_cast<std::size_t>(ranks)) return;
        requests.push_back(comm.post(1, batch));
        batch.clear();
        comm.progress();
      };
      for (int step = 1; step < ranks; ++step) post(sends, send_to((comm.rank() + step) % ranks, out));
      for (int peer = 0; peer < ranks; ++peer) {
        if (peer != comm.rank()) post(receives, receive_from(peer, in[static_cast<std::size_t>(peer)]));
      }
      for (const Request request : sends) comm.wait(request, kPatience);
      for (const Request request : receives) comm.wait(request, kPatience);
      for (int peer = 0; peer < ranks; ++peer) {
        if (peer == comm.rank()) continue;
        require(Content(1, peer).is_in(in[static_cast<std::size_t>(peer)]), "every byte arrives");
      }
    });
  }
}

TEST_P(ConformanceTest, MessagesOfAPairMatchInTheOrderOfPosting) {
  run_well(2, [](Communicator& comm) {
    constexpr std::size_t kCount = 200;
    std::vector<Bytes> data(kCount, Bytes(3));
    std::vector<Request> requests;
    const int peer = 1 - comm.rank();
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::uint64_t round = 1000 - i;  // numbers need not ascend; they are only compared
      if (comm.rank() == 0) Content(i, 0).fill(data[i]);
      requests.push_back(post_one(comm, round, comm.rank() == 0 ? send_to(peer, data[i]) : receive_from(peer, data[i])));
    }
    for (std::size_t i = kCount; i-- > 0;) comm.wait(requests[i], kPatience);
    for (std::size_t i = 0; i < kCount; ++i) require(Content(i, 0).is_in(data[i]), "order");
  });
}

TEST_P(ConformanceTest, AnEmptyBatchIsComplete) {
  for (const int ranks : kWorldSizes) {
    run_well(ranks, [](Communicator& comm) {
      for (std::uint64_t round = 0; round < 100; ++round) {
        const Request request = comm.post(round, {});
        require(request != 0, "a request is never 0");
        require(comm.test(request), "an empty batch is complete");
        comm.wait(request, Seconds(0.0));
      }
    });
  }
}

TEST_P(ConformanceTest, ARoundNumberMayComeAgainOnceWaitedFor) {
  run_well(3, [](Communicator& comm) {
    for (int i = 0; i < 50; ++i) barrier(comm, 5);
  });
}

TEST_P(ConformanceTest, DuplicatesAreIndependent) {
  for (const int ranks : kWorldSizes) {
    run_well(ranks, [&](Communicator& comm) {
      const std::unique_ptr<Communicator> second = comm.duplicate();
      const std::unique_ptr<Communicator> third = second->duplicate();
      require(second->rank() == comm.rank() && third->size() == comm.size(), "same ranks");
      const int next = (comm.rank() + 1) % ranks;
      const int previous = (comm.rank() + ranks - 1) % ranks;
      std::array<Communicator*, 3> all{&comm, second.get(), third.get()};
      std::array<Bytes, 3> out;
      std::array<Bytes, 3> in;
      std::array<Request, 3> requests{};
      for (std::size_t i = 0; i < 3 && ranks > 1; ++i) {  // the same peers and round on each, waited for in another order
        out[i] = Bytes(100, static_cast<std::uint8_t>(i));
        in[i] = Bytes(100);
        const std::array batch{send_to(next, out[i]), receive_from(previous, in[i])};
        requests[i] = all[i]->post(1, batch);
      }
      for (std::size_t i = 3; i-- > 0 && ranks > 1;) {
        all[i]->wait(requests[i], kPatience);
        require(in[i] == out[i], "each has its own messages");
      }
      barrier(comm, 2);
      if (comm.rank() == 0) third->abort("only this one");
      if (comm.rank() != 0) error_in_time(*third);
      barrier(comm, 3);
      barrier(*second, 3);
      require(second->traffic()[static_cast<std::size_t>(next)].sent_bytes == (ranks == 1 ? 0 : 101), "own traffic");
    });
  }
}

TEST_P(ConformanceTest, ADuplicateMayBeDrivenByAnotherThread) {
  run_well(3, [](Communicator& comm) {
    const std::unique_ptr<Communicator> second = comm.duplicate();
    std::string error;
    std::thread other([&] {
      try {
        for (std::uint64_t round = 0; round < 100; ++round) barrier(*second, round);
      } catch (const std::exception& e) {
        error = e.what();
        second->abort(error);
      }
    });
    try {
      for (std::uint64_t round = 0; round < 100; ++round) barrier(comm, round);
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
    require(error.empty(), error);
  });
}

// ---- What is refused ----------------------------------------------------------------------------------------------------

TEST_P(ConformanceTest, WrongArgumentsAreRefusedAndTheCommunicatorStaysUsable) {
  run_well(3, [&](Communicator& comm) {
    Bytes data(8);
    const int peer = (comm.rank() + 1) % 3;
    const std::string own = fmt::format("rank {}/3: round 4: ", comm.rank());
    const auto refused = [&](const std::string& text, std::vector<Message> batch) {
      const std::string error = error_of<InvalidArgument>([&] { comm.post(4, batch); });
      require(error == own + text, "unexpected text: " + error);
    };
    refused("peer (3) must be in [0, 3)", {send_to(3, data)});
    refused("peer (-1) must be in [0, 3)", {receive_from(-1, data)});
    refused(fmt::format("peer ({}) must be another rank", comm.rank()), {send_to(comm.rank(), data)});
    refused(fmt::format("data of the message for rank {} must not be null", peer), {{Direction::send, peer, nullptr, 8}});
    refused(fmt::format("bytes (0) of the message for rank {} must be positive", peer), {{Direction::send, peer, &data, 0}});
    refused(fmt::format("bytes (-5) of the message for rank {} must be positive", peer),
            {{Direction::receive, peer, &data, -5}});
    refused(fmt::format("second send to rank {} in one round", peer), {send_to(peer, data), send_to(peer, data)});
    refused(fmt::format("second receive from rank {} in one round", peer),
            {receive_from(peer, data), receive_from(peer, data)});

    barrier(comm, 1);
    Bytes in(8);
    const std::array parts{send_to(peer, data), receive_from((comm.rank() + 2) % 3, in)};
    const bool whole = GetParam()->whole_rounds();
    const Request first = comm.post(4, std::span(parts).first(whole ? 2 : 1));
    refused(fmt::format("second send to rank {} in one round", peer), {send_to(peer, data)});
    const Request second = comm.post(4, std::span(parts).subspan(whole ? 2 : 1));
    comm.wait(second, kPatience);
    comm.wait(first, kPatience);
    const std::string error = error_of<InvalidArgument>([&] { comm.wait(first, kPatience); });
    require(error == fmt::format("rank {}/3: request {} is not outstanding", comm.rank(), first), error);
    error_of<InvalidArgument>([&] { comm.test(0); });
    error_of<InvalidArgument>([&] { comm.test(~Request{0}); });
    const Request last = comm.post(9, {});
    error_of<InvalidArgument>([&] { comm.wait(last, Seconds(std::numeric_limits<double>::quiet_NaN())); });
    barrier(comm, 2);
  });
}

TEST_P(ConformanceTest, DifferentSizesFailAtBothEnds) {
  const auto errors = run(2, [](Communicator& comm) {
    Bytes data(comm.rank() == 0 ? 64 : 128);
    post_one(comm, 7, comm.rank() == 0 ? send_to(1, data) : receive_from(0, data));
    throw CommError(error_in_time(comm));  // a sender may learn late
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, testing::HasSubstr("is of round 7 with 64 bytes"));
    EXPECT_THAT(error, testing::HasSubstr("round 7 with 128 bytes"));
  }
  EXPECT_THAT(errors[0], testing::StartsWith("rank 0/2: "));
  EXPECT_THAT(errors[1], testing::StartsWith("rank 1/2: "));
}

TEST_P(ConformanceTest, DifferentRoundsFailAtBothEnds) {
  const auto errors = run(2, [](Communicator& comm) {
    Bytes data(64);
    post_one(comm, comm.rank() == 0 ? 3 : 4, comm.rank() == 0 ? send_to(1, data) : receive_from(0, data));
    throw CommError(error_in_time(comm));  // a sender may learn late
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, testing::HasSubstr("is of round 3 with 64 bytes"));
    EXPECT_THAT(error, testing::HasSubstr("round 4 with 64 bytes"));
  }
}

// ---- What fails ---------------------------------------------------------------------------------------------------------

TEST_P(ConformanceTest, SilencePastTheDeadlineIsAnErrorThatNamesPeerRoundAndTime) {
  for (const int ranks : {2, 4}) {
    SharedCounter failed;
    SharedCounter arrived;
    const auto errors = run(ranks, [&](Communicator& comm) {
      meet(comm, arrived);
      if (comm.rank() == ranks - 1) {  // plays dead until all others have noticed
        failed.wait_for(ranks - 1);
        return;
      }
      Bytes data(65536);
      Request request = 0;
      const std::string first = error_of([&] {
        request = post_one(comm, 14, receive_from(ranks - 1, data));
        comm.wait(request, Seconds(0.3));
      });
      failed.add();
      require(error_of([&] { comm.progress(); }) == first, "the error stays");
      require(error_of([&] { comm.wait(request, kPatience); }) == first, "the error stays");
      require(error_of([&] { comm.test(request); }) == first, "the error stays");
      require(error_of([&] { comm.post(15, {}); }) == first, "the error stays");
      require(error_of([&] { comm.duplicate(); }) == first, "the error stays");
      throw CommError(first);
    });
    for (int rank = 0; rank < ranks - 1; ++rank) {
      const std::string& error = errors[static_cast<std::size_t>(rank)];
      EXPECT_THAT(error, testing::StartsWith(fmt::format("rank {}/{}: ", rank, ranks)));
      // Where another rank was first to notice, its words are part of the error.
      EXPECT_THAT(error,
                  testing::ContainsRegex(fmt::format("waiting for 65536 bytes from rank {} in round 14: no sign of life for "
                                                     "[0-9]+(\\.[0-9]+)? s \\(deadline 0\\.3 s\\)",
                                                     ranks - 1)));
    }
  }
}

TEST_P(ConformanceTest, APeerThatIsSlowButMakesProgressIsWaitedFor) {
  const auto run_slowly = [&](Seconds deadline) {
    const auto errors = run(2, [&](Communicator& comm) {
      Bytes data(1000);
      barrier(comm, 0);
      if (comm.rank() == 0) {
        comm.wait(post_one(comm, 1, receive_from(1, data)), deadline);
        return;
      }
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() - begin < 1.5 * deadline) {
        comm.progress();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      comm.wait(post_one(comm, 1, send_to(0, data)), kPatience);
    });
    return errors[0] + errors[1];
  };
  EXPECT_EQ(with_growing_deadlines(Seconds(0.8), run_slowly), "");
}

TEST_P(ConformanceTest, SilenceBeforeTheWaitDoesNotCount) {
  run_well(2, [](Communicator& comm) {
    barrier(comm, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // neither shows life
    Bytes data(1);
    const Request request = post_one(comm, 1, comm.rank() == 0 ? receive_from(1, data) : send_to(0, data));
    comm.wait(request, kPatience);
    barrier(comm, 2);
  });
}

TEST_P(ConformanceTest, ARankThatLeftIsMissedAtOnce) {
  SharedCounter arrived;
  const auto errors = run(3, [&](Communicator& comm) {
    meet(comm, arrived);
    if (comm.rank() == 1) return;
    Bytes data(10);
    comm.wait(post_one(comm, 1, receive_from(1, data)), Seconds(1e9));
  });
  EXPECT_EQ(errors[1], "");
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_THAT(errors[rank], testing::StartsWith(fmt::format("rank {}/3: ", rank)));
    EXPECT_THAT(errors[rank], testing::HasSubstr("waiting for 10 bytes from rank 1 in round 1: rank 1 has left"));
  }
}

TEST_P(ConformanceTest, WhatWasSentBeforeLeavingArrives) {
  run_well(2, [](Communicator& comm) {
    Bytes data(200000);
    if (comm.rank() == 0) {
      Content(1, 0).fill(data);
      comm.wait(post_one(comm, 1, send_to(1, data)), kPatience);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    comm.wait(post_one(comm, 1, receive_from(0, data)), kPatience);
    require(Content(1, 0).is_in(data), "content");
  });
}

TEST_P(ConformanceTest, AnAbortReachesEveryRankWithItsReason) {
  for (const int ranks : {2, 4, 7}) {
    SharedCounter arrived;
    const auto errors = run(ranks, [&](Communicator& comm) {
      meet(comm, arrived);
      if (comm.rank() == 1) {
        comm.abort("out of patience");
        comm.abort("a second reason");
        throw CommError(error_of([&] { comm.progress(); }));
      }
      Bytes data(10);
      if (comm.rank() == 0) throw CommError(error_in_time(comm));  // computing, not waiting
      comm.wait(post_one(comm, 1, receive_from(0, data)), Seconds(1e9));
    });
    EXPECT_EQ(errors[1], fmt::format("rank 1/{}: aborted: out of patience", ranks));
    EXPECT_EQ(errors[0], fmt::format("rank 0/{}: rank 1 aborted: out of patience", ranks));
    for (int rank = 2; rank < ranks; ++rank) {
      const std::string& error = errors[static_cast<std::size_t>(rank)];
      EXPECT_THAT(error, testing::StartsWith(fmt::format("rank {}/{}: ", rank, ranks)));
      EXPECT_THAT(error, testing::EndsWith("rank 1 aborted: out of patience"));
    }
  }
}

TEST_P(ConformanceTest, AnAbortReachesARankThatHasUnreadDataOfTheAborter) {
  SharedCounter arrived;
  const auto errors = run(2, [&](Communicator& comm) {
    Bytes data(std::size_t{1} << 20);
    meet(comm, arrived);
    if (comm.rank() == 0) {
      post_one(comm, 1, send_to(1, data));  // nobody wants it
      comm.abort("changed my mind");
      return;
    }
    throw CommError(error_in_time(comm));
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "rank 1/2: rank 0 aborted: changed my mind");
}

TEST_P(ConformanceTest, AfterAbortBuffersBelongToTheCallerAgain) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    SharedCounter arrived;
    const auto errors = run(2, [&](Communicator& comm) {
      Bytes data(std::size_t{1} << 20, 1);
      meet(comm, arrived);
      try {
        const Request request = post_one(comm, 1, comm.rank() == 0 ? receive_from(1, data) : send_to(0, data));
        if (comm.rank() == 0) comm.abort("enough");
        comm.wait(request, kPatience);
      } catch (const CommError&) {  // what the peer sees depends on who came first
      }
      std::fill(data.begin(), data.end(), static_cast<std::uint8_t>(2));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      require(data == Bytes(data.size(), 2), "the transport wrote after abort");
    });
    EXPECT_EQ(errors[0], "");
    EXPECT_EQ(errors[1], "");
  }
}

TEST_P(ConformanceTest, AnErrorOfOneRankReachesAll) {
  SharedCounter arrived;
  const auto errors = run(4, [&](Communicator& comm) {
    meet(comm, arrived);
    if (comm.rank() == 2) throw InvalidArgument("rank 2/4: tensor o is too small");
    barrier(comm, 1, Seconds(1e9));
  });
  for (const std::size_t rank : {0U, 1U, 3U}) {
    EXPECT_THAT(errors[rank], testing::EndsWith("rank 2 aborted: tensor o is too small"));
  }
}

}  // namespace ringspan::comm_testing
