// Plan: what one rank computes, sends and keeps, decided before any data is seen. Pure: no data, no threads, no clock.
//
// Every rank makes its own plan from the same Problem and PlanOptions; nothing of the other ranks' plans is built. What rank
// r plans to send to s equals what s plans to receive from r.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/problem.h"

namespace ringspan {

enum class Strategy : std::uint8_t { automatic, local, all_gather, exchange, ring, pass_q, ulysses };

// "auto", "local", "all-gather", "exchange", "ring", "pass-q", "ulysses".
std::string_view to_string(Strategy strategy);
Strategy parse_strategy(std::string_view name);

// time = flops / F + bytes / B + messages * L + copies that computing does not hide, in integer nanoseconds, so that all ranks
// choose alike. With host_tensors a stage copies at H while it computes at F: what takes longer counts.
struct CostModel {
  std::int64_t flops_per_second = 100'000'000'000;      // F, of one rank
  std::int64_t bytes_per_second = 5'000'000'000;        // B, received by one rank
  std::int64_t message_nanoseconds = 20'000;            // L, per message received by one rank
  std::int64_t host_bytes_per_second = 25'000'000'000;  // H, between tensors on the host and the device, either way
  bool operator==(const CostModel&) const = default;
};

// Queries and keys of a tile of the CPU's kernels; both 0: left open.
struct Tile {
  int queries = 0;
  int keys = 0;
  bool operator==(const Tile&) const = default;
};

// What was measured on this machine, for sizes that options leave open; with_tuned_sizes() of ringspan/tuning.h fills it in.
struct TunedSizes {
  Tile attend_tile{}, attend_backward_tile{};
  std::int64_t bucket_rows = 0;  // the fewest rows of a bucket where the planner chooses; the smallest of all ranks counts
  std::string source{};          // for people: a file and a date
  bool operator==(const TunedSizes&) const = default;
};

// What a rank needs besides the steps that all ranks plan alike: scratch of its kernels on a CPU, lists of tasks on a device,
// states and sums of gradients that other kernels do without. With a memory budget a plan leaves room for the most of any rank,
// so that all choose the same strategy and buckets; an Attention agrees on it. As it is made: as this rank alone.
struct RankOverhead {
  std::int64_t forward_scratch = 0, backward_scratch = 0;  // bytes
  bool task_lists = false;
  std::int64_t keys_without_state =
      std::numeric_limits<std::int64_t>::max();  // of a task, the fewest that any rank's kernel takes
  bool gradient_sums =
      false;  // a rank's kernels cannot write gradients at once: it computes on a CPU, or tensors lie on the host
  bool ungrouped_tasks = false;  // a rank's tasks are calls of a library each (PlanOptions::partials), or gradient_sums
  bool operator==(const RankOverhead&) const = default;
};

// Where a size comes from: "given" by the options, "tuned", "default", or made smaller for the "memory budget".
enum class SizeSource : std::uint8_t { given, tuned, standard, budget };
std::string_view to_string(SizeSource source);

// What a rank computes on: its kernels and memory differ, its steps do not.
enum class DeviceKind : std::uint8_t { cpu, cuda };
// "cpu", "cuda".
std::string_view to_string(DeviceKind kind);
DeviceKind parse_device_kind(std::string_view name);

// How results that several calls of a library's fused attention leave for the same rows are kept until they are merged: not at
// all (then our own kernels compute, which accumulate in float32), or in the storage dtype.
enum class Partials : std::uint8_t { float32, storage };
// "float32", "storage".
std::string_view to_string(Partials partials);
Partials parse_partials(std::string_view name);

struct PlanOptions {
  static constexpr std::int64_t kBucketAuto = 0;
  static constexpr std::int64_t kBucketNone = -1;
  static constexpr int kMaxThreads = 4096;

  Strategy strategy = Strategy::automatic;
  int computing_ranks = 0;                 // local only: how many ranks compute; 0: one
  std::int64_t bucket_rows = kBucketAuto;  // rows of a chunk that travel at once; kBucketNone: whole chunks
  // Bytes per rank where it computes, of what Plan::memory lists; 0: unlimited. The plan itself comes on top: it grows with its
  // tasks, of which shards in many pieces have many.
  std::int64_t memory_budget = 0;
  CostModel cost{};
  bool backward = true;        // plan the backward pass too
  bool keep_o_float32 = true;  // for 16-bit training: keep o in float32, delta is computed from it
  int threads = 1;             // of this rank's kernels; an Attention starts at most kMaxThreads
  // By name; empty: the best that supports the shape. On a device (docs/cuda.md) "own", one of our own: "mma" or "wgmma"; or
  // a library's fused attention where one call gives a row's final result: "cudnn", or what ringspan.torch brings, "flash_attn"
  // and "flash_attn_3"; empty: see ExecuteOptions::deterministic.
  std::string attend_kernel{};
  std::string attend_backward_kernel{};
  // storage: such a library also computes where rows take several calls (several ranks, overlapping branches), each of which
  // rounds its results to 16 bits before they are merged; docs/cuda.md has the error. This rank's own choice, like the names.
  Partials partials = Partials::float32;
  Tile attend_tile{};  // of this rank's kernels, like their names; left open: as tuned, else the kernel's own
  Tile attend_backward_tile{};
  TunedSizes tuned{};
  DeviceKind device = DeviceKind::cpu;  // of this rank; an Attention sets it to what it runs on
  RankOverhead most_overhead{};         // of all ranks, for the memory budget
  bool device_messages = false;         // and its communicator takes memory of the device: no pinned messages
  // The caller's tensors lie in pinned host memory and stream through the device in pieces of bucket_rows rows; all ranks on
  // devices, with strategy exchange if they are several. memory_budget is then what the pieces, and all that is computed from
  // them, may take there.
  bool host_tensors = false;

