#include "comm/agree.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <typeinfo>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm_testing/decorators.h"
#include "comm_testing/patience.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using comm_testing::kPatience;

// Runs `body` on every rank and returns what each threw, "" for nothing; the class is checked where it is asked for.
template <typename Expected>
std::vector<std::string> errors_of(int ranks, const std::function<void(Communicator&)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  run_thread_ranks(ranks, [&](Communicator& comm) {
    try {
      body(comm);
    } catch (const Expected& error) {
      errors[static_cast<std::size_t>(comm.rank())] = error.what();
    }
  });
  return errors;
}

TEST(AgreementTest, StepsAreCeilLog2) {
  const std::map<int, int> expected{{1, 0}, {2, 1}, {3, 2}, {4, 2}, {5, 3}, {7, 3}, {8, 3}, {9, 4}, {65536, 16}};
  for (const auto& [ranks, steps] : expected) EXPECT_EQ(Agreement::steps(ranks), steps) << ranks;
}

TEST(AgreementTest, ExtremesWithTheLowestRanksThatHoldThem) {
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 11}) {
    std::mt19937 random(static_cast<std::uint32_t>(ranks));
    std::vector<std::vector<std::int64_t>> values(3, std::vector<std::int64_t>(static_cast<std::size_t>(ranks)));
    for (auto& field : values) {
      for (auto& value : field) value = std::uniform_int_distribution<int>(-2, 2)(random);
    }
    run_thread_ranks(ranks, [&](Communicator& comm) {
      Agreement agreement(comm);
      std::vector<AgreeField> fields;
      for (const auto& field : values)
        fields.push_back({"budget", field[static_cast<std::size_t>(comm.rank())], decimal_text, true});
      const auto extents = agreement.agree(fields, nullptr, kPatience);
      ASSERT_EQ(extents.size(), values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto low = std::ranges::min_element(values[i]);
        const auto high = std::ranges::max_element(values[i]);
        EXPECT_EQ(extents[i].minimum, *low);
        EXPECT_EQ(extents[i].minimum_rank, low - values[i].begin());
        EXPECT_EQ(extents[i].maximum, *high);
        EXPECT_EQ(extents[i].maximum_rank, high - values[i].begin());
      }
    });
  }
}

TEST(AgreementTest, AllRanksNameTheFirstFieldThatDiffers) {
  const auto errors = errors_of<CommError>(4, [](Communicator& comm) {
    Agreement agreement(comm);
    const std::array<AgreeField, 4> fields{
        AgreeField{"tokens_q", 4096}, AgreeField{"memory", 100 + comm.rank(), decimal_text, true},
        AgreeField{"tokens_k", comm.rank() == 3 ? 8192 : 4096}, AgreeField{"heads", comm.rank()}};
    agreement.agree(fields, nullptr, kPatience);
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(errors[rank], "rank " + std::to_string(rank) + "/4: ranks disagree on tokens_k: 4096 on rank 0, 8192 on rank 3");
  }
}

TEST(AgreementTest, TheErrorOfTheLowestRankReachesAllWithItsClass) {
  for (const int ranks : {1, 2, 3, 7}) {
    const int low = ranks / 2;
    const auto errors = errors_of<InvalidArgument>(ranks, [&](Communicator& comm) {
      Agreement agreement(comm);
      std::exception_ptr own;
      if (comm.rank() == low) own = std::make_exception_ptr(InvalidArgument("k.head_dim (64) must equal q.head_dim (128)"));
      if (comm.rank() > low) own = std::make_exception_ptr(Unsupported("something else"));
      // A rank with wrong arguments may have nothing sensible to say about them.
      const std::array<AgreeField, 1> fields{AgreeField{"tokens_q", comm.rank()}};
      agreement.agree(fields, own, kPatience);
    });
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string where = rank == low ? "" : "on rank " + std::to_string(low) + ": ";
      EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "rank " + std::to_string(rank) + "/" + std::to_string(ranks) + ": " +
                                                            where + "k.head_dim (64) must equal q.head_dim (128)");
    }
  }
}

TEST(AgreementTest, MemoryThatIsNotToBeHadReachesAllAsSuch) {
  const auto errors = errors_of<OutOfBudget>(3, [](Communicator& comm) {
    const std::exception_ptr own = comm.rank() == 1 ? std::make_exception_ptr(std::bad_alloc()) : nullptr;
    Agreement(comm).agree({}, own, kPatience);
  });
  EXPECT_EQ(errors[0], "rank 0/3: on rank 1: out of memory");
  EXPECT_EQ(errors[1], "rank 1/3: out of memory");
}

