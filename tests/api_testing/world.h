// Runs one problem over many ranks, from whole tensors to whole tensors, and judges the result by the oracle.
//
// For tests: every rank gets its shard of seeded tensors in memory of its own, runs forward and backward through the public
// API, and its outputs are joined again. Ranks are threads of this process, or processes forked from it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oracle/dense.h"
#include "plan/plan_data.h"
#include "ringspan/attention.h"
#include "ringspan/transports.h"

namespace ringspan::testing {

enum class Ranks : std::uint8_t { threads, processes };

struct Case {
  Problem problem;
  PlanOptions options;
  ExecuteOptions execute;
  Ranks ranks = Ranks::threads;
  std::vector<std::string> devices;  // of each rank, instead of execute.device; empty: that
  bool peer_copies = false;          // thread ranks copy messages between their devices
  std::uint64_t seed = 1;
  bool dlse = false;
  float gain = 1.0F;  // of the logits: q is multiplied with it
  // Puts a communicator around each rank's (comm_testing/decorators.h); empty: none.
  std::function<std::unique_ptr<Communicator>(Communicator&)> wrap;
  // What the computation may be off besides: added to the floors of the exact result.
  std::function<void(const oracle::Inputs&, oracle::Result&)> widen;
  std::function<void(internal::PlanData&)> spoil;  // alters every rank's plan before it is executed (planted bugs)
};

// One line that says what is run, for failures.
std::string to_string(const Case& test);

// Whole tensors, dense (batch, tokens, heads, dim) in the storage dtype; statistics (batch, heads, tokens) in float32.
struct Whole {
  explicit Whole(const Case& test);
  std::vector<std::byte> q, k, v, d_out;
  std::vector<float> dlse, sinks, slopes;
};

struct Outputs {
  std::vector<std::byte> o, dq, dk, dv;  // as Whole
  std::vector<float> lse, dsinks;
  bool operator==(const Outputs&) const = default;  // the same bits, but for NaN in the statistics
};

// One rank's tensors, in memory that forked processes share with their parent.
class RankTensors {
 public:
  RankTensors(const Case& test, const Whole& whole, int rank);
  ForwardTensors forward() const;
  BackwardTensors backward() const;
  std::int64_t bytes() const;  // of forward and backward
  std::int64_t forward_bytes() const;

  Shard shard_q, shard_k;  // with replicated_q shard_q holds all queries

 private:
  friend class Gather;
  struct Block {
    std::size_t offset = 0, bytes = 0;
  };
  Block add(std::size_t bytes);
  std::byte* at(const Block& block) const { return memory_->bytes().data() + block.offset; }

  const Case* test_;
  std::shared_ptr<SharedMemory> memory_;
  std::size_t used_ = 0;
  Block q_, k_, v_, d_out_, dlse_, sinks_, slopes_, o_, lse_, dq_, dk_, dv_, dsinks_;
};

// Called on a rank between construction and the end, with its tensors: by default one forward and one backward pass.
using RankScript = std::function<void(Attention&, const RankTensors&)>;
void forward_and_backward(Attention& attention, const RankTensors& tensors);

// Runs the script on all ranks. Where queries are replicated, all ranks must have computed the same bits (else an Error).
Outputs run(const Case& test, const Whole& whole, const RankScript& script = forward_and_backward);

// Runs and compares o, lse and, where planned, all gradients with the oracle; empty when all passes, else what failed.
std::string judge(const Case& test);
std::string judge(const Case& test, const Whole& whole, const Outputs& outputs);

}  // namespace ringspan::testing
