#include "rank_work.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>

#include "base/quantity.h"
#include "machine.h"
#include "plan/plan_data.h"
#include "ringspan/error.h"
#include "ringspan/transports.h"

namespace ringspan::cli {
namespace {

Shard all_rows(std::int64_t tokens) {
  Shard shard;
  if (tokens > 0) {
    shard.pieces.push_back({0, 1, tokens});
    shard.offsets.push_back(0);
  }
  shard.rows = tokens;
  return shard;
}

Pages gathered(const Shard& shard, const GlobalTensor& whole) {
  Pages pages(whole.shape.tokens == 0 ? 0 : whole.shape.bytes() / whole.shape.tokens * shard.rows);
  gather(shard, whole, pages.data());
  return pages;
}

}  // namespace

OutputShapes::OutputShapes(const Problem& p, Layout layout)
    : o{p.batch, p.tokens_q, p.heads, p.head_dim_v, p.dtype, layout},
      lse{p.batch, p.tokens_q, p.heads, 1, DType::float32, Layout::bhsd},
      dq{p.batch, p.tokens_q, p.heads, p.head_dim, p.dtype, layout},
      dk{p.batch, p.tokens_k, p.kv_heads, p.head_dim, p.dtype, layout},
      dv{p.batch, p.tokens_k, p.kv_heads, p.head_dim_v, p.dtype, layout} {}

std::vector<MemoryLine> memory_lines(const Plan& plan, bool dlse) {
  std::vector<MemoryLine> lines = plan.memory(plan.options().backward ? Pass::backward : Pass::forward);
  if (!dlse || !plan.options().backward) return lines;
  const auto is = [](const char* name) { return [name](const MemoryLine& line) { return line.component == name; }; };
  MemoryLine own = *std::find_if(lines.begin(), lines.end(), is("lse"));
  own.component = "dlse";
  lines.insert(std::next(std::find_if(lines.begin(), lines.end(), is("do"))), own);
  return lines;
}

std::int64_t memory_bytes(const Plan& plan, bool dlse) {
  std::int64_t bytes = 0;
  for (const MemoryLine& line : memory_lines(plan, dlse)) bytes += line.bytes;
  return bytes;
}

TensorShape RankWork::local(TensorShape whole, const Shard& shard) const {
  whole.tokens = shard.rows;
  return whole;
}

RankWork::RankWork(const Plan& plan, const Inputs& inputs, Layout layout)
    : plan_(plan), inputs_(inputs), outputs_(plan.problem(), layout), backward_(plan.options().backward) {
  const Problem& problem = plan.problem();
  shard_q_ = problem.replicated_q ? all_rows(problem.tokens_q)
                                  : make_shard(problem.sharding_q, problem.tokens_q, problem.ranks, plan.rank());
  shard_k_ = make_shard(problem.sharding_k, problem.tokens_k, problem.ranks, plan.rank());
  q_ = gathered(shard_q_, inputs.q);
  k_ = gathered(shard_k_, inputs.k);
  v_ = gathered(shard_k_, inputs.v);
  o_ = Pages(local(outputs_.o, shard_q_).bytes());
  lse_ = Pages(local(outputs_.lse, shard_q_).bytes());
  if (!backward_) return;
  if (inputs.gradient.kind == GradientSpec::Kind::file) {
    d_out_ = gathered(shard_q_, inputs.d_out);
  } else {
    d_out_ = Pages(local(outputs_.o, shard_q_).bytes());
    if (inputs.gradient.kind == GradientSpec::Kind::ones) {
      fill_ones(shard_q_, outputs_.o, d_out_.data());
    } else {
      fill_normal(inputs.gradient.seed, shard_q_, outputs_.o, d_out_.data());
    }
  }
  if (inputs.dlse.data != nullptr) dlse_ = gathered(shard_q_, inputs.dlse);
  dq_ = Pages(local(outputs_.dq, shard_q_).bytes());
  dk_ = Pages(local(outputs_.dk, shard_k_).bytes());
  dv_ = Pages(local(outputs_.dv, shard_k_).bytes());
  if (problem.sinks) dsinks_.assign(static_cast<std::size_t>(problem.heads), 0.0F);
}

RankReport RankWork::run(Attention& attention, WatchedCommunicator& watched, const std::function<void(Pass)>& before) {
  const auto constant = [&](const Pages& pages, const TensorShape& shape, const Shard& shard) {
    return as_tensor(static_cast<const std::byte*>(pages.data()), local(shape, shard));
  };
  const auto mutable_tensor = [&](const Pages& pages, const TensorShape& shape, const Shard& shard) {
    return as_tensor(pages.data(), local(shape, shard));
  };
  ForwardTensors forward;
  forward.q = constant(q_, inputs_.q.shape, shard_q_);
  forward.k = constant(k_, inputs_.k.shape, shard_k_);
  forward.v = constant(v_, inputs_.v.shape, shard_k_);
  forward.o = mutable_tensor(o_, outputs_.o, shard_q_);
  forward.lse = mutable_tensor(lse_, outputs_.lse, shard_q_);
  forward.alibi_slopes = inputs_.alibi_slopes;
  forward.alibi_batch_stride = inputs_.alibi_batch_stride;
  forward.sinks = inputs_.sinks;
  RankReport report;
  const auto take = [&](Pass pass, double& seconds, double& waiting) {
    const PassStats& stats = attention.stats(pass);
    seconds = stats.seconds;
    waiting = stats.waiting_seconds;
    report.sent_bytes += stats.sent_bytes;
    report.received_bytes += stats.received_bytes;
  };
  if (before) before(Pass::forward);
  watched.begin(Pass::forward, "forward");
  attention.forward(forward);
  take(Pass::forward, report.forward_seconds, report.forward_waiting);
  if (!backward_) return report;
  BackwardTensors backward;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.o = forward.o;
  backward.lse = forward.lse;
  backward.d_out = constant(d_out_, outputs_.o, shard_q_);
  if (inputs_.dlse.data != nullptr) backward.dlse = constant(dlse_, inputs_.dlse.shape, shard_q_);
  backward.dq = mutable_tensor(dq_, outputs_.dq, shard_q_);
  backward.dk = mutable_tensor(dk_, outputs_.dk, shard_k_);
  backward.dv = mutable_tensor(dv_, outputs_.dv, shard_k_);
  backward.alibi_slopes = inputs_.alibi_slopes;
  backward.alibi_batch_stride = inputs_.alibi_batch_stride;
  backward.sinks = inputs_.sinks;
  backward.dsinks = dsinks_.empty() ? nullptr : dsinks_.data();
  if (before) before(Pass::backward);
  watched.begin(Pass::backward, "backward");
  attention.backward(backward);
  take(Pass::backward, report.backward_seconds, report.backward_waiting);
  return report;
}

void RankWork::store_queries(Target& target) const {
  if (plan_.problem().replicated_q && plan_.rank() != 0) return;
  scatter(shard_q_, outputs_.o, o_.data(), "o", target);
  scatter(shard_q_, outputs_.lse, lse_.data(), "lse", target);
  if (backward_) scatter(shard_q_, outputs_.dq, dq_.data(), "dq", target);
}

void RankWork::store_keys(Target& target) const {
  if (!backward_) return;
  scatter(shard_k_, outputs_.dk, dk_.data(), "dk", target);
  scatter(shard_k_, outputs_.dv, dv_.data(), "dv", target);
}

void RankWork::store_sinks(Target& target) const {
  if (!dsinks_.empty()) target.write("dsinks", 0, dsinks_.data(), static_cast<std::int64_t>(dsinks_.size() * sizeof(float)));
}

namespace {

// What ranks leave for their parent.
class Board {
 public:
  Board(int ranks, int repetitions)
      : ranks_(ranks),
        repetitions_(repetitions),
        memory_(static_cast<std::size_t>(ranks) * (static_cast<std::size_t>(repetitions) * sizeof(RankReport) +
                                                   static_cast<std::size_t>(ranks) * sizeof(std::int64_t))) {}

