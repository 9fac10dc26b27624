#include "sample.h"

#include <algorithm>
#include <functional>
#include <random>

#include "oracle/multiplicity.h"
#include "pattern/lower.h"
#include "ringspan/sharding.h"

namespace ringspan::cli {
namespace {

using oracle::Row;

constexpr double kSampledWork = 2e9;  // multiply-adds per element of a pair, of both arithmetics; some seconds on one core
constexpr std::size_t kSampledQueries = 64;
constexpr std::size_t kSampledKeys = 24;
constexpr int kTries = 200;  // for a row that is not padding, of one rank

// How many queries see the key, in all heads that read it.
double queries_of(const Problem& problem, const Row& key) {
  Restriction restriction = unrestricted(problem);
  restriction.k_begin = key.position;
  restriction.k_end = key.position + 1;
  restriction.head_begin = static_cast<int>(key.head) * problem.group();
  restriction.head_end = restriction.head_begin + problem.group();
  double queries = 0;
  for_each_slice(problem, restriction, [&](const Slice& slice) {
    const bool here = slice.batch_first <= key.batch && key.batch < slice.batch_first + slice.batch_count;
    if (here) queries += static_cast<double>(slice.q.count) * static_cast<double>(slice.heads.count);
  });
  return queries;
}

struct Drawn {
  Row row;
  int rank = 0;
  double work = 0;  // 0: padding
};

// How many of the rows were drawn in the first turn of the ranks.
std::size_t first_of_ranks(const std::vector<Drawn>& rows) {
  const auto next = std::adjacent_find(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return b.rank <= a.rank; });
  return static_cast<std::size_t>(next - rows.begin()) + (next == rows.end() ? 0 : 1);
}

class Draw {
 public:
  Draw(const Problem& problem, std::uint64_t seed) : problem_(problem), random_(seed) {}

  // One row of every rank in turn, until there are `most`, but at least one of each; rows with work where there are any.
  std::vector<Drawn> rows(const Sharding& sharding, std::int64_t tokens, std::int64_t heads, std::size_t most,
                          const std::function<double(const Row&)>& work_of) {
    std::vector<std::pair<int, Shard>> ranks;
    for (int rank = 0; rank < problem_.ranks; ++rank) {
      ranks.emplace_back(rank, make_shard(sharding, tokens, problem_.ranks, rank));
    }
    std::erase_if(ranks, [](const auto& of) { return of.second.rows == 0; });
    std::vector<Drawn> drawn;
    while (!ranks.empty() && drawn.size() < most) {
      std::vector<std::pair<int, Shard>> further;
      for (auto& [rank, shard] : ranks) {
        drawn.push_back(one(rank, shard, heads, work_of));
        if (drawn.back().work > 0) further.emplace_back(rank, std::move(shard));
      }
      ranks = std::move(further);
    }
    drawn.resize(std::min(drawn.size(), std::max(most, first_of_ranks(drawn))));
    return drawn;
  }

 private:
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }

  Drawn one(int rank, const Shard& shard, std::int64_t heads, const std::function<double(const Row&)>& work_of) {
    Drawn drawn{{}, rank, 0};
    for (int n = 0; n < kTries && drawn.work == 0; ++n) {
      const std::int64_t local = below(shard.rows);
      const auto piece = std::upper_bound(shard.offsets.begin(), shard.offsets.end(), local) - shard.offsets.begin() - 1;
      const auto at = static_cast<std::size_t>(piece);
      drawn.row = {below(problem_.batch), below(heads), shard.pieces[at].at(local - shard.offsets[at])};
      drawn.work = work_of(drawn.row);
    }
    return drawn;
  }

  const Problem& problem_;
  std::mt19937_64 random_;
};

// As many as fit into the work, but `least`.
void keep_what_fits(std::vector<Drawn>& keys, double work_per_query, std::size_t least) {
  double left = kSampledWork;
  std::size_t count = 0;
  for (; count < keys.size(); ++count) {
    left -= keys[count].work * work_per_query;
    if (left < 0 && count >= least) break;
  }
  keys.resize(count);
}

void choose_keys(const Problem& problem, Draw& draw, Sample& sample) {
  const auto seen_by = [&](const Row& key) {
    const oracle::Range queries = oracle::query_bounds(problem, key.batch, key.position);
    return queries.begin < queries.end ? queries_of(problem, key) : 0.0;
  };
  std::vector<Drawn> keys = draw.rows(problem.sharding_k, problem.tokens_k, problem.kv_heads, kSampledKeys, seen_by);
  const double width = problem.head_dim + problem.head_dim_v;
  const double rows = static_cast<double>(problem.batch) * problem.heads * static_cast<double>(problem.tokens_q);
  const double whole_row = std::max(1.0, static_cast<double>(pair_count(problem)) / std::max(1.0, rows)) * width;
  const std::size_t ranks = first_of_ranks(keys);
  double of_each = 0;
  for (std::size_t x = 0; x < ranks; ++x) of_each += keys[x].work * whole_row;
  if (of_each <= kSampledWork) {
    keep_what_fits(keys, whole_row, ranks);
  } else if (oracle::states(problem) == 1) {
    sample.from_outputs = true;
    keep_what_fits(keys, 4 * width, ranks);  // nothing is shared by the pairs of a row
  } else {
    std::sort(keys.begin(), keys.end(), [](const Drawn& a, const Drawn& b) { return a.work < b.work; });
    std::vector<int> ranks_of_keys;
    for (const Drawn& key : keys) ranks_of_keys.push_back(key.rank);
    keep_what_fits(keys, whole_row, 1);
    std::sort(ranks_of_keys.begin(), ranks_of_keys.end());
    ranks_of_keys.erase(std::unique(ranks_of_keys.begin(), ranks_of_keys.end()), ranks_of_keys.end());
    for (const int rank : ranks_of_keys) {
      const bool kept = std::any_of(keys.begin(), keys.end(), [&](const Drawn& key) { return key.rank == rank; });
      if (!kept) sample.ranks_without_keys.push_back(rank);
    }
  }
  for (const Drawn& key : keys) sample.keys.push_back(key.row);
}

}  // namespace

Sample draw_sample(const Problem& problem, bool backward, std::uint64_t seed) {
  Draw draw(problem, seed);
  Sample sample;
  if (problem.tokens_q > 0) {
    sample.queries = {{0, 0, 0}, {problem.batch - 1, problem.heads - 1, problem.tokens_q - 1}};
    const auto sees = [&](const Row& query) {
      const oracle::Range keys = oracle::key_bounds(problem, query.batch, query.position);
      return keys.begin < keys.end ? 1.0 : 0.0;
    };
    const Sharding sharding = problem.replicated_q ? Sharding{} : problem.sharding_q;
    for (const Drawn& query : draw.rows(sharding, problem.tokens_q, problem.heads, kSampledQueries - 2, sees)) {
      sample.queries.push_back(query.row);
    }
  }
  if (backward && problem.tokens_k > 0) choose_keys(problem, draw, sample);
  return sample;
}

}  // namespace ringspan::cli
