#include "ringspan/sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "ringspan/error.h"

namespace ringspan {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Every position is owned once, storage order ascends, hulls are disjoint and the offsets fit.
void expect_partition(const Sharding& sharding, std::int64_t tokens, int ranks) {
  std::vector<int> owners(static_cast<std::size_t>(tokens));
  for (int rank = 0; rank < ranks; ++rank) {
    const Shard shard = make_shard(sharding, tokens, ranks, rank);
    const auto positions = shard.positions();
    ASSERT_EQ(static_cast<std::int64_t>(positions.size()), shard.rows);
    ASSERT_TRUE(std::is_sorted(positions.begin(), positions.end()));
    ASSERT_EQ(shard.pieces.size(), shard.offsets.size());
    std::int64_t rows = 0, end = 0;
    for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
      ASSERT_FALSE(shard.pieces[i].empty());
      ASSERT_GE(shard.pieces[i].first, end) << "hulls overlap";
      ASSERT_EQ(shard.offsets[i], rows);
      rows += shard.pieces[i].count;
      end = shard.pieces[i].end();
    }
    for (const std::int64_t position : positions) ++owners[static_cast<std::size_t>(position)];
  }
  for (const int count : owners) ASSERT_EQ(count, 1) << sharding.to_string() << " tokens " << tokens << " ranks " << ranks;
}

