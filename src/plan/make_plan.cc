// make_plan: from a problem and options to one rank's plan. What all ranks must agree on (strategy, bucket) is decided from
// what all ranks know: the problem, the options and the programs of the same sample of ranks.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "plan/capability.h"
#include "plan/cost.h"
#include "plan/pass.h"
#include "plan/strategy.h"
#include "ringspan/error.h"

namespace ringspan {
namespace internal {
namespace {

constexpr int kSampledRanks = 16;              // all ranks up to this many, else evenly spaced ones
constexpr std::int64_t kAutoBuckets = 32;      // a chunk travels in about this many buckets ...
constexpr std::int64_t kAutoBucketRows = 256;  // ... of at least this many rows
constexpr std::int64_t kSmallestBucketRows = 16;
constexpr int kPlanVersion = 1;

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
  if (options.threads < 1) throw InvalidArgument(fmt::format("threads ({}) must be at least 1", options.threads));
  const CostModel& cost = options.cost;
  if (cost.flops_per_second < 1 || cost.bytes_per_second < 1 || cost.message_nanoseconds < 0) {
    throw InvalidArgument(fmt::format("cost ({},{},{}) must be flops/s >= 1, bytes/s >= 1, nanoseconds >= 0",
                                      cost.flops_per_second, cost.bytes_per_second, cost.message_nanoseconds));
  }
}

std::int64_t chunk_rows(const Setting& setting) {
  const bool keys = setting.options.strategy != Strategy::pass_q;
  std::int64_t rows = 1;
  for (const Shard& shard : keys ? setting.shards_k : setting.shards_q) rows = std::max(rows, shard.rows);
  return rows;
}

std::int64_t resolve_bucket(const Setting& setting) {
  const std::int64_t rows = chunk_rows(setting);
  const std::int64_t asked = setting.options.bucket_rows;
  if (!strategy_row(setting.options.strategy).buckets || asked == PlanOptions::kBucketNone) return rows;
  if (asked > 0) return std::min(asked, rows);
  return std::min(rows, std::max(kAutoBucketRows, (rows + kAutoBuckets - 1) / kAutoBuckets));
}

PlanData build(const Setting& setting, int rank) {
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
    row.stage(pass);
    Program program = pass.finish();
    data.nanoseconds += modelled_nanoseconds(data.problem, program, backward ? Pass::backward : Pass::forward, cost);
    (backward ? data.backward : data.forward) = std::move(program);
  }
  data.has_backward = setting.options.backward;
  return data;
}

std::vector<int> sampled_ranks(int ranks) {
  std::vector<int> sample;
  const int count = std::min(ranks, kSampledRanks);
  for (int i = 0; i < count; ++i)
    sample.push_back(count == 1 ? 0 : static_cast<int>(std::int64_t{i} * (ranks - 1) / (count - 1)));
  return sample;
}

struct Outcome {
  std::int64_t nanoseconds = 0;
  std::int64_t bytes = 0;
  MemoryLine dominating;
};

// The slowest and the largest of the sampled ranks.
Outcome evaluate(const Setting& setting) {
  Outcome outcome;
  for (int rank : sampled_ranks(setting.ranks())) {
    const PlanData data = build(setting, rank);
    outcome.nanoseconds = std::max(outcome.nanoseconds, data.nanoseconds);
    const std::int64_t bytes = peak_bytes(data);
    if (bytes > outcome.bytes) {
      outcome.bytes = bytes;
      outcome.dominating = dominating(data);
    }
  }
  return outcome;
}

// Shrinks the bucket until the plan fits the budget. Returns the outcome of the last try; setting.bucket_rows is set.
Outcome fit(Setting& setting) {
  setting.bucket_rows = resolve_bucket(setting);
  Outcome outcome = evaluate(setting);
  const bool free = strategy_row(setting.options.strategy).buckets && setting.options.bucket_rows == PlanOptions::kBucketAuto;
  while (setting.options.memory_budget > 0 && outcome.bytes > setting.options.memory_budget && free &&
         setting.bucket_rows > kSmallestBucketRows) {
    setting.bucket_rows = std::max(kSmallestBucketRows, setting.bucket_rows / 2);
    outcome = evaluate(setting);
  }
  return outcome;
}

std::string candidate_name(const PlanOptions& options) {
  std::string name(to_string(options.strategy));
  if (options.strategy == Strategy::local) name += fmt::format(":{}", options.computing_ranks);
  return name;
}

std::vector<PlanOptions> candidates(const Problem& problem, const PlanOptions& options) {
  std::vector<PlanOptions> list;
  if (options.strategy != Strategy::automatic) {
    list.push_back(options);
    if (options.strategy == Strategy::local && options.computing_ranks == 0) list.back().computing_ranks = 1;
    return list;
  }
  for (const StrategyRow& row : strategies()) {
    PlanOptions candidate = options;
    candidate.strategy = row.strategy;
    if (row.strategy != Strategy::local) {
      list.push_back(candidate);
      continue;
    }
    for (int computing = 1; computing < std::max(problem.ranks, 2); computing *= 2) {
      candidate.computing_ranks = computing;
      list.push_back(candidate);
    }
  }
  return list;
}

class Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(state_); }
  ~Hash() { XXH3_freeState(state_); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;
  void add(const void* data, std::size_t bytes) { XXH3_64bits_update(state_, data, bytes); }
  void add(std::string_view text) {
    const std::uint64_t size = text.size();
    add(&size, sizeof size);
    add(text.data(), text.size());
  }
  template <typename T>
  void add_all(const std::vector<T>& values) {
    const std::uint64_t size = values.size();
    add(&size, sizeof size);
    add(values.data(), values.size() * sizeof(T));
  }
  std::uint64_t value() const { return XXH3_64bits_digest(state_); }

 private:
  XXH3_state_t* state_;
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
  hash.add(fmt::format("{:a} {:a} {} {} {:a} {}", problem.scale, problem.softcap, problem.alibi, problem.sinks, problem.dropout,
                       problem.seed));
  hash.add(fmt::format("{} {} {} {}", problem.ranks, problem.replicated_q, problem.sharding_q.to_string(),
                       problem.sharding_k.to_string()));
  hash.add(fmt::format("{} {} {} {} {}", to_string(options.strategy), options.computing_ranks, bucket_rows, options.backward,
                       options.keep_o_float32));
  return hash.value();
}

}  // namespace

