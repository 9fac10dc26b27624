#include "io/problem_line.h"

#include <gtest/gtest.h>

#include <functional>

#include "ringspan/error.h"

namespace ringspan::io {
namespace {

bool same(const Problem& a, const Problem& b) {
  const auto fields = [](const Problem& p) {
    return std::tie(p.batch, p.tokens_q, p.tokens_k, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.dtype, p.pattern,
                    p.cu_seqlens_q, p.cu_seqlens_k, p.lengths_q, p.lengths_k, p.starts_k, p.scale, p.softcap, p.alibi, p.sinks,
                    p.dropout, p.seed, p.ranks, p.sharding_q, p.sharding_k, p.replicated_q);
  };
  return fields(a) == fields(b);
}

std::string error_of(const std::string& line) {
  try {
    parse_problem(line);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(ProblemLine, DefaultsAreNotPrinted) {
  Problem p;
  p.tokens_q = p.tokens_k = 10;
  EXPECT_EQ(print_problem(p), "nq=10 h=1 d=64");
  EXPECT_TRUE(same(parse_problem("nq=10 h=1 d=64"), p));
}

TEST(ProblemLine, ShortWordsFollowFromOthers) {
  const Problem p = parse_problem("h=8 d=32 nq=5");
  EXPECT_EQ(p.tokens_k, 5);
  EXPECT_EQ(p.kv_heads, 8);
  EXPECT_EQ(p.head_dim_v, 32);
  EXPECT_EQ(p.batch, 1);
}

TEST(ProblemLine, EverythingRoundTrips) {
  Problem p;
  p.batch = 3;
  p.tokens_q = 1000;
  p.tokens_k = 0;
  p.heads = 6;
  p.kv_heads = 2;
  p.head_dim = 7;
  p.head_dim_v = 9;
  p.dtype = DType::bfloat16;
  p.pattern = Pattern::parse("causal & documents & dilated:4x1,8x2@torchscale@global");
  p.cu_seqlens_q = {0, 17, 1000};
  p.cu_seqlens_k = {0, 0, 0};
  p.lengths_q = {1, 2, 3};
  p.lengths_k = {0, 0, 0};
  p.starts_k = {4, 5, 6};
  p.scale = 0.1F;
  p.softcap = 1e-7F;
  p.alibi = p.sinks = p.replicated_q = true;
  p.dropout = 1.0F / 3;
  p.seed = ~std::uint64_t{0};
  p.ranks = 2;
  p.sharding_q = Sharding::parse("explicit:0-98:2,500-999;1-99:2,100-499");
  p.sharding_k = Sharding::parse("block_striped:3");
  const std::string line = print_problem(p);
  EXPECT_TRUE(same(parse_problem(line), p)) << line;
  EXPECT_EQ(print_problem(parse_problem(line)), line);
}

// Every single field survives by itself, so that none is missing from the printer or the parser.
TEST(ProblemLine, EveryFieldRoundTrips) {
  const std::vector<std::function<void(Problem&)>> changes = {
      [](Problem& p) { p.batch = 2; },
      [](Problem& p) { p.tokens_q = 9; },
      [](Problem& p) { p.tokens_k = 9; },
      [](Problem& p) { p.heads = 4; },
      [](Problem& p) { p.kv_heads = 2; },
      [](Problem& p) { p.head_dim = 3; },
      [](Problem& p) { p.head_dim_v = 3; },
      [](Problem& p) { p.dtype = DType::float16; },
      [](Problem& p) { p.pattern.causal = true; },
      [](Problem& p) { p.cu_seqlens_q = {0}; },
      [](Problem& p) { p.cu_seqlens_k = {0}; },
      [](Problem& p) { p.lengths_q = {1}; },
      [](Problem& p) { p.lengths_k = {1}; },
      [](Problem& p) { p.starts_k = {1}; },
      [](Problem& p) { p.scale = 2.0F; },
      [](Problem& p) { p.softcap = 2.0F; },
      [](Problem& p) { p.alibi = true; },
      [](Problem& p) { p.sinks = true; },
      [](Problem& p) { p.dropout = 0.5F; },
      [](Problem& p) { p.seed = 1; },
      [](Problem& p) { p.ranks = 3; },
      [](Problem& p) { p.sharding_q.kind = ShardingKind::zigzag; },
      [](Problem& p) { p.sharding_k.kind = ShardingKind::striped; },
      [](Problem& p) { p.replicated_q = true; },
  };
  for (std::size_t x = 0; x < changes.size(); ++x) {
    Problem p;
    changes[x](p);
    EXPECT_FALSE(same(p, Problem{})) << x;
    EXPECT_TRUE(same(parse_problem(print_problem(p)), p)) << print_problem(p);
  }
}

TEST(ProblemLine, OtherWordsAreHandedOver) {
  std::vector<Word> others;
  parse_problem("strategy=ring nq=1 h=1 d=1 bucket=16", others);
  EXPECT_EQ(others, (std::vector<Word>{{"strategy", "ring"}, {"bucket", "16"}}));
}

TEST(ProblemLine, ErrorsNameTheWord) {
  EXPECT_EQ(error_of("nq=1 h=1 d=1 foo=2"), "unknown word foo=2");
  EXPECT_EQ(error_of("nq=1 h=1"), "the word d= is missing: a problem has at least nq= (tokens), h= (heads) and d= (head_dim)");
  EXPECT_EQ(error_of("nq=1 h"), "'h' is not a word of the form key=value");
  EXPECT_EQ(error_of("=1"), "'=1' is not a word of the form key=value");
  EXPECT_EQ(error_of("nq=1 nq=2"), "the word nq occurs twice");
  EXPECT_EQ(error_of("nq=ten"), "nq=ten: expected a whole number");
  EXPECT_EQ(error_of("nq="), "nq=: expected a whole number");
  EXPECT_EQ(error_of("nq=1.5"), "nq=1.5: expected a whole number");
  EXPECT_EQ(error_of("nq=9223372036854775808"), "nq=9223372036854775808: expected a number up to 9223372036854775807");
  EXPECT_EQ(error_of("h=2147483648"), "h=2147483648: expected a number up to 2147483647");
  EXPECT_EQ(error_of("cu_q=0,x"), "cu_q must be whole numbers up to 2147483647 separated by commas, but entry 1 is 'x'");
  EXPECT_EQ(error_of("cu_q=0,20,"), "cu_q must be whole numbers up to 2147483647 separated by commas, but entry 2 is ''");
  EXPECT_EQ(error_of("len_q=9999999999999999999"),
            "len_q must be whole numbers up to 9223372036854775807 separated by commas, but entry 0 is '9999999999999999999'");
  EXPECT_EQ(error_of("scale=big"), "scale=big: expected a number");
  EXPECT_EQ(error_of("scale=1x"), "scale=1x: expected a number");
  EXPECT_EQ(error_of("scale=1e50x"), "scale=1e50x: expected a number");
  for (const std::string value : {"1e50", "-1e50", "1e-50"}) {
    EXPECT_EQ(error_of("scale=" + value), "scale=" + value + ": expected a number that float32 can hold");
  }
  EXPECT_EQ(error_of("alibi=yes"), "alibi=yes: expected 0 or 1");
  EXPECT_EQ(error_of("dtype=f8"), "dtype: unknown dtype 'f8': expected float32, bfloat16 or float16");
  EXPECT_EQ(error_of("pattern=casual").rfind("pattern: ", 0), 0U);
  EXPECT_EQ(error_of("shard_q=zagzig").rfind("shard_q: ", 0), 0U);
}

}  // namespace
}  // namespace ringspan::io