std::string message(const Sharding& sharding, std::int64_t tokens, int ranks) {
  try {
    validate(sharding, tokens, ranks);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

std::string parse_message(std::string_view text) {
  try {
    Sharding::parse(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Sharding, EveryKindIsAPartition) {
  for (const char* text : {"contiguous", "zigzag", "striped", "block_striped:1", "block_striped:3", "block_striped:64"}) {
    for (const std::int64_t tokens : {0, 1, 2, 5, 7, 16, 97, 256}) {
      for (const int ranks : {1, 2, 3, 4, 7, 16}) expect_partition(Sharding::parse(text), tokens, ranks);
    }
  }
}

TEST(Sharding, SizesAreAsEvenAsPossible) {
  EXPECT_THAT(make_shard({}, 7, 3, 0).positions(), ElementsAre(0, 1, 2));
  EXPECT_THAT(make_shard({}, 7, 3, 1).positions(), ElementsAre(3, 4));
  EXPECT_THAT(make_shard({}, 2, 3, 2).positions(), ElementsAre());
}

TEST(Sharding, ZigzagTakesAChunkFromEitherEnd) {
  const Sharding zigzag{ShardingKind::zigzag, 0, {}};
  // Chunks of 2 2 1 1 1 1.
  EXPECT_THAT(make_shard(zigzag, 8, 3, 0).positions(), ElementsAre(0, 1, 7));
  EXPECT_THAT(make_shard(zigzag, 8, 3, 1).positions(), ElementsAre(2, 3, 6));
  EXPECT_THAT(make_shard(zigzag, 8, 3, 2).pieces, ElementsAre(Progression{4, 1, 2}));
}

TEST(Sharding, StripedIsOneProgression) {
  const Sharding striped{ShardingKind::striped, 0, {}};
  EXPECT_THAT(make_shard(striped, 10, 4, 1).pieces, ElementsAre(Progression{1, 4, 3}));
  EXPECT_THAT(make_shard(striped, 10, 4, 3).pieces, ElementsAre(Progression{3, 4, 2}));
}

TEST(Sharding, ABillionTokensCostNothing) {
  const std::int64_t n = std::int64_t{1} << 40;
  EXPECT_EQ(make_shard({ShardingKind::zigzag, 0, {}}, n, 65536, 12345).rows, n / 65536);
  EXPECT_EQ(make_shard({ShardingKind::striped, 0, {}}, n, 65536, 12345).rows, n / 65536);
}

TEST(Sharding, ExplicitListsThatInterleaveBecomeRunsWithDisjointHulls) {
  const Sharding sharding = Sharding::parse("explicit:0-8:2,1-9:4,20-24;3-7:4,10-19,25-29");
  expect_partition(sharding, 30, 2);
  EXPECT_THAT(make_shard(sharding, 30, 2, 0).positions(), ElementsAre(0, 1, 2, 4, 5, 6, 8, 9, 20, 21, 22, 23, 24));
  // Two progressions that together are a range.
  EXPECT_THAT(make_shard(Sharding::parse("explicit:1-9:2,0-8:2"), 10, 1, 0).pieces, ElementsAre(Progression{0, 1, 10}));
}

TEST(Sharding, RandomExplicitListsArePartitions) {
  const unsigned seed = 11;
  std::mt19937 engine(seed);
  for (int round = 0; round < 300; ++round) {
    // Deal strided classes of a random modulus to random ranks, some of them split.
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); };
    const int tokens = draw(0, 80), ranks = draw(1, 4), modulus = draw(1, 6);
    Sharding sharding{ShardingKind::explicit_lists, 0, std::vector<std::vector<Progression>>(static_cast<std::size_t>(ranks))};
    for (int first = 0; first < modulus; ++first) {
      const int count = first < tokens ? (tokens - 1 - first) / modulus + 1 : 0;
      const int split = draw(0, count);
      const auto list = [&]() -> auto& { return sharding.lists[static_cast<std::size_t>(draw(0, ranks - 1))]; };
      list().push_back({first, modulus, split});
      list().push_back({first + split * modulus, modulus, count - split});
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed << " round " << round << " " << sharding.to_string());
    expect_partition(sharding, tokens, ranks);
    expect_partition(Sharding::parse(sharding.to_string()), tokens, ranks);
  }
}

TEST(Sharding, TextRoundTrips) {
  for (const char* text : {"contiguous", "zigzag", "striped", "block_striped:128", "explicit:0-99;100-199,300-398:2;;5-5"}) {
    EXPECT_EQ(Sharding::parse(text).to_string(), text);
  }
  EXPECT_EQ(Sharding::parse("explicit:300-399:2,7").to_string(), "explicit:300-398:2,7-7");
}

TEST(Sharding, TextErrorsPointAtTheCharacter) {
  EXPECT_THAT(parse_message("zig"), HasSubstr("unknown sharding 'zig': expected contiguous"));
  EXPECT_THAT(parse_message("block_striped:0"), HasSubstr("'block_striped:0': expected a block size of at least 1"));
  EXPECT_THAT(parse_message("block_striped:99999999999999999999"), HasSubstr("a block of more than 1099511627776 positions"));
  EXPECT_THAT(parse_message("block_striped:-99999999999999999999"), HasSubstr("expected a block size of at least 1"));
  EXPECT_THAT(parse_message("block_striped:4x"), HasSubstr("expected a block size of at least 1"));
  EXPECT_EQ(parse_message("explicit:0-9,x"), "sharding: expected a position\n  explicit:0-9,x\n               ^");
  EXPECT_EQ(parse_message("explicit:9-1"), "sharding: the last position is before the first\n  explicit:9-1\n            ^");
  EXPECT_THAT(parse_message("explicit:0-9:0"), HasSubstr("expected a stride of at least 1"));
  EXPECT_THAT(parse_message("explicit:0-9/3"), HasSubstr("expected ',', ';' or the end"));
  EXPECT_THAT(parse_message("explicit:99999999999999999999"),
              HasSubstr("99999999999999999999 is beyond the most tokens (1099511627776)"));
  EXPECT_EQ(parse_message("explicit:0-9223372036854775807"),
            "sharding: 9223372036854775807 is beyond the most tokens (1099511627776)\n  explicit:0-9223372036854775807\n"
            "             ^");
}

TEST(Sharding, UnsoundListsAreRefused) {
  EXPECT_THAT(message(Sharding::parse("explicit:0-5;5-9"), 10, 2),
              HasSubstr("position 5 is in the lists of rank 0 (0-5) and rank 1 (5-9); lists must be disjoint"));
  EXPECT_THAT(message(Sharding::parse("explicit:0-8:2;1-9:4"), 10, 2), HasSubstr("the lists hold 8 positions of 10"));
  EXPECT_THAT(message(Sharding::parse("explicit:0-5;6-10"), 10, 2), HasSubstr("lists[1] holds positions outside [0, 10)"));
  EXPECT_THAT(message(Sharding::parse("explicit:0-9"), 10, 2), HasSubstr("1 lists, expected one for each of the 2 ranks"));
  EXPECT_THAT(message({ShardingKind::explicit_lists, 0, {{{0, 0, 10}}}}, 10, 1), HasSubstr("has stride 0"));
  EXPECT_THAT(message({ShardingKind::explicit_lists, 0, {{{0, 1, -1}}}}, 10, 1), HasSubstr("has count -1"));
  EXPECT_THAT(message({ShardingKind::explicit_lists, 0, {{{0, INT64_MAX, INT64_MAX}}}}, 10, 1), HasSubstr("outside [0, 10)"));
}

// Two of three residues each: not a progression, so that positions would have to be listed one by one.
TEST(Sharding, InterleavedProgressionsAreMergedUpToALimit) {
  const std::int64_t tokens = std::int64_t{3} << 28;
  const auto every_third = [&](std::int64_t first) { return Progression{first, 3, tokens / 3}; };
  const Sharding sharding{ShardingKind::explicit_lists, 0, {{every_third(0), every_third(1)}, {every_third(2)}}};
  try {
    make_shard(sharding, tokens, 2, 0);
    FAIL() << "expected an error";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("interleaved progressions of one rank hold 536870912 positions; at most 268435456"));
  }
  EXPECT_EQ(make_shard(sharding, tokens, 2, 1).rows, tokens / 3);
}

TEST(Sharding, MorePiecesThanAllRanksCanKnowAreRefused) {
  const Sharding sharding = Sharding::parse("block_striped:2");
  try {
    validate(sharding, std::int64_t{1} << 30, 2);
    FAIL() << "expected an error";
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(),
                 "sharding.block (2) deals 1073741824 tokens in 536870912 blocks, more than 16777216; use blocks of at "
                 "least 64, or striped");
  }
  EXPECT_NO_THROW(validate(Sharding::parse("block_striped:64"), std::int64_t{1} << 30, 2));
  EXPECT_NO_THROW(validate(sharding, std::int64_t{1} << 30, 1));
  EXPECT_NO_THROW(validate(Sharding::parse("block_striped:1"), std::int64_t{1} << 30, 2)) << "is striped";
}

