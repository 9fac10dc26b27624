// Plans as text and as JSON.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "plan/plan_data.h"
#include "ringspan/plan.h"

namespace ringspan {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

Problem problem(const char* pattern = "causal", std::int64_t tokens = 4096, int ranks = 4) {
  Problem p;
  p.tokens_q = p.tokens_k = tokens;
  p.heads = 8;
  p.kv_heads = 2;
  p.ranks = ranks;
  p.pattern = Pattern::parse(pattern);
  return p;
}

Plan plan_of(const Problem& p, Strategy strategy, int rank) {
  PlanOptions options;
  options.strategy = strategy;
  return make_plan(p, options, rank);
}

TEST(PlanText, SaysWhatARankDoes) {
  const std::string text = plan_of(problem(), Strategy::exchange, 2).to_string();
  EXPECT_THAT(text, HasSubstr("plan of rank 2 of 4\n"));
  EXPECT_THAT(text,
              HasSubstr("problem   causal; batch 1, 4096 queries x 4096 keys, 8 heads (2 kv), head_dim 64 (v 64), float32"));
  EXPECT_THAT(text, HasSubstr("sharding  queries contiguous: 1024 rows here; keys contiguous: 1024 rows here"));
  EXPECT_THAT(text, HasSubstr("strategy  exchange, buckets of 512 rows: the owner of the query computes"));
  EXPECT_THAT(text, HasSubstr("work    20975616 pairs in 5 tasks, 5.37 GFLOP"));
  EXPECT_THAT(text, HasSubstr("caller's tensors 5.031 MiB: q 2 MiB, k 512 KiB, v 512 KiB, o 2 MiB, lse 32 KiB"));
  // Two chunks of 1,024 rows of k and v, 2 heads of 64: 2 MiB.
  EXPECT_THAT(text, HasSubstr("bytes   sends 1048576 in 2 messages, receives 2097152 in 4"));
  EXPECT_THAT(text, HasSubstr("rank 1: sends 0 in 0, receives 1048576 in 2"));
  EXPECT_THAT(text, HasSubstr("meanwhile attend 1 (4194304 pairs)"));
  EXPECT_THAT(text, HasSubstr("\n  backward\n"));
  EXPECT_THAT(text, Not(HasSubstr("rejected")));
}

TEST(PlanText, FoldsWhatRepeats) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.bucket_rows = 16;
  const std::string text = make_plan(problem("full", 65'536), options, 1).to_string();
  EXPECT_THAT(text, HasSubstr(" x 1023 (every 3 stages): "));
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 80);
}

// Of the portable kernels, so that sizes are the same on every machine.
TEST(PlanText, NamesTheSourceOfEverySize) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.attend_kernel = options.attend_backward_kernel = "portable";
  const auto text = [&] { return make_plan(problem("causal", 1 << 16), options, 1).to_string(); };
  EXPECT_THAT(text(), HasSubstr("  kernels   attend_f32_portable, tiles of 96 x 256 (default)\n"
                                "            attend_backward_f32_portable, tiles of 126 x 256 (default)\n"
                                "  buckets   512 rows (default)\n"));
  options.tuned = {{192, 128}, {66, 240}, 1024, "tune.json, 2026-11-21"};
  EXPECT_THAT(text(), HasSubstr("  kernels   attend_f32_portable, tiles of 192 x 128 (tuned: tune.json, 2026-11-21)\n"
                                "            attend_backward_f32_portable, tiles of 66 x 240 (tuned: tune.json, 2026-11-21)\n"
                                "  buckets   1024 rows (tuned: tune.json, 2026-11-21)\n"));
  options.tuned.bucket_rows = 64;  // a chunk still travels in 32 of them
  EXPECT_THAT(text(), HasSubstr("  buckets   512 rows (default)\n"));
  options.attend_tile = {48, 64};
  options.bucket_rows = 100;
  EXPECT_THAT(text(), HasSubstr("attend_f32_portable, tiles of 48 x 64 (given)\n"));
  EXPECT_THAT(text(), HasSubstr("  buckets   100 rows (given)\n"));
  options.bucket_rows = PlanOptions::kBucketAuto;
  options.memory_budget = make_plan(problem("causal", 1 << 16), options, 1).memory_bytes(Pass::backward) - 1;
  EXPECT_THAT(text(), HasSubstr("  buckets   256 rows (memory budget)\n"));
  options = {};
  options.attend_kernel = "reference";
  options.backward = false;
  EXPECT_THAT(text(), HasSubstr("  kernels   attend_f32_reference, without tiles\n"));
}

