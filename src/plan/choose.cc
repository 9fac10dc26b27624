#include "plan/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "pattern/lower.h"
#include "plan/capability.h"
#include "plan/cost.h"
#include "plan/strategy.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

constexpr int kSampledRanks = 16;              // all ranks up to this many, else evenly spaced ones
constexpr std::int64_t kAutoBuckets = 32;      // a chunk travels in about this many buckets ...
constexpr std::int64_t kAutoBucketRows = 256;  // ... of at least this many rows, twice as many of 16 bits, unless measured
constexpr std::int64_t kSmallestBucketRows = 16;
constexpr std::int64_t kAutoPieceRows = 16'384;  // from the host: more than hide their copies, see docs/cuda.md ...
constexpr std::int64_t kAutoPieces = 128;        // ... and no more pieces of a side than this, over the root of the ranks

void resolve_bucket(Setting& setting) {
  const std::int64_t rows = std::max(setting.largest_chunk(), std::int64_t{1});
  const std::int64_t asked = setting.options.bucket_rows;
  if (setting.options.host_tensors && asked == PlanOptions::kBucketAuto) {
    std::int64_t root = 1;  // steps are pieces times pieces times ranks
    while (root * root < setting.ranks()) ++root;
    setting.bucket_rows = std::min(rows, std::max(kAutoPieceRows, (rows * root + kAutoPieces - 1) / kAutoPieces));
    return;
  }
  if (!setting.has_buckets() || asked != PlanOptions::kBucketAuto) {
    setting.bucket_source = asked == PlanOptions::kBucketAuto ? SizeSource::standard : SizeSource::given;
    setting.bucket_rows = asked > 0 ? std::min(asked, rows) : rows;
    return;
  }
  const std::int64_t share = (rows + kAutoBuckets - 1) / kAutoBuckets, measured = setting.options.tuned.bucket_rows;
  const std::int64_t least = measured > 0 ? measured : kAutoBucketRows * 4 / size_of(setting.problem->dtype);
  setting.bucket_source = measured > 0 && measured >= share ? SizeSource::tuned : SizeSource::standard;
  setting.bucket_rows = std::min(rows, std::max(least, share));
}

std::vector<int> sampled_ranks(int ranks) {
  std::vector<int> sample;
  const int count = std::min(ranks, kSampledRanks);
  for (std::int64_t i = 0; i < count; ++i) sample.push_back(count == 1 ? 0 : static_cast<int>(i * (ranks - 1) / (count - 1)));
  return sample;
}

struct Outcome {
  Int128 nanoseconds = 0;
  std::int64_t bytes = 0;
  MemoryLine dominating;
};

// The slowest and the largest of the sampled ranks.
Outcome evaluate(const Setting& setting) {
  Outcome outcome;
  for (const int rank : sampled_ranks(setting.ranks())) {
    const PlanData data = build_plan(setting, rank);
    outcome.nanoseconds = std::max(outcome.nanoseconds, data.nanoseconds);
    const std::int64_t bytes = peak_bytes_of_any(data);
    if (bytes > outcome.bytes) {
      outcome.bytes = bytes;
      outcome.dominating = dominating(data);
    }
  }
  return outcome;
}

// Halves the bucket until the plan fits the budget; where none does, takes the smallest plan that was tried.
Outcome fit(Setting& setting) {
  resolve_bucket(setting);
  Outcome best = evaluate(setting);
  std::int64_t best_rows = setting.bucket_rows;
  const std::int64_t budget = setting.options.memory_budget;
  const bool is_free = setting.has_buckets() && setting.options.bucket_rows == PlanOptions::kBucketAuto;
  while (is_free && budget > 0 && best.bytes > budget && setting.bucket_rows > kSmallestBucketRows) {
    const std::int64_t larger = setting.bucket_rows;
    setting.bucket_rows = std::max(kSmallestBucketRows, larger / 2);
    if (setting.last_stage() > setting.most_stages()) break;
    const Outcome outcome = evaluate(setting);
    if (outcome.bytes >= best.bytes) continue;
    best = outcome;
    best_rows = setting.bucket_rows;
    setting.bucket_source = SizeSource::budget;
  }
  setting.bucket_rows = best_rows;
  return best;
}

struct Candidate {
  PlanOptions options;
  std::string name;
  std::size_t place = 0;  // among equally fast ones the first wins
  int computing = 0;      // how many ranks compute
};

std::vector<PlanOptions> candidate_options(const Problem& problem, const PlanOptions& options) {
  if (options.strategy != Strategy::automatic) {
    PlanOptions only = options;
    if (only.strategy == Strategy::local && only.computing_ranks == 0) only.computing_ranks = 1;
    return {only};
  }
  if (options.host_tensors) {  // there is nothing to choose between
    PlanOptions only = options;
    only.strategy = problem.ranks == 1 ? Strategy::local : Strategy::exchange;
    only.computing_ranks = problem.ranks == 1 ? 1 : 0;
    return {only};
  }
  std::vector<PlanOptions> list;
  for (const StrategyRow& row : strategies()) {
    PlanOptions candidate = options;
    candidate.strategy = row.strategy;
    if (row.strategy != Strategy::local) {
      list.push_back(candidate);
      continue;
    }
    for (std::int64_t computing = 1; computing < std::max(problem.ranks, 2); computing *= 2) {
      candidate.computing_ranks = static_cast<int>(computing);
      list.push_back(candidate);
    }
  }
  return list;
}