PlanData plan_rank(const Problem& problem, const PlanOptions& options, int rank) {
  problem.validate();
  validate_options(problem, options, rank);
  Setting setting;
  setting.problem = &problem;
  setting.states = problem.pattern.states();
  for (int r = 0; r < problem.ranks; ++r) {
    setting.shards_q.push_back(make_shard(problem.sharding_q, problem.tokens_q, problem.ranks, r));
    setting.shards_k.push_back(make_shard(problem.sharding_k, problem.tokens_k, problem.ranks, r));
  }

  const std::vector<PlanOptions> list = candidates(problem, options);
  std::vector<Rejected> rejected;
  std::optional<Setting> best;
  Outcome best_outcome;
  std::optional<Outcome> smallest;
  std::string smallest_name;
  for (const PlanOptions& candidate : list) {
    const std::string name = candidate_name(candidate);
    const std::string reason = unsupported_reason(problem, candidate);
    if (!reason.empty()) {
      if (list.size() == 1) throw Unsupported(reason);
      rejected.push_back({name, reason, 0});
      continue;
    }
    setting.options = candidate;
    if (list.size() == 1 && options.memory_budget == 0) {
      setting.bucket_rows = resolve_bucket(setting);
      best = setting;
      break;
    }
    const Outcome outcome = fit(setting);
    if (options.memory_budget > 0 && outcome.bytes > options.memory_budget) {
      rejected.push_back({name, fmt::format("needs {} bytes on a rank, the budget is {}", outcome.bytes, options.memory_budget),
                          outcome.nanoseconds});
      if (!smallest || outcome.bytes < smallest->bytes) {
        smallest = outcome;
        smallest_name = name;
      }
      continue;
    }
    if (!best || outcome.nanoseconds < best_outcome.nanoseconds) {
      if (best) rejected.push_back({candidate_name(best->options), "slower by the cost model", best_outcome.nanoseconds});
      best = setting;
      best_outcome = outcome;
    } else {
      rejected.push_back({name, "slower by the cost model", outcome.nanoseconds});
    }
  }
  if (!best && smallest) {
    throw OutOfBudget(fmt::format(
        "no plan fits memory_budget ({} bytes): the smallest possible is {} bytes, with strategy {}; {} "
        "takes most of it ({} bytes)",
        options.memory_budget, smallest->bytes, smallest_name, smallest->dominating.component, smallest->dominating.bytes));
  }
  if (!best) throw Unsupported("no strategy supports this combination: " + (rejected.empty() ? "" : rejected.front().reason));
  PlanData data = build(*best, rank);
  data.options.bucket_rows = strategy_row(best->options.strategy).buckets ? best->bucket_rows : PlanOptions::kBucketNone;
  data.rejected = std::move(rejected);
  data.fingerprint = fingerprint(problem, data.options, data.options.bucket_rows);
  return data;
}

}  // namespace internal

Plan make_plan(const Problem& problem, const PlanOptions& options, int rank) {
  return Plan(std::make_shared<const internal::PlanData>(internal::plan_rank(problem, options, rank)));
}

}  // namespace ringspan