  std::span<RankReport> reports(int rank) const {
    return {reinterpret_cast<RankReport*>(memory_.bytes().data()) + static_cast<std::ptrdiff_t>(rank) * repetitions_,
            static_cast<std::size_t>(repetitions_)};
  }
  std::span<std::int64_t> sent(int rank) const {
    std::byte* begin =
        memory_.bytes().data() + sizeof(RankReport) * static_cast<std::size_t>(ranks_) * static_cast<std::size_t>(repetitions_);
    return {reinterpret_cast<std::int64_t*>(begin) + static_cast<std::ptrdiff_t>(rank) * ranks_,
            static_cast<std::size_t>(ranks_)};
  }

 private:
  int ranks_;
  int repetitions_;
  SharedMemory memory_;
};

void run_rank(const Plan& plan, const Inputs& inputs, Layout layout, const WorldOptions& options, Target* target,
              Communicator& communicator, const Board& board) {
  const int rank = communicator.rank();
  ProgressLine line(options.show_progress && rank == 0);
  RankWork work(plan, inputs, layout);
  WatchedCommunicator watched(communicator, plan, &line);
  watched.set_prefix(options.progress_prefix);
  Attention attention(plan, watched, options.execute);
  for (int i = 0; i < options.warm_up; ++i) work.run(attention, watched);
  const std::span<RankReport> reports = board.reports(rank);
  for (RankReport& report : reports) report = work.run(attention, watched);
  std::copy(watched.sent_bytes().begin(), watched.sent_bytes().end(), board.sent(rank).begin());
  if (target == nullptr) return;
  work.store_queries(*target);
  work.store_keys(*target);
  if (rank == 0) work.store_sinks(*target);
}

}  // namespace

std::int64_t plan_bytes(const Plan& plan) {
  return internal::bytes_of(plan.data().forward) + internal::bytes_of(plan.data().backward);
}

namespace {

constexpr int kManyRanks = 64;  // of fewer, plans are small beside the rest

// A plan grows with the ranks that it has to do with: by the smallest of three, before all are made.
void check_memory(const Plan& first, const PlanOptions& options) {
  const Problem& problem = first.problem();
  if (problem.ranks <= kManyRanks) return;
  std::int64_t least = plan_bytes(first);
  for (const int rank : {problem.ranks / 2, problem.ranks - 1}) {
    throw_if_interrupted();
    least = std::min(least, plan_bytes(make_plan(problem, options, rank)));
  }
  const Machine machine = read_machine();
  const std::int64_t memory = machine.memory_limit.value_or(machine.memory);
  if (memory <= 0 || least <= memory / problem.ranks) return;
  throw OutOfBudget(fmt::format("the plans of {} ranks take about {} in one process, this machine has {}; use fewer ranks",
                                problem.ranks, internal::bytes_text(static_cast<double>(least) * problem.ranks),
                                internal::bytes_text(static_cast<double>(memory))));
}

}  // namespace

std::vector<Plan> plan_all(const Problem& problem, const PlanOptions& options) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < problem.ranks; ++rank) {
    throw_if_interrupted();
    plans.push_back(make_plan(problem, options, rank));
    if (rank == 0) check_memory(plans.front(), options);
  }
  return plans;
}

