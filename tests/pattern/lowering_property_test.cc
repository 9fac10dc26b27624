// The lowering against the definitions: for random problems the (state, batch, head, q, k) multiset of the slices equals the
// oracle's, whole, restricted, and put together again from the pieces of all pairs of ranks.
// The cases are the same in every run; RC_PARAMS="seed=N max_success=M" in the environment gives others. A failure prints how
// to reproduce it.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <ostream>

#include "oracle/multiplicity.h"
#include "pattern/lower.h"
#include "ringspan/error.h"

namespace ringspan {

void showValue(const Problem& p, std::ostream& out) {  // found by RapidCheck through argument-dependent lookup
  out << p.pattern.to_string() << " batch " << p.batch << " tokens " << p.tokens_q << " x " << p.tokens_k << " heads "
      << p.heads << " ranks " << p.ranks << " q " << p.sharding_q.to_string() << " k " << p.sharding_k.to_string();
  const auto list = [&](const char* name, const auto& values) {
    if (values.empty()) return;
    out << " " << name;
    for (const auto value : values) out << " " << value;
  };
  list("cu_seqlens_q", p.cu_seqlens_q);
  list("cu_seqlens_k", p.cu_seqlens_k);
  list("lengths_q", p.lengths_q);
  list("lengths_k", p.lengths_k);
  list("starts_k", p.starts_k);
}

namespace {

const bool kConfigured = setenv("RC_PARAMS", "seed=1 max_success=3000", 0) == 0;

// Evenly from the whole range in every case, where RapidCheck on its own begins with small ones.
std::int64_t draw(std::int64_t low, std::int64_t high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::int64_t>(low, high + 1));
}
bool chance(int one_in) { return draw(0, one_in - 1) == one_in - 1; }  // shrinks to false

std::vector<std::int32_t> draw_offsets(std::int64_t tokens, std::int64_t documents) {
  std::vector<std::int32_t> offsets{0, static_cast<std::int32_t>(tokens)};
  for (std::int64_t d = 1; d < documents; ++d) offsets.push_back(static_cast<std::int32_t>(draw(0, tokens)));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

// As many as do not overlap.
std::vector<Block> draw_blocks(const Problem& problem) {
  Problem trial;
  trial.tokens_q = problem.tokens_q;
  trial.tokens_k = problem.tokens_k;
  trial.pattern.blocks.emplace();
  std::vector<Block>& blocks = *trial.pattern.blocks;
  for (std::int64_t count = draw(0, 6); count > 0; --count) {
    Block block;
    block.q_begin = draw(0, problem.tokens_q);
    block.q_end = draw(block.q_begin, problem.tokens_q);
    block.k_begin = draw(0, problem.tokens_k);
    block.k_end = draw(block.k_begin, problem.tokens_k);
    block.kind = static_cast<BlockKind>(draw(0, 3));
    if (block.kind == BlockKind::band) {
      block.lo = draw(-20, 20);
      block.hi = draw(block.lo, 25);
    }
    blocks.push_back(block);
    try {
      trial.validate();
    } catch (const InvalidArgument&) {
      blocks.pop_back();
    }
  }
  return blocks;
}

Dilated draw_dilated() {
  Dilated dilated;
  for (std::int64_t count = draw(1, 4); count > 0; --count)
    dilated.branches.push_back({draw(1, 16), draw(1, chance(6) ? 20 : 5)});
  dilated.dialect = static_cast<Dialect>(draw(0, 2));
  dilated.global = chance(3);
  return dilated;
}

Sharding draw_sharding(std::int64_t tokens, int ranks) {
  Sharding sharding;
  sharding.kind = static_cast<ShardingKind>(draw(0, 4));
  if (sharding.kind == ShardingKind::block_striped) sharding.block = draw(1, 6);
  if (sharding.kind == ShardingKind::explicit_lists) {  // residue classes dealt at random
    sharding.lists.resize(static_cast<std::size_t>(ranks));
    const std::int64_t modulus = draw(1, 4);
    for (std::int64_t first = 0; first < std::min(modulus, tokens); ++first) {
      sharding.lists[static_cast<std::size_t>(draw(0, ranks - 1))].push_back(
          {first, modulus, (tokens - 1 - first) / modulus + 1});
    }
  }
  return sharding;
}

Problem draw_problem() {
  Problem problem;
  Pattern& pattern = problem.pattern;
  problem.tokens_q = draw(0, 30);
  problem.tokens_k = chance(2) ? draw(0, 30) : problem.tokens_q;
  problem.heads = problem.kv_heads = static_cast<int>(draw(1, 7));
  problem.batch = chance(3) ? draw(1, 4) : 1;
  pattern.align = chance(3) ? Align::top_left : Align::bottom_right;
  pattern.causal = chance(3);
  if (chance(3)) pattern.window = Window{draw(-1, 9), draw(-1, 9)};
  if (chance(4)) pattern.prefix = draw(0, 33);
  if (chance(4)) pattern.blocks = draw_blocks(problem);
  if (chance(2)) pattern.dilated = draw_dilated();
  if (chance(3)) {
    pattern.documents = true;
    const std::int64_t documents = draw(1, 5);
    problem.cu_seqlens_q = draw_offsets(problem.tokens_q, documents);
    if (problem.tokens_q != problem.tokens_k || chance(2)) problem.cu_seqlens_k = draw_offsets(problem.tokens_k, documents);
  } else if (chance(3)) {
    for (std::int64_t b = 0; b < problem.batch; ++b) problem.lengths_q.push_back(draw(0, problem.tokens_q));
    if (chance(2)) {
      for (std::int64_t b = 0; b < problem.batch; ++b) problem.lengths_k.push_back(draw(0, problem.tokens_k));
    }
    if (chance(2)) {
      for (std::int64_t b = 0; b < problem.batch; ++b) {
        const std::int64_t length = problem.lengths_k.empty() ? 0 : problem.lengths_k[static_cast<std::size_t>(b)];
        problem.starts_k.push_back(draw(0, problem.tokens_k - length));
      }
    }
  }
  problem.ranks = static_cast<int>(draw(1, 5));
  problem.sharding_q = draw_sharding(problem.tokens_q, problem.ranks);
  problem.sharding_k = draw_sharding(problem.tokens_k, problem.ranks);
  problem.validate();
  return problem;
}

rc::Gen<Problem> problems() { return rc::gen::exec(draw_problem); }

// How often each (state, batch, head, i, j) occurs, as a dense array.
class Counts {
 public:
  explicit Counts(const Problem& problem) : problem_(problem) {
    counts_.resize(static_cast<std::size_t>(oracle::states(problem) * problem.batch * problem.heads * problem.tokens_q *
                                            problem.tokens_k));
  }

  void add(const Slice& slice) {
    for (std::int64_t b = slice.batch_first; b < slice.batch_first + slice.batch_count; ++b) {
      for (std::int64_t h = 0; h < slice.heads.count; ++h) {
        for (std::int64_t x = 0; x < slice.q.count; ++x) {
          for (std::int64_t y = 0; y < slice.k.count; ++y) {
            const std::int64_t i = slice.q.at(x), j = slice.k.at(y);
            if (slice.lo <= j - i && j - i <= slice.hi) ++counts_.at(index(slice.state, b, slice.heads.at(h), i, j));
          }
        }
      }
    }
  }

  static Counts by_definition(const Problem& problem) {
    Counts counts(problem);
    for (int state = 0; state < oracle::states(problem); ++state) {
      for (std::int64_t b = 0; b < problem.batch; ++b) {
        for (std::int64_t h = 0; h < problem.heads; ++h) {
          for (std::int64_t i = 0; i < problem.tokens_q; ++i) {
            const std::span<std::uint8_t> row(counts.counts_.data() + counts.index(state, b, h, i, 0),
                                              static_cast<std::size_t>(problem.tokens_k));
            oracle::multiplicity_row(problem, b, h, i, state, {0, problem.tokens_k}, row);
          }
        }
      }
    }
    return counts;
  }

  void keep_inside(const Restriction& r) {
    for (std::size_t at = 0; at < counts_.size(); ++at) {
      auto rest = static_cast<std::int64_t>(at);
      const std::int64_t j = rest % problem_.tokens_k;
      const std::int64_t i = (rest /= problem_.tokens_k) % problem_.tokens_q;
      const std::int64_t h = rest / problem_.tokens_q % problem_.heads;
      const bool inside = r.q_begin <= i && i < r.q_end && r.k_begin <= j && j < r.k_end && r.head_begin <= h && h < r.head_end;
      if (!inside) counts_[at] = 0;
    }
  }

  Int128 total() const { return std::accumulate(counts_.begin(), counts_.end(), Int128{0}); }
  bool operator==(const Counts& other) const { return counts_ == other.counts_; }

 private:
  std::size_t index(int state, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t row = ((state * problem_.batch + b) * problem_.heads + h) * problem_.tokens_q + i;
    return static_cast<std::size_t>(row * problem_.tokens_k + j);
  }

  const Problem& problem_;
  std::vector<std::uint8_t> counts_;
};

Restriction draw_restriction(const Problem& problem) {
  Restriction r;
  r.q_begin = draw(0, problem.tokens_q);
  r.q_end = draw(r.q_begin, problem.tokens_q);
  r.k_begin = draw(0, problem.tokens_k);
  r.k_end = draw(r.k_begin, problem.tokens_k);
  r.head_begin = static_cast<int>(draw(0, problem.heads - 1));
  r.head_end = static_cast<int>(draw(r.head_begin + 1, problem.heads));
  return r;
}

RC_GTEST_PROP(Lowering, IsTheDefinition, ()) {
  const Problem problem = *problems();
  const Counts expected = Counts::by_definition(problem);
  Counts lowered(problem);
  Int128 pairs = 0;
  for (const Slice& slice : lower(problem)) {
    RC_ASSERT(normalize(slice) == slice);
    RC_ASSERT(pair_count(slice) > 0);
    for (std::int64_t b = slice.batch_first; b < slice.batch_first + slice.batch_count; ++b) {
      for (std::int64_t x = 0; x < slice.q.count; ++x) RC_ASSERT(slice.diagonal == oracle::diagonal(problem, b, slice.q.at(x)));
    }
    lowered.add(slice);
    pairs += pair_count(slice);
  }
  RC_ASSERT(lowered == expected);
  RC_ASSERT(pairs == expected.total());
  RC_ASSERT(pair_count(problem) == pairs);
  RC_CLASSIFY(pairs == 0, "empty");
}

RC_GTEST_PROP(Lowering, RestrictedIsTheWholeFiltered, ()) {
  const Problem problem = *problems();
  const Restriction r = draw_restriction(problem);
  Counts expected = Counts::by_definition(problem);
  expected.keep_inside(r);
  Counts restricted(problem);
  const std::vector<Slice> slices = lower(problem, r);
  for (const Slice& slice : slices) restricted.add(slice);
  RC_ASSERT(restricted == expected);
  // The same slices in the same order, so that all ranks that look at one of them agree on what comes first.
  std::vector<Slice> filtered;
  for (Slice slice : lower(problem)) {
    slice.heads = clip(slice.heads, r.head_begin, r.head_end);
    slice.q = clip(slice.q, r.q_begin, r.q_end);
    slice.k = clip(slice.k, r.k_begin, r.k_end);
    if (const Slice part = normalize(slice); !part.q.empty()) filtered.push_back(part);
  }
  RC_ASSERT(slices == filtered);
}

RC_GTEST_PROP(Lowering, TheUnionOverRanksIsTheDefinition, ()) {
  const Problem problem = *problems();
  Counts counts(problem);
  Int128 pairs = 0;
  for (int q_rank = 0; q_rank < problem.ranks; ++q_rank) {
    const Shard q = make_shard(problem.sharding_q, problem.tokens_q, problem.ranks, q_rank);
    for (int k_rank = 0; k_rank < problem.ranks; ++k_rank) {
      const Shard k = make_shard(problem.sharding_k, problem.tokens_k, problem.ranks, k_rank);
      if (q.rows == 0 || k.rows == 0) continue;
      const Restriction hull{q.pieces.front().first, q.pieces.back().end(), k.pieces.front().first, k.pieces.back().end(), 0,
                             problem.heads};
      for_each_slice(problem, hull, [&](const Slice& slice) {
        for (const Progression& q_piece : q.pieces) {
          for (const Progression& k_piece : k.pieces) {
            const Slice part = normalize(restrict_k(restrict_q(slice, q_piece), k_piece));
            counts.add(part);
            pairs += pair_count(part);
          }
        }
      });
    }
  }
  const Counts expected = Counts::by_definition(problem);
  RC_ASSERT(counts == expected);
  RC_ASSERT(pairs == expected.total());
}

RC_GTEST_PROP(Lowering, TextRoundTrips, ()) {
  const Problem problem = *problems();
  RC_ASSERT(Pattern::parse(problem.pattern.to_string()) == problem.pattern);
}

}  // namespace
}  // namespace ringspan
