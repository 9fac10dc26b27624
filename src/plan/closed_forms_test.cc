// Bytes that plans move, against the closed forms of docs/strategies.md.
#include <gtest/gtest.h>

#include <cmath>

#include "pattern/lower.h"
#include "plan/plan_data.h"
#include "ringspan/plan.h"

namespace ringspan {
namespace {

constexpr std::int64_t kTokens = 1680;  // divisible by 2 p for the p below

struct Shape {
  int ranks = 4, heads = 12, kv_heads = 12;
  DType dtype = DType::float32;
  const char* pattern = "full";
  const char* sharding = "contiguous";
  std::int64_t tokens = kTokens;
  bool replicated_q = false;
  bool keep_o_float32 = true;
  bool backward = true;
};

Problem problem_of(const Shape& shape) {
  Problem p;
  p.batch = 2;
  p.tokens_q = p.tokens_k = shape.tokens;
  p.heads = shape.heads;
  p.kv_heads = shape.kv_heads;
  p.head_dim = 16;
  p.head_dim_v = 24;
  p.dtype = shape.dtype;
  p.ranks = shape.ranks;
  p.pattern = Pattern::parse(shape.pattern);
  p.sharding_q = p.sharding_k = Sharding::parse(shape.sharding);
  p.replicated_q = shape.replicated_q;
  return p;
}

std::int64_t received(const Problem& p, const Shape& shape, Strategy strategy, Pass pass, int rank, std::int64_t bucket = 0) {
  PlanOptions options;
  options.strategy = strategy;
  options.bucket_rows = bucket;
  options.backward = shape.backward;
  options.keep_o_float32 = shape.keep_o_float32;
  std::int64_t bytes = 0;
  for (const PeerBytes& peer : make_plan(p, options, rank).traffic(pass)) bytes += peer.received_bytes;
  return bytes;
}

std::int64_t received(const Shape& shape, Strategy strategy, Pass pass, int rank) {
  return received(problem_of(shape), shape, strategy, pass, rank);
}

std::int64_t total(const Shape& shape, Strategy strategy, Pass pass) {
  std::int64_t bytes = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) bytes += received(shape, strategy, pass, rank);
  return bytes;
}

// The quantities of the closed forms, in rows over all batch items.
struct Terms {
  explicit Terms(const Shape& shape)
      : p(shape.ranks),
        s(size_of(shape.dtype)),
        d(16),
        dv(24),
        q_rows(2 * shape.tokens * shape.heads),
        k_rows(2 * shape.tokens * shape.kv_heads) {}
  // 1 - 1/p of something that p divides.
  std::int64_t others(std::int64_t of_all) const {
    EXPECT_EQ(of_all % p, 0);
    return of_all / p * (p - 1);
  }
  std::int64_t p, s, d, dv, q_rows, k_rows;
};

const Shape kShapes[] = {{.ranks = 2},
                         {.ranks = 4},
                         {.ranks = 3, .kv_heads = 4},
                         {.ranks = 7, .kv_heads = 1},
                         {.ranks = 4, .kv_heads = 3, .dtype = DType::bfloat16}};

TEST(ClosedForms, KeysThatTravel) {
  for (const Strategy strategy : {Strategy::all_gather, Strategy::exchange, Strategy::ring}) {
    for (const Shape& shape : kShapes) {
      const Terms t(shape);
      for (int rank = 0; rank < shape.ranks; ++rank) {
        const std::int64_t inputs = t.others(t.k_rows) * (t.d + t.dv) * t.s;
        const std::int64_t gradients = t.others(t.k_rows) * (t.d + t.dv) * 4;
        EXPECT_EQ(received(shape, strategy, Pass::forward, rank), inputs);
        EXPECT_EQ(received(shape, strategy, Pass::backward, rank), inputs + gradients);
      }
    }
  }
}

TEST(ClosedForms, QueriesThatTravel) {
  for (const Shape& shape : kShapes) {
    const Terms t(shape);
    const std::int64_t rows = t.others(t.q_rows);
    for (int rank = 0; rank < shape.ranks; ++rank) {
      EXPECT_EQ(received(shape, Strategy::pass_q, Pass::forward, rank), rows * (t.d * t.s + 4 * t.dv + 4));
      EXPECT_EQ(received(shape, Strategy::pass_q, Pass::backward, rank), rows * ((t.d + t.dv) * t.s + 8 + 4 * t.d));
    }
  }
}

// Every rank has q and do: only results and delta travel, and finished rows to all.
TEST(ClosedForms, ReplicatedQueries) {
  for (Shape shape : kShapes) {
    shape.replicated_q = true;
    const Terms t(shape);
    const std::int64_t rows = t.others(t.q_rows);
    const std::int64_t keys = t.others(t.k_rows) * (t.d + t.dv);
    const std::int64_t o = rows * (t.dv * t.s + 4), dq = rows * t.d * t.s;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      EXPECT_EQ(received(shape, Strategy::pass_q, Pass::forward, rank), rows * (4 * t.dv + 4) + o);
      EXPECT_EQ(received(shape, Strategy::pass_q, Pass::backward, rank), rows * (4 + 4 * t.d) + dq);
      EXPECT_EQ(received(shape, Strategy::ring, Pass::forward, rank), keys * t.s + o);
      EXPECT_EQ(received(shape, Strategy::ring, Pass::backward, rank), keys * (t.s + 4) + dq);
    }
  }
}

