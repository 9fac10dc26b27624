// One rank's part of a run: its tensors, cut out of the whole ones, and the passes over them.
//
// Memory: exactly the lines of memory_lines() that are the caller's, in pages of their own. Thread safety: one thread;
// different ranks share nothing but what they only read, and the target.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gradient.h"
#include "ringspan/attention.h"
#include "tensors.h"
#include "watch.h"

namespace ringspan::cli {

// The whole input. q, k, v are always there; d_out where the gradient is a file's.
struct Inputs {
  GlobalTensor q, k, v;
  GlobalTensor d_out;
  GlobalTensor dlse;  // float32, (batch, heads, tokens); data null: none
  GradientSpec gradient;
  const float* alibi_slopes = nullptr;
  std::int64_t alibi_batch_stride = 0;
  const float* sinks = nullptr;
};

// The shapes of the whole outputs.
struct OutputShapes {
  TensorShape o, lse, dq, dk, dv;
  OutputShapes(const Problem& problem, Layout layout);
};

// What one rank measured; plain values, so that forked ranks can leave them in shared memory.
struct RankReport {
  double forward_seconds = 0, backward_seconds = 0;
  double forward_waiting = 0, backward_waiting = 0;
  std::int64_t sent_bytes = 0, received_bytes = 0;
};

// Plan::memory of the last pass and, where it is given, dlse, which a plan does not know of: as large as lse.
std::vector<MemoryLine> memory_lines(const Plan& plan, bool dlse);
std::int64_t memory_bytes(const Plan& plan, bool dlse);  // their sum

class RankWork {
 public:
  // Loads the shards of this rank.
  RankWork(const Plan& plan, const Inputs& inputs, Layout layout);

  const Plan& plan() const { return plan_; }
  // Forward and, where planned and given a gradient, backward. `watched` is what `attention` was made on.
  // `before` is called before each pass.
  RankReport run(Attention& attention, WatchedCommunicator& watched, const std::function<void(Pass)>& before = {});
  void store_queries(Target& target) const;  // o, lse, dq: of the first rank only where queries are replicated
  void store_keys(Target& target) const;     // dk, dv
  void store_sinks(Target& target) const;    // dsinks; the same on all ranks, so that one stores them

  const std::vector<float>& dsinks() const { return dsinks_; }
  const Shard& shard_k() const { return shard_k_; }
  const std::byte* dk() const { return dk_.data(); }
  const std::byte* dv() const { return dv_.data(); }

 private:
  TensorShape local(TensorShape whole, const Shard& shard) const;

  Plan plan_;
  Inputs inputs_;
  Shard shard_q_, shard_k_;  // shard_q_: all queries where they are replicated
  OutputShapes outputs_;
  Pages q_, k_, v_, o_, lse_, d_out_, dlse_, dq_, dk_, dv_;
  std::vector<float> dsinks_;
  bool backward_ = false;
};

// The plans of all ranks. An interrupt ends it between two of them: planning many ranks takes long.
// Throws OutOfBudget where the plans alone take more than the memory of the machine.
std::vector<Plan> plan_all(const Problem& problem, const PlanOptions& options);
std::int64_t plan_bytes(const Plan& plan);  // what a plan itself keeps in memory

// Runs every rank, with its plan, as a thread or a forked process and returns what they measured, by rank, with the bytes that
// rank r sent to s at [r * ranks + s] of `sent`. Results go to `target` (may be null).
struct WorldReport {
  std::vector<RankReport> ranks;
  std::vector<std::int64_t> sent;
  double seconds = 0;  // of the slowest rank, both passes
  double forward_seconds = 0, backward_seconds = 0;
};
struct WorldOptions {
  bool processes = false;
  bool show_progress = false;
  std::string progress_prefix;
  ExecuteOptions execute;
  int warm_up = 0;      // executions before the one that is reported
  int repetitions = 1;  // the median is reported
};
WorldReport run_world(std::span<const Plan> plans, const Inputs& inputs, Layout layout, const WorldOptions& options,
                      Target* target);

}  // namespace ringspan::cli
