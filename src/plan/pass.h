// PassBuilder: what every strategy shares when it writes the program of one pass on one rank: the rank's own rows, the
// state, the gradients, the first and the last steps. The strategies (stream.cc, gather.cc) add transfers and tasks.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "plan/builder.h"
#include "plan/reads.h"
#include "plan/route.h"
#include "plan/strategy.h"
#include "ringspan/error.h"

namespace ringspan::internal {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline Progression heads_progression(int count) { return {0, 1, count}; }
inline Progression heads_progression(HeadRange heads) { return {heads.begin, 1, heads.end - heads.begin}; }

// The most stages of a streaming strategy: a round's number is at most twice its stage's, and stays below 2^24. From the host a
// stage is a piece against a piece, and planned one by one: pieces that make more of them are too small to hide their copies.
inline constexpr std::int64_t kMaxStages = (std::int64_t{1} << 23) - (std::int64_t{1} << 20);
inline constexpr std::int64_t kMaxHostStages = std::int64_t{1} << 17;

// The most tasks of a pass. More come of shards in many pieces, each of which meets many others.
inline constexpr std::int64_t kMostTasks = std::int64_t{1} << 23;

// That a strategy has more: others may have fewer.
class TooManyTasks : public OutOfBudget {
 public:
  using OutOfBudget::OutOfBudget;
};

// What is the same for all ranks, made once per plan.
struct Setting {
  const Problem* problem = nullptr;
  std::shared_ptr<const Lowering> lowering;  // of the problem
  PlanOptions options;                       // strategy resolved
  std::vector<Shard> shards_q, shards_k;
  std::int64_t bucket_rows = 0;  // > 0 for streaming strategies
  SizeSource bucket_source = SizeSource::standard;
  int states = 1;
  std::int64_t most_tasks = kMostTasks;

  int ranks() const { return problem->ranks; }
  // 16-bit training keeps o in float32.
  bool keeps_o_float32() const { return problem->dtype != DType::float32 && options.backward && options.keep_o_float32; }
  // Whether rows travel in buckets, between ranks or between host and device.
  bool has_buckets() const { return strategy_row(options.strategy).buckets || options.host_tensors; }
  // Rows of the largest shard of the side that moves.
  std::int64_t largest_chunk() const;
  // The stage in which a streaming strategy ends, the same for every rank, whatever it has to do.
  std::int64_t last_stage() const;
  std::int64_t most_stages() const { return options.host_tensors ? kMaxHostStages : kMaxStages; }
  // Found when first asked for, then shared by all ranks, passes and bucket sizes, and by copies of this. Any thread.
  const RingRoutes& ring_routes() const;

 private:
  struct Shared {
    std::once_flag once;
    std::optional<const RingRoutes> ring_routes;
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// The plan of one rank, but for what is the choice's: rejected, fingerprint.
PlanData build_plan(const Setting& setting, int rank);

class PassBuilder {
 public:
  PassBuilder(const Setting& setting, int rank, bool backward);

  const Problem& problem() const { return *setting_.problem; }
  const Lowering& lowering() const { return *setting_.lowering; }
  const Setting& setting() const { return setting_; }
  int rank() const { return rank_; }
  bool is_backward() const { return backward_; }
  ProgramBuilder& builder() { return builder_; }

  // The rank's own rows: all of its queries (keys), with every location that this pass has. States exist for all heads, or
  // only for `heads` where another rank computes the rest and returns finished rows.
  void make_own(HeadRange heads);
  // The same, with the locations in the caller's tensors only.
  void make_own_tensors(HeadRange heads);
  const std::vector<Entry>& own_q() const { return own_q_; }
  const std::vector<Entry>& own_k() const { return own_k_; }

  // Rows of padding are those past their batch item's length. They have no key, and no sink either.
  enum class Which : std::uint8_t { all, real, padding };
  // One item per entry that has such rows and heads, with where the parts are.
  std::vector<RowItem> over(std::span<const Entry> entries, std::span<const Part> parts, HeadRange heads,
                            Which which = Which::all) const;
  void fill(std::vector<Launch>& where, std::span<const Entry> entries, const Part& part, float value, HeadRange heads);
  // {m, l, acc, o, lse, o in float32} of own rows: state -> result.
  void finalize_own(std::vector<Launch>& where, std::span<const Entry> entries, std::span<const Part> parts);

  // The gradient of the sinks: its place, what own rows add to it, and the sum over all ranks.
  RegionId make_sink_gradient();
  void add_sink_gradient(std::vector<Launch>& where, std::span<const Entry> entries);
  void sum_sinks(std::int64_t stage);

  // Fills, delta: launches that come first.
  void begin(std::int64_t stage);
  // State -> o and lse, or float32 gradients -> the caller's; sinks; replicated outputs. Stages from `stage` on.
  void end(std::int64_t stage);

  // Tasks of queries against keys, restricted to `heads`.
  std::vector<AttendItem> attend_items(std::span<const Entry> queries, std::span<const Entry> keys, HeadRange heads);

  // A state for received queries: m, l, acc of every entry, in `region`; with the launches that make it the identity.
  void add_state(std::vector<Entry>& entries, RegionId region, std::vector<Launch>& fill);
  // Float32 gradients for rows at hand, densely in `region`; with the launches that make them zero.
  void add_gradients(std::vector<Entry>& entries, bool key_side, RegionId region, std::vector<Launch>& fill);

  // Received queries whose rows this rank holds itself, because every rank holds all of them.
  void use_replicated(std::vector<Entry>& entries);

  // Packs the parts of own (or relayed) rows into a bundle placed in `region`.
  void pack(std::vector<Launch>& where, std::span<const Entry> sources, std::int32_t bundle, RegionId region);
  // Takes received rows in: copies to, adds to, or merges into the destinations.
  void take_in(std::vector<Launch>& where, std::span<const Entry> received, std::span<const Part> parts, TransferOp op,
               std::span<const Entry> destinations);
  // m, l, acc of the entries -> the parts of a result bundle placed in `region` (normalised o and lse).
  void finalize_into(std::vector<Launch>& where, std::span<const Entry> states, std::int32_t bundle, RegionId region,
                     bool complete);

  // The parts of messages, float32 first.
  std::vector<Part> key_inputs() const;
  std::vector<Part> query_inputs() const;  // empty where every rank holds them
  std::vector<Part> query_results(bool complete) const;
  std::vector<Part> key_results(bool complete) const;

  HeadRange all_heads() const { return {0, problem().heads}; }
  Part part(TensorKind kind, int state = 0) const;          // in the storage dtype where it has one
  Part part_float32(TensorKind kind, int state = 0) const;  // in float32

  Program finish();

 private:
  std::vector<Entry> pieces_as_entries(const Shard& shard, int heads) const;
  void make_own_forward(HeadRange heads);
  void make_own_backward();
  std::vector<Box> parts_of(const Box& box, Which which) const;
  void add_items(const Slice& slice, const Entry& query, const Entry& key, std::vector<AttendItem>& items) const;
  void end_forward(std::int64_t stage);
  void end_backward(std::int64_t stage);
  void replicate(std::int64_t stage, std::vector<Part> parts);
  void sum_sink_gradients(std::int64_t stage);

  const Setting& setting_;
  int rank_;
  bool backward_;
  ProgramBuilder builder_;
  HeadRange state_heads_;
  std::vector<Entry> own_q_, own_k_;
};

}  // namespace ringspan::internal