template <typename Thrown>
void expect_same_class_on_all_ranks() {
  run_thread_ranks(2, [](Communicator& comm) {
    const std::exception_ptr own = comm.rank() == 1 ? std::make_exception_ptr(Thrown("no")) : nullptr;
    try {
      Agreement(comm).agree({}, own, kPatience);
      ADD_FAILURE() << "expected an error";
    } catch (const Error& error) {
      EXPECT_STREQ(typeid(error).name(), typeid(Thrown).name());
    }
  });
}

TEST(AgreementTest, EveryErrorKeepsItsClass) {
  expect_same_class_on_all_ranks<InvalidArgument>();
  expect_same_class_on_all_ranks<Unsupported>();
  expect_same_class_on_all_ranks<CommError>();
  expect_same_class_on_all_ranks<OutOfBudget>();
  expect_same_class_on_all_ranks<DeviceError>();
  expect_same_class_on_all_ranks<Error>();
}

TEST(AgreementTest, LongErrorsAreCutAndSaySo) {
  const auto errors = errors_of<InvalidArgument>(2, [](Communicator& comm) {
    Agreement agreement(comm);
    std::exception_ptr own;
    if (comm.rank() == 1) own = std::make_exception_ptr(InvalidArgument(std::string(2000, 'x')));
    agreement.agree({}, own, kPatience);
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, testing::EndsWith("xxx..."));
    EXPECT_LT(error.size(), 600U);
  }
}

TEST(AgreementTest, LongErrorsAreCutBetweenCharacters) {
  for (int before = 0; before < 2; ++before) {
    std::string text(static_cast<std::size_t>(before), 'x');
    for (int i = 0; i < 500; ++i) text += "é";
    const auto errors = errors_of<InvalidArgument>(
        1, [&](Communicator& comm) { Agreement(comm).agree({}, std::make_exception_ptr(InvalidArgument(text)), kPatience); });
    EXPECT_THAT(errors[0], testing::EndsWith("éé...")) << before;
  }
}

// Errors of this library's communicators name their rank already.
TEST(AgreementTest, NoRankIsNamedTwice) {
  const auto errors = errors_of<CommError>(2, [](Communicator& comm) {
    const std::exception_ptr own = comm.rank() == 1 ? std::make_exception_ptr(CommError("rank 1/2: no")) : nullptr;
    Agreement(comm).agree({}, own, kPatience);
  });
  EXPECT_EQ(errors[0], "rank 0/2: on rank 1: no");
  EXPECT_EQ(errors[1], "rank 1/2: no");
}

TEST(AgreementTest, DifferentListsAreReported) {
  const auto counts = errors_of<CommError>(3, [](Communicator& comm) {
    Agreement agreement(comm);
    const std::array<AgreeField, 3> fields{AgreeField{"a", 1}, AgreeField{"b", 1}, AgreeField{"c", 1}};
    agreement.agree(std::span(fields).first(comm.rank() == 2 ? 2 : 3), nullptr, kPatience);
  });
  EXPECT_EQ(counts[1], "rank 1/3: ranks disagree on the number of fields to agree on: 3 on rank 0, 2 on rank 2");
  const auto names = errors_of<CommError>(2, [](Communicator& comm) {
    Agreement agreement(comm);
    const std::array<AgreeField, 1> fields{AgreeField{comm.rank() == 0 ? "a" : "b", 1}};
    agreement.agree(fields, nullptr, kPatience);
  });
  EXPECT_THAT(names[0], testing::StartsWith("rank 0/2: ranks disagree on the fields to agree on (hash of their names): 0x"));
}

// Its version is all that is known of a message of another release.
TEST(AgreementTest, AnotherReleaseIsNamedWhateverElseItSays) {
  const auto errors = errors_of<CommError>(2, [](Communicator& comm) {
    if (comm.rank() == 0) Agreement(comm).agree({}, nullptr, kPatience);
    std::vector<std::byte> other(static_cast<std::size_t>(Agreement::message_bytes()), std::byte{0xff}), heard = other;
    const AgreeExtent version{Agreement::kVersion + 1, Agreement::kVersion + 1, 1, 1};
    std::memcpy(other.data(), &version, sizeof version);
    const std::array batch{Message{Message::Direction::send, 0, other.data(), Agreement::message_bytes()},
                           Message{Message::Direction::receive, 0, heard.data(), Agreement::message_bytes()}};
    comm.wait(comm.post(kAgreeRounds, batch), kPatience);
  });
  EXPECT_EQ(errors[0], "rank 0/2: ranks disagree on the version of the protocol: " + std::to_string(Agreement::kVersion) +
                           " on rank 0, " + std::to_string(Agreement::kVersion + 1) + " on rank 1");
}

