#include "plan/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "pattern/validate.h"
#include "plan/capability.h"
#include "plan/cost.h"
#include "plan/kernel_choice.h"
#include "plan/load.h"
#include "plan/strategy.h"
#include "ringspan/error.h"

namespace ringspan::internal {
namespace {

constexpr int kAllRanks = 16;                         // so many ranks are all looked at ...
constexpr std::size_t kFewRanks = 8;                  // ... of more so many, and those that have the most of something ...
constexpr std::int64_t kEnoughEffort = 200'000;       // ... and as many others as this allows, ...
constexpr std::int64_t kMuchEffort = 500'000;         // ... but none after this, unless few ranks have a memory budget to fit
constexpr std::int64_t kEffortOfAnError = 4'000'000;  // a budget that an error names holds for as many as this allows
constexpr std::int64_t kMostSlices = 4'000'000;       // whose pairs are counted, rank by rank; more are estimated
constexpr std::int64_t kAutoBuckets = 32;             // a chunk travels in about this many buckets ...
constexpr std::int64_t kAutoBucketRows =
    512;  // ... of at least this many rows, unless measured: fewer keys slow kernels down ...
constexpr std::int64_t kAutoBucketRowsOnDevice = 8192;  // ... there: between two buckets the host waits, for some 0.1 ms
constexpr std::int64_t kSmallestBucketRows = 16;
constexpr std::int64_t kManyStages = 4096;       // nor halved, with more stages than these, ...
constexpr std::int64_t kWorthHalving = 256;      // ... where that saved no more than this part of a rank's bytes
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
  const bool on_devices = writes_gradients(setting.options);  // all ranks, as agreed
  const std::int64_t standard = on_devices ? kAutoBucketRowsOnDevice : kAutoBucketRows;
  const std::int64_t least = measured > 0 ? measured : standard;
  setting.bucket_source = measured > 0 && measured >= share ? SizeSource::tuned : SizeSource::standard;
  setting.bucket_rows = std::min(rows, std::max(least, share));
}

// What making a plan took, about in microseconds: counted in what does not depend on a rank's kernels, as launches do, since
// all ranks must come to the same number.
std::int64_t effort_of(const PlanData& data) {
  auto effort = static_cast<std::int64_t>(data.problem.ranks);
  for (const Program* program : {&data.forward, &data.backward}) {
    effort += program->visited_slices + static_cast<std::int64_t>(program->attend_items.size() + program->bundles.size());
  }
  return effort;
}

// A strategy with a bucket size, and what is known of it so far.
struct Candidate {
  PlanOptions options;
  std::string name;
  std::size_t place = 0;    // among equally fast ones the first wins
  Int128 computing = 0;     // nanoseconds that the rank with the most pairs computes
  Int128 least = 0;         // nanoseconds that it takes whatever its bucket
  int busiest = 0;          // that rank
  bool may_shrink = false;  // its bucket, for a memory budget
  std::int64_t bucket_rows = 0;
  SizeSource bucket_source = SizeSource::standard;

  // The most of the ranks that were looked at.
  Int128 nanoseconds = 0;
  std::int64_t bytes = 0, bytes_before = 0;  // with a bucket twice as large
  MemoryLine dominating;
  int looked_at = 0;
  std::size_t next = 0;  // of the order
  std::int64_t effort = 0;
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
    setting_.lowering = std::make_shared<const Lowering>(problem);
    setting_.states = problem.pattern.states();
    for (int r = 0; r < problem.ranks; ++r) {
      setting_.shards_q.push_back(make_valid_shard(problem.sharding_q, problem.tokens_q, problem.ranks, r));
      setting_.shards_k.push_back(make_valid_shard(problem.sharding_k, problem.tokens_k, problem.ranks, r));
    }
  }