TEST(PlanText, OneRankHasNoOthers) {
  Problem p = problem();
  p.ranks = 1;
  EXPECT_THAT(make_plan(p, {}, 0).to_string(),
              HasSubstr("  strategy  local:1: the only rank computes all, and nothing travels\n"));
}

TEST(PlanText, NamesTheRejected) {
  const std::string text = make_plan(problem(), {}, 0).to_string();
  EXPECT_THAT(text, HasSubstr("  rejected  local:1: slower by the cost model"));
  EXPECT_THAT(text, ::testing::ContainsRegex("(at least [0-9.]+ m?s)"));
  EXPECT_THAT(text,
              ::testing::ContainsRegex("[0-9.]+ ms on this rank by the model, [0-9.]+ ms on the slowest of 4 looked at: 100 "
                                       "GFLOP/s, 4.657 GiB/s received, 20 us per message"));
  EXPECT_THAT(plan_of(problem(), Strategy::ring, 0).to_string(), HasSubstr("ms on this rank by the model: 100 GFLOP/s"));
}

TEST(PlanText, NamesTheExtras) {
  Problem p = problem("documents & causal", 100);
  p.cu_seqlens_q = {0, 40, 100};
  p.sinks = true;
  p.dropout = 0.5F;
  p.replicated_q = true;
  p.dtype = DType::bfloat16;
  const std::string text = plan_of(p, Strategy::pass_q, 0).to_string();
  EXPECT_THAT(text, HasSubstr("2 documents"));
  EXPECT_THAT(text, HasSubstr("with sinks dropout 0.5 (seed 0)"));
  EXPECT_THAT(text, HasSubstr("contiguous (replicated)"));
  EXPECT_THAT(text, HasSubstr("saved"));
}

TEST(PlanText, ShowsWhatEachBatchItemHas) {
  Problem p = problem("causal", 100);
  p.batch = 2;
  p.lengths_q = {100, 1};
  p.starts_k = {0, 40};
  p.lengths_k = {100, 60};
  EXPECT_THAT(plan_of(p, Strategy::pass_q, 0).to_string(),
              HasSubstr("of the batch items: queries 100, 1; first key 0, 40; keys 100, 60\n"));
  p.batch = 9;
  p.lengths_q = p.starts_k = {};
  p.lengths_k = {7, 8, 9, 10, 11, 12, 13, 99, 5};
  EXPECT_THAT(plan_of(p, Strategy::pass_q, 0).to_string(), HasSubstr("of the batch items: keys 5 to 99\n"));
}