// kv heads that a rank works with: of its query heads.
std::int64_t kv_heads_of_rank(const Shape& shape, int rank) {
  const int first = shape.heads * rank / shape.ranks, last = shape.heads * (rank + 1) / shape.ranks - 1;
  const int group = shape.heads / shape.kv_heads;
  return last / group - first / group + 1;
}

TEST(ClosedForms, Ulysses) {
  for (const Shape& shape :
       {Shape{.ranks = 4}, Shape{.ranks = 2, .kv_heads = 2}, Shape{.ranks = 4, .kv_heads = 2}, Shape{.ranks = 6, .kv_heads = 1},
        Shape{.ranks = 4, .dtype = DType::bfloat16}, Shape{.ranks = 4, .dtype = DType::float16, .keep_o_float32 = false}}) {
    const Terms t(shape);
    const std::int64_t shard = 2 * shape.tokens / t.p;  // (batch, position) rows
    // 16-bit training returns partial results in float32: their owner keeps o in float32.
    const std::int64_t o_size = t.s == 2 && shape.keep_o_float32 ? 4 : t.s;
    // dk and dv are finished where no two ranks share a kv head.
    const std::int64_t gradient_size = shape.kv_heads % shape.ranks == 0 ? t.s : 4;
    std::int64_t kv_of_all = 0;
    for (int rank = 0; rank < shape.ranks; ++rank) kv_of_all += kv_heads_of_rank(shape, rank);
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const std::int64_t q_in = t.others(shard * shape.heads), kv = kv_heads_of_rank(shape, rank);
      const std::int64_t k_in = shard * (t.p - 1) * kv;
      EXPECT_EQ(received(shape, Strategy::ulysses, Pass::forward, rank),
                q_in * t.d * t.s + k_in * (t.d + t.dv) * t.s + q_in * (t.dv * o_size + 4));
      EXPECT_EQ(received(shape, Strategy::ulysses, Pass::backward, rank),
                q_in * ((t.d + t.dv) * t.s + 8) + k_in * (t.d + t.dv) * t.s + q_in * t.d * t.s +
                    shard * (kv_of_all - kv) * (t.d + t.dv) * gradient_size);
    }
  }
}

TEST(ClosedForms, OneRankComputes) {
  const Shape shape{.ranks = 4, .kv_heads = 4};
  const Terms t(shape);
  const std::int64_t q = t.others(t.q_rows), k = t.others(t.k_rows) * (t.d + t.dv) * t.s;
  EXPECT_EQ(received(shape, Strategy::local, Pass::forward, 0), q * t.d * t.s + k);
  EXPECT_EQ(received(shape, Strategy::local, Pass::forward, 2), t.q_rows / 4 * (t.dv * t.s + 4));
  EXPECT_EQ(received(shape, Strategy::local, Pass::backward, 0), q * ((t.d + t.dv) * t.s + 8) + k);
  EXPECT_EQ(received(shape, Strategy::local, Pass::backward, 2), t.q_rows / 4 * t.d * t.s + t.k_rows / 4 * (t.d + t.dv) * t.s);
}

// 3/4 of what a full pattern moves, over all ranks; the first rank still receives all. Relayed downwards the rows need no
// detour: the ranks below an owner read both of its chunks, those above (the last hops) one of them.
TEST(ClosedForms, CausalZigzag) {
  for (const int ranks : {2, 3, 4, 7}) {
    const Shape full{.ranks = ranks}, causal{.ranks = ranks, .pattern = "causal", .sharding = "zigzag"};
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const Strategy strategy : {Strategy::all_gather, Strategy::exchange, Strategy::ring}) {
        EXPECT_EQ(4 * total(causal, strategy, pass), 3 * total(full, Strategy::ring, pass));
      }
    }
    EXPECT_EQ(received(causal, Strategy::exchange, Pass::forward, 0), received(full, Strategy::ring, Pass::forward, 0));
  }
}

// Where readers lie far apart, a relay carries through ranks that read nothing of it; direct routes do not.
TEST(ClosedForms, RelaysPassOnWhatOthersRead) {
  const Shape shape{.ranks = 8, .pattern = "dilated:1680x8", .sharding = "striped"};
  EXPECT_EQ(total(shape, Strategy::exchange, Pass::forward), 0) << "8 ranks, every 8th row: each rank has what it reads";
  const Shape half{.ranks = 8, .pattern = "dilated:1680x4", .sharding = "striped"};
  EXPECT_EQ(total(half, Strategy::ring, Pass::forward), 4 * total(half, Strategy::exchange, Pass::forward))
      << "4 hops to the reader";
}