TEST(AgreementTest, WhatAPassMustHaveInCommon) {
  EXPECT_EQ(errors_of<CommError>(4,
                                 [](Communicator& comm) {
                                   Agreement agreement(comm);
                                   for (std::uint64_t call = 0; call < 5; ++call) {
                                     agreement.agree_pass({.plan = ~std::uint64_t{0}, .execution = call}, nullptr, kPatience);
                                   }
                                   std::int64_t sent = 0;
                                   for (const PeerTraffic& traffic : comm.traffic()) sent += traffic.sent_bytes;
                                   EXPECT_EQ(sent, 5 * 2 * Agreement::pass_message_bytes());
                                 }),
            std::vector<std::string>(4));
  const auto plans = errors_of<CommError>(2, [](Communicator& comm) {
    Agreement(comm).agree_pass({.plan = comm.rank() == 0 ? 0xffffffffffffffffU : 0x12U}, nullptr, kPatience);
  });
  EXPECT_EQ(plans[1],
            "rank 1/2: ranks disagree on the plan (fingerprint): 0xffffffffffffffff on rank 0, 0x0000000000000012 on rank 1");
  const auto where_rank_1_has = [](const AgreePass& other) {
    return errors_of<CommError>(3, [&](Communicator& comm) {
      const AgreePass own{.plan = 1, .attention = 2, .execution = 8, .seed = 5};
      Agreement(comm).agree_pass(comm.rank() == 1 ? other : own, nullptr, kPatience);
    })[2];
  };
  const std::string disagree = "rank 2/3: ranks disagree on ";
  EXPECT_EQ(where_rank_1_has({.plan = 1, .attention = 2, .execution = 7, .seed = 5}),
            disagree + "the number of the execution: 8 on rank 0, 7 on rank 1");
  EXPECT_EQ(where_rank_1_has({.plan = 1, .attention = 3, .execution = 8, .seed = 5}),
            disagree + "which attention is called (its number): 2 on rank 0, 3 on rank 1");
  EXPECT_EQ(where_rank_1_has({.plan = 1, .attention = 2, .execution = 8, .backward = true, .seed = 5}),
            disagree + "the pass: forward on rank 0, backward on rank 1");
  EXPECT_EQ(where_rank_1_has({.plan = 1, .attention = 2, .execution = 8, .seed = 6}),
            disagree + "the seed of dropout: 0x0000000000000005 on rank 0, 0x0000000000000006 on rank 1");
}

TEST(AgreementTest, ErrorsNameWhatWasToBeAgreed) {
  const auto errors = errors_of<CommError>(2, [](Communicator& comm) {
    if (comm.rank() == 0) Agreement(comm).agree({}, nullptr, Communicator::Seconds{0.05});
  });
  EXPECT_THAT(errors[0], testing::HasSubstr("in round 0 of the agreement on the problem: "));
}

// An embedder's communicator may throw anything: the buffers are taken back, and the peers hear of it.
TEST(AgreementTest, AnErrorOfAnyKindAborts) {
  class Throwing final : public comm_testing::ForwardingCommunicator {
   public:
    using ForwardingCommunicator::ForwardingCommunicator;
    void wait(Request, Seconds) override { throw std::runtime_error("out of ink"); }
  };
  const auto errors = errors_of<CommError>(3, [](Communicator& comm) {
    if (comm.rank() != 1) return Agreement(comm).agree_pass({}, nullptr, kPatience);
    Throwing throwing(comm);
    EXPECT_THROW(Agreement(throwing).agree_pass({}, nullptr, kPatience), std::runtime_error);
    comm.progress();
  });
  EXPECT_EQ(errors[1], "rank 1/3: aborted: out of ink");
  for (const int rank : {0, 2}) EXPECT_THAT(errors[rank], testing::HasSubstr("rank 1 aborted: out of ink"));
}

TEST(RoundNameTest, CountsFromTheStartOfEachRange) {
  EXPECT_EQ(round_name(14), "round 14");
  EXPECT_EQ(round_name(kPassRounds + 2), "round 2 of the agreement on the pass");
  EXPECT_EQ(round_name(kNcclRounds + 64), "round 64 of joining NCCL");
  EXPECT_EQ(round_name(kPlanAgreeRounds + 1), "round 1 of the agreement on the plan");
  EXPECT_EQ(round_name(kPlanAgreeRounds + 64), "round " + std::to_string(kPlanAgreeRounds + 64));
  EXPECT_EQ(round_name(kDeviceRounds + 3), "round 3 of the greetings before messages of devices");
  EXPECT_EQ(round_name(kGreetingRounds), "round 0 of the greeting before the call");
  EXPECT_EQ(round_name(kUserRounds + 7), "user round 7");
}

TEST(AgreementTest, TheCommunicatorStaysUsableAfterDisagreement) {
  run_thread_ranks(3, [](Communicator& comm) {
    Agreement agreement(comm);
    EXPECT_THROW(agreement.agree_pass({.plan = static_cast<std::uint64_t>(comm.rank())}, nullptr, kPatience), CommError);
    agreement.agree_pass({.plan = 5}, nullptr, kPatience);
  });
}

}  // namespace
}  // namespace ringspan
