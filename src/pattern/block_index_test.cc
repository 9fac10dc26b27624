// The index of a list of blocks, against a look at each of them.
#include "pattern/block_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "pattern/lower.h"

namespace ringspan {
namespace {

using internal::BlockIndex;
using internal::Rectangle;

Block rectangle(std::int64_t q_begin, std::int64_t q_end, std::int64_t k_begin, std::int64_t k_end) {
  return {q_begin, q_end, k_begin, k_end, BlockKind::full, 0, 0};
}

std::vector<Block> grid(std::int64_t rows, std::int64_t size) {
  std::vector<Block> blocks;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < rows; ++j) blocks.push_back(rectangle(i * size, (i + 1) * size, j * size, (j + 1) * size));
  }
  return blocks;
}

TEST(BlockIndex, FindsWhatALookAtEachFinds) {
  std::mt19937 random(1);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  const auto range = [&](std::int64_t longest) {
    const std::int64_t begin = draw(0, 300);
    return std::pair{begin, begin + draw(0, longest)};
  };
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Block> blocks;
    for (std::int64_t i = draw(0, 100); i > 0; --i) {
      const auto [q_begin, q_end] = range(trial % 3 == 0 ? 200 : 20);
      const auto [k_begin, k_end] = range(trial % 5 == 0 ? 200 : 20);
      blocks.push_back(rectangle(q_begin, q_end, k_begin, k_end));
    }
    if (trial % 2 == 0) {
      std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
        return std::pair(a.q_begin, a.k_begin) < std::pair(b.q_begin, b.k_begin);
      });
    }
    const BlockIndex index(blocks);
    std::vector<std::size_t> found, expected;
    for (int query = 0; query < 20; ++query) {
      const auto [q_begin, q_end] = range(100);
      const auto [k_begin, k_end] = range(100);
      expected.clear();
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        const Block& b = blocks[i];
        if (b.q_begin < q_end && q_begin < b.q_end && b.k_begin < k_end && k_begin < b.k_end) expected.push_back(i);
      }
      index.find({q_begin, q_end, k_begin, k_end}, found);
      ASSERT_EQ(found, expected) << "trial " << trial;
    }
  }
}

// As they come, by columns and shuffled.
TEST(BlockIndex, LooksAtFew) {
  std::vector<Block> blocks = grid(250, 10);
  for (int order = 0; order < 3; ++order) {
    const BlockIndex index(blocks);
    std::vector<std::size_t> found;
    EXPECT_LE(index.find({700, 720, 1200, 1220}, found), 200);
    EXPECT_EQ(found.size(), 4U);
    EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
    for (const Rectangle& row_or_column : {Rectangle{700, 710, 0, 2500}, Rectangle{0, 2500, 700, 710}}) {
      EXPECT_LE(index.find(row_or_column, found), 3000);
      EXPECT_EQ(found.size(), 250U);
    }
    if (order == 0) {
      std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.k_begin < b.k_begin; });
    } else {
      std::shuffle(blocks.begin(), blocks.end(), std::mt19937(1));
    }
  }
}

// Whatever else the pattern has.
TEST(Lowering, VisitsWhatAProblemsSlicesAre) {
  for (const char* pattern : {"full", "causal", "window:40,70", "prefix:130", "documents & causal", "dilated:64x1,128x2"}) {
    Problem p;
    p.tokens_q = p.tokens_k = 400;
    p.heads = p.kv_heads = 2;
    p.pattern = Pattern::parse(pattern);
    if (p.pattern.documents) p.cu_seqlens_q = {0, 90, 90, 400};
    p.pattern.blocks = grid(20, 20);
    std::shuffle(p.pattern.blocks->begin(), p.pattern.blocks->end(), std::mt19937(1));
    const Lowering lowering(p);
    for (std::int64_t begin = 0; begin < 400; begin += 30) {
      const Restriction r{begin, begin + 50, 300 - begin / 2, 400 - begin / 3, 0, 2};
      std::vector<Slice> slices;
      const std::int64_t looked_at = lowering.for_each_slice(r, [&](const Slice& slice) { slices.push_back(slice); });
      ASSERT_EQ(slices, lower(p, r)) << pattern;
      EXPECT_LT(looked_at, 400);
    }
  }
}

}  // namespace
}  // namespace ringspan