  Choice choose() {
    const std::vector<PlanOptions> list = candidate_options(*setting_.problem, options_);
    const bool single = list.size() == 1;
    for (std::size_t place = 0; place < list.size(); ++place) {
      Candidate candidate;
      candidate.options = setting_.options = list[place];
      candidate.name = to_string(list[place].strategy);
      if (list[place].strategy == Strategy::local) candidate.name += fmt::format(":{}", list[place].computing_ranks);
      candidate.place = place;
      const std::string reason = refusal();
      if (!reason.empty()) {
        if (single) throw Unsupported(reason);
        reject(candidate, reason, true);
        continue;
      }
      candidate.bucket_rows = setting_.bucket_rows;
      candidate.bucket_source = setting_.bucket_source;
      if (single && options_.memory_budget == 0) return {std::move(setting_), {}, 0, 0, 0};
      candidate.may_shrink =
          options_.memory_budget > 0 && setting_.has_buckets() && candidate.options.bucket_rows == PlanOptions::kBucketAuto;
      open_.push_back(std::move(candidate));
    }
    if (open_.empty()) throw Unsupported("no strategy supports this combination: " + rejected_.front().rejected.reason);
    prepare();
    const Candidate best = fastest();
    for (const Candidate& candidate : open_) {
      if (candidate.place == best.place) continue;
      const bool computing = candidate.nanoseconds == candidate.computing && candidate.looked_at == 0;
      std::string reason =
          fmt::format("{} by the cost model", candidate.nanoseconds == best.nanoseconds ? "no faster" : "slower");
      if (computing) reason += ", even without communication";
      reject(candidate, std::move(reason), is_known(candidate));
    }
    std::sort(rejected_.begin(), rejected_.end(), [](const auto& a, const auto& b) { return a.place < b.place; });
    use(best);
    Choice choice{std::move(setting_), {}, best.nanoseconds, best.looked_at, plans_};
    for (Loser& loser : rejected_) choice.rejected.push_back(std::move(loser.rejected));
    return choice;
  }

 private:
  struct Loser {
    std::size_t place;
    Rejected rejected;
  };

  std::string refusal() {
    std::string reason = unsupported_reason(*setting_.problem, setting_.options);
    if (!reason.empty()) return reason;
    resolve_bucket(setting_);
    if (setting_.has_buckets() && setting_.last_stage() > setting_.most_stages()) {
      return fmt::format("buckets of {} rows on {} ranks make up to {} stages, more than {}; use larger buckets",
                         setting_.bucket_rows, setting_.ranks(), setting_.last_stage(), setting_.most_stages());
    }
    return {};
  }