  bool operator==(const PlanOptions&) const = default;
};

enum class Pass : std::uint8_t { forward, backward };

struct MemoryLine {
  // q, k, v, o, lse, ... of the caller; buckets, staging, state, gradients, saved, scratch, alignment and what only the other
  // pass uses of the arena; beside the arena, in plans for a device: task lists, pinned task lists, pinned messages.
  std::string component{};
  std::int64_t bytes = 0;
  bool in_arena = false;
  bool beside_arena = false;  // neither: the caller's tensor
  bool pinned = false;        // host memory of a rank that computes on a device
};

struct PeerBytes {
  std::int64_t sent_bytes = 0;
  std::int64_t received_bytes = 0;
  std::int64_t sent_messages = 0;
  std::int64_t received_messages = 0;
};

struct Rejected {
  std::string candidate{};
  std::string reason{};
  std::int64_t nanoseconds = 0;  // the model's time; 0 where it was not computed
  bool at_least = false;         // the time: it lost before all of it was known
};

// The kernel of a pass on this rank.
struct KernelChoice {
  std::string name{};
  Tile tile{};  // 0 x 0: it has no tiles
  SizeSource tile_source = SizeSource::standard;
  std::string reason{};  // on a device: why a library's fused attention is not what runs
};

namespace internal {
struct PlanData;
}

// What is asked of Pass::backward throws InvalidArgument where PlanOptions::backward was false.
class Plan {
 public:
  explicit Plan(std::shared_ptr<const internal::PlanData> data) : data_(std::move(data)) {}

  const Problem& problem() const;
  const PlanOptions& options() const;
  Strategy strategy() const;  // never automatic
  int rank() const;
  std::int64_t bucket_rows() const;  // of whole chunks those of the largest; kBucketNone: nothing travels in buckets
  SizeSource bucket_source() const;
  const KernelChoice& kernel(Pass pass) const;

  // Bytes of the one arena that execution needs, for both passes; alignment 64.
  std::int64_t arena_bytes() const;
  // The same for another rank (plans it). Throws Unsupported where an attention laid this plan out anew for its device.
  std::int64_t arena_bytes(int rank) const;
  // By component; the sum of the lines of a pass is what the rank needs in it: where it computes, but for the pinned ones.
  // Tensors that lie on the host are pinned. An optional dlse comes on top: 4 bytes per query row and head.
  std::vector<MemoryLine> memory(Pass pass) const;
  std::int64_t memory_bytes(Pass pass) const;  // without the pinned ones
  std::int64_t pinned_bytes(Pass pass) const;  // 0 of a plan for the CPU

  std::vector<PeerBytes> traffic(Pass pass) const;  // ranks entries
  // Between host memory and the device, with host_tensors; an optional dlse is counted.
  struct HostBytes {
    std::int64_t to_device = 0, to_host = 0;
  };
  HostBytes host_bytes(Pass pass) const;
  // The same by the model: all copies, and what of them is not hidden behind computing.
  struct HostTime {
    std::int64_t copies = 0, exposed = 0;  // nanoseconds
  };
  HostTime host_nanoseconds(Pass pass) const;
  std::string pairs() const;  // (batch, head, i, j) pairs that this rank computes, 128-bit decimal
  double flops(Pass pass) const;
  std::int64_t modelled_nanoseconds() const;
  // Of the slowest of the ranks whose plans made the choice, comparable with the times of rejected(); 0: there was no choice.
  std::int64_t slowest_nanoseconds() const;
  int ranks_looked_at() const;
  std::vector<Rejected> rejected() const;
  std::int64_t excess_rows() const;  // rows received beyond those read (covering progressions)

  // Equal on all ranks of one problem and options: problem, strategy, route, bucket, version.
  std::uint64_t fingerprint() const;

  std::string to_string() const;  // for people
  std::string to_json() const;    // docs/plan.md describes it

  const internal::PlanData& data() const { return *data_; }

 private:
  std::shared_ptr<const internal::PlanData> data_;
};

// Throws InvalidArgument, Unsupported (a combination that the capability table lists as such) or OutOfBudget (of the budget, or
// more than 2^23 tasks in a pass).
Plan make_plan(const Problem& problem, const PlanOptions& options, int rank);

}  // namespace ringspan
