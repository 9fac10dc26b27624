// Random problems for the tests of the planner: every pattern, sharding and option, small enough to enumerate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "ringspan/error.h"
#include "ringspan/plan.h"

namespace ringspan::testing {

class RandomProblem {
 public:
  explicit RandomProblem(std::uint64_t seed) : random_(seed) {}

  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool chance(int one_in) { return draw(1, one_in) == 1; }

  Problem problem(int ranks, std::int64_t max_tokens = 40) {
    Problem p;
    p.ranks = ranks;
    p.tokens_q = draw(0, chance(5) ? 4 : max_tokens);
    p.tokens_k = chance(3) ? draw(0, max_tokens) : p.tokens_q;
    p.kv_heads = static_cast<int>(draw(1, 4));
    p.heads = p.kv_heads * static_cast<int>(draw(1, 3));
    p.batch = chance(3) ? draw(2, 3) : 1;
    p.head_dim = static_cast<int>(draw(1, 3));
    p.head_dim_v = static_cast<int>(draw(1, 3));
    p.dtype = static_cast<DType>(draw(0, 2));
    p.pattern = pattern(p);
    frames(p);
    p.sinks = chance(4);
    p.alibi = chance(6);
    p.replicated_q = chance(4);
    p.sharding_q = sharding(p.tokens_q, ranks);
    p.sharding_k = chance(2) && p.tokens_q == p.tokens_k ? p.sharding_q : sharding(p.tokens_k, ranks);
    p.validate();
    return p;
  }

  PlanOptions options(const Problem& problem, Strategy strategy) {
    PlanOptions o;
    o.strategy = strategy;
    if (strategy == Strategy::local) o.computing_ranks = static_cast<int>(draw(1, problem.ranks));
    const bool buckets = strategy == Strategy::exchange || strategy == Strategy::ring || strategy == Strategy::pass_q;
    if (buckets && !chance(3)) o.bucket_rows = chance(4) ? PlanOptions::kBucketNone : draw(1, 9);
    o.backward = !chance(5);
    o.keep_o_float32 = !chance(3);
    if (problem.sinks && problem.pattern.states() > 1) o.backward = false;
    if (problem.pattern.dilated && problem.pattern.dilated->dialect == Dialect::torchscale && problem.sinks) o.backward = false;
    return o;
  }

  Sharding sharding(std::int64_t tokens, int ranks) {
    Sharding s;
    s.kind = static_cast<ShardingKind>(draw(0, 4));
    if (s.kind == ShardingKind::block_striped) s.block = draw(1, 6);
    if (s.kind == ShardingKind::explicit_lists) {  // residue classes dealt at random
      s.lists.resize(static_cast<std::size_t>(ranks));
      const std::int64_t modulus = draw(1, 4);
      for (std::int64_t first = 0; first < std::min(modulus, tokens); ++first) {
        s.lists[static_cast<std::size_t>(draw(0, ranks - 1))].push_back({first, modulus, (tokens - 1 - first) / modulus + 1});
      }
    }
    return s;
  }

 private:
  Pattern pattern(const Problem& problem) {
    Pattern p;
    p.align = chance(4) ? Align::top_left : Align::bottom_right;
    p.causal = chance(2);
    if (chance(3)) p.window = Window{draw(-1, 9), draw(-1, 9)};
    if (chance(6)) p.prefix = draw(0, 33);
    if (chance(5)) blocks(p, problem);
    if (chance(2)) {
      p.dilated.emplace();
      for (std::int64_t count = draw(1, 4); count > 0; --count) {
        p.dilated->branches.push_back({draw(1, 24), draw(1, chance(5) ? 12 : 5)});
      }
      p.dilated->dialect = static_cast<Dialect>(draw(0, 2));
      p.dilated->global = chance(4);
    }
    return p;
  }

  // Bands of rows, each with one range of keys.
  void blocks(Pattern& pattern, const Problem& problem) {
    pattern.blocks.emplace();
    for (std::int64_t q = 0; q < problem.tokens_q;) {
      Block block;
      block.q_begin = q;
      block.q_end = std::min(problem.tokens_q, q + draw(1, 15));
      block.k_begin = draw(0, problem.tokens_k);
      block.k_end = draw(block.k_begin, problem.tokens_k);
      block.kind = static_cast<BlockKind>(draw(0, 3));
      if (block.kind == BlockKind::band) {
        block.lo = draw(-20, 20);
        block.hi = draw(block.lo, 25);
      }
      q = block.q_end;
      pattern.blocks->push_back(block);
    }
  }

  void frames(Problem& p) {
    if (chance(4)) {
      p.pattern.documents = true;
      const std::int64_t documents = draw(1, 5);
      const auto offsets = [&](std::int64_t tokens) {
        std::vector<std::int32_t> list{0, static_cast<std::int32_t>(tokens)};
        for (std::int64_t d = 1; d < documents; ++d) list.push_back(static_cast<std::int32_t>(draw(0, tokens)));
        std::sort(list.begin(), list.end());
        return list;
      };
      p.cu_seqlens_q = offsets(p.tokens_q);
      if (p.tokens_q != p.tokens_k || chance(2)) p.cu_seqlens_k = offsets(p.tokens_k);
    } else if (chance(4)) {
      for (std::int64_t b = 0; b < p.batch; ++b) p.lengths_q.push_back(draw(0, p.tokens_q));
      if (chance(2)) {
        for (std::int64_t b = 0; b < p.batch; ++b) p.lengths_k.push_back(draw(0, p.tokens_k));
      }
      if (chance(2)) {
        for (std::int64_t b = 0; b < p.batch; ++b) {
          const std::int64_t length = p.lengths_k.empty() ? 0 : p.lengths_k[static_cast<std::size_t>(b)];
          p.starts_k.push_back(draw(0, p.tokens_k - length));
        }
      }
    }
  }

  std::mt19937_64 random_;
};

// What to type to see a failure again.
inline std::string describe(const Problem& p, const PlanOptions& o, std::uint64_t seed) {
  std::ostringstream out;
  out << "seed " << seed << ": " << p.pattern.to_string() << ", batch " << p.batch << ", tokens " << p.tokens_q << " x "
      << p.tokens_k << ", heads " << p.heads << "/" << p.kv_heads << ", dims " << p.head_dim << "/" << p.head_dim_v << ", "
      << to_string(p.dtype) << ", ranks " << p.ranks << ", q " << p.sharding_q.to_string() << ", k " << p.sharding_k.to_string()
      << (p.replicated_q ? ", replicated q" : "") << (p.sinks ? ", sinks" : "") << ", " << to_string(o.strategy) << ":"
      << o.computing_ranks << ", bucket " << o.bucket_rows << (o.backward ? ", backward" : "")
      << (o.keep_o_float32 ? ", keep o" : "");
  const auto list = [&](const char* name, const auto& values) {
    if (values.empty()) return;
    out << ", " << name;
    for (const auto value : values) out << " " << value;
  };
  list("cu_seqlens_q", p.cu_seqlens_q);
  list("cu_seqlens_k", p.cu_seqlens_k);
  list("lengths_q", p.lengths_q);
  list("lengths_k", p.lengths_k);
  list("starts_k", p.starts_k);
  return out.str();
}

}  // namespace ringspan::testing