WorldReport run_world(std::span<const Plan> plans, const Inputs& inputs, Layout layout, const WorldOptions& options,
                      Target* target) {
  const auto ranks = static_cast<int>(plans.size());
  const Board board(ranks, options.repetitions);
  const RankBody body = [&](Communicator& communicator) {
    run_rank(plans[static_cast<std::size_t>(communicator.rank())], inputs, layout, options, target, communicator, board);
  };
  if (options.processes) {
    run_forked_ranks(ranks, body);
  } else {
    run_thread_ranks(ranks, body);
  }
  // A repetition takes as long as its slowest rank; the median repetition is the one reported.
  struct Repetition {
    double seconds = 0;
    int index = 0;
  };
  std::vector<Repetition> repetitions;
  for (int i = 0; i < options.repetitions; ++i) {
    double forward = 0;
    double backward = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const RankReport& report = board.reports(rank)[static_cast<std::size_t>(i)];
      forward = std::max(forward, report.forward_seconds);
      backward = std::max(backward, report.backward_seconds);
    }
    repetitions.push_back({forward + backward, i});
  }
  std::sort(repetitions.begin(), repetitions.end(),
            [](const Repetition& a, const Repetition& b) { return a.seconds < b.seconds; });
  const auto median = static_cast<std::size_t>(repetitions[repetitions.size() / 2].index);
  WorldReport report;
  for (int rank = 0; rank < ranks; ++rank) {
    report.ranks.push_back(board.reports(rank)[median]);
    report.forward_seconds = std::max(report.forward_seconds, report.ranks.back().forward_seconds);
    report.backward_seconds = std::max(report.backward_seconds, report.ranks.back().backward_seconds);
    const auto sent = board.sent(rank);
    report.sent.insert(report.sent.end(), sent.begin(), sent.end());
  }
  report.seconds = report.forward_seconds + report.backward_seconds;
  return report;
}

}  // namespace ringspan::cli