TEST(PlanJson, IsTheWholePlan) {
  for (const Strategy strategy : {Strategy::ring, Strategy::ulysses, Strategy::pass_q}) {
    Problem p = problem("dilated:512x1,2048x4 & causal");
    p.sinks = true;
    p.sharding_k = Sharding::parse("zigzag");
    const Plan plan = plan_of(p, strategy, 1);
    const json j = json::parse(plan.to_json());
    EXPECT_EQ(j["schema"], 1);
    EXPECT_EQ(j["rank"], 1);
    EXPECT_EQ(j["problem"]["pattern"], p.pattern.to_string());
    EXPECT_EQ(j["problem"]["sharding_k"], "zigzag");
    EXPECT_EQ(j["options"]["strategy"], to_string(strategy));
    EXPECT_EQ(j["options"]["bucket_rows"], plan.bucket_rows());
    EXPECT_EQ(j["arena_bytes"], plan.arena_bytes());
    EXPECT_EQ(j["fingerprint"].get<std::string>().size(), 16U);
    EXPECT_EQ(j["shard_k"].size(), 2U);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const json& of_pass = j[pass == Pass::forward ? "forward" : "backward"];
      std::int64_t received = 0, messages = 0;
      for (const json& stage : of_pass["stages"]) {
        for (const json& round : stage["rounds"]) {
          for (const json& transfer : round["transfers"]) {
            if (transfer["bundle"] >= 0) {
              EXPECT_EQ(transfer["bytes"], of_pass["bundles"][transfer["bundle"].get<std::size_t>()]["bytes"]);
            }
            if (transfer["direction"] != "receive") continue;
            received += transfer["bytes"].get<std::int64_t>();
            ++messages;
          }
        }
      }
      for (const json& peer : of_pass["traffic"]) {
        received -= peer["received_bytes"].get<std::int64_t>();
        messages -= peer["received_messages"].get<std::int64_t>();
      }
      EXPECT_EQ(received, 0);
      EXPECT_EQ(messages, 0);
      std::int64_t memory = 0;
      for (const json& line : of_pass["memory"]) memory += line["bytes"].get<std::int64_t>();
      EXPECT_EQ(memory, plan.memory_bytes(pass));
      for (const json& bundle : of_pass["bundles"]) {  // the boxes and the parts make the bytes
        std::int64_t rows = 0, row_bytes = 0;
        for (const json& box : bundle["boxes"]) {
          rows += box["batch"][1].get<std::int64_t>() * box["heads"][2].get<std::int64_t>() *
                  box["positions"][2].get<std::int64_t>();
        }
        for (const json& part : bundle["parts"]) {
          row_bytes += part["width"].get<std::int64_t>() * (part["dtype"] == "float32" ? 4 : 2);
        }
        EXPECT_EQ(bundle["bytes"], rows * row_bytes);
      }
      std::int64_t attend = 0;
      for (const json& stage : of_pass["stages"]) {
        for (const char* when : {"before", "compute"}) {
          for (const json& launch : stage[when]) {
            if (launch["kind"].get<std::string>().rfind("attend", 0) == 0) attend += launch["items"].get<std::int64_t>();
          }
        }
      }
      EXPECT_EQ(of_pass["attend_items"], attend);
      EXPECT_EQ(of_pass["regions"].empty(), false);
    }
    EXPECT_EQ(j["forward"]["pairs"], plan.pairs());
  }
}

TEST(PlanJson, NamesTheSourceOfEverySize) {
  PlanOptions options;
  options.strategy = Strategy::ring;
  options.attend_kernel = "portable";
  options.attend_backward_kernel = "reference";
  options.attend_tile = {48, 64};
  options.tuned.bucket_rows = 300;
  options.tuned.source = "tune.json, 2026-11-21";
  const json sizes = json::parse(make_plan(problem(), options, 0).to_json())["sizes"];
  const json expected = {
      {"attend", {{"kernel", "attend_f32_portable"}, {"tile_queries", 48}, {"tile_keys", 64}, {"source", "given"}}},
      {"attend_backward",
       {{"kernel", "attend_backward_f32_reference"}, {"tile_queries", 0}, {"tile_keys", 0}, {"source", "default"}}},
      {"bucket", {{"rows", 300}, {"source", "tuned"}}},
      {"tuned_by", "tune.json, 2026-11-21"}};
  EXPECT_EQ(sizes, expected);
  options.tuned.source = "t\xfcne.json, 2026-11-21";  // a path may be any bytes
  EXPECT_EQ(json::parse(make_plan(problem(), options, 0).to_json())["sizes"]["tuned_by"], "t\uFFFDne.json, 2026-11-21");
}

TEST(PlanJson, ForwardOnlyAndAutomatic) {
  PlanOptions options;
  options.backward = false;
  const json j = json::parse(make_plan(problem(), options, 0).to_json());
  EXPECT_TRUE(j["backward"].is_null());
  EXPECT_EQ(j["rejected"].size(), 6U);
  EXPECT_FALSE(j["rejected"][0]["reason"].get<std::string>().empty());
}

}  // namespace
}  // namespace ringspan
