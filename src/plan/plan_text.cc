// Plan::to_string: a plan for people. Everything is derived from PlanData; docs/plan.md explains the lines.
#include "plan/plan_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>

#include "base/quantity.h"
#include "plan/cost.h"
#include "plan/plan_data.h"
#include "plan/strategy.h"

namespace ringspan {
namespace internal {
namespace {

// A value per batch item; of more than eight the least and the greatest, so that a batch of a thousand is a line too.
std::string per_item(const char* label, const std::vector<std::int64_t>& values) {
  constexpr std::size_t kShown = 8;
  if (values.size() <= kShown) return fmt::format(" {} {};", label, fmt::join(values, ", "));
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return fmt::format(" {} {} to {};", label, *least, *most);
}

}  // namespace

void append_problem(std::string& out, const Problem& p) {
  auto to = std::back_inserter(out);
  fmt::format_to(to, "  problem   {}; batch {}, {} queries x {} keys, {} heads ({} kv), head_dim {} (v {}), {}\n",
                 p.pattern.to_string(), p.batch, p.tokens_q, p.tokens_k, p.heads, p.kv_heads, p.head_dim, p.head_dim_v,
                 to_string(p.dtype));
  if (!p.cu_seqlens_q.empty()) fmt::format_to(to, "            {} documents\n", p.cu_seqlens_q.size() - 1);
  std::string items;
  if (!p.lengths_q.empty()) items += per_item("queries", p.lengths_q);
  if (!p.starts_k.empty()) items += per_item("first key", p.starts_k);
  if (!p.lengths_k.empty()) items += per_item("keys", p.lengths_k);
  if (!items.empty()) {
    items.pop_back();
    fmt::format_to(to, "            of the batch items:{}\n", items);
  }
  std::string extras;
  if (p.softcap > 0.0F) extras += fmt::format(" softcap {}", p.softcap);
  if (p.alibi) extras += " alibi";
  if (p.sinks) extras += " sinks";
  if (p.dropout > 0.0F) extras += fmt::format(" dropout {} (seed {})", p.dropout, p.seed);
  if (!extras.empty()) fmt::format_to(to, "            with{}\n", extras);
}

void append_strategy(std::string& out, const PlanData& data, const std::string& times) {
  auto to = std::back_inserter(out);
  const StrategyRow& row = strategy_row(data.options.strategy);
  std::string name(row.name);
  if (data.options.strategy == Strategy::local) name += fmt::format(":{}", data.options.computing_ranks);
  if (data.options.bucket_rows > 0) name += fmt::format(", buckets of {} rows", data.options.bucket_rows);
  fmt::format_to(to, "  strategy  {}: {}\n", name,
                 data.problem.ranks == 1 ? "the only rank computes all, and nothing travels" : row.summary);
  if (data.options.host_tensors) out += "            tensors lie on the host and stream through the device\n";
  const CostModel& cost = data.options.cost;
  fmt::format_to(to, "            {}: {}/s, {}/s received, {} per message\n", times, flops_text(cost.flops_per_second),
                 bytes_text(cost.bytes_per_second), duration_text(cost.message_nanoseconds));
  for (const Rejected& rejected : data.rejected) {
    const bool is_most = rejected.at_least || rejected.nanoseconds == std::numeric_limits<std::int64_t>::max();  // or more
    const std::string time =
        rejected.nanoseconds > 0 ? fmt::format(" ({}{})", is_most ? "at least " : "", duration_text(rejected.nanoseconds)) : "";
    fmt::format_to(to, "  rejected  {}: {}{}\n", rejected.candidate, rejected.reason, time);
  }
}

}  // namespace internal

namespace {

using internal::bytes_text;
using internal::duration_text;
using internal::flops_text;
using internal::Launch;
using internal::PlanData;
using internal::Program;
using internal::Stage;

constexpr std::size_t kMaxStageLines = 16;  // longer lists of stages are cut in the middle
constexpr std::size_t kMaxPeerLines = 16;
constexpr int kMaxPeriod = 64;

void append_sharding(std::string& out, const PlanData& data) {
  const Problem& p = data.problem;
  fmt::format_to(std::back_inserter(out), "  sharding  queries {}{}: {} rows here; keys {}: {} rows here\n",
                 p.sharding_q.to_string(), p.replicated_q ? " (replicated)" : "", data.shard_q.rows, p.sharding_k.to_string(),
                 data.shard_k.rows);
}

std::string times(const PlanData& data) {
  std::string text = duration_text(data.nanoseconds) + " on this rank by the model";
  if (data.ranks_looked_at == 0) return text;
  return text +
         fmt::format(", {} on the slowest of {} looked at", duration_text(data.slowest_nanoseconds), data.ranks_looked_at);
}

// Sizes that decide the speed, each with where it comes from.
void append_sizes(std::string& out, const PlanData& data) {
  auto to = std::back_inserter(out);
  const auto from = [&](SizeSource source) {
    std::string text(to_string(source));
    if (source == SizeSource::tuned && !data.options.tuned.source.empty()) text += ": " + data.options.tuned.source;
    return text;
  };
  const auto kernel = [&](const char* label, const KernelChoice& choice) {
    fmt::format_to(to, "  {}{}", label, choice.name);
    if (choice.tile == Tile{}) {
      fmt::format_to(to, ", without tiles\n");
    } else {
      fmt::format_to(to, ", tiles of {} x {} ({})\n", choice.tile.queries, choice.tile.keys, from(choice.tile_source));
    }
    if (!choice.reason.empty()) fmt::format_to(to, "            {}\n", choice.reason);
  };
  kernel("kernels   ", data.attend);
  if (data.has_backward) kernel("          ", data.attend_backward);
  if (data.options.bucket_rows > 0)
    fmt::format_to(to, "  buckets   {} rows ({})\n", data.options.bucket_rows, from(data.bucket_source));
}

std::string launches(const Program& program, const std::vector<Launch>& list) {
  std::array<std::int64_t, internal::kLaunchKinds> counts{};
  std::array<std::int64_t, internal::kLaunchKinds> items{};
  // Tasks of backward may be for dq only, or for dk and dv only: the same pairs twice.
  std::int64_t dq_tasks = 0, dk_dv_tasks = 0;
  Int128 pairs = 0, pairs_of_keys = 0;
  for (const Launch& launch : list) {
    ++counts[static_cast<std::size_t>(launch.kind)];
    items[static_cast<std::size_t>(launch.kind)] += launch.count;
    if (!internal::is_attention(launch.kind)) continue;
    for (std::int64_t i = launch.first; i < launch.first + launch.count; ++i) {
      const internal::AttendItem& item = program.attend_items[static_cast<std::size_t>(i)];
      const Int128 own = pair_count(item.slice);
      const bool backward = launch.kind == internal::LaunchKind::attend_backward;
      const bool without_dq = backward && item.operands[internal::kDq].view < 0;
      const bool without_keys = backward && item.operands[internal::kDk].view < 0;
      dq_tasks += without_keys ? 1 : 0;
      dk_dv_tasks += without_dq ? 1 : 0;
      pairs += without_dq ? 0 : own;
      pairs_of_keys += without_keys ? 0 : own;
    }
  }
  pairs = std::max(pairs, pairs_of_keys);
  std::string text;
  for (std::size_t kind = 0; kind < counts.size(); ++kind) {
    if (counts[kind] == 0) continue;
    const auto of_kind = static_cast<internal::LaunchKind>(kind);
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", internal::to_string(of_kind), items[kind]);
    if (of_kind == internal::LaunchKind::attend_backward && dq_tasks + dk_dv_tasks > 0)
      text += fmt::format(" ({} for dq, {} for dk and dv)", dq_tasks, dk_dv_tasks);
  }
  if (pairs > 0) text += fmt::format(" ({} pairs)", ringspan::to_string(pairs));
  return text;
}

// What a stage does, without the names of the peers, so that like stages look alike.
std::string describe(const Program& program, const Stage& stage) {
  std::int64_t bytes[2] = {0, 0};
  int messages[2] = {0, 0};
  for (const internal::Round& round : stage.rounds) {
    for (const internal::Transfer& transfer : round.transfers) {
      bytes[transfer.send ? 0 : 1] += transfer.bytes;
      ++messages[transfer.send ? 0 : 1];
    }
  }
  Plan::HostBytes copied;
  for (const Launch& launch : stage.copies) internal::add_host_bytes(program, launch, &copied);
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  if (!stage.before.empty()) add("first " + launches(program, stage.before));
  if (messages[0] > 0) add(fmt::format("send {} in {}", bytes_text(bytes[0]), messages[0]));
  if (messages[1] > 0) add(fmt::format("receive {} in {}", bytes_text(bytes[1]), messages[1]));
  if (copied.to_device > 0) add("copy in " + bytes_text(copied.to_device));
  if (copied.to_host > 0) add("copy out " + bytes_text(copied.to_host));
  const bool moves = messages[0] + messages[1] > 0 || !stage.copies.empty();
  if (!stage.compute.empty()) add((moves ? "meanwhile " : "") + launches(program, stage.compute));
  return text;
}

// Runs of a repeated group of lines: `count` times the `period` lines from `first` on.
struct Run {
  std::size_t first = 0, period = 1, count = 1;
};

std::vector<Run> runs_of(const std::vector<std::string>& lines) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < lines.size();) {
    Run best{i, 1, 1};
    for (std::size_t period = 1; period <= kMaxPeriod && i + 2 * period <= lines.size(); ++period) {
      std::size_t count = 1;
      while (i + (count + 1) * period <= lines.size() &&
             std::equal(lines.begin() + static_cast<std::ptrdiff_t>(i), lines.begin() + static_cast<std::ptrdiff_t>(i + period),
                        lines.begin() + static_cast<std::ptrdiff_t>(i + count * period))) {
        ++count;
      }
      if (count > 1 && count * period > best.count * best.period) best = {i, period, count};
    }
    runs.push_back(best);
    i += best.period * best.count;
  }
  return runs;
}

