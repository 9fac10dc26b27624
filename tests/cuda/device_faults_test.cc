// Errors of ranks while their devices are still busy: what they leave behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ringspan/attention.h"
#include "ringspan/device.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

constexpr int kHeads = 4, kDim = 64, kTokens = 400, kFew = 16;
const std::string kDevice = "cuda-emulated";

// Rank 0 has all tokens but the last few, and is still busy when rank 1 gives up.
struct Rank {
  explicit Rank(Communicator& comm)
      : rows(comm.rank() == 0 ? kTokens - kFew : kFew),
        bytes(rows * kHeads * kDim * 4),
        memory(kDevice, 4 * bytes + rows * kHeads * 4),
        attention(problem(), options(), comm, {.device = kDevice}) {
    const std::vector<std::byte> zero(static_cast<std::size_t>(3 * bytes)),
        unwritten(static_cast<std::size_t>(bytes), std::byte{0xff});
    memory.copy_from_host(zero.data(), 3 * bytes, 0);
    memory.copy_from_host(unwritten.data(), bytes, 3 * bytes);
  }
  static Problem problem() {
    Problem p;
    p.tokens_q = p.tokens_k = kTokens;
    p.heads = p.kv_heads = kHeads;
    p.head_dim = p.head_dim_v = kDim;
    p.ranks = 2;
    p.pattern = Pattern::parse("causal");
    p.sharding_q = p.sharding_k = Sharding::parse("explicit:16-399;0-15");
    return p;
  }
  static PlanOptions options() {
    PlanOptions o;
    o.strategy = Strategy::exchange;
    o.backward = false;
    return o;
  }
  std::byte* at(std::int64_t tensor) { return static_cast<std::byte*>(memory.data()) + tensor * bytes; }
  ForwardTensors tensors() {
    ForwardTensors t;
    t.q = dense_bshd(static_cast<const void*>(at(0)), rows, kHeads, kDim);
    t.k = dense_bshd(static_cast<const void*>(at(1)), rows, kHeads, kDim);
    t.v = dense_bshd(static_cast<const void*>(at(2)), rows, kHeads, kDim);
    t.o = dense_bshd(static_cast<void*>(at(3)), rows, kHeads, kDim);
    t.lse = dense_bhsd(static_cast<void*>(at(4)), rows, kHeads, 1);
    return t;
  }
  std::int64_t unwritten() {
    std::vector<std::byte> o(static_cast<std::size_t>(bytes));
    memory.copy_to_host(o.data(), bytes, 3 * bytes);
    return std::count(o.begin(), o.end(), std::byte{0xff});
  }

  std::int64_t rows, bytes;
  DeviceBuffer memory;
  Attention attention;
};

// try_rank0: what rank 0 does after a pass, while rank 1 fails. Whether it hears of that or is through before, no clock
// decides.
template <typename Try>
void while_rank1_fails(const Try& try_rank0) {
  const auto body = [&](Communicator& comm) {
    Rank rank(comm);
    rank.attention.forward(rank.tensors());
    if (comm.rank() == 1) throw std::runtime_error("a mistake of rank 1");
    try_rank0(rank);
    EXPECT_EQ(rank.unwritten(), 0);
  };
  EXPECT_THROW(run_thread_ranks(make_thread_world(std::vector<std::string>{kDevice, kDevice}), body), std::runtime_error);
}

TEST(DeviceFaults, NothingIsWrittenAfterAWaitThatThrows) {
  while_rank1_fails([](Rank& rank) {
    try {
      rank.attention.wait();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("a mistake of rank 1"), std::string::npos) << error.what();
    }
  });
}

TEST(DeviceFaults, NothingIsWrittenAfterAPassThatThrows) {
  while_rank1_fails([](Rank& rank) { EXPECT_THROW(rank.attention.forward(rank.tensors()), Error); });
}

}  // namespace
}  // namespace ringspan