class Chooser {
 public:
  Chooser(const Problem& problem, const PlanOptions& options) : options_(options) {
    setting_.problem = &problem;
    setting_.states = problem.pattern.states();
    for (int r = 0; r < problem.ranks; ++r) {
      setting_.shards_q.push_back(make_shard(problem.sharding_q, problem.tokens_q, problem.ranks, r));
      setting_.shards_k.push_back(make_shard(problem.sharding_k, problem.tokens_k, problem.ranks, r));
    }
  }

  Choice choose() {
    std::vector<Candidate> list = candidates();
    const bool single = list.size() == 1;
    for (const Candidate& candidate : list) {
      setting_.options = candidate.options;
      const std::string reason = refusal(candidate);
      if (!reason.empty()) {
        if (single) throw Unsupported(reason);
        reject(candidate, reason, 0);
      } else if (single && options_.memory_budget == 0) {
        resolve_bucket(setting_);
        best_ = setting_;
      } else {
        consider(candidate);
      }
    }
    if (!best_) fail();
    std::stable_sort(rejected_.begin(), rejected_.end(), [](const auto& a, const auto& b) { return a.place < b.place; });
    Choice choice{std::move(*best_), {}};
    for (Loser& loser : rejected_) choice.rejected.push_back(std::move(loser.rejected));
    return choice;
  }

 private:
  struct Loser {
    std::size_t place;
    Rejected rejected;
  };

  // Those in which more ranks compute come first: they are the cheaper ones to plan, and often make the others superfluous.
  std::vector<Candidate> candidates() {
    std::vector<Candidate> list;
    for (const PlanOptions& options : candidate_options(*setting_.problem, options_)) {
      setting_.options = options;
      Candidate candidate{options, std::string(to_string(options.strategy)), list.size(), 0};
      if (options.strategy == Strategy::local) candidate.name += fmt::format(":{}", options.computing_ranks);
      const StrategyRow& row = strategy_row(options.strategy);
      for (int rank = 0; rank < setting_.ranks(); ++rank) candidate.computing += row.assign(setting_, rank).computes() ? 1 : 0;
      list.push_back(std::move(candidate));
    }
    std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.computing > b.computing; });
    return list;
  }

  std::string refusal(const Candidate& candidate) {
    std::string reason = unsupported_reason(*setting_.problem, candidate.options);
    if (!reason.empty()) return reason;
    resolve_bucket(setting_);
    if (setting_.has_buckets() && setting_.last_stage() > setting_.most_stages()) {
      return fmt::format("buckets of {} rows on {} ranks make up to {} stages, more than {}; use larger buckets",
                         setting_.bucket_rows, setting_.ranks(), setting_.last_stage(), setting_.most_stages());
    }
    return {};
  }

  void consider(const Candidate& candidate) {
    if (best_ && candidate.computing < setting_.ranks()) {
      const Int128 bound = computing_nanoseconds(candidate.computing);
      if (bound > best_outcome_.nanoseconds) {
        reject(candidate, "slower by the cost model, even without communication", bound);
        return;
      }
    }
    const Outcome outcome = fit(setting_);
    if (options_.memory_budget > 0 && outcome.bytes > options_.memory_budget) {
      reject(candidate, fmt::format("needs {} bytes on a rank, the budget is {}", outcome.bytes, options_.memory_budget),
             outcome.nanoseconds);
      if (smallest_name_.empty() || outcome.bytes < smallest_.bytes) {
        smallest_ = outcome;
        smallest_name_ = candidate.name;
      }
      return;
    }
    const bool wins = !best_ || outcome.nanoseconds < best_outcome_.nanoseconds ||
                      (outcome.nanoseconds == best_outcome_.nanoseconds && candidate.place < best_candidate_.place);
    if (best_ && wins) reject(best_candidate_, "slower by the cost model", best_outcome_.nanoseconds);
    if (!wins) {
      reject(candidate, "slower by the cost model", outcome.nanoseconds);
      return;
    }
    best_ = setting_;
    best_outcome_ = outcome;
    best_candidate_ = candidate;
  }

  // The least that the slowest of so many computing ranks needs.
  Int128 computing_nanoseconds(int computing) {
    const Problem& problem = *setting_.problem;
    if (!pairs_) pairs_ = pair_count(problem);
    Int128 flops = flops_per_pair(problem, Pass::forward);
    if (options_.backward) flops += flops_per_pair(problem, Pass::backward);
    return nanoseconds_of(*pairs_ * flops / std::max(computing, 1), options_.cost);
  }

  void reject(const Candidate& candidate, std::string reason, Int128 nanoseconds) {
    rejected_.push_back({candidate.place, {candidate.name, std::move(reason), saturated(nanoseconds)}});
  }

  [[noreturn]] void fail() const {
    if (smallest_name_.empty()) {
      throw Unsupported("no strategy supports this combination: " + rejected_.front().rejected.reason);
    }
    throw OutOfBudget(fmt::format(
        "no plan fits memory_budget ({} bytes): the smallest possible is {} bytes, with strategy {}; {} takes most of it ({} "
        "bytes)",
        options_.memory_budget, smallest_.bytes, smallest_name_, smallest_.dominating.component, smallest_.dominating.bytes));
  }

  const PlanOptions& options_;
  Setting setting_;
  std::optional<Setting> best_;
  Outcome best_outcome_;
  Candidate best_candidate_;
  Outcome smallest_;
  std::string smallest_name_;
  std::vector<Loser> rejected_;
  std::optional<Int128> pairs_;
};

}  // namespace

Choice choose(const Problem& problem, const PlanOptions& options) { return Chooser(problem, options).choose(); }

}  // namespace ringspan::internal
