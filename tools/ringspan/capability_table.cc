#include "capability_table.h"

#include <array>

#include "kernels/attend.h"
#include "ringspan/error.h"

namespace ringspan::cli {
namespace {

Problem base_problem() {
  Problem problem;
  problem.tokens_q = problem.tokens_k = 24;
  problem.heads = problem.kv_heads = 4;
  problem.head_dim = problem.head_dim_v = 8;
  problem.ranks = 2;
  return problem;
}

void documents(Problem& problem, const char* pattern) {
  problem.pattern = Pattern::parse(pattern);
  problem.cu_seqlens_q = {0, 5, 16, 24};
}

}  // namespace

const std::vector<Feature>& capability_patterns() {
  static const std::vector<Feature> features{
      {"full", [](Problem&, PlanOptions&) {}},
      {"causal", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("causal"); }},
      {"causal, top-left", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("causal@top_left"); }},
      {"window", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("window:5,2"); }},
      {"window & causal", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("window:5,0&causal"); }},
      {"documents", [](Problem& p, PlanOptions&) { documents(p, "documents"); }},
      {"window & causal & documents", [](Problem& p, PlanOptions&) { documents(p, "window:5,0&causal&documents"); }},
      {"prefix", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("prefix:7"); }},
      {"block", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("block:0-12,0-8;12-24,8-24,causal"); }},
      {"dilated @longnet", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("dilated:8x1,16x2@longnet"); }},
      {"dilated @torchscale", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("dilated:8x1,16x2@torchscale"); }},
      {"dilated @head_groups", [](Problem& p, PlanOptions&) { p.pattern = Pattern::parse("dilated:8x1,16x2@head_groups"); }},
      {"dilated & causal & documents", [](Problem& p, PlanOptions&) { documents(p, "dilated:8x1,16x2&causal&documents"); }},
      {"cross attention, causal",
       [](Problem& p, PlanOptions&) {
         p.pattern = Pattern::parse("causal");
         p.tokens_q = 17;
       }},
  };
  return features;
}

const std::vector<Feature>& capability_options() {
  static const std::vector<Feature> features{
      {"-", [](Problem&, PlanOptions&) {}},
      {"grouped kv heads", [](Problem& p, PlanOptions&) { p.kv_heads = 2; }},
      {"one kv head", [](Problem& p, PlanOptions&) { p.kv_heads = 1; }},
      {"other head_dim of v", [](Problem& p, PlanOptions&) { p.head_dim_v = 12; }},
      {"batch 2", [](Problem& p, PlanOptions&) { p.batch = 2; }},
      {"softcap", [](Problem& p, PlanOptions&) { p.softcap = 5.0F; }},
      {"alibi", [](Problem& p, PlanOptions&) { p.alibi = true; }},
      {"sinks", [](Problem& p, PlanOptions&) { p.sinks = true; }},
      {"dropout", [](Problem& p, PlanOptions&) { p.dropout = 0.25F; }},
      {"replicated q", [](Problem& p, PlanOptions&) { p.replicated_q = true; }},
      {"zigzag sharding", [](Problem& p, PlanOptions&) { p.sharding_q = p.sharding_k = Sharding::parse("zigzag"); }},
      {"striped keys", [](Problem& p, PlanOptions&) { p.sharding_k = Sharding::parse("striped"); }},
      {"buckets of rows", [](Problem&, PlanOptions& o) { o.bucket_rows = 4; }},
      {"no buckets", [](Problem&, PlanOptions& o) { o.bucket_rows = PlanOptions::kBucketNone; }},
      {"one device, tensors on the host",
       [](Problem& p, PlanOptions& o) {
         p.ranks = 1;
         o.device = DeviceKind::cuda;
         o.host_tensors = true;
         o.bucket_rows = 10;
         o.keep_o_float32 = false;
       }},
      {"several devices, tensors on their hosts",
       [](Problem&, PlanOptions& o) {
         o.device = DeviceKind::cuda;
         o.host_tensors = true;
         o.bucket_rows = 10;
         o.keep_o_float32 = false;
       }},
      {"fused calls, partials in 16 bits",
       [](Problem&, PlanOptions& o) {
         o.device = DeviceKind::cuda;
         o.partials = Partials::storage;
       }},
  };
  return features;
}

std::string refusal(const Problem& problem, const PlanOptions& plan) {
  try {
    make_plan(problem, plan, 0);  // validates, asks the capability predicate, chooses kernels
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const Unsupported& error) {
    return error.what();
  }
  return {};
}

std::vector<Cell> capability_cells() {
  constexpr std::array<DType, 3> kDTypes{DType::float32, DType::bfloat16, DType::float16};
  constexpr std::array<Strategy, 6> kStrategies{Strategy::local, Strategy::all_gather, Strategy::exchange,
                                                Strategy::ring,  Strategy::pass_q,     Strategy::ulysses};
  std::vector<Cell> cells;
  for (const Feature& pattern : capability_patterns()) {
    for (const Feature& option : capability_options()) {
      for (const DType dtype : kDTypes) {
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          for (const Strategy strategy : kStrategies) {
            Cell cell{pattern.name, option.name, dtype, pass, strategy, base_problem(), {}, {}};
            cell.problem.dtype = dtype;
            pattern.apply(cell.problem, cell.plan);
            option.apply(cell.problem, cell.plan);
            cell.plan.strategy = strategy;
            cell.plan.backward = pass == Pass::backward;
            cell.reason = refusal(cell.problem, cell.plan);
            cells.push_back(std::move(cell));
          }
        }
      }
    }
  }
  return cells;
}

}  // namespace ringspan::cli