TEST(Sharding, UnsoundFieldsAreRefused) {
  EXPECT_THAT(message({ShardingKind::block_striped, 0, {}}, 10, 2), HasSubstr("sharding.block (0) must be at least 1"));
  EXPECT_THAT(message({ShardingKind::zigzag, 4, {}}, 10, 2), HasSubstr("sharding.block (4) must be 0 for zigzag"));
  EXPECT_THAT(message({ShardingKind::striped, 0, {{}}}, 10, 2), HasSubstr("sharding.lists must be empty for striped"));
  EXPECT_THAT(message({}, 10, 0), HasSubstr("ranks (0) must be at least 1"));
  EXPECT_THAT(message({}, -1, 2), HasSubstr("tokens (-1) must be at least 0"));
  EXPECT_THAT(message({static_cast<ShardingKind>(9), 0, {}}, 10, 2), HasSubstr("sharding.kind (9)"));
  EXPECT_THROW(make_shard({}, 10, 2, 2), InvalidArgument);
  EXPECT_THROW(make_shard({}, 10, 2, -1), InvalidArgument);
}

TEST(Sharding, RowsGoThereAndBack) {
  const std::int64_t tokens = 23, outer = 2, row = 3;
  std::vector<char> full(static_cast<std::size_t>(tokens * outer * row));
  std::iota(full.begin(), full.end(), 1);
  for (const char* text : {"contiguous", "zigzag", "striped", "block_striped:3"}) {
    std::vector<char> back(full.size());
    for (int rank = 0; rank < 4; ++rank) {
      const Shard shard = make_shard(Sharding::parse(text), tokens, 4, rank);
      std::vector<char> local(static_cast<std::size_t>(shard.rows * outer * row));
      shard_rows(shard, tokens, outer, row, full.data(), local.data());
      const auto positions = shard.positions();
      for (std::size_t x = 0; x < positions.size(); ++x) {
        ASSERT_EQ(local[x * row], full[static_cast<std::size_t>(positions[x] * row)]);
      }
      unshard_rows(shard, tokens, outer, row, local.data(), back.data());
    }
    EXPECT_EQ(back, full) << text;
  }
}

TEST(Sharding, RowsBeyondTheTensorAreRefused) {
  const Shard shard = make_shard(Sharding::parse("striped"), 10, 2, 1);
  std::vector<char> full(10), local(5);
  const auto message = [&](std::int64_t tokens, std::int64_t outer, std::int64_t row_bytes) -> std::string {
    try {
      shard_rows(shard, tokens, outer, row_bytes, full.data(), local.data());
      unshard_rows(shard, tokens, outer, row_bytes, local.data(), full.data());
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "taken";
  };
  EXPECT_EQ(message(10, 1, 1), "taken");
  EXPECT_EQ(message(9, 1, 1), "tokens (9) must be at least 10, the end of the shard");
  EXPECT_EQ(message(10, -1, 1), "outer (-1) must be at least 0");
  EXPECT_EQ(message(10, 1, -1), "row_bytes (-1) must be at least 0");
}

TEST(Sharding, ShardsThatAreNoneAreRefused) {
  std::vector<char> full(64), local(64);
  const auto message = [&](const Shard& shard) -> std::string {
    try {
      shard_rows(shard, 64, 1, 1, full.data(), local.data());
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "taken";
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_EQ(message({{{4, 2, 3}}, {1}, 4}), "taken");
  for (const Progression piece : {Progression{-4, 1, 2}, {0, 1, -1}, {0, 0, 2}, {kHuge, 1, 2}, {0, kHuge, 4}, {0, 1, kHuge}})
    EXPECT_THAT(message({{piece}, {0}, 4}), HasSubstr("which no shard has"));
  EXPECT_THAT(message({{{0, 1, 2}}, {-1}, 4}), HasSubstr("offset -1, which no shard has"));
  EXPECT_EQ(message({{{0, 1, 4}}, {1}, 4}), "shard: piece 0 ends at row 5, but the shard has 4");
  EXPECT_EQ(message({{{0, 1, 4}}, {}, 4}), "shard: 0 offsets for 1 pieces, but as many were expected");
}

}  // namespace
}  // namespace ringspan
