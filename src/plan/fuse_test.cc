#include "plan/fuse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

namespace ringspan::internal {
namespace {

using ::testing::HasSubstr;

// The band on indices, with the rows that were cut off, is the band on positions.
TEST(Fuse, BandsOnIndicesHoldTheSamePairs) {
  std::mt19937_64 random(11);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int indexed_count = 0, banded = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    Slice slice;
    slice.heads = {0, 1, 1};
    const std::int64_t step = draw(1, 4);
    slice.q = {draw(0, 20), step, draw(1, 9)};
    slice.k = {draw(0, 20), draw(0, 3) == 0 ? draw(1, 4) : step, draw(1, 9)};
    slice.lo = draw(0, 2) == 0 ? kNoLow : draw(-25, 25);
    slice.hi = draw(0, 2) == 0 ? kNoHigh : draw(-25, 25);
    std::set<std::pair<std::int64_t, std::int64_t>> pairs;
    for (std::int64_t t = 0; t < slice.q.count; ++t) {
      for (std::int64_t u = 0; u < slice.k.count; ++u) {
        const std::int64_t difference = slice.k.at(u) - slice.q.at(t);
        if (slice.lo <= difference && difference <= slice.hi) pairs.insert({slice.q.at(t), slice.k.at(u)});
      }
    }
    const auto indexed = index_slice(slice);
    if (!indexed) {
      ++refused;
      EXPECT_NE(slice.q.stride, slice.k.stride);
      continue;
    }
    ASSERT_EQ(indexed->empty, pairs.empty()) << to_string(slice);
    if (indexed->empty) continue;
    ++indexed_count;
    const IndexBand& band = indexed->band;
    banded += band.has_low || band.has_high ? 1 : 0;
    ASSERT_TRUE(band.low <= 0 && band.high >= 0) << to_string(slice);
    std::set<std::pair<std::int64_t, std::int64_t>> same;
    std::set<std::int64_t> rows, columns;
    for (std::int64_t t = 0; t < indexed->slice.q.count; ++t) {
      for (std::int64_t u = 0; u < indexed->slice.k.count; ++u) {
        if ((band.has_low && u - t < band.low) || (band.has_high && u - t > band.high)) continue;
        same.insert({indexed->slice.q.at(t), indexed->slice.k.at(u)});
        rows.insert(t);
        columns.insert(u);
      }
    }
    ASSERT_EQ(same, pairs) << to_string(slice);
    ASSERT_EQ(static_cast<std::int64_t>(rows.size()), indexed->slice.q.count) << to_string(slice);
    ASSERT_EQ(static_cast<std::int64_t>(columns.size()), indexed->slice.k.count) << to_string(slice);
    ASSERT_EQ(index_slice(indexed->slice)->band, band) << to_string(slice);  // nothing more to cut off
  }
  EXPECT_GT(indexed_count, 5000);
  EXPECT_GT(banded, 2000);
  EXPECT_GT(refused, 100);
}

TEST(Fuse, HeadsShareKvHeadsEvenly) {
  EXPECT_EQ(fused_group({0, 1, 8}, 4), 4);
  EXPECT_EQ(fused_group({0, 1, 8}, 1), 1);
  EXPECT_EQ(fused_group({4, 1, 4}, 4), 4);
  EXPECT_EQ(fused_group({1, 2, 4}, 4), 2);  // heads 1 3 5 7
  EXPECT_EQ(fused_group({0, 4, 4}, 2), 1);
  EXPECT_EQ(fused_group({2, 1, 6}, 4), 0);  // two of the first kv head, four of the second
  EXPECT_EQ(fused_group({0, 3, 4}, 4), 0);  // heads 0 3 6 9: kv heads 0 0 1 2
}

std::string refusal_of(const char* pattern, Pass pass = Pass::forward,
                       const std::function<void(Problem&, PlanOptions&)>& change = {}) {
  Problem problem;
  PlanOptions options;
  problem.tokens_q = problem.tokens_k = 64;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = problem.head_dim_v = 16;
  problem.dtype = DType::bfloat16;
  problem.pattern = Pattern::parse(pattern);
  if (problem.pattern.documents) problem.cu_seqlens_q = problem.cu_seqlens_k = {0, 7, 40, 64};
  options.device = DeviceKind::cuda;
  if (change) change(problem, options);
  const Plan plan = make_plan(problem, options, 0);
  const FusedProgram fused = fuse(plan.data(), pass);
  EXPECT_EQ(is_fused(fused.program), fused.refusal.empty());
  EXPECT_FALSE(is_fused(plan.data().forward));
  return fused.refusal;
}

TEST(Fuse, WhatTakesOneCallPerRow) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const char* pattern :
         {"full", "causal", "causal@top_left", "window:5,3", "documents & causal", "dilated:32x1", "dilated:32x2"}) {
      EXPECT_EQ(refusal_of(pattern, pass), "") << pattern;
    }
  }
  EXPECT_EQ(refusal_of("block:0-20,0-30;20-64,5-64"), "");
}

