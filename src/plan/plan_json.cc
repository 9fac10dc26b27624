// Plan::to_json, the whole plan for programs, and RankCosts::to_json; docs/plan.md describes every field.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "plan/plan_data.h"
#include "plan/rank_costs.h"

namespace ringspan {
namespace {

using internal::Launch;
using internal::Program;
using nlohmann::ordered_json;

constexpr int kPlanSchema = 1;  // raised when a field changes its meaning or goes; new fields may appear without

// Paths in it need not be UTF-8.
std::string text_of(const ordered_json& json) { return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace); }

ordered_json progression_json(const Progression& p) { return ordered_json::array({p.first, p.stride, p.count}); }

ordered_json pieces_json(const std::vector<Progression>& pieces) {
  ordered_json list = ordered_json::array();
  for (const Progression& piece : pieces) list.push_back(progression_json(piece));
  return list;
}

ordered_json problem_json(const Problem& p) {
  return {{"batch", p.batch},
          {"tokens_q", p.tokens_q},
          {"tokens_k", p.tokens_k},
          {"heads", p.heads},
          {"kv_heads", p.kv_heads},
          {"head_dim", p.head_dim},
          {"head_dim_v", p.head_dim_v},
          {"dtype", to_string(p.dtype)},
          {"pattern", p.pattern.to_string()},
          {"cu_seqlens_q", p.cu_seqlens_q},
          {"cu_seqlens_k", p.cu_seqlens_k},
          {"lengths_q", p.lengths_q},
          {"lengths_k", p.lengths_k},
          {"starts_k", p.starts_k},
          {"scale", p.effective_scale()},
          {"softcap", p.softcap},
          {"alibi", p.alibi},
          {"sinks", p.sinks},
          {"dropout", p.dropout},
          {"seed", p.seed},
          {"ranks", p.ranks},
          {"sharding_q", p.sharding_q.to_string()},
          {"sharding_k", p.sharding_k.to_string()},
          {"replicated_q", p.replicated_q}};
}

ordered_json options_json(const PlanOptions& o) {
  return {{"strategy", to_string(o.strategy)},
          {"computing_ranks", o.computing_ranks},
          {"bucket_rows", o.bucket_rows},
          {"memory_budget", o.memory_budget},
          {"cost",
           {{"flops_per_second", o.cost.flops_per_second},
            {"bytes_per_second", o.cost.bytes_per_second},
            {"message_nanoseconds", o.cost.message_nanoseconds},
            {"host_bytes_per_second", o.cost.host_bytes_per_second}}},
          {"backward", o.backward},
          {"keep_o_float32", o.keep_o_float32},
          {"threads", o.threads},
          {"attend_kernel", o.attend_kernel},
          {"attend_backward_kernel", o.attend_backward_kernel},
          {"partials", to_string(o.partials)},
          {"device", to_string(o.device)},
          {"device_messages", o.device_messages},
          {"host_tensors", o.host_tensors}};
}

ordered_json rejected_json(const std::vector<Rejected>& rejected) {
  ordered_json list = ordered_json::array();
  for (const Rejected& r : rejected) {
    list.push_back(
        {{"candidate", r.candidate}, {"reason", r.reason}, {"nanoseconds", r.nanoseconds}, {"at_least", r.at_least}});
  }
  return list;
}

ordered_json sizes_json(const internal::PlanData& data) {
  const auto kernel = [](const KernelChoice& choice) {
    ordered_json json{{"kernel", choice.name},
                      {"tile_queries", choice.tile.queries},
                      {"tile_keys", choice.tile.keys},
                      {"source", to_string(choice.tile_source)}};
    if (!choice.reason.empty()) json["reason"] = choice.reason;
    return json;
  };
  ordered_json sizes{{"attend", kernel(data.attend)}};
  sizes["attend_backward"] = data.has_backward ? kernel(data.attend_backward) : ordered_json();
  sizes["bucket"] = {{"rows", data.options.bucket_rows}, {"source", to_string(data.bucket_source)}};
  sizes["tuned_by"] = data.options.tuned.source.empty() ? ordered_json() : ordered_json(data.options.tuned.source);
  return sizes;
}

ordered_json bundles_json(const Program& program) {
  ordered_json list = ordered_json::array();
  for (const internal::Bundle& bundle : program.bundles) {
    ordered_json boxes = ordered_json::array();
    for (const internal::Box& box : bundle.boxes) {
      boxes.push_back({{"batch", {box.batch_first, box.batch_count}},
                       {"heads", progression_json(box.heads)},
                       {"positions", progression_json(box.positions)}});
    }
    ordered_json parts = ordered_json::array();
    for (const internal::Part& part : bundle.parts) {
      parts.push_back(
          {{"kind", to_string(part.kind)}, {"dtype", to_string(part.dtype)}, {"width", part.width}, {"state", part.state}});
    }
    list.push_back({{"bytes", bundle.bytes}, {"parts", std::move(parts)}, {"boxes", std::move(boxes)}});
  }
  return list;
}

ordered_json launches_json(const std::vector<Launch>& launches) {
  ordered_json list = ordered_json::array();
  for (const Launch& launch : launches) list.push_back({{"kind", to_string(launch.kind)}, {"items", launch.count}});
  return list;
}

ordered_json rounds_json(const std::vector<internal::Round>& rounds) {
  static constexpr const char* kOps[] = {"copy", "add", "merge"};
  ordered_json list = ordered_json::array();
  for (const internal::Round& round : rounds) {
    ordered_json transfers = ordered_json::array();
    for (const internal::Transfer& t : round.transfers) {
      transfers.push_back({{"direction", t.send ? "send" : "receive"},
                           {"peer", t.peer},
                           {"source", t.source},
                           {"offset", t.offset},
                           {"bytes", t.bytes},
                           {"bundle", t.bundle},
                           {"op", kOps[static_cast<std::size_t>(t.op)]}});
    }
    list.push_back({{"number", round.number}, {"transfers", std::move(transfers)}});
  }
  return list;
}

ordered_json stages_json(const Program& program) {
  ordered_json list = ordered_json::array();
  for (const internal::Stage& stage : program.stages) {
    list.push_back({{"name", stage.name},
                    {"before", launches_json(stage.before)},
                    {"copies", launches_json(stage.copies)},
                    {"rounds", rounds_json(stage.rounds)},
                    {"compute", launches_json(stage.compute)}});
  }
  return list;
}

ordered_json pass_json(const Plan& plan, Pass pass) {
  const Program& program = pass == Pass::forward ? plan.data().forward : plan.data().backward;
  ordered_json memory = ordered_json::array();
  for (const MemoryLine& line : plan.memory(pass)) {
    memory.push_back({{"component", line.component},
                      {"bytes", line.bytes},
                      {"in_arena", line.in_arena},
                      {"beside_arena", line.beside_arena},
                      {"pinned", line.pinned}});
  }
  ordered_json traffic = ordered_json::array();
  const std::vector<PeerBytes> peers = plan.traffic(pass);
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    const PeerBytes& p = peers[peer];
    if (p.sent_messages + p.received_messages == 0) continue;
    traffic.push_back({{"peer", peer},
                       {"sent_bytes", p.sent_bytes},
                       {"sent_messages", p.sent_messages},
                       {"received_bytes", p.received_bytes},
                       {"received_messages", p.received_messages}});
  }
  ordered_json regions = ordered_json::array();
  for (const internal::Region& r : program.regions) {
    regions.push_back({{"name", r.name}, {"component", to_string(r.component)}, {"offset", r.offset}, {"bytes", r.bytes}});
  }
  const Plan::HostBytes host = plan.host_bytes(pass);
  const Plan::HostTime host_time = plan.host_nanoseconds(pass);
  return {{"host_bytes", {{"to_device", host.to_device}, {"to_host", host.to_host}}},
          {"host_nanoseconds", {{"copies", host_time.copies}, {"exposed", host_time.exposed}}},
          {"pairs", to_string(program.pairs)},
          {"flops", plan.flops(pass)},
          {"memory_bytes", plan.memory_bytes(pass)},
          {"memory", std::move(memory)},
          {"pinned_bytes", plan.pinned_bytes(pass)},
          {"arena_bytes", program.arena_bytes},
          {"excess_rows", program.excess_rows},
          {"traffic", std::move(traffic)},
          {"attend_items", program.attend_items.size()},
          {"row_items", program.row_items.size()},
          {"regions", std::move(regions)},
          {"bundles", bundles_json(program)},
          {"stages", stages_json(program)}};
}

}  // namespace

