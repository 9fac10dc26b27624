#include "oracle/random_problem.h"

#include <algorithm>
#include <cmath>

#include "oracle/multiplicity.h"
#include "oracle/random_source.h"

namespace ringspan::oracle {
namespace {

constexpr std::int64_t kMaxTokens = 1500;

// Lengths where code breaks: none, one, fewer than ranks, around tiles, primes; and many small ones, which are cheap.
std::int64_t draw_tokens(RandomSource& random, int ranks) {
  switch (random.integer(0, 9)) {
    case 0:
      return random.integer(0, 1);
    case 1:
      return random.integer(0, ranks);
    case 2:
      return (std::int64_t{16} << random.integer(0, 5)) + random.integer(-1, 1);
    case 3:
    case 4: {
      std::int64_t prime = random.integer(2, kMaxTokens);
      while (!is_prime(prime)) --prime;
      return prime;
    }
    case 5:
      return random.integer(2, kMaxTokens);
    default:
      return static_cast<std::int64_t>(std::exp(random.unit() * std::log(static_cast<double>(kMaxTokens))));
  }
}

std::vector<std::int32_t> draw_offsets(RandomSource& random, std::int64_t tokens, std::int64_t documents) {
  std::vector<std::int32_t> offsets{0, static_cast<std::int32_t>(tokens)};
  for (std::int64_t d = 1; d < documents; ++d) offsets.push_back(static_cast<std::int32_t>(random.integer(0, tokens)));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

// Cells of an uneven grid: disjoint whatever their kinds.
std::vector<Block> draw_blocks(RandomSource& random, std::int64_t tokens_q, std::int64_t tokens_k) {
  const std::vector<std::int32_t> rows = draw_offsets(random, tokens_q, random.integer(1, 4));
  const std::vector<std::int32_t> columns = draw_offsets(random, tokens_k, random.integer(1, 4));
  std::vector<Block> blocks;
  for (std::size_t r = 0; r + 1 < rows.size(); ++r) {
    for (std::size_t c = 0; c + 1 < columns.size(); ++c) {
      if (random.chance(0.4)) continue;
      Block block{rows[r], rows[r + 1], columns[c], columns[c + 1], static_cast<BlockKind>(random.integer(0, 3)), 0, 0};
      if (block.kind == BlockKind::band) {
        block.lo = random.integer(-tokens_q, tokens_k);
        block.hi = block.lo + random.integer(0, 200);
      }
      blocks.push_back(block);
    }
  }
  return blocks;
}

Dilated draw_dilated(RandomSource& random, std::int64_t tokens) {
  Dilated dilated;
  std::int64_t segment =
      random.chance(0.5) ? std::int64_t{4} << random.integer(0, 6) : random.integer(1, std::max<std::int64_t>(tokens, 1));
  std::int64_t rate = random.integer(1, 3);
  for (std::int64_t count = random.integer(1, 4); count > 0; --count) {
    dilated.branches.push_back({segment, rate});
    segment = random.chance(0.7) ? segment * 2 : random.integer(1, 300);
    rate = random.chance(0.7) ? rate * 2 : random.integer(1, 7);
  }
  dilated.dialect = random.pick({Dialect::longnet, Dialect::torchscale, Dialect::head_groups});
  return dilated;
}

void draw_pattern(RandomSource& random, Problem& p) {
  Pattern& pattern = p.pattern;
  if (random.chance(0.12)) return;  // full
  pattern.causal = random.chance(0.45);
  if (random.chance(0.25)) {
    const std::int64_t reach = random.pick<std::int64_t>({0, 1, 7, 64, 300});
    pattern.window =
        Window{random.chance(0.2) ? -1 : random.integer(0, reach), random.chance(0.3) ? -1 : random.integer(0, reach)};
  }
  if (random.chance(0.12)) pattern.prefix = random.integer(0, p.tokens_k);
  if (random.chance(0.15)) pattern.blocks = draw_blocks(random, p.tokens_q, p.tokens_k);
  if (random.chance(0.45)) pattern.dilated = draw_dilated(random, p.tokens_k);
  if (random.chance(0.3)) {
    pattern.documents = true;
    const std::int64_t documents = random.integer(1, 6);
    p.cu_seqlens_q = draw_offsets(random, p.tokens_q, documents);
    if (p.tokens_q != p.tokens_k || random.chance(0.3)) p.cu_seqlens_k = draw_offsets(random, p.tokens_k, documents);
    if (pattern.dilated) pattern.dilated->global = random.chance(0.4);
  }
  if (random.chance(0.15)) pattern.align = Align::top_left;
}

Sharding draw_sharding(RandomSource& random, std::int64_t tokens, int ranks) {
  Sharding sharding;
  sharding.kind = static_cast<ShardingKind>(random.integer(0, 4));
  if (sharding.kind == ShardingKind::block_striped) sharding.block = random.pick<std::int64_t>({1, 3, 16, 100});
  if (sharding.kind != ShardingKind::explicit_lists) return sharding;
  sharding.lists.resize(static_cast<std::size_t>(ranks));
  const auto some_rank = [&] { return static_cast<std::size_t>(random.integer(0, ranks - 1)); };
  if (random.chance(0.5)) {  // residue classes
    const std::int64_t modulus = random.integer(1, 5);
    for (std::int64_t first = 0; first < std::min(modulus, tokens); ++first) {
      sharding.lists[some_rank()].push_back({first, modulus, (tokens - 1 - first) / modulus + 1});
    }
  } else {  // uneven runs
    const std::vector<std::int32_t> offsets = draw_offsets(random, tokens, ranks + 2);
    for (std::size_t x = 0; x + 1 < offsets.size(); ++x) {
      if (offsets[x] < offsets[x + 1]) sharding.lists[some_rank()].push_back({offsets[x], 1, offsets[x + 1] - offsets[x]});
    }
  }
  return sharding;
}

void draw_lengths(RandomSource& random, Problem& p) {
  if (p.pattern.documents || !random.chance(0.25)) return;
  const bool same = p.tokens_q == p.tokens_k && random.chance(0.5);
  for (std::int64_t b = 0; b < p.batch; ++b) p.lengths_q.push_back(random.integer(0, p.tokens_q));
  if (same) p.lengths_k = p.lengths_q;
  if (!same && !random.chance(0.3)) {
    for (std::int64_t b = 0; b < p.batch; ++b) p.lengths_k.push_back(random.integer(0, p.tokens_k));
  }
  if (random.chance(0.5)) return;
  if (random.chance(0.5)) p.lengths_q.clear();
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t length = p.lengths_k.empty() ? 0 : p.lengths_k[static_cast<std::size_t>(b)];
    p.starts_k.push_back(random.integer(0, p.tokens_k - length));
  }
}

// Heads and widths, smaller with every attempt, so that the work gets below its bound.
void draw_shape(RandomSource& random, Problem& p, int attempt) {
  const int kind = static_cast<int>(random.integer(0, 2));
  const int most = attempt < 3 ? 8 : 3;
  p.kv_heads = kind == 2 ? 1 : static_cast<int>(random.integer(kind == 1 ? 2 : 1, std::max(most / 2, 2)));
  const int group = kind == 0 ? 1 : static_cast<int>(random.integer(2, most / 2 + 1));
  p.heads = p.kv_heads * group;
  p.head_dim = attempt < 3 ? random.pick({1, 3, 8, 15, 16, 32, 33, 64, 64, 96, 128, 256}) : random.pick({1, 5, 8, 13, 16});
  p.head_dim_v = random.chance(0.6) ? p.head_dim : random.pick({1, 2, 7, 8, 16, 24, 40});
}

void draw_scores(RandomSource& random, RandomCase& drawn) {
  Problem& p = drawn.problem;
  if (random.chance(0.2)) p.scale = random.pick({0.02F, 0.125F, 1.0F, -0.25F});
  if (random.chance(0.2)) p.softcap = random.pick({0.5F, 5.0F, 30.0F});
  p.alibi = random.chance(0.2);
  p.sinks = random.chance(0.2);
  if (random.chance(0.2)) p.dropout = random.pick({0.1F, 0.5F});
  p.seed = random.bits();
  drawn.dlse = random.chance(0.3);
  drawn.gain = random.pick({1.0F, 1.0F, 4.0F, 30.0F});
}

void draw_options(RandomSource& random, RandomCase& drawn) {
  PlanOptions& options = drawn.options;
  options.strategy = static_cast<Strategy>(random.integer(0, 6));
  const bool buckets =
      options.strategy == Strategy::exchange || options.strategy == Strategy::ring || options.strategy == Strategy::pass_q;
  if (random.chance(0.3)) options.bucket_rows = PlanOptions::kBucketNone;
  if (buckets && random.chance(0.4)) options.bucket_rows = random.pick<std::int64_t>({1, 13, 64, 256});
  // A bucket per row is a message per row: fine for few rows.
  if (options.bucket_rows == 1 && std::max(drawn.problem.tokens_q, drawn.problem.tokens_k) > 200) options.bucket_rows = 64;
  if (options.strategy == Strategy::local) options.computing_ranks = static_cast<int>(random.integer(0, drawn.problem.ranks));
  options.threads = static_cast<int>(random.integer(1, 2));
  options.keep_o_float32 = random.chance(0.7);
  options.backward = random.chance(0.85);
  // Detached merge weights leave the gradient of a sink undefined.
  const auto& dilated = drawn.problem.pattern.dilated;
  if (drawn.problem.sinks && dilated && dilated->dialect == Dialect::torchscale) options.backward = false;
  drawn.fake_device = random.chance(0.15);
}

// Everything that the work depends on.
void draw_problem(RandomSource& random, Problem& p, int attempt) {
  p = Problem{};
  p.ranks = static_cast<int>(random.integer(1, 7));
  p.batch = random.chance(0.5) ? 1 : random.integer(1, 3);
  p.tokens_q = draw_tokens(random, p.ranks);
  p.tokens_k = random.chance(0.65) ? p.tokens_q : draw_tokens(random, p.ranks);
  p.dtype = random.pick({DType::float32, DType::bfloat16, DType::float16});
  draw_shape(random, p, attempt);
  draw_pattern(random, p);
  draw_lengths(random, p);
}

}  // namespace

std::int64_t work_of(const Problem& problem) {
  std::int64_t pairs = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t i = 0; i < problem.tokens_q; ++i) {
      const Range keys = key_bounds(problem, b, i);
      pairs += keys.end - keys.begin;
    }
  }
  return pairs * problem.heads * (problem.head_dim + problem.head_dim_v);
}

bool is_prime(std::int64_t n) {
  for (std::int64_t divisor = 2; divisor * divisor <= n; ++divisor) {
    if (n % divisor == 0) return false;
  }
  return n >= 2;
}

RandomCase draw_case(std::uint64_t seed, std::uint64_t index) {
  RandomSource random(seed, index);
  RandomCase drawn;
  int attempt = 0;
  do {
    draw_problem(random, drawn.problem, attempt++);
  } while (work_of(drawn.problem) > kMaxRandomWork);
  Problem& p = drawn.problem;
  p.sharding_q = draw_sharding(random, p.tokens_q, p.ranks);
  p.sharding_k = random.chance(0.5) && p.tokens_q == p.tokens_k ? p.sharding_q : draw_sharding(random, p.tokens_k, p.ranks);
  p.replicated_q = random.chance(0.15);
  draw_scores(random, drawn);
  draw_options(random, drawn);
  drawn.data_seed = random.bits() >> 32;
  return drawn;
}

}  // namespace ringspan::oracle