// Contiguous causal: rank r reads the r chunks before its own; a relay carries a chunk upwards to the last rank.
TEST(ClosedForms, CausalContiguous) {
  const Shape shape{.ranks = 4, .pattern = "causal"};
  const Terms t(shape);
  const std::int64_t chunk = t.k_rows / t.p * (t.d + t.dv) * t.s;
  for (int rank = 0; rank < 4; ++rank) {
    for (const Strategy strategy : {Strategy::all_gather, Strategy::exchange, Strategy::ring}) {
      EXPECT_EQ(received(shape, strategy, Pass::forward, rank), rank * chunk);
      EXPECT_EQ(received(shape, strategy, Pass::backward, rank),
                rank * chunk + (3 - rank) * chunk);  // float32: dk, dv as large
    }
  }
}

TEST(ClosedForms, WindowsMoveHalosOnly) {
  for (const std::int64_t left : {1, 100, 420}) {
    const std::string pattern = "window:" + std::to_string(left) + ",0";
    const Shape shape{.ranks = 4, .dtype = DType::bfloat16, .pattern = pattern.c_str()};
    const Terms t(shape);
    const std::int64_t halo = 2 * left * shape.kv_heads * (t.d + t.dv);  // elements
    for (int rank = 0; rank < 4; ++rank) {
      for (const Strategy strategy : {Strategy::all_gather, Strategy::exchange, Strategy::ring}) {
        EXPECT_EQ(received(shape, strategy, Pass::forward, rank), rank > 0 ? halo * 2 : 0);
        EXPECT_EQ(received(shape, strategy, Pass::backward, rank), (rank > 0 ? halo * 2 : 0) + (rank < 3 ? halo * 4 : 0));
      }
    }
  }
}

// Rows that one branch needs from outside [a, b), for one head: cnt of positions of the residue in the segments that it has
// queries of.
std::int64_t dilated_rows(std::int64_t tokens, std::int64_t w, std::int64_t r, std::int64_t residue, std::int64_t a,
                          std::int64_t b, bool causal) {
  const auto cnt = [&](std::int64_t from, std::int64_t to) {  // relative to the segment
    const auto below = [&](std::int64_t x) { return x <= residue ? 0 : (x - 1 - residue) / r + 1; };
    return from < to ? below(to) - below(from) : 0;
  };
  std::int64_t rows = 0;
  for (std::int64_t begin = a / w * w; begin < b; begin += w) {
    const std::int64_t end = std::min(begin + w, tokens), from = std::max(a, begin), to = std::min(b, end);
    if (cnt(from - begin, to - begin) == 0) continue;
    rows += cnt(0, from - begin) + (causal ? 0 : cnt(to - begin, end - begin));
  }
  return rows;
}

TEST(ClosedForms, DilatedBranches) {
  for (const bool causal : {false, true}) {
    for (const auto& [w, r] : {std::pair{500, 1}, std::pair{1000, 4}, std::pair{1680, 16}, std::pair{999, 7}}) {
      for (const int ranks : {2, 3, 7}) {
        const std::string pattern = "dilated:" + std::to_string(w) + "x" + std::to_string(r) + (causal ? " & causal" : "");
        const Shape shape{.ranks = ranks, .heads = 6, .kv_heads = 6, .pattern = pattern.c_str(), .tokens = 1679};
        const Terms t(shape);
        for (int rank = 0; rank < ranks; ++rank) {
          const Shard shard = make_shard({}, shape.tokens, ranks, rank);
          std::int64_t rows = 0;
          for (int head = 0; head < shape.heads; ++head) {
            rows += dilated_rows(shape.tokens, w, r, head % r, shard.pieces[0].first, shard.pieces[0].end(), causal);
          }
          for (const Strategy strategy : {Strategy::all_gather, Strategy::exchange}) {
            EXPECT_EQ(received(shape, strategy, Pass::forward, rank), 2 * rows * (t.d + t.dv) * t.s) << pattern << " " << ranks;
          }
        }
      }
    }
  }
}

// Grouped heads: min(g, r) / r of a segment moves per kv head.
TEST(ClosedForms, DilatedBranchesOfGroupedHeads) {
  for (const int kv_heads : {8, 4, 2, 1}) {
    const Shape shape{.ranks = 2, .heads = 8, .kv_heads = kv_heads, .pattern = "dilated:1680x4"};
    const Terms t(shape);
    const std::int64_t residues = std::min(8 / kv_heads, 4);
    EXPECT_EQ(received(shape, Strategy::exchange, Pass::forward, 0), t.k_rows / 2 * residues / 4 * (t.d + t.dv) * t.s);
  }
}

// The same bytes whatever the buckets are; only the number of messages differs.
TEST(ClosedForms, BucketsDoNotChangeBytes) {
  for (const char* pattern : {"full", "causal & window:300,0", "dilated:840x4,1680x8"}) {
    const Shape shape{.ranks = 3, .pattern = pattern, .sharding = "zigzag"};
    const Problem p = problem_of(shape);
    for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::pass_q}) {
      for (int rank = 0; rank < 3; ++rank) {
        const std::int64_t whole = received(p, shape, strategy, Pass::backward, rank, PlanOptions::kBucketNone);
        for (const std::int64_t bucket : {1, 7, 100}) {
          EXPECT_EQ(received(p, shape, strategy, Pass::backward, rank, bucket), whole) << pattern << " bucket " << bucket;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringspan
