// make_plan: from a problem and options to one rank's plan.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "plan/capability.h"
#include "plan/choose_together.h"
#include "plan/cost.h"
#include "plan/kernel_choice.h"
#include "plan/pass.h"
#include "ringspan/error.h"

namespace ringspan {
namespace internal {

void validate_options(const Problem& problem, const PlanOptions& options, int rank) {
  if (rank < 0 || rank >= problem.ranks) {
    throw InvalidArgument(fmt::format("rank ({}) must be in [0, {})", rank, problem.ranks));
  }
  if (options.bucket_rows < PlanOptions::kBucketNone) {
    throw InvalidArgument(fmt::format("bucket_rows ({}) must be positive, auto (0) or none (-1)", options.bucket_rows));
  }
  if (options.memory_budget < 0) {
    throw InvalidArgument(fmt::format("memory_budget ({}) must be 0 (unlimited) or positive", options.memory_budget));
  }
  if (options.computing_ranks < 0 || options.computing_ranks > problem.ranks) {
    throw InvalidArgument(
        fmt::format("computing_ranks ({}) must be in [0, ranks ({})]", options.computing_ranks, problem.ranks));
  }
  if (options.computing_ranks != 0 && options.strategy == Strategy::automatic) {
    throw InvalidArgument(fmt::format("computing_ranks ({}) is for strategy local only, not auto", options.computing_ranks));
  }
  if (options.threads < 1 || options.threads > PlanOptions::kMaxThreads) {
    throw InvalidArgument(fmt::format("threads ({}) must be in [1, {}]", options.threads, PlanOptions::kMaxThreads));
  }
  if (options.partials != Partials::float32 && options.partials != Partials::storage) {
    throw InvalidArgument(fmt::format("partials ({}) must be float32 or storage", static_cast<int>(options.partials)));
  }
  if (options.device != DeviceKind::cpu && options.device != DeviceKind::cuda) {
    throw InvalidArgument(fmt::format("device ({}) must be cpu or cuda", static_cast<int>(options.device)));
  }
  for (const auto& [name, tile] : {std::pair{"attend_tile", options.attend_tile},
                                   {"attend_backward_tile", options.attend_backward_tile},
                                   {"tuned.attend_tile", options.tuned.attend_tile},
                                   {"tuned.attend_backward_tile", options.tuned.attend_backward_tile}}) {
    if ((tile.queries > 0) == (tile.keys > 0) && tile.queries >= 0 && tile.keys >= 0) continue;
    throw InvalidArgument(fmt::format("{} ({} x {}) must name queries and keys, or neither", name, tile.queries, tile.keys));
  }
  for (const auto& [name, count] : {std::pair{"tuned.bucket_rows", options.tuned.bucket_rows},
                                    {"most_overhead.forward_scratch", options.most_overhead.forward_scratch},
                                    {"most_overhead.backward_scratch", options.most_overhead.backward_scratch},
                                    {"most_overhead.keys_without_state", options.most_overhead.keys_without_state}}) {
    if (count < 0) throw InvalidArgument(fmt::format("{} ({}) must not be negative", name, count));
  }
  const CostModel& cost = options.cost;
  if (cost.flops_per_second < 1 || cost.bytes_per_second < 1 || cost.message_nanoseconds < 0) {
    throw InvalidArgument(fmt::format("cost ({},{},{}) must be flops/s >= 1, bytes/s >= 1, nanoseconds >= 0",
                                      cost.flops_per_second, cost.bytes_per_second, cost.message_nanoseconds));
  }
  if (cost.host_bytes_per_second < 1) {
    throw InvalidArgument(fmt::format("cost.host_bytes_per_second ({}) must be at least 1", cost.host_bytes_per_second));
  }
  if (options.backward) return;
  // Nobody else looks at these; but one name may be meant for whichever passes there are.
  const std::string& kernel = options.attend_backward_kernel;
  const bool named = !kernel.empty() && kernel != options.attend_kernel;
  if (named || options.attend_backward_tile != Tile{}) choose_kernel(problem, options, Pass::backward);
}

namespace {

constexpr int kPlanVersion = 4;

// 64 bits of what was added, in order. Each word goes through a bijection of the state (Stafford's thirteenth mix, the one of
// SplitMix64), so that two histories of equal lengths that differ in one word never collide.
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, from + at, std::min(bytes - at, sizeof word));
      mix(word);
    }
    mix(bytes);
  }
  void add(std::string_view text) { add(text.data(), text.size()); }
  template <typename T>
  void add_all(const std::vector<T>& values) {
    add(values.data(), values.size() * sizeof(T));
  }
  std::uint64_t value() const { return state_; }

 private:
  void mix(std::uint64_t word) {
    std::uint64_t x = (std::rotl(state_, 23) ^ word) + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    state_ = x ^ (x >> 31);
  }

  std::uint64_t state_ = 0;
};