  // What every candidate takes at least, and in which order ranks are looked at.
  void prepare() {
    const Loads loads(setting_, kMostSlices);
    const std::vector<int> extremes = loads.extremes();
    order_ = spread_ranks(extremes, setting_.ranks());
    always_ = setting_.ranks() <= kAllRanks ? order_.size() : std::max(extremes.size(), kFewRanks);
    for (Candidate& candidate : open_) {
      use(candidate);
      const StrategyRow& row = strategy_row(candidate.options.strategy);
      Int128 most = -1;
      for (int rank = 0; rank < setting_.ranks(); ++rank) {
        const Int128 pairs = loads.pairs(row.assign(setting_, rank));
        if (pairs <= most) continue;
        most = pairs;
        candidate.busiest = rank;
      }
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        if (pass == Pass::backward && !options_.backward) continue;
        candidate.computing += nanoseconds_of(most * flops_per_pair(*setting_.problem, pass), options_.cost);
      }
      candidate.nanoseconds = candidate.least = candidate.computing;
    }
  }

  void use(const Candidate& candidate) {
    setting_.options = candidate.options;
    setting_.bucket_rows = candidate.bucket_rows;
    setting_.bucket_source = candidate.bucket_source;
  }

  bool is_known(const Candidate& candidate) const {
    if (candidate.looked_at == setting_.ranks()) return true;
    const bool all_must_fit = options_.memory_budget > 0 && setting_.ranks() <= kAllRanks;
    if (candidate.effort >= kMuchEffort && !all_must_fit) return true;
    return candidate.looked_at > 0 && candidate.next >= always_ && candidate.effort >= kEnoughEffort;
  }

  void look(Candidate& candidate) {
    int rank = candidate.busiest;
    if (candidate.looked_at > 0) {
      if (order_[candidate.next] == candidate.busiest) ++candidate.next;
      rank = order_[candidate.next++];
    }
    use(candidate);
    const PlanData data = build_plan(setting_, rank);
    ++plans_;
    ++candidate.looked_at;
    candidate.effort += effort_of(data);
    candidate.nanoseconds = std::max(candidate.nanoseconds, data.nanoseconds);
    const std::int64_t bytes = peak_bytes_of_any(data);
    if (bytes > candidate.bytes) {
      candidate.bytes = bytes;
      candidate.dominating = dominating(data);
    }
    if (!setting_.has_buckets()) bound_others(candidate, data.nanoseconds);
  }

  // Where the same rank computes the same, nothing takes less than one message per peer with what is read and one with results.
  void bound_others(const Candidate& at_once, Int128 nanoseconds) {
    const StrategyRow& row = strategy_row(at_once.options.strategy);
    for (Candidate& candidate : open_) {
      const StrategyRow& other = strategy_row(candidate.options.strategy);
      if (!other.buckets || other.assign != row.assign) continue;
      candidate.least = std::max(candidate.least, nanoseconds);
      candidate.nanoseconds = std::max(candidate.nanoseconds, nanoseconds);
    }
  }

  // The same with half the bucket, of which nothing is known yet; false where there is none.
  bool shrink(Candidate& candidate) {
    if (!candidate.may_shrink || candidate.bucket_rows <= kSmallestBucketRows) return false;
    use(candidate);
    setting_.bucket_rows = std::max(kSmallestBucketRows, candidate.bucket_rows / 2);
    if (setting_.last_stage() > setting_.most_stages()) return false;
    // Each time saves half as much, for twice as many stages.
    const std::int64_t saved = candidate.bytes_before > 0 ? candidate.bytes_before - candidate.bytes : candidate.bytes;
    if (setting_.last_stage() > kManyStages && saved <= candidate.bytes / kWorthHalving) return false;
    candidate.bucket_rows = setting_.bucket_rows;
    candidate.bucket_source = SizeSource::budget;
    candidate.nanoseconds = candidate.least;
    candidate.bytes_before = candidate.bytes;
    candidate.bytes = candidate.effort = 0;
    candidate.looked_at = 0;
    candidate.next = 0;
    return true;
  }

  // Always looks at a further rank of the candidate that is the fastest by what is known: once nothing more is to be known of
  // that one, no other can win. Leaves the others in open_, but those that do not fit.
  Candidate fastest() {
    while (!open_.empty()) {
      const auto best = std::min_element(open_.begin(), open_.end(), [](const Candidate& a, const Candidate& b) {
        return std::pair(a.nanoseconds, a.place) < std::pair(b.nanoseconds, b.place);
      });
      if (is_known(*best)) return *best;
      if (!try_look(*best)) {
        open_.erase(best);
        continue;
      }
      if (options_.memory_budget == 0 || best->bytes <= options_.memory_budget) continue;
      misfits_.push_back(*best);
      if (shrink(*best)) continue;
      std::int64_t least = best->bytes;
      for (const Candidate& misfit : misfits_) least = misfit.place == best->place ? std::min(least, misfit.bytes) : least;
      reject(*best, fmt::format("needs at least {} bytes on a rank, the budget is {}", least, options_.memory_budget), false);
      open_.erase(best);
    }
    if (misfits_.empty()) std::rethrow_exception(too_many_tasks_);
    fail();
  }

  // look(), or the candidate is rejected for its tasks.
  bool try_look(Candidate& candidate) {
    try {
      look(candidate);
      return true;
    } catch (const TooManyTasks& error) {
      too_many_tasks_ = std::current_exception();
      reject(candidate, error.what(), false);
      return false;
    }
  }

  // The smallest plan is found like the fastest.
  [[noreturn]] void fail() {
    while (true) {
      const auto smallest = std::min_element(misfits_.begin(), misfits_.end(),
                                             [](const Candidate& a, const Candidate& b) { return a.bytes < b.bytes; });
      const bool are_all = smallest->looked_at == setting_.ranks();
      if (!is_known(*smallest) || (!are_all && smallest->effort < kEffortOfAnError)) {
        if (try_look(*smallest)) continue;
        misfits_.erase(smallest);
        if (misfits_.empty()) std::rethrow_exception(too_many_tasks_);
        continue;
      }
      const std::string of_whom = are_all ? "" : fmt::format(" on the {} ranks that were looked at", smallest->looked_at);
      throw OutOfBudget(
          fmt::format("no plan fits memory_budget ({} bytes): the smallest possible is {} bytes, with strategy {}{}; {} takes "
                      "most of it ({} bytes)",
                      options_.memory_budget, smallest->bytes, smallest->name, of_whom, smallest->dominating.component,
                      smallest->dominating.bytes));
    }
  }

  void reject(const Candidate& candidate, std::string reason, bool is_known) {
    rejected_.push_back({candidate.place, {candidate.name, std::move(reason), saturated(candidate.nanoseconds), !is_known}});
  }

  const PlanOptions& options_;
  Setting setting_;
  std::vector<int> order_;
  std::size_t always_ = 0;  // so many of the order, whatever it takes
  int plans_ = 0;
  std::vector<Candidate> open_, misfits_;
  std::vector<Loser> rejected_;
  std::exception_ptr too_many_tasks_;  // of the latest candidate that was rejected for them
};

}  // namespace

Choice choose(const Problem& problem, const PlanOptions& options) { return Chooser(problem, options).choose(); }

}  // namespace ringspan::internal