// What a plan cannot know yet, it says.
TEST(Fuse, APlanLeavesTheLibraryToTheAttention) {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 64;
  problem.dtype = DType::bfloat16;
  PlanOptions options;
  options.device = DeviceKind::cuda;
  EXPECT_EQ(make_plan(problem, options, 0).kernel(Pass::forward).reason, "");
  options.attend_kernel = "cudnn";
  const Plan plan = make_plan(problem, options, 0);
  EXPECT_THAT(plan.kernel(Pass::forward).reason, HasSubstr("asked when an attention is made"));
  EXPECT_EQ(plan.kernel(Pass::backward).reason, "");
  EXPECT_THAT(plan.to_string(), HasSubstr("asked when an attention is made"));
}

TEST(Fuse, EveryRefusalIsSaid) {
  const auto with = [](auto change) { return refusal_of("causal", Pass::forward, change); };
  EXPECT_THAT(with([](Problem& p, PlanOptions&) { p.dtype = DType::float32; }), HasSubstr("16-bit"));
  EXPECT_THAT(with([](Problem& p, PlanOptions&) { p.softcap = 5.0F; }), HasSubstr("softcap"));
  EXPECT_THAT(with([](Problem& p, PlanOptions&) { p.scale = -0.25F; }), HasSubstr("negative scale"));
  EXPECT_THAT(with([](Problem& p, PlanOptions&) { p.alibi = true; }), HasSubstr("ALiBi"));
  EXPECT_THAT(with([](Problem& p, PlanOptions&) { p.sinks = true; }), HasSubstr("sinks"));
  EXPECT_THAT(with([](Problem& p, PlanOptions&) { p.dropout = 0.1F; }), HasSubstr("dropout"));
  EXPECT_THAT(with([](Problem& p, PlanOptions& o) { p.ranks = 2, o.strategy = Strategy::ring; }), HasSubstr("other ranks"));
  EXPECT_THAT(with([](Problem&, PlanOptions& o) {
                o.host_tensors = true;
                o.backward = false;
              }),
              HasSubstr("stream from the host"));
  EXPECT_THAT(refusal_of("dilated:16x1,32x2"), HasSubstr("more than one call"));
  EXPECT_THAT(refusal_of("dilated:16x1,32x2@torchscale"), HasSubstr("softmax of their own"));
  EXPECT_THAT(refusal_of("dilated:16x1,32x2@head_groups"), HasSubstr("head_groups"));
  EXPECT_THAT(refusal_of("prefix:10"), HasSubstr("more than one call"));
  EXPECT_THAT(refusal_of("block:0-20,0-30;20-64,5-64", Pass::backward), HasSubstr("read by more than one call"));
  EXPECT_THAT(refusal_of("dilated:4x1", Pass::forward, [](Problem& p, PlanOptions&) { p.tokens_q = p.tokens_k = 4 * 65; }),
              HasSubstr("65 calls"));
}

// With partials in the storage dtype: a call and a row launch in the place of each task, all else as it was.
TEST(Fuse, PartialsAreTakenInByRowLaunches) {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 64;
  problem.heads = problem.kv_heads = 4;
  problem.head_dim = problem.head_dim_v = 16;
  problem.dtype = DType::bfloat16;
  problem.ranks = 3;
  problem.pattern = Pattern::parse("causal");
  problem.sharding_q = problem.sharding_k = Sharding::parse("zigzag");
  PlanOptions options;
  options.device = DeviceKind::cuda;
  options.strategy = Strategy::ring;
  const Plan plan = make_plan(problem, options, 1);
  const auto launches = [](const Program& program, LaunchKind kind) {
    std::int64_t count = 0;
    for (const Stage& stage : program.stages) {
      for (const auto* list : {&stage.before, &stage.compute}) {
        for (const Launch& launch : *list) count += launch.kind == kind ? 1 : 0;
      }
    }
    return count;
  };
  const PlanData& data = plan.data();
  const Program forward = fuse_partials(data, Pass::forward).program;
  const auto tasks = static_cast<std::int64_t>(data.forward.attend_items.size());
  EXPECT_GT(tasks, 2);
  EXPECT_EQ(launches(forward, LaunchKind::attend), 0);
  EXPECT_EQ(launches(forward, LaunchKind::fused), tasks);
  EXPECT_EQ(launches(forward, LaunchKind::merge), tasks);
  EXPECT_EQ(forward.pairs, data.forward.pairs);
  const Program backward = fuse_partials(data, Pass::backward).program;
  EXPECT_EQ(launches(backward, LaunchKind::fused_backward), static_cast<std::int64_t>(data.backward.attend_items.size()));
  EXPECT_EQ(launches(backward, LaunchKind::attend_backward), 0);
  EXPECT_EQ(backward.regions.back().name, "partials");
  EXPECT_EQ(backward.regions.back().offset % 256, 0);
  EXPECT_EQ(backward.regions.back().offset + backward.regions.back().bytes, backward.arena_bytes);
}

}  // namespace
}  // namespace ringspan::internal