void append_stages(std::string& out, const Program& program) {
  std::vector<std::string> lines;
  for (const Stage& stage : program.stages) lines.push_back(describe(program, stage));
  std::vector<std::string> text;
  for (const Run& run : runs_of(lines)) {
    for (std::size_t i = 0; i < run.period; ++i) {
      const std::size_t index = run.first + i;
      std::string repeat;
      if (run.count > 1) {
        repeat =
            run.period == 1 ? fmt::format(" x {}", run.count) : fmt::format(" x {} (every {} stages)", run.count, run.period);
      }
      text.push_back(fmt::format("    stage {}{}: {}\n", index, repeat, lines[index]));
    }
  }
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.size() > kMaxStageLines && i == kMaxStageLines / 2) {
      const std::size_t skipped = text.size() - kMaxStageLines;
      out += fmt::format("    ... {} more lines\n", skipped);
      i += skipped;
    }
    out += text[i];
  }
}

void append_memory(std::string& out, const Plan& plan, Pass pass) {
  struct Share {
    const char* title;
    const char* nothing;  // what to say of no bytes; null: nothing at all
    std::int64_t bytes = 0;
    std::string list = {};
  };
  Share caller{"caller's tensors", "none"}, ours{"arena", "nothing"};
  Share beside{"beside the arena", nullptr}, pinned{"pinned host memory", nullptr};
  for (const MemoryLine& line : plan.memory(pass)) {
    Share& share = line.pinned ? pinned : line.beside_arena ? beside : line.in_arena ? ours : caller;
    share.bytes += line.bytes;
    if (line.bytes == 0) continue;
    share.list += fmt::format("{}{} {}", share.list.empty() ? "" : ", ", line.component, bytes_text(line.bytes));
  }
  auto to = std::back_inserter(out);
  fmt::format_to(to, "    memory  {} ({} bytes)\n", bytes_text(plan.memory_bytes(pass)), plan.memory_bytes(pass));
  for (const Share* share : {&caller, &ours, &beside, &pinned}) {
    if (share->list.empty() && share->nothing == nullptr) continue;
    fmt::format_to(to, "      {} {}: {}\n", share->title, bytes_text(share->bytes),
                   share->list.empty() ? share->nothing : share->list);
  }
}

