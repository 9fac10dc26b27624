// The public headers, and the calls that README and attention.h show, as a program sees them that compiles with every warning.
#include <ringspan/ringspan.h>
#include <ringspan/ringspan_c.h>

namespace {

using ringspan::Tensor;

[[maybe_unused]] void call(ringspan::Communicator& world, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor d_out,
                           Tensor dq, Tensor dk, Tensor dv) {
  ringspan::Problem problem;
  problem.tokens_q = problem.tokens_k = 1'000'000;
  problem.pattern = ringspan::Pattern::parse("causal & window:4095,0");
  problem.ranks = world.size();
  ringspan::Attention attention(problem, {.threads = 2}, world, {.trace = true});
  attention.forward({.q = q, .k = k, .v = v, .o = o, .lse = lse});
  attention.backward({.q = q, .k = k, .v = v, .o = o, .lse = lse, .d_out = d_out, .dq = dq, .dk = dk, .dv = dv});
}

// Every aggregate with one member named.
[[maybe_unused]] const ringspan::Problem kProblem{.tokens_q = 8};
[[maybe_unused]] const ringspan::Pattern kPattern{.causal = true};
[[maybe_unused]] const ringspan::Dilated kDilated{.global = true};
[[maybe_unused]] const ringspan::Sharding kSharding{.block = 1};
[[maybe_unused]] const ringspan::Shard kShard{.rows = 1};
[[maybe_unused]] const ringspan::TunedSizes kTuned{.bucket_rows = 1};
[[maybe_unused]] const ringspan::MemoryLine kLine{.bytes = 1};
[[maybe_unused]] const ringspan::Rejected kRejected{.nanoseconds = 1};
[[maybe_unused]] const ringspan::KernelChoice kChoice{.tile_source = ringspan::SizeSource::given};
[[maybe_unused]] const ringspan::RankOutcome kOutcome{.signal = 1};
[[maybe_unused]] const ringspan::NcclOptions kNccl{.device = "cuda"};

}  // namespace