std::string Plan::to_json() const {
  ordered_json slowest;
  if (ranks_looked_at() > 0) slowest = {{"nanoseconds", slowest_nanoseconds()}, {"ranks_looked_at", ranks_looked_at()}};
  ordered_json plan = {{"schema", kPlanSchema},
                       {"rank", data_->rank},
                       {"fingerprint", fmt::format("{:016x}", data_->fingerprint)},
                       {"problem", problem_json(data_->problem)},
                       {"options", options_json(data_->options)},
                       {"sizes", sizes_json(*data_)},
                       {"shard_q", pieces_json(data_->shard_q.pieces)},
                       {"shard_k", pieces_json(data_->shard_k.pieces)},
                       {"modelled_nanoseconds", modelled_nanoseconds()},
                       {"slowest", std::move(slowest)},
                       {"rejected", rejected_json(data_->rejected)},
                       {"arena_bytes", arena_bytes()},
                       {"forward", pass_json(*this, Pass::forward)},
                       {"backward", data_->has_backward ? pass_json(*this, Pass::backward) : ordered_json()}};
  return text_of(plan);
}

std::string internal::RankCosts::to_json() const {
  ordered_json ranks = ordered_json::array();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const internal::RankCost& rank = ranks_[i];
    const auto pass = [&](std::size_t index) -> ordered_json {
      const internal::PassCost& cost = rank.passes[index];
      return {{"pairs", ringspan::to_string(cost.pairs)},
              {"flops", cost.flops},
              {"memory_bytes", cost.memory_bytes},
              {"pinned_bytes", cost.pinned_bytes},
              {"sent_bytes", cost.sent_bytes},
              {"sent_messages", cost.sent_messages},
              {"received_bytes", cost.received_bytes},
              {"received_messages", cost.received_messages}};
    };
    ranks.push_back({{"rank", i},
                     {"queries", rank.queries},
                     {"keys", rank.keys},
                     {"modelled_nanoseconds", rank.nanoseconds},
                     {"forward", pass(0)},
                     {"backward", first_.options().backward ? pass(1) : ordered_json()}});
  }
  const ordered_json json = {{"schema", kPlanSchema},
                             {"fingerprint", fmt::format("{:016x}", first_.fingerprint())},
                             {"problem", problem_json(first_.problem())},
                             {"options", options_json(first_.options())},
                             {"rejected", rejected_json(first_.data().rejected)},
                             {"ranks", std::move(ranks)}};
  return text_of(json);
}

}  // namespace ringspan