void append_traffic(std::string& out, const Plan& plan, Pass pass) {
  auto to = std::back_inserter(out);
  const std::vector<PeerBytes> peers = plan.traffic(pass);
  PeerBytes total;
  std::size_t busy = 0;
  for (const PeerBytes& peer : peers) {
    total.sent_bytes += peer.sent_bytes;
    total.received_bytes += peer.received_bytes;
    total.sent_messages += peer.sent_messages;
    total.received_messages += peer.received_messages;
    busy += peer.sent_messages + peer.received_messages > 0 ? 1U : 0U;
  }
  fmt::format_to(to, "    bytes   sends {} in {} messages, receives {} in {}\n", total.sent_bytes, total.sent_messages,
                 total.received_bytes, total.received_messages);
  std::size_t shown = 0;
  for (std::size_t peer = 0; peer < peers.size(); ++peer) {
    const PeerBytes& p = peers[peer];
    if (p.sent_messages + p.received_messages == 0) continue;
    if (busy > kMaxPeerLines && shown == kMaxPeerLines) {
      fmt::format_to(to, "      ... and {} more peers\n", busy - shown);
      break;
    }
    fmt::format_to(to, "      rank {}: sends {} in {}, receives {} in {}\n", peer, p.sent_bytes, p.sent_messages,
                   p.received_bytes, p.received_messages);
    ++shown;
  }
}