// What all ranks share: not the rank, its threads or its kernels.
std::uint64_t fingerprint(const Problem& problem, const PlanOptions& options, std::int64_t bucket_rows) {
  Hash hash;
  hash.add(fmt::format("{} {} {} {} {} {} {} {} {} {}", kPlanVersion, problem.batch, problem.tokens_q, problem.tokens_k,
                       problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim_v, to_string(problem.dtype),
                       problem.pattern.to_string()));
  hash.add_all(problem.cu_seqlens_q);
  hash.add_all(problem.cu_seqlens_k);
  hash.add_all(problem.lengths_q);
  hash.add_all(problem.lengths_k);
  hash.add_all(problem.starts_k);
  hash.add(fmt::format("{:a} {:a} {} {} {:a} {}", problem.scale, problem.softcap, problem.alibi, problem.sinks, problem.dropout,
                       problem.seed));
  hash.add(fmt::format("{} {} {} {}", problem.ranks, problem.replicated_q, problem.sharding_q.to_string(),
                       problem.sharding_k.to_string()));
  hash.add(fmt::format("{} {} {} {} {}", to_string(options.strategy), options.computing_ranks, bucket_rows, options.backward,
                       options.keep_o_float32));
  if (options.host_tensors) hash.add("host tensors");
  return hash.value();
}

}  // namespace

PlanData build_plan(const Setting& setting, int rank) {
  PlanData data;
  data.problem = *setting.problem;
  data.options = setting.options;
  data.rank = rank;
  data.shard_q = setting.shards_q[static_cast<std::size_t>(rank)];
  data.shard_k = setting.shards_k[static_cast<std::size_t>(rank)];
  const StrategyRow& row = strategy_row(setting.options.strategy);
  const CostModel& cost = setting.options.cost;
  for (const bool backward : {false, true}) {
    if (backward && !setting.options.backward) continue;
    PassBuilder pass(setting, rank, backward);
    setting.options.host_tensors ? stage_from_host(pass) : row.stage(pass);
    Program program = pass.finish();
    data.nanoseconds += modelled_nanoseconds(data.problem, program, backward ? Pass::backward : Pass::forward, cost);
    (backward ? data.backward : data.forward) = std::move(program);
  }
  data.has_backward = setting.options.backward;
  data.bucket_source = setting.bucket_source;
  return data;
}

PlanData plan_rank(const Problem& problem, const PlanOptions& options, int rank) {
  problem.validate();
  validate_options(problem, options, rank);
  const std::shared_ptr<const Choice> choice = choose_together(problem, options);
  const Setting& setting = choice->setting;
  PlanData data = build_plan(setting, rank);
  const std::int64_t bytes = peak_bytes(data);
  if (options.memory_budget > 0 && bytes > options.memory_budget) {  // not one of the ranks that the choice was made by
    const MemoryLine most = dominating(data);
    throw OutOfBudget(
        fmt::format("rank {} needs {} bytes with strategy {}, memory_budget is {}; {} takes most of it ({} bytes)", rank, bytes,
                    to_string(setting.options.strategy), options.memory_budget, most.component, most.bytes));
  }
  data.options.bucket_rows = setting.has_buckets() ? setting.bucket_rows : PlanOptions::kBucketNone;
  data.attend = choose_kernel(problem, data.options, Pass::forward);
  if (data.has_backward) data.attend_backward = choose_kernel(problem, data.options, Pass::backward);
  data.rejected = choice->rejected;
  data.slowest_nanoseconds = choice->slowest_nanoseconds;
  data.ranks_looked_at = choice->ranks_looked_at;
  data.fingerprint = fingerprint(problem, data.options, data.options.bucket_rows);
  data.choice = choice;
  return data;
}

}  // namespace internal

Plan make_plan(const Problem& problem, const PlanOptions& options, int rank) {
  return Plan(std::make_shared<const internal::PlanData>(internal::plan_rank(problem, options, rank)));
}

}  // namespace ringspan