void append_pass(std::string& out, const Plan& plan, Pass pass) {
  const PlanData& data = plan.data();
  const Program& program = pass == Pass::forward ? data.forward : data.backward;
  auto to = std::back_inserter(out);
  fmt::format_to(to, "  {}\n", pass == Pass::forward ? "forward" : "backward");
  fmt::format_to(to, "    work    {} pairs in {} tasks, {}\n", ringspan::to_string(program.pairs), program.attend_items.size(),
                 flops_text(plan.flops(pass)));
  append_memory(out, plan, pass);
  append_traffic(out, plan, pass);
  if (data.options.host_tensors) {
    const Plan::HostBytes host = plan.host_bytes(pass);
    const Plan::HostTime time = plan.host_nanoseconds(pass);
    const Int128 computing =
        internal::nanoseconds_of(program.pairs * internal::flops_per_pair(data.problem, pass), data.options.cost);
    fmt::format_to(to, "    copies  {} from the host, {} to it\n", bytes_text(host.to_device), bytes_text(host.to_host));
    fmt::format_to(to, "            by the model {} at {}/s beside {} of computing at {}/s; {} of it not hidden\n",
                   duration_text(time.copies), bytes_text(data.options.cost.host_bytes_per_second), duration_text(computing),
                   flops_text(data.options.cost.flops_per_second), duration_text(time.exposed));
  }
  if (program.excess_rows > 0) {
    fmt::format_to(to, "    excess  {} rows are received that nobody reads: {}\n", program.excess_rows,
                   data.options.host_tensors ? "pieces travel whole" : "too many pieces to name one by one");
  }
  append_stages(out, program);
}

}  // namespace

std::string Plan::to_string() const {
  std::string out;
  fmt::format_to(std::back_inserter(out), "plan of rank {} of {}\n", data_->rank, data_->problem.ranks);
  internal::append_problem(out, data_->problem);
  append_sharding(out, *data_);
  internal::append_strategy(out, *data_, times(*data_));
  append_sizes(out, *data_);
  fmt::format_to(std::back_inserter(out), "  arena     {} bytes ({})\n", arena_bytes(), bytes_text(arena_bytes()));
  append_pass(out, *this, Pass::forward);
  if (data_->has_backward) append_pass(out, *this, Pass::backward);
  return out;
}

}  // namespace ringspan
